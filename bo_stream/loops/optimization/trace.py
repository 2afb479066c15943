"""The picture of a run: the best value and the seconds of each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bo_stream.loops.optimization.campaign import OptimizationCampaign
from bo_stream.loops.optimization.steps import OptimizationStep

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
