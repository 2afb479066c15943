"""Result files of an optimization: the history of its trials, a record, and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bo_stream.diagnostics.pictures import mark_hand_overs
from bo_stream.diagnostics.trust import TrustReport
from bo_stream.loops.optimization.campaign import OptimizationCampaign, OptimizationStep
from bo_stream.loops.optimization.trials import STATUSES, Status
from bo_stream.loops.results import (
    model_record,
    record_file,
    write_files,
    write_picture,
    write_trust,
)
from bo_stream.models.auto.inference import HandOver

History = Literal["csv", "parquet"]
HISTORIES: tuple[History, ...] = ("csv", "parquet")
"""File types of the history of all trials."""

MARKED = 100
"""Most steps that are drawn with a marker each."""


def write_optimization(
    campaign: OptimizationCampaign, folder: Path, notes: list[str], kind: History = "csv"
) -> TrustReport | None:
    """Write history and run.json, both or none; then trace.png, trust.png and trust.json.

    A picture that cannot be drawn is a warning. In run.json are the ``notes``, texts of warnings,
    and the model of the outcomes in units of ``outcome_unit``. Returns whether that model, if there
    is one, can be trusted.
    """
    table = history(campaign)
    files = {
        f"history.{kind}": table.to_csv(index=False).encode()
        if kind == "csv"
        else table.to_parquet(index=False),
        "run.json": record_file(_record(campaign), campaign.seconds, notes),
    }
    write_files(folder, files)
    write_picture(folder / "trace.png", lambda: draw_trace(campaign))
    surrogate = campaign.optimizer.surrogate
    if surrogate.model is None:
        return None
    return write_trust(folder, surrogate.model, surrogate.validation)


def history(campaign: OptimizationCampaign) -> pd.DataFrame:
    """Return one row per trial, by key; ``best`` is the best outcome up to it."""
    steps = campaign.step_of()
    rows = [
        {
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
        for trial in campaign.optimizer.ledger
    ]
    table = pd.DataFrame(rows)
    if rows:
        y = table["y"].astype("float64")
        table["best"] = (y.cummax() if campaign.settings.maximize else y.cummin()).ffill()
    return table


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
        "objective": asdict(campaign.objective),
        "optimum": campaign.objective.optimum,
        "settings": asdict(campaign.settings),
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
    figure.suptitle(
        f"{campaign.objective.function}, {verb}: {len(campaign.optimizer.ledger):,} trials"
    )
    names = [field.name for field in fields(OptimizationStep)]
    steps = pd.DataFrame(map(asdict, campaign.steps), columns=names)
    steps = steps.astype({"mean": float, "noiseless": float})  # None becomes NaN
    size = 3.0 if len(steps) <= MARKED else 0.0
    _draw_values(values, campaign, steps, size)
    _draw_seconds(seconds, steps, size)
    mark_hand_overs(seconds, steps_of_hand_overs(campaign))
    for axes in (values, seconds):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    return figure


def _draw_values(
    axes: Axes, campaign: OptimizationCampaign, steps: pd.DataFrame, size: float
) -> None:
    better, ledger = np.fmax if campaign.settings.maximize else np.fmin, campaign.optimizer.ledger
    best = [  # of each step, NaN where no outcome was told
        better.reduce(np.array([np.nan, *(ledger[key].Y for key in keys)], float))
        for keys in steps["keys"]
    ]
    so_far = better.accumulate(np.array(best, float))
    axes.plot(steps.number, so_far, "-", color="0.6", label="best outcome")
    axes.plot(steps.number, steps["mean"], "o-", ms=size, label="best posterior mean")
    if steps.noiseless.notna().any():
        axes.plot(steps.number, steps.noiseless, "s--", ms=size, label="noiseless value there")
    optimum = campaign.objective.optimum
    if optimum is not None and not campaign.settings.maximize:
        axes.axhline(optimum, color="black", lw=0.8, ls=":", label=f"optimum {optimum:.4g}")
    axes.set_ylabel("best value")


def steps_of_hand_overs(campaign: OptimizationCampaign) -> Iterator[tuple[float, HandOver]]:
    """Yield the step of each hand-over: that whose outcomes made the observations so many."""
    ledger = campaign.optimizer.ledger
    told = np.cumsum([sum(ledger[k].Y is not None for k in step.keys) for step in campaign.steps])
    for move in getattr(campaign.optimizer.surrogate.model, "history", ()):
        place = min(int(np.searchsorted(told, move.observations)), len(campaign.steps) - 1)
        yield campaign.steps[place].number, move


def _draw_seconds(axes: Axes, steps: pd.DataFrame, size: float) -> None:
    axes.plot(steps.number, steps.model_seconds, "o-", ms=size, lw=1, label="model and choice")
    axes.plot(steps.number, steps.evaluation_seconds, "o-", ms=size, lw=1, label="evaluation")
    axes.set(xlabel="step", ylabel="seconds per step")
    if (steps.model_seconds > 0.0).any():
        axes.set_yscale("log", nonpositive="mask")
