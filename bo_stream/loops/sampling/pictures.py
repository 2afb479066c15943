"""Pictures of a sampling run: the map with its picks, and the error over the observations."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bo_stream.diagnostics.pictures import mark_hand_overs
from bo_stream.loops.datasets import Array, Dataset
from bo_stream.loops.predictions import Score
from bo_stream.loops.sampling.settings import STRATEGY_NAMES, Strategy
from bo_stream.models.auto.inference import HandOver


@dataclass(frozen=True)
class MapView:
    """Content of a map, in units of the data.

    Attributes:
        data: True values at all sites.
        mean: Posterior mean at all rows, ``n``.
        deviation: Posterior standard deviation of the function there, ``n``.
        picks: Rows that were observed, in order.
        initial: Number of initial rows among them.
        outliers: Rows among them that the model is without.
    """

    data: Dataset
    mean: Array
    deviation: Array
    picks: Sequence[int]
    initial: int
    outliers: Sequence[int] = ()


def draw_map(view: MapView) -> Figure:
    """Draw truth, mean, standard deviation and picks: lines in 1-D, else maps of two inputs."""
    figure = _lines(view) if view.data.X.shape[1] == 1 else _maps(view)
    figure.suptitle(
        f"{view.data.source}: {len(view.picks):,} of {len(view.data.y):,} sites observed",
        fontsize=12,
    )
    return figure


def draw_curve(
    curves: Mapping[Strategy, Sequence[Score]], target: str, hand_overs: Iterable[HandOver] = ()
) -> Figure:
    """Draw the error over the number of observations, one line per strategy.

    Args:
        curves: Scores of each strategy.
        target: Name of what is predicted.
        hand_overs: Of the main strategy's model, to be marked.
    """
    figure = Figure(figsize=(7.0, 4.4), layout="constrained")
    axes = figure.subplots()
    for (name, curve), style in zip(curves.items(), ("o-", "s--"), strict=False):
        observations = [score.observations for score in curve]
        label = f"{STRATEGY_NAMES[name]}: {curve[-1].rmse_sd:.3f} sd at the end"
        axes.plot(observations, [score.rmse for score in curve], style, ms=3, label=label)
    mark_hand_overs(axes, ((move.observations, move) for move in hand_overs))
    last = next(iter(curves.values()))[-1]
    unit = last.rmse / last.rmse_sd
    right = axes.secondary_yaxis(
        "right", functions=(lambda y: np.divide(y, unit), lambda y: np.multiply(y, unit))
    )
    right.set_ylabel("in standard deviations of the target", fontsize=9)
    axes.set(xlabel="observations", ylabel=_wrapped(f"held-out RMSE, {target}"))
    axes.yaxis.label.set_fontsize(9)
    axes.set_ylim(bottom=0.0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    return figure


def _maps(view: MapView) -> Figure:
    data, raster = view.data, _raster(view.data)
    ratio = float(np.clip(_aspect(data) * _heights_per_width(data), 0.45, 1.8))
    width, height = (4.6, 4.6 * ratio) if ratio < 1.0 else (4.6 / ratio, 4.6)
    figure = Figure(figsize=(2 * width + 2.4, 2 * height + 1.2), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    values = {"norm": Normalize(*np.quantile(data.y, (0.002, 0.998))), "cmap": "viridis"}
    spread = {"norm": Normalize(*np.quantile(view.deviation, (0.0, 0.998))), "cmap": "magma"}
    panels = (
        ("truth", data.y, values),
        ("posterior mean", view.mean, values),
        ("posterior standard deviation", view.deviation, spread),
        ("picks over the posterior mean", view.mean, values),
    )
    for panel, (title, shown, colours) in zip(axes.flat, panels, strict=True):
        panel.set_title(title, fontsize=10)
        panel.set_aspect(_aspect(data))
        painted = _painted(panel, data, raster, shown, colours)
        bar = figure.colorbar(painted, ax=panel, shrink=0.9, pad=0.02)
        bar.set_label(_wrapped(data.target), fontsize=8)
        bar.ax.tick_params(labelsize=8)
    _draw_picks(axes[1, 1], view)
    unit = " (degrees)" if _is_lon_lat(data) else ""
    for bottom, left in zip(axes[-1, :], axes[:, 0], strict=True):
        bottom.set_xlabel(data.columns[0] + unit, fontsize=9)
        left.set_ylabel(data.columns[1] + unit, fontsize=9)
    return figure


def _heights_per_width(data: Dataset) -> float:
    width, height = np.ptp(data.X[:, :2], axis=0)
    return float(height / width)


def _is_lon_lat(data: Dataset) -> bool:
    first, second = (name.lower() for name in data.columns[:2])
    return first.startswith(("lon", "lng")) and second.startswith("lat")


def _aspect(data: Dataset) -> float:
    """Return the height of a unit of the second input over the width of one of the first."""
    if _is_lon_lat(data):
        return 1.0 / math.cos(math.radians(float(np.median(data.X[:, 1]))))
    return 1.0 if 0.2 < _heights_per_width(data) < 5.0 else 1.0 / _heights_per_width(data)


_Raster = tuple[Array, Array, tuple[NDArray[np.intp], NDArray[np.intp]]]
"""Ticks x and y of a regular grid, and the rows and columns of sites on it."""


def _raster(data: Dataset) -> _Raster | None:
    """Find the raster of a 2-D data set, or None if its sites are scattered."""
    if data.X.shape[1] != 2:
        return None
    most = 4 * len(data.y)
    x, y = (_ticks(values, most) for values in data.X.T)
    if x is None or y is None or x.size * y.size > most:
        return None
    column, row = (
        np.rint((values - ticks[0]) / (ticks[1] - ticks[0])).astype(np.intp)
        for values, ticks in zip(data.X.T, (x, y), strict=True)
    )
    return x, y, (row, column)


def _ticks(values: Array, most: int) -> Array | None:
    """Find evenly spaced ticks on which all values lie, or None if there are none or too many."""
    unique = np.unique(np.round(values, 9))
    spacing = float(np.median(np.diff(unique))) if unique.size > 2 else 0.0
    if spacing <= 0.0:
        return None
    steps = (unique - unique[0]) / spacing
    if steps[-1] >= most or np.abs(steps - np.rint(steps)).max() > 0.1:
        return None
    ticks: Array = np.linspace(unique[0], unique[-1], int(np.rint(steps[-1])) + 1)
    return ticks


def _painted(
    axes: Axes, data: Dataset, raster: _Raster | None, values: Array, colours: Mapping[str, Any]
) -> ScalarMappable:
    """Paint values at all sites, as pixels of the raster or else as dots."""
    if raster is None:
        size = float(np.clip(2e4 / len(values), 1.0, 30.0))
        x, y = data.X[:, :2].T
        return axes.scatter(x, y, s=size, c=values, linewidths=0, **colours)
    columns, rows, pixels = raster
    picture = np.full((rows.size, columns.size), np.nan)
    picture[pixels] = values
    return axes.pcolormesh(columns, rows, picture, **colours)


def _draw_picks(axes: Axes, view: MapView) -> None:
    line: dict[str, Any] = {"linestyle": "none", "markeredgecolor": "black", "markeredgewidth": 0.4}
    for name, rows, marker, size, colour in (
        ("chosen", view.picks[view.initial :], "o", 2.6, "white"),
        ("initial", view.picks[: view.initial], "s", 4.5, "tab:red"),
        ("outliers", view.outliers, "X", 7.0, "tab:orange"),
    ):
        if rows:
            x, y = view.data.X[list(rows), :2].T
            label = f"{name} ({len(rows):,})"
            axes.plot(x, y, marker=marker, ms=size, color=colour, label=label, **line)
    axes.legend(loc="best", fontsize=8, framealpha=0.85)


def _lines(view: MapView) -> Figure:
    data = view.data
    order = np.argsort(data.X[:, 0])
    x, mean, deviation = data.X[order, 0], view.mean[order], view.deviation[order]
    figure = Figure(figsize=(9.0, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(x, data.y[order], ".", color="0.6", ms=3, label="truth")
    axes.plot(x, mean, color="tab:blue", label="posterior mean")
    axes.fill_between(
        x, mean - 2 * deviation, mean + 2 * deviation, alpha=0.25, label="± 2 standard deviations"
    )
    rows = list(view.picks)
    axes.plot(data.X[rows, 0], data.y[rows], "o", mfc="none", mec="tab:red", ms=5, label="picks")
    if view.outliers:
        rows = list(view.outliers)
        axes.plot(data.X[rows, 0], data.y[rows], "X", color="tab:orange", ms=8, label="outliers")
    axes.set(xlabel=data.columns[0], ylabel=_wrapped(data.target))
    axes.legend(fontsize=8)
    return figure


def _wrapped(label: str) -> str:
    return textwrap.fill(label, 48)
