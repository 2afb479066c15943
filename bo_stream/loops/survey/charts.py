"""Charts of a survey: predicted against observed shares, what rounds would gain, and did gain."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

Array = NDArray[np.float64]

SIZE = (5.4, 4.6)
_INSIDE, _OUTSIDE = "#0072b2", "#d55e00"
_ROUND = (0.0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
_LEAST_GROUP = 10
"""Rows that are averaged at least."""


def draw_calibration(held_out: pd.DataFrame) -> Figure:
    """Draw observed against predicted shares of positives, on square-root axes.

    A bar is the 95 % interval of a predicted count, a diamond the mean of a group of rows whose
    predictions are alike.

    Args:
        held_out: Table of ``held_out_counts``.
    """
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    examined = held_out["examined"].to_numpy()
    shares = {name: held_out[name].to_numpy() / examined for name in _SHARES}
    expected, found, low, high = shares.values()
    inside = (low <= found) & (found <= high)
    axes.vlines(expected, low, high, color="0.75", lw=0.8, zorder=1)
    for rows, shape, colour, text in (
        (inside, "o", _INSIDE, "inside its 95 % interval"),
        (~inside, "^", _OUTSIDE, "outside"),
    ):
        label = f"{text} ({rows.sum():,})"
        axes.plot(expected[rows], found[rows], shape, ms=4, color=colour, alpha=0.8, label=label)
    means = _group_means(expected, found)
    if len(means):
        axes.plot(*means.T, "D", ms=7, mfc="white", mec="black", label="mean of a group")
    top = float(max(expected.max(), found.max(), high.max())) * 1.05 + 1e-3
    axes.plot([0.0, top], [0.0, top], color="black", lw=1.0, ls=":", label="predicted = observed")
    axes.set_xscale("function", functions=(np.sqrt, np.square))
    axes.set_yscale("function", functions=(np.sqrt, np.square))
    axes.set(xlim=(0.0, top), ylim=(0.0, top), xlabel="predicted", ylabel="observed")
    for axis in (axes.xaxis, axes.yaxis):
        _in_per_cent(axis, [value for value in _ROUND if value <= top])
    _finish(axes)
    figure.legend(loc="outside lower left", ncols=2, fontsize=11, frameon=False)
    return figure


_SHARES = ("expected", "positive", "low_95", "high_95")


def _group_means(expected: Array, found: Array) -> Array:
    """Return mean prediction and mean observation of up to ten groups of like predictions."""
    groups = min(10, len(expected) // _LEAST_GROUP)
    if groups < 2:
        return np.empty((0, 2))
    order = np.argsort(expected)
    return np.array([(expected[g].mean(), found[g].mean()) for g in np.array_split(order, groups)])


def draw_forecast(forecast: pd.DataFrame) -> Figure:
    """Draw the expected share of today's uncertainty that is left after further rounds.

    Args:
        forecast: A row a round, with columns ``sites`` (in addition to today's) and ``remaining``.
    """
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    sites = [0, *forecast["sites"].tolist()]
    remaining = [1.0, *forecast["remaining"].tolist()]
    axes.plot(sites, remaining, "o-", color=_INSIDE, ms=6)
    axes.annotate(
        f"{100 * remaining[-1]:.0f} %", (sites[-1], remaining[-1]), (0, 9),
        textcoords="offset points", ha="center", fontsize=11,
    )  # fmt: skip
    axes.set(xlabel="further sites surveyed", ylabel="uncertainty left, of today's")
    axes.set_ylim(0.0, 1.08)
    axes.xaxis.set_major_locator(FixedLocator(sites))
    _in_per_cent(axes.yaxis, [0.0, 0.25, 0.5, 0.75, 1.0])
    _finish(axes)
    return figure


_COLOURS = {"adaptive": _INSIDE, "random": _OUTSIDE}
_LABELS = {
    "accuracy": "called right",
    "sensitivity": "called above, of those above",
    "log_score": "mean log score of a count (nats)",
    "rmse": "error of prevalence (RMSE)",
}


def draw_replay(scores: pd.DataFrame) -> Figure:
    """Draw the scores of replays against the number of sites surveyed.

    Thin lines are seeds, thick ones their means. A dotted line marks the random design's last
    accuracy.

    Args:
        scores: A row a round, with columns ``design``, ``seed``, ``round``, ``surveyed`` and any of
            ``accuracy``, ``sensitivity``, ``log_score`` and ``rmse``, all of sites not surveyed.
    """
    measures = [name for name in _LABELS if name in scores]
    rows = len(measures) // 2
    figure = Figure(figsize=(2 * SIZE[0], 0.8 * SIZE[1] * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, 2, sharex=True, squeeze=False)
    for axes, measure in zip(panels.flat, measures, strict=True):
        for design, curves in scores.groupby("design"):
            _draw_curves(axes, curves, str(design), measure)
        axes.set(ylabel=_LABELS[measure])
        if measure in ("accuracy", "sensitivity"):
            axes.yaxis.set_major_formatter(_per_cent())
        _finish(axes)
    for axes in panels[-1]:
        axes.set_xlabel("sites surveyed")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, fontsize=9, frameon=False)
    figure.suptitle("Scores at the sites that are not surveyed", fontsize=11)
    return figure


def _draw_curves(axes: Axes, curves: pd.DataFrame, design: str, measure: str) -> None:
    """Draw one design's curves of each seed and their mean."""
    colour, seeds = _COLOURS[design], curves["seed"].nunique()
    for _, one in curves.groupby("seed"):
        axes.plot(one["surveyed"], one[measure], color=colour, lw=0.7, alpha=0.5)
    means = curves.groupby("round")[["surveyed", measure]].mean()
    label = design if seeds == 1 else f"{design}: mean of {seeds} seeds"
    axes.plot(means["surveyed"], means[measure], "o-", color=colour, lw=2.2, ms=4, label=label)
    if design == "random" and measure == "accuracy":
        last = means[measure].iloc[-1]
        axes.axhline(last, color=colour, lw=1.0, ls=":", label="random at the end")


def _in_per_cent(axis: Axis, values: list[float]) -> None:
    axis.set_major_locator(FixedLocator(values))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(_per_cent())


def _per_cent() -> FuncFormatter:
    return FuncFormatter(lambda value, _: f"{100 * value:g} %")


def _finish(axes: Axes) -> None:
    axes.grid(color="0.9", lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=11)
