"""Maps and charts of a survey, and the data of a map to zoom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from botorch.models.transforms.input import InputTransform
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap, PowerNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray
from scipy.spatial import KDTree

from bo_stream.loops.survey.findings import (
    SurveyFindings,
    chance_in_words,
    label_texts,
    result_in_words,
    shown_labels,
)
from bo_stream.loops.survey.model import ABOVE, BELOW, UNCERTAIN, as_set, per_cent
from bo_stream.loops.survey.settings import DEGREES, Coordinates
from bo_stream.mapping import RADIUS, REACH, Kilometres, kilometres

Array = NDArray[np.float64]

_SIZE = (5.4, 4.6)
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
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    examined = held_out["examined"].to_numpy()
    columns = ("expected", "positive", "low_95", "high_95")
    expected, found, low, high = (held_out[name].to_numpy() / examined for name in columns)
    inside = (low <= found) & (found <= high)
    axes.vlines(expected, low, high, color="0.75", lw=0.8, zorder=1)
    for rows, shape, colour, text in (
        (inside, "o", _INSIDE, "inside its 95 % interval"),
        (~inside, "^", _OUTSIDE, "outside"),
    ):
        label = f"{text} ({rows.sum():,})"
        axes.plot(expected[rows], found[rows], shape, ms=4, color=colour, alpha=0.8, label=label)
    groups = min(10, len(expected) // _LEAST_GROUP)
    if groups > 1:
        order = np.array_split(np.argsort(expected), groups)
        means = np.array([(expected[rows].mean(), found[rows].mean()) for rows in order])
        axes.plot(*means.T, "D", ms=7, mfc="white", mec="black", label="mean of a group")
    top = float(max(expected.max(), found.max(), high.max())) * 1.05 + 1e-3
    axes.plot([0.0, top], [0.0, top], color="black", lw=1.0, ls=":", label="predicted = observed")
    axes.set_xscale("function", functions=(np.sqrt, np.square))
    axes.set_yscale("function", functions=(np.sqrt, np.square))
    axes.set(xlim=(0.0, top), ylim=(0.0, top), xlabel="predicted", ylabel="observed")
    ticks = [value for value in _ROUND if value <= top]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{100 * value:g} %" for value in ticks])
    _finish(axes)
    figure.legend(loc="outside lower left", ncols=2, fontsize=11, frameon=False)
    return figure


def draw_forecast(forecast: pd.DataFrame) -> Figure:
    """Draw the expected uncertainty after further rounds, a share of that after the pending sites.

    Args:
        forecast: A row a round, with columns ``sites`` (after the pending ones) and ``remaining``.
    """
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    sites = [0, *forecast["sites"].tolist()]
    remaining = [1.0, *forecast["remaining"].tolist()]
    axes.plot(sites, remaining, "o-", color=_INSIDE, ms=6)
    axes.annotate(
        f"{100 * remaining[-1]:.0f} %", (sites[-1], remaining[-1]), (0, 9),
        textcoords="offset points", ha="center", fontsize=11,
    )  # fmt: skip
    axes.set(xlabel="further sites surveyed", ylabel="share of uncertainty left")
    axes.set_ylim(0.0, 1.08)
    axes.set_xticks(sites)
    axes.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0], ["0 %", "25 %", "50 %", "75 %", "100 %"])
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
    figure = Figure(figsize=(2 * _SIZE[0], 0.8 * _SIZE[1] * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, 2, sharex=True, squeeze=False)
    for axes, measure in zip(panels.flat, measures, strict=True):
        for design, curves in scores.groupby("design"):
            colour, seeds = _COLOURS[str(design)], curves["seed"].nunique()
            for _, one in curves.groupby("seed"):
                axes.plot(one["surveyed"], one[measure], color=colour, lw=0.7, alpha=0.5)
            means = curves.groupby("round")[["surveyed", measure]].mean()
            label = str(design) if seeds == 1 else f"{design}: mean of {seeds} seeds"
            x, y = means["surveyed"], means[measure]
            axes.plot(x, y, "o-", color=colour, lw=2.2, ms=4, label=label)
            if design == "random" and measure == "accuracy":
                axes.axhline(y.iloc[-1], color=colour, lw=1.0, ls=":", label="random at the end")
        axes.set(ylabel=_LABELS[measure])
        if measure in ("accuracy", "sensitivity"):
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        _finish(axes)
    for axes in panels[-1]:
        axes.set_xlabel("sites surveyed")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, fontsize=9, frameon=False)
    figure.suptitle("Scores at the sites that are not surveyed", fontsize=11)
    return figure


def _finish(axes: Axes) -> None:
    axes.grid(color="0.9", lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=11)


# --- maps of a survey: values or classes of sites ------------------------------------------------


COLOURS = {ABOVE: "#d55e00", UNCERTAIN: "#c9c9c9", BELOW: "#56b4e9"}
"""Of the classes [Okabe and Ito, 2008]: apart for the colour-blind, and as greys."""

WIDTH = 5.4
"""Of a picture, in inches: a phone shows its letters at some ten pixels."""

MOST_NUMBERS = 40
"""Chosen sites that are numbered; of more the numbers would cover the map."""

_TALLEST, _WIDEST = 2.6, 0.5
"""Height over width of a map at most, at least; the ground beyond the sites fills the rest."""

DISC = 16.0
"""Diameter of a numbered disc, in points."""

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
        given = torch.tensor(positions)
        plane = kilometres(given, units=coordinates.mapping_units)
        if isinstance(plane, Kilometres):
            middle = float(plane.centre[0])
            positions[:, 0] = (positions[:, 0] - middle + 180.0) % 360.0 - 180.0 + middle
        sites: Array = plane.transform(given).numpy()
        return cls(plane, sites, positions, coordinates)

    def extent(self, tallest: float, widest: float) -> tuple[tuple[float, float], ...]:
        """Return limits east and north, in kilometres, that have all sites and some margin.

        Args:
            tallest: Height over width at most.
            widest: Height over width at least.
        """
        low, high = self.sites.min(0), self.sites.max(0)
        half = 0.53 * (high - low) + 0.01 * (high - low).max() + 0.05
        half = np.maximum(half, (half[1] / tallest, half[0] * widest))
        middle = 0.5 * (low + high)
        return tuple(zip((middle - half).tolist(), (middle + half).tolist(), strict=True))

    def place(self, positions: Array) -> Array:
        """Map positions, ``n x 2``, to kilometres; longitudes may be beyond the date line."""
        given = torch.tensor(positions)
        if self.coordinates.are_degrees:
            given[:, 0] = (given[:, 0] + 180.0) % 360.0 - 180.0
        placed: Array = self.plane.transform(given).numpy()
        return placed

    def reaches(self, positions: Array) -> NDArray[np.bool_]:
        """Tell of each position, ``n x 2``, whether it is near enough to be mapped."""
        if not isinstance(self.plane, Kilometres):
            return np.ones(len(positions), dtype=bool)
        in_space = self.coordinates.in_space
        apart = in_space(torch.tensor(positions)) - in_space(self.plane.centre.unsqueeze(0))
        chord = 2.0 * RADIUS * math.sin(0.5 * REACH / RADIUS)
        return np.asarray(apart.norm(dim=-1) < chord - 1.0, dtype=bool)


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
    dots = _dots(axes, ground, c=values, cmap=without_white(colours), norm=norm)
    ticks, beyond = bar_ticks(top), "max" if values.max() > top else "neither"
    bar = figure.colorbar(dots, ax=axes, location="bottom", pad=0.02, aspect=32, extend=beyond)
    bar.set_label(label, fontsize=11)
    bar.set_ticks(ticks, labels=[f"{100 * tick:.3g} %" for tick in ticks])
    bar.ax.tick_params(labelsize=11)
    if mark is not None:
        bar.ax.axvline(mark, color="black", lw=2.5)
    _mark(figure, axes, ground, table, table[:0] if chosen is None else chosen)
    return figure


def bar_ticks(top: float) -> list[float]:
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
    _dots(axes, ground, c=table["class"].map(COLOURS).to_numpy())
    classes = [
        Line2D([], [], marker="o", ms=8, ls="none", color=COLOURS[name], label=text)
        for name, text in labels.items()
    ]
    _mark(figure, axes, ground, table, chosen, classes)
    return figure


# --- ground -------------------------------------------------------------------------------------


def _canvas(table: pd.DataFrame, coordinates: Coordinates) -> tuple[Figure, Axes, Ground]:
    """Begin a map: axes in kilometres, lines of longitude and latitude, a scale bar.

    The axes are as wide as the picture, and as tall as the sites need at that scale.
    """
    ground = Ground.of(table, coordinates)
    (left, right), (bottom, top) = ground.extent(_TALLEST, _WIDEST)
    bottom -= 0.06 * (top - bottom)  # of the scale bar
    height = 0.9 * WIDTH * (top - bottom) / (right - left)
    figure = Figure(figsize=(WIDTH, height + 1.4), layout="constrained")
    axes = figure.subplots()
    axes.set_aspect("equal")
    axes.set(xlim=(left, right), ylim=(bottom, top))
    axes.spines[:].set_color("0.7")
    _draw_graticule(axes, ground)
    # The scale bar has a round number of kilometres, a third of the map at most.
    length = _round_length((right - left) / 3.0)
    x, y = left + 0.04 * (right - left), bottom + 0.045 * (top - bottom)
    step = 0.012 * (top - bottom)
    ends, heights = [x, x, x + length, x + length], [y + step, y, y, y + step]
    axes.plot(ends, heights, color="black", lw=1.4, zorder=6)
    axes.text(x + 0.5 * length, y + step, f"{length:g} km", ha="center", va="bottom", fontsize=11)
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
        locator = MaxNLocator(nbins=4, steps=[1, 2, 5, 10])
        values = locator.tick_values(low[column], high[column])
        start, end = course[column][[0, -1]]
        for value in values[(values >= start) & (values <= end)]:
            line = np.empty((60, 2))
            line[:, column], line[:, 1 - column] = value, course[1 - column]
            line = line[ground.reaches(line)]
            if not len(line):
                continue
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
    axes.tick_params(length=0, labelsize=11, labelcolor="0.35")


def _round_length(most: float) -> float:
    """Return the largest of 1, 2, 5 times a power of ten that is not above ``most``."""
    power = 10.0 ** math.floor(math.log10(most))
    return max(step * power for step in (1.0, 2.0, 5.0) if step * power <= most * (1.0 + 1e-9))


# --- marks --------------------------------------------------------------------------------------


def _dots(axes: Axes, ground: Ground, **colours: Any) -> Any:
    """Draw all sites as dots that fill the ground where they are without much overlap."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    points = 72.0 * 0.9 * WIDTH / (right - left)  # of a kilometre
    dense = len(ground.sites) > _PIXELS
    apart = points * min(2.0 * nearest(ground.sites), right - left, top - bottom)
    size = max(apart**2, 1.0) if dense else float(np.clip(0.5 * apart**2, 8.0, 60.0))
    shape, edge = ("s", 0.0) if dense else ("o", 0.25)
    x, y = ground.sites.T
    return axes.scatter(
        x, y, s=size, marker=shape, linewidths=edge, edgecolors="0.45", zorder=2, **colours
    )


def nearest(sites: Array) -> float:
    """Return the median distance of sites, ``n x 2``, from the next one, in kilometres.

    It is half the side of the square that a site has for itself where sites are at random.
    """
    if len(sites) < 2:
        return math.inf
    return float(np.median(KDTree(sites).query(sites, 2)[0][:, 1]))


def without_white(name: str) -> Colormap:
    """Return a colour map without its lightest part, which white paper swallows."""
    return ListedColormap(colormaps[name](np.linspace(0.15, 1.0, 256)))


def _mark(
    figure: Figure,
    axes: Axes,
    ground: Ground,
    table: pd.DataFrame,
    chosen: pd.DataFrame,
    marks: Sequence[Line2D] = (),
) -> None:
    """Mark surveyed and chosen sites, explain all marks in a legend, and number the chosen ones.

    Args:
        figure: The picture, complete but for these.
        axes: The map.
        ground: Its positions.
        table: All sites, with a column ``examined``.
        chosen: Sites to be surveyed next.
        marks: Further marks to be explained, which come first.
    """
    marks, surveyed = list(marks), table["examined"].notna().to_numpy()
    if surveyed.any():
        marks += axes.plot(
            *ground.sites[surveyed].T, "o", ms=4.5 if surveyed.sum() < 400 else 3.0, mfc="none",
            mec="black", mew=0.8, zorder=4, label=f"surveyed ({surveyed.sum():,})",
        )  # fmt: skip
    sites = ground.place(chosen[list(ground.coordinates.names)].to_numpy(float))
    are_few = len(sites) <= MOST_NUMBERS
    if len(sites):
        shape, size = ("o", 4.0) if are_few else ("D", 5.0)
        label = f"next ({len(sites):,})"
        marks += axes.plot(
            *sites.T, shape, color="black", mec="white", ms=size, zorder=7, label=label
        )
    if marks:
        figure.legend(
            handles=marks, loc="outside lower left", ncols=2, fontsize=11, frameon=False,
            handletextpad=0.3, columnspacing=1.0,
        )  # fmt: skip
    if len(sites) and are_few:
        _number(figure, axes, sites)


def _number(figure: Figure, axes: Axes, sites: Array) -> None:
    """Number sites by discs that do not cover each other, each with a line to its site.

    The picture must be complete but for them: their room is that of the final axes.
    """
    figure.draw_without_rendering()
    points = 72.0 / figure.dpi  # of a pixel
    at = points * np.asarray(axes.transData.transform(sites))
    box = points * np.asarray(axes.get_window_extent().get_points())
    discs = spread_apart(at, DISC + 1.0, box[0] + 0.5 * DISC, box[1] - 0.5 * DISC)
    for number, (site, shift) in enumerate(zip(sites, discs - at, strict=True), start=1):
        offset = ScaledTranslation(shift[0] / 72.0, shift[1] / 72.0, figure.dpi_scale_trans)
        axes.plot(
            *site, "o", color="black", mec="white", ms=DISC, zorder=8, in_layout=False,
            transform=axes.transData + offset,
        )  # fmt: skip
        line = {"arrowstyle": "-", "lw": 0.9, "shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            str(number), tuple(site), tuple(shift), textcoords="offset points", color="white",
            fontsize=9.0, fontweight="bold", ha="center", va="center_baseline", zorder=9,
            arrowprops=line if np.hypot(*shift) > 0.5 * DISC else None, in_layout=False,
        )  # fmt: skip


def spread_apart(points: Array, distance: float, low: Array, high: Array) -> Array:
    """Move points so that any two of them are some distance apart, each as little as it can be.

    The points take places one after the other: each the nearest of some on rings about itself that
    are in the box and far enough from those taken.

    Args:
        points: ``n x 2``.
        distance: Least distance of the moved points.
        low: Lower corner of the box that they stay in, 2.
        high: Upper corner.

    Returns:
        The moved points, ``n x 2``. One for which the box has no room stays where it is.
    """
    moved = np.clip(points, low, high)
    for row, middle in enumerate(moved.copy()):
        for ring in np.arange(0.0, float(np.hypot(*(high - low))), 0.2 * distance):
            angles = np.linspace(0.0, 2.0 * np.pi, 1 + 8 * int(1.0 + 4.0 * ring / distance))
            places = middle + ring * np.column_stack((np.cos(angles), np.sin(angles)))
            apart = np.sqrt(((places[:, None] - moved[:row]) ** 2).sum(-1))
            free = ((low <= places) & (places <= high)).all(axis=1)
            free &= (apart >= distance).all(axis=1)
            if free.any():
                moved[row] = places[int(free.argmax())]
                break
    return moved


# --- the map to zoom ------------------------------------------------------------------------------


_STEPS = 24
"""Colours of a layer of numbers."""

_TALLEST_ZOOMED = 2.0
"""Height over width of the map to zoom at most, so that a phone shows it whole."""


def zoomable_map(findings: SurveyFindings) -> dict[str, Any]:
    """Return the data of a map of all sites, to be drawn by ``map.js``.

    They are lists of numbers and texts, an entry a site, and take some hundred bytes a site.
    """
    table, coordinates = findings.predictions, findings.settings.coordinates
    ground = Ground.of(table, coordinates)
    (left, right), (bottom, top) = ground.extent(_TALLEST_ZOOMED, _WIDEST)
    width, height = right - left, top - bottom
    apart = min(2.0 * nearest(ground.sites), width, height)
    east, north = ground.sites.T
    chosen = pd.Index(table["id"]).get_indexer(pd.Index(findings.chosen["id"]))
    names, labels = _named(findings)
    values: dict[str, Any] = {
        "width": round(width, 3),
        "height": round(height, 3),
        "apart": round(apart, 4),
        "zoom": float(np.clip(max(width, height) / max(apart, 1e-9), 8.0, 1000.0)),
        "x": (east - left).round(3).tolist(),
        "y": (top - north).round(3).tolist(),
        "names": names,
        "labels": [[name, cells] for name, cells in labels.items()],
        **{  # in per cent, with the digits of the page's lists
            name: [per_cent(share).removesuffix(" %") for share in table[column]]
            for name, column in (("mean", "prevalence"), ("low", "lower"), ("high", "upper"))
        },
        "results": {  # in words, by the index of the site
            str(index): result_in_words(row)
            for index, row in enumerate(table.to_dict("records"))
            if not pd.isna(row["examined"])
        },
        "next": chosen[chosen >= 0].tolist(),
        "layers": [],
        "marks": [[f"surveyed ({len(findings.surveyed):,})", "ring"]],
    }
    if coordinates.are_degrees:
        longitude = (table["longitude"] + 180.0) % 360.0 - 180.0
        values["places"] = [table["latitude"].round(5).tolist(), longitude.round(5).tolist()]
    if len(findings.chosen):
        values["marks"].append([f"to survey next ({len(findings.chosen):,})", "disc"])
    if findings.settings.threshold is not None:
        line = as_set(findings.settings.threshold)
        values["above"] = f"Above {line}"
        values["called"] = ["called above", "uncertain", "called below"]
        values["chance"] = [chance_in_words(chance) for chance in table["exceedance"]]
        order, counts = [ABOVE, UNCERTAIN, BELOW], findings.class_counts()
        texts = zip((f"above {line}", "uncertain", f"below {line}"), order, strict=True)
        values["layers"].append(
            {
                "name": "Calls",
                "colours": [COLOURS[name] for name in order],
                "index": [order.index(name) for name in table["class"]],
                "legend": [[f"{text} ({counts[name]:,})", COLOURS[name]] for text, name in texts],
            }
        )
    mean, spread = table["prevalence"].to_numpy(), (table["upper"] - table["lower"]).to_numpy()
    values["layers"] += [
        _layer("Prevalence", mean, "YlOrBr", findings.settings.threshold or 0.0),
        _layer("Uncertainty", spread, "BuPu", 0.0),
    ]
    return values


def _named(findings: SurveyFindings) -> tuple[list[str], dict[str, list[str]]]:
    """Return the name of each site, else its id, and what else says which it is, by heading."""
    ids = findings.predictions["id"].astype(str)
    name, others = shown_labels(findings.labels)
    labels = label_texts(findings.labels).reindex(findings.predictions["id"], fill_value="")
    texts = {other: labels[other].str.strip().tolist() for other in others}
    if name is None:
        return ids.tolist(), texts
    names = labels[name].str.strip().to_numpy()
    return np.where(names == "", ids, names).tolist(), {**texts, "Id": ids.tolist()}


def _layer(name: str, values: Array, colours: str, mark: float) -> dict[str, Any]:
    """Return a layer of shares, coloured as in the still maps."""
    top = max(float(np.quantile(values, 0.995)), mark, 1e-9)
    norm, palette = PowerNorm(0.5, 0.0, top, clip=True), without_white(colours)
    steps = np.minimum(np.asarray(norm(values)) * _STEPS, _STEPS - 1).astype(int)
    ticks = bar_ticks(top)
    return {
        "name": name,
        "colours": [to_hex(palette((step + 0.5) / _STEPS)) for step in range(_STEPS)],
        "index": steps.tolist(),
        "legend": [[f"{100 * tick:.3g} %", to_hex(palette(float(norm(tick))))] for tick in ticks],
    }
