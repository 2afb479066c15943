"""Draw what a cover tree's resolution costs, by ``python docs/figures/resolution.py``.

It shows what ``python -m benchmarks.accuracy.resolution --only 4 --out docs/figures`` has measured,
in ``resolution.json``, after figure 4 of Terenin et al. (2024).
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

from docs.figures.shared import save

HERE = Path(__file__).parent
NUMBERS = HERE / "resolution.json"
PICTURE = HERE / "resolution.svg"

COLOURS = ("#9ecae1", "#4292c6", "#2171b5", "#08306b")
"""Of the dimensions, the smallest first."""
PANELS = {
    "at_inputs": "Wasserstein distance\nat inputs, prior sd",
    "centres": "centres M\nof 1,000 inputs",
    "condition": "condition number of $K_{zz}$\n(10¹³: or more)",
    "plain": "iterations of CG\nfor K + Λ",
}
LEAST = 1e-4
"""Distances are drawn from here on: without moved inputs they are rounding errors."""


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


if __name__ == "__main__":
    save(draw(), PICTURE, NUMBERS)
