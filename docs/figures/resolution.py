"""Draw what a cover tree's resolution costs, by ``python docs/figures/resolution.py``.

The picture, and two tables on the paper's page that ``python -m docs.figures.measured`` writes,
show what ``python -m benchmarks.accuracy.resolution`` has measured, after figures 4 and 7 of
Terenin et al. (2024).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.common.report import table
from docs.figures.shared import save, short, with_short_exponents

HERE = Path(__file__).parent
NUMBERS = HERE / "measured" / "resolution.json"
PICTURE = HERE / "resolution.svg"

COLOURS = ("#9ecae1", "#4292c6", "#2171b5", "#08306b")
"""Of the dimensions, the smallest first."""
PANELS = {
    "at_inputs": "Wasserstein distance\nat inputs, prior sd",
    "centres": "centres M\nof 1,000 inputs",
    "condition": "condition number of $K_{zz}$\n(10¹³: or more)",
    "plain": "iterations of CG\nfor K + Λ",
}
ROWS = {
    "at_inputs": "distance at 500 of the inputs, prior sd",
    "elsewhere": "distance at 500 other points, prior sd",
    "centres": "centres M of 1,000 inputs",
    "condition": "condition number of K_zz",
    "solved": "condition number of what `ClusteredGP` solves",
    "plain": "iterations without a preconditioner",
    "preconditioned": "iterations with the model's",
}
"""Measures of the table."""
LEAST = 1e-4
"""Distances are drawn from here on: without moved inputs they are rounding errors."""
MOST = 1e13
"""Condition numbers are known up to here."""


def draw() -> Figure:
    """Draw a panel for each measure and a line for each dimension."""
    settings = json.loads(NUMBERS.read_text(encoding="utf-8"))["settings"]
    figure = Figure(figsize=(10.0, 2.9), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for colour, (dim, costs) in zip(COLOURS, settings["costs"].items(), strict=True):
            values = [max(cost[key], LEAST) for cost in costs]
            label = f"d = {dim}"
            axes.plot(settings["radii"], values, "o-", color=colour, ms=3, lw=1.4, label=label)
        axes.set(xscale="log", yscale="log")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("resolution ε", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=8, frameon=False)
    return figure


def costs_table() -> str:
    """Write what each resolution costs, a measure a row, in markdown."""
    settings = json.loads(NUMBERS.read_text(encoding="utf-8"))["settings"]
    radii = ", ".join(f"{radius:g}" for radius in settings["radii"])
    by_dim = settings["costs"].values()
    rows = [
        [name, *(", ".join(bounded(cost[key]) for cost in costs) for costs in by_dim)]
        for key, name in ROWS.items()
    ]
    header = [f"at ε = {radii}", *(f"d = {dim}" for dim in settings["costs"])]
    return table(header, rows) + "\n"


def sizes_table() -> str:
    """Write RMSE and condition number by points and rows, a method a row, in markdown."""
    claims = json.loads(NUMBERS.read_text(encoding="utf-8"))["claims"]
    pattern = re.compile(r"figure 7: (\w+), N = ([\d,]+), M = ([\d,]+): (RMSE|condition number)")
    found = {
        m.groups(): claim["measured"] for claim in claims if (m := pattern.match(claim["name"]))
    }
    methods, rows, points = (list(dict.fromkeys(key[i] for key in found)) for i in range(3))

    def cell(method: str, n: str, m: str) -> str:
        if (method, n, m, "RMSE") not in found:
            return ""
        error, condition = (found[method, n, m, what] for what in ("RMSE", "condition number"))
        return f"{error:.3f}, {bounded(condition)}"

    lines = [[f"{t}, N = {n}", *(cell(t, n, m) for m in points)] for t in methods for n in rows]
    lines = [line for line in lines if any(line[1:])]
    return table(["RMSE, condition number of K_zz", *(f"M = {m}" for m in points)], lines) + "\n"


def bounded(value: float) -> str:
    """Write a few significant digits, a rounding error as 0."""
    if value < LEAST:
        return "0"
    if value >= MOST:
        return "≥ 10¹³"
    return short(value) if value < 1e4 else with_short_exponents(f"{value:.0e}")


if __name__ == "__main__":
    save(draw(), PICTURE, NUMBERS)
