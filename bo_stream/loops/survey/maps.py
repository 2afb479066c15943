"""Maps of a survey: values or classes of sites, the sites surveyed and those to survey next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from botorch.models.transforms.input import InputTransform
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from bo_stream.loops.survey.calls import ABOVE, BELOW, UNCERTAIN
from bo_stream.loops.survey.coordinates import DEGREES, Coordinates
from bo_stream.mapping import Kilometres

Array = NDArray[np.float64]

COLOURS = {ABOVE: "#d55e00", UNCERTAIN: "#c9c9c9", BELOW: "#56b4e9"}
"""Of the classes [Okabe and Ito, 2008]: apart for the colour-blind, and as greys."""

WIDTH = 5.4
"""Of a picture, in inches: a phone shows its letters at some ten pixels."""

MOST_NUMBERS = 40
"""Chosen sites that are numbered; of more the numbers would cover the map."""

_PIXELS = 3_000
"""Sites from which on they are drawn as squares that touch."""


@dataclass(frozen=True)
class Ground:
    """Positions of a map in kilometres.

    Attributes:
        plane: From positions to kilometres about the middle of the sites.
        sites: ``n x 2``, of all sites, in kilometres east and north.
        positions: ``n x 2``, as given; longitudes within 180 degrees of the middle's.
        coordinates: Units and names of positions.
    """

    plane: InputTransform
    sites: Array
    positions: Array
    coordinates: Coordinates

    @classmethod
    def of(cls, table: pd.DataFrame, coordinates: Coordinates) -> Ground:
        """Lay out the sites of a table with columns of these coordinates' names."""
        positions = table[list(coordinates.names)].to_numpy(float).copy()
        plane = coordinates.plane(torch.from_numpy(positions))
        if isinstance(plane, Kilometres):
            middle = float(plane.centre[0])
            positions[:, 0] = (positions[:, 0] - middle + 180.0) % 360.0 - 180.0 + middle
        return cls(plane, _in_kilometres(plane, positions), positions, coordinates)

    def place(self, positions: Array) -> Array:
        """Map positions, ``n x 2``, to kilometres."""
        return _in_kilometres(self.plane, positions)

    def place_sites(self, table: pd.DataFrame) -> Array:
        """Map the positions of a table's sites to kilometres, ``n x 2``."""
        return self.place(table[list(self.coordinates.names)].to_numpy(float))


def _in_kilometres(plane: InputTransform, positions: Array) -> Array:
    found: Array = plane.transform(torch.tensor(positions)).numpy()
    return found


def draw_values(
    table: pd.DataFrame,
    values: Array,
    label: str,
    colours: str,
    mark: float | None = None,
    chosen: pd.DataFrame | None = None,
    coordinates: Coordinates = DEGREES,
) -> Figure:
    """Draw shares of all sites as a map with a colour bar in per cent.

    Args:
        table: The sites, with columns of position and ``examined``.
        values: Of the sites, n, between 0 and 1.
        label: Of the colour bar.
        colours: Name of a colour map, from light to dark.
        mark: Value that the colour bar marks, such as a threshold.
        chosen: Sites to be surveyed next, if they are to be marked.
        coordinates: Units and names of positions.
    """
    figure, axes, ground = _canvas(table, coordinates)
    top = max(float(np.quantile(values, 0.995)), mark or 0.0, 1e-9)
    norm = PowerNorm(0.5, 0.0, top)
    dots = _dots(axes, ground, c=values, cmap=_without_white(colours), norm=norm)
    beyond = "max" if values.max() > top else "neither"
    bar = figure.colorbar(dots, ax=axes, location="bottom", pad=0.02, aspect=32, extend=beyond)
    bar.set_label(label, fontsize=10)
    bar.ax.xaxis.set_major_locator(FixedLocator(_bar_ticks(top)))
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    bar.ax.tick_params(labelsize=9)
    if mark is not None:
        bar.ax.axvline(mark, color="black", lw=2.5)
    marks = _mark_surveyed(axes, ground, table)
    if chosen is not None and len(chosen):
        marks += _mark_chosen(axes, ground, chosen)
    _legend(figure, marks)
    return figure


def _bar_ticks(top: float) -> list[float]:
    """Return some round values from 0 to ``top``, denser where they are small."""
    step = _round_length(top)
    return [
        0.0,
        *(share * step for share in (0.05, 0.2, 0.5, 1.0, 2.0, 4.0) if share * step <= top),
    ]


def draw_classes(
    table: pd.DataFrame,
    labels: Mapping[str, str],
    chosen: pd.DataFrame,
    coordinates: Coordinates = DEGREES,
) -> Figure:
    """Draw the class of each site, the sites surveyed, and the numbered ones to survey next.

    Args:
        table: The sites, with columns of position, ``class`` and ``examined``.
        labels: Text of each class for the legend.
        chosen: Sites to be surveyed next.
        coordinates: Units and names of positions.
    """
    figure, axes, ground = _canvas(table, coordinates)
    colours = table["class"].map(COLOURS).to_numpy()
    _dots(axes, ground, c=colours)
    classes = [
        Line2D([], [], marker="o", ms=8, ls="none", color=COLOURS[name], label=text)
        for name, text in labels.items()
    ]
    marks = _mark_surveyed(axes, ground, table) + _mark_chosen(axes, ground, chosen)
    _legend(figure, [*classes, *marks])
    return figure


# --- ground -------------------------------------------------------------------------------------


def _canvas(table: pd.DataFrame, coordinates: Coordinates) -> tuple[Figure, Axes, Ground]:
    """Begin a map: axes in kilometres, lines of longitude and latitude, a scale bar."""
    ground = Ground.of(table, coordinates)
    low, high = ground.sites.min(0), ground.sites.max(0)
    middle, half = 0.5 * (low + high), 0.54 * np.maximum(high - low, 0.2 * (high - low).max() + 0.1)
    ratio = float(np.clip(half[1] / half[0], 0.5, 1.6))
    figure = Figure(figsize=(WIDTH, 0.85 * WIDTH * ratio + 0.9), layout="constrained")
    axes = figure.subplots()
    axes.set_aspect("equal")
    axes.set(xlim=(middle[0] - half[0], middle[0] + half[0]))
    axes.set(ylim=(middle[1] - 1.12 * half[1], middle[1] + half[1]))  # the scale bar is below
    axes.spines[:].set_color("0.7")
    _draw_graticule(axes, ground)
    _draw_scale(axes)
    return figure, axes, ground


def _draw_graticule(axes: Axes, ground: Ground) -> None:
    """Draw lines of longitude and latitude, labelled where they cross the lower and left edge."""
    left, bottom = axes.get_xlim()[0], axes.get_ylim()[0]
    low, high = ground.positions.min(0), ground.positions.max(0)
    margin = 0.2 * (high - low).max() + 1e-3
    course = [np.linspace(a - margin, b + margin, 60) for a, b in zip(low, high, strict=True)]
    if ground.coordinates.are_degrees:
        course[1] = course[1].clip(-90.0, 90.0)
    ticks: list[list[tuple[float, str]]] = [[], []]
    for column in (0, 1):
        for value in _round_values(course[column], low[column], high[column]):
            line = np.empty((60, 2))
            line[:, column], line[:, 1 - column] = value, course[1 - column]
            x, y = ground.place(line).T
            axes.plot(x, y, color="0.88", lw=0.7, zorder=0)
            across, along = (x, y) if column == 0 else (y, x)
            edge = bottom if column == 0 else left
            label = ground.coordinates.label(value, column)
            ticks[column].append((float(np.interp(edge, along, across)), label))
    for axis, found, limits in (
        (axes.xaxis, ticks[0], axes.get_xlim()),
        (axes.yaxis, ticks[1], axes.get_ylim()),
    ):
        inside = [each for each in found if limits[0] <= each[0] <= limits[1]]
        axis.set_ticks([place for place, _ in inside], [text for _, text in inside])
    axes.tick_params(length=0, labelsize=9, labelcolor="0.35")


def _round_values(course: Array, low: float, high: float) -> Array:
    locator = MaxNLocator(nbins=4, steps=[1, 2, 5, 10])
    values = locator.tick_values(low, high)
    return values[(values >= course[0]) & (values <= course[-1])]


def _draw_scale(axes: Axes) -> None:
    """Draw a scale bar of a round number of kilometres, a third of the map at most."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    length = _round_length((right - left) / 3.0)
    x, y = left + 0.04 * (right - left), bottom + 0.045 * (top - bottom)
    step = 0.012 * (top - bottom)
    ends, heights = [x, x, x + length, x + length], [y + step, y, y, y + step]
    axes.plot(ends, heights, color="black", lw=1.4, zorder=6)
    axes.text(x + 0.5 * length, y + step, f"{length:g} km", ha="center", va="bottom", fontsize=9)


def _round_length(most: float) -> float:
    """Return the largest of 1, 2, 5 times a power of ten that is not above ``most``."""
    power = 10.0 ** math.floor(math.log10(most))
    return max(step * power for step in (1.0, 2.0, 5.0) if step * power <= most * (1.0 + 1e-9))


# --- marks --------------------------------------------------------------------------------------


def _dots(axes: Axes, ground: Ground, **colours: Any) -> Any:
    """Draw all sites as dots that fill the ground without much overlap."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    points = (72.0 * 0.8 * WIDTH) ** 2 * min((top - bottom) / (right - left), 1.6)
    room = points / len(ground.sites)
    dense = len(ground.sites) > _PIXELS
    size = max(room, 1.0) if dense else float(np.clip(0.5 * room, 8.0, 60.0))
    shape, edge = ("s", 0.0) if dense else ("o", 0.25)
    x, y = ground.sites.T
    return axes.scatter(
        x, y, s=size, marker=shape, linewidths=edge, edgecolors="0.45", zorder=2, **colours
    )


def _without_white(name: str) -> Colormap:
    """Return a colour map without its lightest part, which white paper swallows."""
    return ListedColormap(colormaps[name](np.linspace(0.15, 1.0, 256)))


def _mark_surveyed(axes: Axes, ground: Ground, table: pd.DataFrame) -> list[Line2D]:
    surveyed = table["examined"].notna().to_numpy()
    if not surveyed.any():
        return []
    x, y = ground.sites[surveyed].T
    size = 4.5 if surveyed.sum() < 400 else 3.0
    label = f"surveyed ({surveyed.sum():,})"
    return axes.plot(x, y, "o", ms=size, mfc="none", mec="black", mew=0.8, zorder=4, label=label)


def _mark_chosen(axes: Axes, ground: Ground, chosen: pd.DataFrame) -> list[Line2D]:
    if not len(chosen):
        return []
    x, y = ground.place_sites(chosen).T
    numbered = len(chosen) <= MOST_NUMBERS
    shape, size, label = "o" if numbered else "D", 12.0 if numbered else 5.0, f"next ({len(x):,})"
    marks = axes.plot(x, y, shape, color="black", mec="white", ms=size, zorder=7, label=label)
    for number in range(len(x)) if numbered else ():
        axes.text(
            x[number], y[number], str(number + 1), color="white", fontsize=7.5, fontweight="bold",
            ha="center", va="center_baseline", zorder=8,
        )  # fmt: skip
    return marks


def _legend(figure: Figure, marks: list[Line2D]) -> None:
    if marks:
        figure.legend(
            handles=marks, loc="outside lower left", ncols=2, fontsize=9, frameon=False,
            handletextpad=0.3, columnspacing=1.0,
        )  # fmt: skip
