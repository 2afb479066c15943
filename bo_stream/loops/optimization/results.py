"""Result files of an optimization: the history of its trials, a record, and a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bo_stream.loops.optimization.campaign import OptimizationCampaign, OptimizationStep
from bo_stream.loops.optimization.trials import STATUSES, History, Status, Trial
from bo_stream.loops.results import model_record, record_file, write_files, write_picture

MARKED = 100
"""Most steps that are drawn with a marker each."""


def write_optimization(
    campaign: OptimizationCampaign, folder: Path, notes: list[str], kind: History = "csv"
) -> None:
    """Write history and run.json, both or none; then draw trace.png.

    A picture that cannot be drawn is a warning. In run.json are the ``notes``, texts of warnings,
    and the model of the outcomes in units of ``outcome_unit``.

    Raises:
        OSError: The disk is full or the folder cannot be written; the old files stand.
    """
    files = {
        f"history.{kind}": _history_file(campaign, kind),
        "run.json": record_file(_record(campaign), campaign.seconds, notes),
    }
    write_files(folder, files)
    write_picture(folder / "trace.png", lambda: draw_trace(campaign))


def history(campaign: OptimizationCampaign) -> pd.DataFrame:
    """Return one row per trial, by key; ``best`` is the best outcome up to it."""
    steps = campaign.step_of()
    rows = [_row(campaign, trial, steps) for trial in campaign.optimizer.ledger]
    table = pd.DataFrame(rows)
    if not rows:
        return table
    y = table["y"].astype("float64")
    table["best"] = (y.cummax() if campaign.settings.maximize else y.cummin()).ffill()
    return table


def _row(campaign: OptimizationCampaign, trial: Trial, steps: dict[int, int]) -> dict[str, Any]:
    return {
        "key": trial.key,
        "step": steps.get(trial.key),
        "origin": trial.origin,
        "status": trial.status,
        "attempts": trial.attempts,
        **{f"x{i}": x for i, x in enumerate(trial.X)},
        "y": trial.Y,
        "noiseless": campaign.objective.noiseless(trial.X),
        "seconds": trial.seconds,
        "error": trial.error,
    }


def _history_file(campaign: OptimizationCampaign, kind: History) -> bytes:
    table = history(campaign)
    if kind == "csv":
        return table.to_csv(index=False).encode()
    file = io.BytesIO()
    table.to_parquet(file, index=False)
    return file.getvalue()


def counts(campaign: OptimizationCampaign) -> dict[Status, int]:
    """Count the trials of each status."""
    ledger = campaign.optimizer.ledger
    return {status: len(ledger.with_status(status)) for status in STATUSES}


def _record(campaign: OptimizationCampaign) -> dict[str, Any]:
    surrogate = campaign.optimizer.surrogate
    name, model = campaign.settings.model, surrogate.model
    return {
        "finished": campaign.finished,
        "steps_done": campaign.steps_done,
        "objective": campaign.objective.as_record(),
        "optimum": campaign.objective.optimum,
        "settings": campaign.settings.as_record(),
        "plan": asdict(campaign.plan),
        "best": _best_record(campaign),
        "counts": counts(campaign),
        "steps": [asdict(step) for step in campaign.steps],
        "refits_at": surrogate.refits,
        "outcome_unit": surrogate.unit,
        "model": None if model is None else model_record(name, model),
    }


def _best_record(campaign: OptimizationCampaign) -> dict[str, Any] | None:
    last = campaign.steps[-1] if campaign.steps else None
    if last is None or last.best is None:
        return None
    trial = campaign.optimizer.ledger[last.best]
    return {
        "key": trial.key,
        "X": trial.X,
        "Y": trial.Y,
        "posterior_mean": last.mean,
        "noiseless": last.noiseless,
    }


def draw_trace(campaign: OptimizationCampaign) -> Figure:
    """Draw the best value above and the seconds per step below, over the steps."""
    figure = Figure(figsize=(7.0, 6.0), layout="constrained")
    values, seconds = figure.subplots(2, 1, sharex=True)
    verb = "maximising" if campaign.settings.maximize else "minimising"
    figure.suptitle(f"{campaign.objective.name}, {verb}: {len(campaign.optimizer.ledger):,} trials")
    _draw_values(values, campaign)
    _draw_seconds(seconds, campaign.steps)
    for axes in (values, seconds):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    return figure


def _draw_values(axes: Axes, campaign: OptimizationCampaign) -> None:
    steps = campaign.steps
    numbers, size = [step.number for step in steps], _marker_size(steps)
    axes.plot(numbers, _best_outcomes(campaign), "-", color="0.6", label="best outcome")
    means = _numbers([step.mean for step in steps])
    axes.plot(numbers, means, "o-", ms=size, label="best posterior mean")
    if any(step.noiseless is not None for step in steps):
        noiseless = _numbers([step.noiseless for step in steps])
        axes.plot(numbers, noiseless, "s--", ms=size, label="noiseless value there")
    optimum = campaign.objective.optimum
    if optimum is not None and not campaign.settings.maximize:
        axes.axhline(optimum, color="black", lw=0.8, ls=":", label=f"optimum {optimum:.4g}")
    axes.set_ylabel("best value")


def _marker_size(steps: Sequence[OptimizationStep]) -> float:
    return 3.0 if len(steps) <= MARKED else 0.0


def _best_outcomes(campaign: OptimizationCampaign) -> list[float]:
    """Return the best outcome up to each step, NaN before the first."""
    better = np.fmax if campaign.settings.maximize else np.fmin
    best, line = float("nan"), []
    for step in campaign.steps:
        for key in step.keys:
            Y = campaign.optimizer.ledger[key].Y
            best = best if Y is None else float(better(best, Y))
        line.append(best)
    return line


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _draw_seconds(axes: Axes, steps: Sequence[OptimizationStep]) -> None:
    numbers, size = [step.number for step in steps], _marker_size(steps)
    model_seconds = [step.model_seconds for step in steps]
    evaluation_seconds = [step.evaluation_seconds for step in steps]
    axes.plot(numbers, model_seconds, "o-", ms=size, lw=1, label="model and choice")
    axes.plot(numbers, evaluation_seconds, "o-", ms=size, lw=1, label="evaluation")
    axes.set(xlabel="step", ylabel="seconds per step")
    if any(seconds > 0.0 for seconds in model_seconds):
        axes.set_yscale("log", nonpositive="mask")
