"""The drawing, the pictures and the table of docs/choosing/many-inputs.md.

``python docs/figures/many_inputs.py`` draws a region and puts the table into the page. With a
folder, it first takes the results of ``python -m benchmarks.optimization.many_inputs --out FOLDER``
from there: both pictures, and the medians in many-inputs.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from botorch.test_functions import Levy
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from torch.quasirandom import SobolEngine

from benchmarks.optimization.many_input_results import (
    Run,
    methods_of,
    quartiles,
    read_costs,
    read_runs,
    regrets_at,
    write_pictures,
)
from bo_stream import AutoGP, sample_paths
from bo_stream.loops.optimization import TrustRegion, maximize_paths, region_candidates
from bo_stream.loops.optimization.region import AdditiveTrend
from bo_stream.loops.optimization.region_search import LogScale
from docs.figures.shared import digest, save, write_part

HERE = Path(__file__).parent
NUMBERS = HERE / "many-inputs.json"
DRAWING = HERE / "region.svg"
PICTURES = (HERE / "many_inputs.png", HERE / "many_inputs_cost.png")
PAGE = HERE.parent / "choosing" / "many-inputs.md"

EARLY, LATE = 200, 1_000
"""Numbers of evaluations in the table."""


# --- what was measured --------------------------------------------------------------------------


def take(folder: Path) -> None:
    """Draw the pictures of a benchmark's results here, and keep its medians."""
    runs = read_runs(folder / "many_inputs")
    write_pictures(runs, read_costs(folder / "many_inputs"), HERE)
    medians = {
        function: {
            method: {str(n): _median(runs, function, method, n) for n in (EARLY, LATE)}
            for method in methods_of(run for run in runs if run.function == function)
        }
        for function in dict.fromkeys(run.function for run in runs)
    }
    seeds = {
        method: min(
            sum(run.method == method and run.function == function for run in runs)
            for function in medians
        )
        for method in methods_of(runs)
    }
    digests = {picture.name: digest(picture) for picture in PICTURES}
    found = {"seeds": seeds, "medians": medians, "pictures": digests}
    NUMBERS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _median(runs: list[Run], function: str, method: str, n: int) -> float | None:
    values = regrets_at(runs, function, method, n)
    return quartiles(values)[1] if values else None


def measured() -> str:
    """Return the pictures and the table as the page has them; nothing before they were taken."""
    if not NUMBERS.exists():
        return ""
    found = json.loads(NUMBERS.read_text(encoding="utf-8"))
    medians: dict[str, dict[str, dict[str, float | None]]] = found["medians"]
    methods = [method for method, number in found["seeds"].items() if number > 0]
    seeds = [f"{found['seeds'][method]}" for method in methods]
    lines = [
        "",
        f"![Regret by evaluations, beside the peers](../figures/{PICTURES[0].name})",
        "",
        f"Median after {LATE:,} evaluations, and after {EARLY} in brackets; the least after "
        f"{LATE:,} is bold. Methods were run with as many seeds as the last row says, or one more.",
        "",
        f"| function | {' | '.join(methods)} |",
        f"|---|{'---|' * len(methods)}",
        *(f"| {name} | {' | '.join(_cells(row, methods))} |" for name, row in medians.items()),
        f"| seeds | {' | '.join(seeds)} |",
        "",
        f"![Processor time of a proposal, beside the peers](../figures/{PICTURES[1].name})",
        "",
    ]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, dict[str, Any]], methods: list[str]) -> list[str]:
    late = {method: row.get(method, {}).get(str(LATE)) for method in methods}
    least = min((value for value in late.values() if value is not None), default=None)
    cells = []
    for method, value in late.items():
        early = row.get(method, {}).get(str(EARLY))
        text = "" if value is None else _number(value)
        bold = f"**{text}**" if text and value == least else text
        cells.append(f"{bold} ({_number(early)})".strip() if early is not None else bold)
    return cells


def _number(value: float) -> str:
    """Write a number to two digits, or to its whole ones."""
    return f"{value:,.0f}" if abs(value) >= 100.0 else f"{value:.2g}"


# --- the drawing --------------------------------------------------------------------------------


def drawing() -> Figure:
    """Draw a step of the search in two inputs: the region, its candidates, choices and a leap."""
    function = Levy(2, bounds=[(-5.0, 10.0)] * 2)

    def value(U: Tensor) -> Tensor:
        return -function.evaluate_true(-5.0 + 15.0 * U)

    generator = torch.Generator().manual_seed(0)
    X = SobolEngine(2, scramble=True, seed=3).draw(40, dtype=torch.float64)
    Y = value(X)
    scaled = LogScale.of(Y).to_scale(Y)
    square = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    model = AutoGP(X, scaled.unsqueeze(-1), bounds=square, families="exact")
    good = X[Y.argsort(descending=True)]
    region = TrustRegion(dim=2, batch=6, length=0.4)
    box = region.bounds(model, good[0])
    candidates = region_candidates(good, box, 120, generator)
    paths = sample_paths(model, 6, 0, at=candidates)
    with torch.no_grad():
        starts = candidates[paths(candidates).squeeze(-1).argmax(-1)]
    chosen = maximize_paths(paths, starts, box, 20)
    leapt = AdditiveTrend(X, scaled).leap(good[0], box, generator)

    figure = Figure(figsize=(6.2, 4.4), layout="constrained")
    axes = figure.subplots()
    axis = torch.linspace(0.0, 1.0, 121, dtype=torch.float64)
    shown = -value(torch.cartesian_prod(axis, axis)).reshape(121, 121).mT
    axes.contour(axis, axis, shown.log1p(), 9, colors="0.8", linewidths=0.7)
    low, high = box.tolist()
    axes.add_patch(
        Rectangle((low[0], low[1]), high[0] - low[0], high[1] - low[1], fill=False, lw=1.6,
                  ec="#0072b2", label="region"),
    )  # fmt: skip
    axes.plot(*X.T, "o", ms=3.5, color="0.35", label="evaluated")
    axes.plot(*candidates.T, ".", ms=3, color="#56b4e9", label="candidates")
    axes.plot(*good[0], "o", ms=9, mfc="none", mec="black", label="best so far")
    axes.plot(*chosen.T, "o", ms=5.5, color="#d55e00", label="chosen")
    axes.annotate("", leapt.tolist(), good[0].tolist(),
                  arrowprops={"arrowstyle": "->", "color": "#d55e00", "lw": 1.3})  # fmt: skip
    axes.plot(*leapt, "*", ms=12, color="#d55e00", label="a leap")
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=[], yticks=[])
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        take(Path(folder))
    save(drawing(), DRAWING)
    write_part(PAGE, "many-inputs", measured())
