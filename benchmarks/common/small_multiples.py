"""Small multiples: a row of panels for each set, a column for each measure, a line for each way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

Line = Sequence[tuple[float, float]]
"""Points (x, y) in the order of x."""


@dataclass(frozen=True)
class Style:
    """How a line is drawn.

    Attributes:
        colour: Of the line.
        marker: At its points.
        wide: Whether it is drawn wider, and below the others so that these can be seen.
    """

    colour: str
    marker: str
    wide: bool = False


@dataclass(frozen=True)
class Measure:
    """What a column shows.

    Attributes:
        title: Above the column.
        better: Which way is better, in words.
        logarithmic: Whether its axis is.
        ceiling: Value at and beyond which nothing can be told; drawn as a line.
    """

    title: str
    better: str
    logarithmic: bool = False
    ceiling: float | None = None


Panels = Mapping[str, Mapping[str, Sequence[Line]]]
"""By set and by way the line of each measure."""


def draw(
    panels: Panels,
    measures: Sequence[Measure],
    styles: Mapping[str, Style],
    ticks: Sequence[float],
    file: Path,
) -> None:
    """Write the picture.

    Args:
        panels: The lines.
        measures: Of the columns, in the order of the lines.
        styles: By way, in the order of the legend.
        ticks: Of the horizontal axes.
        file: Where to.
    """
    width, height = 3.1 * len(measures), 2.6 * len(panels) + 0.8
    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    axes = figure.subplots(len(panels), len(measures), squeeze=False, sharex=True)
    for row, (name, ways) in zip(axes, panels.items(), strict=True):
        row[0].set_ylabel(name, fontsize=11, fontweight="bold")
        for column, (panel, measure) in enumerate(zip(row, measures, strict=True)):
            lines = {way: line[column] for way, line in ways.items()}
            _panel(panel, measure, lines, styles, ticks)
    for panel, measure in zip(axes[0], measures, strict=True):
        panel.set_title(f"{measure.title}\n({measure.better})", fontsize=10)
    for panel in axes[-1]:
        panel.set_xlabel("inducing points M", fontsize=9)
    handles = {line.get_label(): line for panel in axes.flat for line in panel.get_lines()}
    shown = [way for way in styles if way in handles]
    figure.legend(
        [handles[way] for way in shown],
        shown,
        loc="outside lower center",
        ncols=len(shown),
        frameon=False,
        fontsize=9.5,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def _panel(
    axes: Axes,
    measure: Measure,
    lines: Mapping[str, Line],
    styles: Mapping[str, Style],
    ticks: Sequence[float],
) -> None:
    for way, line in lines.items():
        style = styles[way]
        axes.plot(
            *zip(*line, strict=True),
            color=style.colour,
            marker=style.marker,
            label=way,
            ms=8 if style.wide else 4,
            lw=3.6 if style.wide else 1.2,
            zorder=2 if style.wide else 3,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    if measure.logarithmic:
        axes.set_yscale("log")
    if measure.ceiling is not None and axes.get_ylim()[1] >= measure.ceiling:
        axes.axhline(measure.ceiling, color="0.5", lw=0.8, ls=":", label="_ceiling")
        place = (ticks[0], measure.ceiling)
        axes.annotate("or more", place, (0, -9), textcoords="offset points", fontsize=8)
    axes.grid(alpha=0.25, lw=0.6)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
