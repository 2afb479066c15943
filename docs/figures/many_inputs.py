"""The drawing, the pictures and the table of docs/choosing/many-inputs.md.

``python docs/figures/many_inputs.py`` draws a region and puts the table into the page. With a
folder, it first takes the results of ``python -m benchmarks.optimization.many_inputs --out FOLDER``
from there: every search, in measured/many_inputs.zip, both pictures, the claims, and the medians
in many-inputs.json. To go on from the searches, unpack them in ``FOLDER/many_inputs``.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from botorch.test_functions import Levy
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor
from torch.quasirandom import SobolEngine

from benchmarks.optimization.many_input_problems import PROBLEMS
from benchmarks.optimization.many_input_results import (
    SUBJECT,
    Cost,
    Run,
    cost_table,
    methods_of,
    quartiles,
    read_costs,
    read_runs,
    regrets_at,
    write_pictures,
)
from bo_stream import AutoGP, sample_paths
from bo_stream.loops.optimization import TrustRegion, maximize_paths, region_candidates
from bo_stream.loops.optimization.region import AdditiveTrend, LogScale
from docs.figures.shared import digest, save, write_part

HERE = Path(__file__).parent
NUMBERS = HERE / "many-inputs.json"
SEARCHES = HERE / "measured" / "many_inputs.zip"
CLAIMS = SEARCHES.with_suffix(".json")
DRAWING = HERE / "region.svg"
PICTURES = (HERE / "many_inputs.png", HERE / "many_inputs_cost.png")
PAGE = HERE.parent / "choosing" / "many-inputs.md"

FEW_SEEDS, EARLY = ("TuRBO-1", "TuRBO-5"), 500
"""Methods that take minutes a seed, and evaluations after which their seeds are counted."""

TABLES = ((200,), (500, 1_000), (2_000, 5_000))
"""Numbers of evaluations in each table: a number, and perhaps a later one in brackets."""


# --- what was measured --------------------------------------------------------------------------


def take(folder: Path) -> None:
    """Pack a benchmark's searches here, draw their pictures, and keep claims and medians."""
    shutil.make_archive(str(SEARCHES.with_suffix("")), "zip", folder / "many_inputs")
    shutil.copy(folder / CLAIMS.name, CLAIMS)
    write_pictures(*results(), HERE)
    digests = {picture.name: digest(picture) for picture in PICTURES}
    NUMBERS.write_text(json.dumps({**summary(), "pictures": digests}, indent=1) + "\n", "utf-8")


def results() -> tuple[list[Run], list[Cost]]:
    """Unpack the searches, in the order of the functions, and the measurements of costs."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(SEARCHES, folder)
        runs, costs = read_runs(Path(folder)), read_costs(Path(folder))
    order = list(PROBLEMS)
    return sorted(runs, key=lambda run: order.index(run.function)), costs


def summary() -> dict[str, Any]:
    """Return seeds by method, and medians by function, method and number of evaluations.

    And of how many seeds the medians are that not all seeds reached, in how many seeds a method is
    ahead of the region's median, and what a proposal costs.
    """
    runs, costs = results()
    functions = list(dict.fromkeys(run.function for run in runs))
    medians = {
        function: {
            method: {str(n): _median(runs, function, method, n) for n in chain(*TABLES)}
            for method in methods_of(run for run in runs if run.function == function)
        }
        for function in functions
    }
    fewer = {
        function: {method: _fewer(runs, function, method) for method in row}
        for function, row in medians.items()
    }
    seeds = {method: _seeds(runs, functions, method) for method in methods_of(runs)}
    ahead = {
        method: {name: _ahead(runs, name, method, medians[name]) for name in functions}
        for method in FEW_SEEDS
        if method in seeds and SUBJECT in seeds
    }
    spent = [asdict(cost) for cost in costs]
    return {"seeds": seeds, "medians": medians, "fewer": fewer, "ahead": ahead, "costs": spent}


def _fewer(runs: Sequence[Run], function: str, method: str) -> dict[str, int]:
    """Count a method's seeds at those numbers of evaluations that some of its seeds reached."""
    counts = {str(n): len(regrets_at(runs, function, method, n)) for n in chain(*TABLES)}
    return {n: count for n, count in counts.items() if 0 < count < max(counts.values())}


def _ahead(
    runs: Sequence[Run], function: str, method: str, medians: dict[str, Any]
) -> tuple[int, int]:
    """Count the seeds in which a method is ahead of the region's median, and all of its seeds."""
    values, median = regrets_at(runs, function, method, EARLY), medians[SUBJECT][str(EARLY)]
    return sum(value < median for value in values), len(values)


def _seeds(runs: Sequence[Run], functions: Sequence[str], method: str) -> tuple[int, int]:
    """Return the least and the largest number of seeds that a method was run with."""
    own = [run for run in runs if run.method == method]
    numbers = [len({run.seed for run in own if run.function == name}) for name in functions]
    return min(numbers), max(numbers)


def _median(runs: Sequence[Run], function: str, method: str, n: int) -> float | None:
    values = regrets_at(runs, function, method, n)
    return quartiles(values)[1] if values else None


def measured() -> str:
    """Return the pictures and the table as the page has them; nothing before they were taken."""
    if not NUMBERS.exists():
        return ""
    found = json.loads(NUMBERS.read_text(encoding="utf-8"))
    seeds: dict[str, tuple[int, int]] = found["seeds"]
    spelled = (
        f"{method} {least if least == most else f'{least} to {most}'}"
        for method, (least, most) in seeds.items()
    )
    lines = [
        "",
        f"![Regret by evaluations, beside the peers](../figures/{PICTURES[0].name})",
        "",
        *(line for pair in TABLES for line in _table(found, list(seeds), *pair)),
        f"Seeds: {', '.join(spelled)}.",
        *(_counted(method, counts) for method, counts in found["ahead"].items()),
        "",
        f"![Processor time of a proposal, beside the peers](../figures/{PICTURES[1].name})",
        "",
        "Processor time of a proposal after so many random points, in one thread.",
        "",
        cost_table((), [Cost(**cost) for cost in found["costs"]]),
        "",
    ]
    return "\n".join(lines) + "\n"


def _counted(method: str, counts: dict[str, tuple[int, int]]) -> str:
    """Say on which functions some seeds of a method were ahead of the region's median."""
    some = [f"{n} of {seeds} on {name}" for name, (n, seeds) in counts.items() if n > 0]
    start = f"Seeds of {method} that were ahead of the region's median after {EARLY:,}:"
    return f"{start} {'; '.join(some) or 'none'}."


def _table(
    found: dict[str, Any], methods: list[str], n: int, later: int | None = None
) -> list[str]:
    """Return the lines of a table of the methods that were run so far."""
    medians: dict[str, Any] = found["medians"]
    shown = [m for m in methods if any(row.get(m, {}).get(str(n)) for row in medians.values())]
    if not shown:
        return []
    after = "" if later is None else f", and after {later:,} in brackets"
    fewer = [row.get(m, {}) for row in found["fewer"].values() for m in shown]
    if any(str(later) in counts for counts in fewer):
        after += ", of so many seeds if not of all"
    return [
        f"Medians after {n:,} evaluations{after}; the least after {n:,} is bold.",
        "",
        f"| function | {' | '.join(shown)} |",
        f"|---|{'---|' * len(shown)}",
        *(
            f"| {name} | {' | '.join(_cells(row, found['fewer'][name], shown, n, later))} |"
            for name, row in medians.items()
        ),
        "",
    ]


def _cells(
    row: dict[str, dict[str, Any]],
    fewer: dict[str, dict[str, int]],
    methods: list[str],
    n: int,
    later: int | None,
) -> list[str]:
    values = {method: row.get(method, {}).get(str(n)) for method in methods}
    least = min((value for value in values.values() if value is not None), default=None)
    cells = []
    for method, value in values.items():
        after, seeds = (part.get(method, {}).get(str(later)) for part in (row, fewer))
        text = "" if value is None else _number(value)
        bold = f"**{text}**" if text and value == least else text
        of = "" if seeds is None else f"; {seeds}"
        cells.append(f"{bold} ({_number(after)}{of})" if after is not None else bold)
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
    leapt = AdditiveTrend(X, scaled).leap(good[0], box, torch.Generator().manual_seed(6))

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
