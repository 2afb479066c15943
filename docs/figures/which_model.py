"""The picture of which-model.md and README's rows: ``python docs/figures/which_model.py``.

Both show what :func:`bo_stream.recommend` says on the machine that its table was fitted on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bo_stream.costs import problem_of
from bo_stream.recommendation import Recommendation, exact_until, recommend
from docs.figures.shared import save, write_part

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "bo_stream" / "costs.json"
PICTURE = HERE / "which-model.svg"
README = HERE.parents[1] / "README.md"

COLOURS = {
    "exact": "#777777",
    "WISKI": "#1f77b4",
    "OSGPR": "#2ca02c",
    "OSVGP": "#9467bd",
    "DecoupledGP": "#ff7f0e",
}
PANELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "2 inputs": ({"d": 2}, ("exact", "WISKI", "OSGPR")),
    "4 inputs": ({"d": 4}, ("exact", "WISKI", "OSGPR")),
    "8 inputs": ({"d": 8}, ("exact", "OSGPR", "DecoupledGP")),
}
"""What is drawn in each panel: a problem, and families."""

DEFAULTS = (None, None, False, True, None, None)
"""Noise, likelihood, roughness, bounds, lengthscale and kernel as ``recommend`` takes them."""


# --- the rows -----------------------------------------------------------------------------------


def rows() -> str:
    """Make README's table: what one has, which family comes first, and what a step of it costs."""
    one, eight = (_last_exact(d) for d in (1, 8))
    cases: tuple[tuple[str, tuple[int, int], dict[str, Any]], ...] = (
        (f"up to {one} observations in one input, {eight} in eight", (100, 3), {}),
        ("more, up to millions, in one to four inputs", (10**6, 3), {}),
        ("more, up to millions, in any number of inputs", (10**6, 8), {}),
        ("labels, counts or outliers instead of normal noise", (10**4, 3), {"likelihood": "other"}),
        ("10⁴ observations and more of a rough function", (10**5, 8), {"rough": True}),
    )
    lines = ["| you have | take | a step with a refit, an update, memory |", "|---|---|---|"]
    for text, (n, d), options in cases:
        first = recommend(n, d, calibrate=False, **options)[0]
        costs = f"{_seconds(first.step_seconds)}, {_seconds(first.update_seconds)}"
        size = f"n = {_power(n)}, d = {d}"
        lines.append(f"| {text} | {_name(first)} | {costs}, {_bytes(first.bytes)} ({size}) |")
    return "\n".join(lines) + "\n"


def _name(first: Recommendation) -> str:
    """Name a model, beside the one of labels the one of several classes."""
    if first.family == "exact":
        return "`AutoGP`, while exact"
    if first.family != "OSVGP":
        return f"`{first.family}`"
    (of_classes,) = recommend(10**4, 3, likelihood="classes", m=3, calibrate=False)
    return f"`OSVGP`, of several classes `{of_classes.family}`"


def _last_exact(d: int) -> str:
    """Say up to which n the exact model is the first, to a hundred."""
    return f"{round(last_exact(d), -2):,}"


def last_exact(d: int) -> int:
    """Find up to which n the exact model is the first."""
    return exact_until(problem_of(1, d, 1, 1, *DEFAULTS))


def _power(n: int) -> str:
    return {10**4: "10⁴", 10**5: "10⁵", 10**6: "10⁶"}.get(n, f"{n:,}")


def _seconds(value: float) -> str:
    return f"{_rounded(value)} s" if value > 0.3 else f"{_rounded(1e3 * value)} ms"


def _bytes(value: float) -> str:
    return f"{_rounded(value / 1e6)} MB"


def _rounded(value: float) -> str:
    """Round to one digit, for costs are predicted within a factor of two."""
    return f"{float(f'{value:.1g}'):g}"


# --- the picture --------------------------------------------------------------------------------


def picture() -> Figure:
    """Draw the cost of a step of a loop against the number of observations."""
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (title, (options, families)) in zip(panels, PANELS.items(), strict=True):
        draw_steps(axes, options, families)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("observations", fontsize=9)
    panels[0].set_ylabel("a step: update, refit, search", fontsize=9)
    ticks = {0.1: "0.1 s", 1.0: "1 s", 10.0: "10 s", 100.0: "100 s", 1000.0: "1,000 s"}
    panels[0].set_yticks(list(ticks), list(ticks.values()), minor=False)
    panels[0].set_ylim(0.1, 1500.0)
    return figure


def draw_steps(axes: Axes, options: dict[str, Any], families: tuple[str, ...]) -> None:
    """Draw a line for each family, and where the exact model ceases to be the first."""
    counts = np.unique(np.geomspace(20, 1e6, 120).astype(int)).tolist()
    for family in families:
        found = [
            recommend(n, **options, families=[family], calibrate=False)[0].step_seconds
            for n in counts
        ]
        axes.loglog(counts, found, color=COLOURS[family], lw=1.8, label=family)
    last = last_exact(options["d"])
    axes.axvline(last, color="0.7", lw=1.0, ls=":")
    axes.text(last / 1.2, 900.0, f"n = {last:,}", fontsize=8, color="0.4", ha="right")
    axes.set_xticks([100, 1e4, 1e6], ["100", "10⁴", "10⁶"])
    axes.minorticks_off()
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.88))


if __name__ == "__main__":
    save(picture(), PICTURE, TABLE)
    write_part(README, "which-model-when", rows())
