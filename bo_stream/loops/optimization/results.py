"""Everything that an optimization leaves for its reader, and the sitting that makes it."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bo_stream.loops.optimization.campaign import OptimizationCampaign, OptimizationStep
from bo_stream.loops.optimization.evaluation import PointEvaluator
from bo_stream.loops.optimization.trials import STATUSES, History, Status, Trial
from bo_stream.loops.run_files import all_versions
from bo_stream.loops.sampling.results import (
    model_record,
    peak_memory_mib,
    write_picture,
    write_together,
)
from bo_stream.loops.sitting import SECONDS_BETWEEN_CHECKPOINTS, StopRequest


def history(campaign: OptimizationCampaign) -> pd.DataFrame:
    """One row per trial, by key; ``best`` is the best outcome up to it."""
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


def history_file(campaign: OptimizationCampaign, kind: History) -> bytes:
    """The history as a file of a kind."""
    table = history(campaign)
    if kind == "csv":
        return table.to_csv(index=False).encode()
    file = io.BytesIO()
    table.to_parquet(file, index=False)
    return file.getvalue()


def run_record(campaign: OptimizationCampaign, notes: list[str]) -> bytes:
    """Settings, versions, the result, every step, the learned model, time and memory.

    The model has the outcomes in ``outcome_unit``.
    """
    return (json.dumps(_run_record(campaign, notes), indent=2) + "\n").encode()


def _run_record(campaign: OptimizationCampaign, notes: list[str]) -> dict[str, Any]:
    surrogate = campaign.optimizer.surrogate
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
        "model": None
        if surrogate.model is None
        else model_record(campaign.settings.model, surrogate.model),
        "seconds": round(campaign.seconds, 3),
        "threads": torch.get_num_threads(),
        "peak_memory_mib": peak_memory_mib(),
        "versions": all_versions(),
        "warnings": notes,
    }


def counts(campaign: OptimizationCampaign) -> dict[Status, int]:
    """How many trials there are of each status."""
    ledger = campaign.optimizer.ledger
    return {status: len(ledger.with_status(status)) for status in STATUSES}


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


MARKED = 100
"""Most steps that are drawn with a marker each."""


def draw_trace(campaign: OptimizationCampaign) -> Figure:
    """Best value above, seconds per step below, over the steps."""
    figure = Figure(figsize=(7.0, 6.0), layout="constrained")
    values, seconds = figure.subplots(2, 1, sharex=True)
    verb = "maximising" if campaign.settings.maximize else "minimising"
    figure.suptitle(f"{campaign.objective.name}, {verb}: {len(campaign.optimizer.ledger):,} trials")
    _draw_values(values, campaign)
    _draw_seconds(seconds, campaign.steps)
    return figure


def _draw_values(axes: Axes, campaign: OptimizationCampaign) -> None:
    steps = campaign.steps
    numbers = [step.number for step in steps]
    size = _marker_size(steps)
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
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def _marker_size(steps: Sequence[OptimizationStep]) -> float:
    return 3.0 if len(steps) <= MARKED else 0.0


def _best_outcomes(campaign: OptimizationCampaign) -> list[float]:
    """The best outcome up to each step, NaN before the first."""
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
    numbers = [step.number for step in steps]
    size = _marker_size(steps)
    for label, seconds in (
        ("model and choice", [step.model_seconds for step in steps]),
        ("evaluation", [step.evaluation_seconds for step in steps]),
    ):
        axes.plot(numbers, seconds, "o-", ms=size, lw=1, label=label)
    axes.set(xlabel="step", ylabel="seconds per step")
    if any(step.model_seconds > 0.0 for step in steps):
        axes.set_yscale("log", nonpositive="mask")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


SLOW_SECONDS = 1.0
"""Evaluations longer than this are on the disk as soon as they are told."""


def write_optimization(
    campaign: OptimizationCampaign, folder: Path, notes: list[str], kind: History = "csv"
) -> None:
    """Write history and run.json, both or none; then draw trace.png.

    A picture that cannot be drawn is a warning.

    Raises:
        OSError: The disk is full or the folder cannot be written; the old files stand.
    """
    files = {
        f"history.{kind}": history_file(campaign, kind),
        "run.json": run_record(campaign, notes),
    }
    write_together(folder, files)
    write_picture(folder / "trace.png", lambda: draw_trace(campaign))


def sit_optimizing(
    campaign: OptimizationCampaign,
    folder: Path,
    evaluator: PointEvaluator,
    stop: StopRequest,
    on_event: Callable[[Trial | OptimizationStep], None],
    seconds_between_checkpoints: float = SECONDS_BETWEEN_CHECKPOINTS,
) -> None:
    """Do the campaign's steps, with a checkpoint now and then and at the end.

    An evaluation longer than ``SLOW_SECONDS`` is on the disk as soon as it is told.

    Args:
        campaign: Begun or resumed.
        folder: For the checkpoints.
        evaluator: Of the campaign's objective.
        stop: Looked at after each step.
        on_event: Called after each trial and each step.
        seconds_between_checkpoints: At least.

    Raises:
        OSError: A checkpoint cannot be written; the one before stands.
        UsageError: No evaluation succeeds; what was tried is in the checkpoint.
    """
    try:
        _sit(campaign, folder, evaluator, stop, on_event, seconds_between_checkpoints)
    except BaseException:  # whatever it is, no evaluation is lost
        campaign.save(folder)
        raise
    campaign.save(folder)


def _sit(
    campaign: OptimizationCampaign,
    folder: Path,
    evaluator: PointEvaluator,
    stop: StopRequest,
    on_event: Callable[[Trial | OptimizationStep], None],
    seconds_between_checkpoints: float,
) -> None:
    last = -float("inf")
    for event in campaign.run(evaluator):
        on_event(event)
        if stop.made and isinstance(event, OptimizationStep):
            return
        if _took_long(event) or time.monotonic() - last > seconds_between_checkpoints:
            campaign.save(folder)
            last = time.monotonic()


def _took_long(event: Trial | OptimizationStep) -> bool:
    return isinstance(event, Trial) and (event.seconds or 0.0) > SLOW_SECONDS
