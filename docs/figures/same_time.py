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
    """Of a model on a set, the median over splits, after so many minutes."""

    data: str
    model: str
    minutes: float
    rmse: float
    nll: float
    seconds: float
    megabytes: float


def fits() -> list[Fit]:
    """Read what was measured."""
    parts = json.loads(NUMBERS.read_text(encoding="utf-8"))["settings"]["fits"]
    groups: dict[tuple[str, str, float], list[dict[str, float]]] = {}
    for key, part in parts.items():
        data, _, minutes, model = key.split(", ")
        groups.setdefault((data, model, float(minutes.removesuffix(" min"))), []).append(part)
    columns = "rmse", "nll", "seconds", "megabytes"
    return [
        Fit(*key, *(median(part[name] for part in group) for name in columns))
        for key, group in groups.items()
    ]


def distinct(names: Sequence[str]) -> list[str]:
    """List names once each, in the order in which they come."""
    return list(dict.fromkeys(names))


def tables() -> str:
    """Write a table of RMSE and negative log density of the longest budget, in markdown."""
    measured = fits()
    models = distinct([fit.model for fit in measured])
    longest = max(fit.minutes for fit in measured)
    lines = [
        f"| RMSE, negative log density | {' | '.join(models)} |",
        "|---" * (len(models) + 1) + "|",
    ]
    for data in distinct([fit.data for fit in measured]):
        found = {f.model: f for f in measured if f.data == data and f.minutes == longest}
        best = min(f.rmse for f in found.values() if math.isfinite(f.rmse))
        cells = []
        for model in models:
            fit = found.get(model)
            if fit is None or not math.isfinite(fit.rmse):
                cells.append("failed" if fit else "")
                continue
            rmse = f"**{fit.rmse:.3f}**" if fit.rmse == best else f"{fit.rmse:.3f}"
            cells.append(f"{rmse}, {fit.nll:.2f}")
        lines.append(f"| {data} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture() -> Figure:
    """Draw the RMSE of each model on each set, by the minutes that it had."""
    measured = fits()
    sets, models = (distinct([getattr(f, name) for f in measured]) for name in ("data", "model"))
    budgets = sorted({fit.minutes for fit in measured})
    colours = dict(zip(budgets, COLOURS[-len(budgets) :], strict=True))
    rows = math.ceil(len(sets) / 4)
    figure = Figure(figsize=(10.0, 0.6 + 2.1 * rows), layout="constrained")
    grid = figure.subplots(rows, 4, sharey=True, squeeze=False)
    for axes in grid.flat[len(sets) :]:
        axes.set_axis_off()
    for axes, data in zip(grid.flat, sets, strict=False):
        own = [f for f in measured if f.data == data and math.isfinite(f.rmse)]
        for minutes in budgets:
            some = [f for f in own if f.minutes == minutes]
            places = [models.index(f.model) for f in some]
            axes.scatter([f.rmse for f in some], places, s=22, color=colours[minutes], zorder=3)
        axes.axvline(min(f.rmse for f in own), color="#c8102e", linewidth=0.8)
        axes.set_title(data, fontsize=9)
        axes.set_yticks(range(len(models)), models, fontsize=8)
        axes.set_ylim(len(models) - 0.4, -0.6)
        axes.tick_params(axis="x", labelsize=7)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [
        mpl.lines.Line2D([], [], marker="o", linestyle="", color=colours[m], label=f"{m:g} min")
        for m in budgets
    ]
    figure.legend(handles=handles, loc="lower right", fontsize=8, frameon=False)
    figure.supxlabel("RMSE of held-out rows, in standard deviations (red: the best)", fontsize=8)
    return figure


if __name__ == "__main__":
    write_part(PAGE, "same-time", tables())
    save(picture(), PICTURE, NUMBERS)
