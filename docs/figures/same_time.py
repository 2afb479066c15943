"""The picture and the tables of which-model.md, by ``python docs/figures/same_time.py``.

They show what ``python -m benchmarks.accuracy.same_time --out docs/figures`` has measured, in
``same_time.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.figure import Figure

from docs.figures.shared import save, write_part

HERE = Path(__file__).parent
NUMBERS = HERE / "same_time.json"
PICTURE = HERE / "same_time.svg"
PAGE = HERE.parent / "models" / "which-model.md"

COLOURS = ("#9ecae1", "#4292c6", "#08306b")
"""Of the budgets, the shortest first."""


@dataclass(frozen=True)
class Fit:
    """Of a model on a set after so many minutes, the median over some splits."""

    data: str
    model: str
    minutes: float
    rmse: float
    nll: float
    seconds: float
    megabytes: float


def fits(beside: float | None = None) -> list[Fit]:
    """Read what was measured.

    Args:
        beside: Only on splits that have a fit of so many minutes; None: all.
    """
    parts = json.loads(NUMBERS.read_text(encoding="utf-8"))["settings"]["fits"]
    splits = {key: tuple(key.split(", ")) for key in parts}
    known = {
        (data, number) for data, number, minutes, _ in splits.values() if _of(minutes) == beside
    }
    groups: dict[tuple[str, str, float], list[dict[str, float]]] = {}
    for key, (data, number, minutes, model) in splits.items():
        if beside is None or (data, number) in known:
            groups.setdefault((data, model, _of(minutes)), []).append(parts[key])
    columns = "rmse", "nll", "seconds", "megabytes"
    return [
        Fit(*key, *(median(part[name] for part in group) for name in columns))
        for key, group in groups.items()
    ]


def _of(minutes: str) -> float:
    return float(minutes.removesuffix(" min"))


def distinct(names: Sequence[str]) -> list[str]:
    """List names once each, in the order in which they come."""
    return list(dict.fromkeys(names))


def tables() -> str:
    """Write RMSE and negative log density in markdown, a table for each number of minutes.

    Beyond the shortest one each RMSE has that of the shortest one on the same splits in brackets.
    """
    shortest, *longer = budgets()
    parts = [table(fits(), shortest)]
    for minutes in longer:
        head = f"After {minutes:g} minutes, in brackets after {shortest:g} on the same splits."
        parts.append(f"{head}\n\n{table(fits(minutes), minutes, shortest)}")
    return "\n".join(parts)


def budgets() -> list[float]:
    """List the minutes that models had."""
    return sorted({fit.minutes for fit in fits()})


def table(measured: Sequence[Fit], minutes: float, before: float | None = None) -> str:
    """Write RMSE and negative log density after some minutes, in markdown.

    Args:
        measured: Fits.
        minutes: Of those to show.
        before: Of those whose RMSE is shown in brackets; None: of none.
    """
    models = distinct([fit.model for fit in measured])
    name = "RMSE, negative log density" if before is None else "RMSE (before), density"
    lines = [f"| {name} | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|"]
    for data in distinct([fit.data for fit in measured if fit.minutes == minutes]):
        own = [fit for fit in measured if fit.data == data]
        found = {fit.model: fit for fit in own if fit.minutes == minutes}
        former = {fit.model: fit.rmse for fit in own if fit.minutes == before}
        best = min(f.rmse for f in found.values() if math.isfinite(f.rmse))
        cells = []
        for model in models:
            fit = found.get(model)
            if fit is None or not math.isfinite(fit.rmse):
                cells.append("failed" if fit else "")
                continue
            rmse = f"**{fit.rmse:.3f}**" if fit.rmse == best else f"{fit.rmse:.3f}"
            beside = f" ({former[model]:.3f})" if model in former else ""
            cells.append(f"{rmse}{beside}, {fit.nll:.2f}")
        lines.append(f"| {data} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture() -> Figure:
    """Draw the RMSE of each model on each set, by the minutes that it had, on the same splits."""
    measured = fits()
    sets, models = (distinct([getattr(f, name) for f in measured]) for name in ("data", "model"))
    colours = dict(zip(budgets(), COLOURS[-len(budgets()) :], strict=True))
    rows = math.ceil(len(sets) / 4)
    figure = Figure(figsize=(10.0, 0.6 + 2.1 * rows), layout="constrained")
    grid = figure.subplots(rows, 4, sharey=True, squeeze=False)
    for axes in grid.flat[len(sets) :]:
        axes.set_axis_off()
    for axes, data in zip(grid.flat, sets, strict=False):
        longest = max(f.minutes for f in measured if f.data == data)
        own = [f for f in fits(longest) if f.data == data and math.isfinite(f.rmse)]
        for minutes, colour in colours.items():
            some = [f for f in own if f.minutes == minutes]
            places = [models.index(f.model) for f in some]
            axes.scatter([f.rmse for f in some], places, s=22, color=colour, zorder=3)
        axes.axvline(min(f.rmse for f in own), color="#c8102e", linewidth=0.8)
        axes.set_title(data, fontsize=9)
        axes.set_yticks(range(len(models)), models, fontsize=8)
        axes.set_ylim(len(models) - 0.4, -0.6)
        axes.tick_params(axis="x", labelsize=7)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [
        mpl.lines.Line2D([], [], marker="o", linestyle="", color=colour, label=f"{minutes:g} min")
        for minutes, colour in colours.items()
    ]
    figure.legend(handles=handles, loc="lower right", fontsize=8, frameon=False)
    figure.supxlabel("RMSE of held-out rows, in standard deviations (red: the best)", fontsize=8)
    return figure


if __name__ == "__main__":
    write_part(PAGE, "same-time", tables())
    save(picture(), PICTURE, NUMBERS)
