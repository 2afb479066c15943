"""Results of ``many_inputs.py``: their files, tables, claims and pictures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common.report import Claim, at_least, at_most, stated, table

MARKS = (200, 500, 1_000, 2_000, 5_000)
"""Numbers of evaluations in the tables, as far as a search has got."""

AROUND = 1.4
"""Processor time at n evaluations is that from n over this to n times this."""

TARGETS = {
    ("Ackley-20", 500): 0.1,
    ("Ackley-20", 1_000): 0.01,
    ("Ackley-20, noise 0.5", 1_000): 1.5,
    ("Hartmann-6 in 20", 300): 0.01,
    ("Levy-20", 1_000): 0.5,
    ("Rosenbrock-20", 500): 30.0,
    ("Ackley-100", 1_000): 3.0,
    ("Ackley-100", 2_000): 0.5,
    ("rover-60", 500): 21.0,
    ("rover-60", 2_000): 8.0,
}
"""Largest median regrets of the region search."""

COMPARED, NOT_ABOVE = 7, 6
"""Of the first so many functions, those on which no peer's median may be lower."""

PEERS = ("TuRBO-1", "TuRBO-5", "TuRBO-ENN", "CMA-ES", "CMA-ES, random start")

MILLISECONDS = {20: 8.0, 100: 12.0}
"""Its longest processor time of a proposal after 20,000 outcomes, by the number of inputs."""

SUBJECT = "region"

COLOURS = {
    "region": "#d55e00",
    "region, 20 first": "#f0a070",
    "box, TS": "#e69f00",
    "TuRBO-1": "#0072b2",
    "TuRBO-5": "#56b4e9",
    "TuRBO-ENN": "#009e73",
    "CMA-ES": "#cc79a7",
    "CMA-ES, random start": "#7f3c8d",
    "Ax": "#000000",
    "random": "#999999",
}


# --- files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One search.

    Attributes:
        method: Its name.
        function: Name of what is minimised.
        seed: Of the search and of the noise.
        numbers: Of evaluations, at which it was looked at.
        regrets: Of the best point by then; with noise, of the recommended one.
        seconds: Of processor time in asking and telling by then.
        versions: Of packages.
    """

    method: str
    function: str
    seed: int
    numbers: list[int]
    regrets: list[float]
    seconds: list[float]
    versions: dict[str, str]

    def __str__(self) -> str:
        cost = 1e3 * self.seconds[-1] / self.numbers[-1]
        return f"{self.regrets[-1]:.3g} after {self.numbers[-1]:,}, {cost:.3g} ms a proposal"

    def regret(self, n: int) -> float | None:
        """After n evaluations; None if that was not looked at."""
        return dict(zip(self.numbers, self.regrets, strict=True)).get(n)

    def cost(self, n: int) -> float | None:
        """Processor seconds of a proposal around n evaluations; None if it is not that long."""
        at = np.array(self.numbers)
        near = np.flatnonzero((at >= n / AROUND) & (at <= n * AROUND))
        if at[-1] < n or len(near) < 2:
            return None
        first, last = near[0], near[-1]
        return float((self.seconds[last] - self.seconds[first]) / (at[last] - at[first]))


@dataclass(frozen=True)
class Cost:
    """Processor time after a history of random points.

    Attributes:
        method: Its name.
        dim: Number of inputs.
        history: Outcomes of random points before.
        seconds: Of a proposal, asking and telling.
        versions: Of packages.
    """

    method: str
    dim: int
    history: int
    seconds: float
    versions: dict[str, str]

    def __str__(self) -> str:
        return f"{1e3 * self.seconds:.3g} ms a proposal"


def file_name(*parts: object) -> str:
    """Of a result."""
    return "--".join(re.sub(r"[^\w.-]+", "_", str(part)) for part in parts) + ".json"


def read_runs(folder: Path, *parts: object) -> list[Run]:
    """Read all searches, or those whose file names begin with these parts."""
    begin = file_name("search", *parts, "").removesuffix(".json")
    files = sorted(folder.glob(f"{begin}*.json"))
    return [Run(**json.loads(file.read_text())["parts"]["run"]) for file in files]


def read_costs(folder: Path) -> list[Cost]:
    """Read all measurements of costs."""
    files = sorted(folder.glob("cost--*.json"))
    return [Cost(**json.loads(file.read_text())["parts"]["cost"]) for file in files]


def longest(runs: Sequence[Run]) -> Run | None:
    """The one with most evaluations."""
    return max(runs, key=lambda run: run.numbers[-1], default=None)


# --- tables and claims ----------------------------------------------------------------------------


def marks_of(runs: Sequence[Run]) -> list[int]:
    """Those of ``MARKS`` that a search reached; if none did, where it ended."""
    ends = {run.numbers[-1] for run in runs}
    return [n for n in MARKS if n <= max(ends, default=0)] or sorted(ends)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return float(low), float(middle), float(high)


def methods_of(results: Iterable[Run | Cost]) -> list[str]:
    """Names of the methods, in the order of ``COLOURS``."""
    present = {result.method for result in results}
    return [name for name in COLOURS if name in present]


def regrets_at(runs: Sequence[Run], function: str, method: str, n: int) -> list[float]:
    """Of all seeds, each by its longest run that was looked at after n evaluations."""
    found: dict[int, Run] = {}
    for run in runs:
        if (run.function, run.method) == (function, method) and run.regret(n) is not None:
            kept = found.get(run.seed)
            found[run.seed] = run if kept is None else longest([kept, run]) or run
    return [float(found[seed].regret(n) or 0.0) for seed in sorted(found)]


def regret_table(runs: Sequence[Run]) -> str:
    """Median and quartiles by function and method."""
    rows, marks = [], marks_of(runs)
    for function in dict.fromkeys(run.function for run in runs):
        for method in methods_of(run for run in runs if run.function == function):
            cells, seeds = [], 0
            for n in marks:
                values = regrets_at(runs, function, method, n)
                seeds = max(seeds, len(values))
                low, middle, high = quartiles(values) if values else (math.nan,) * 3
                more = f"; {len(values)}" if values and len(values) < seeds else ""
                cells.append(f"{middle:.3g} ({low:.3g}, {high:.3g}{more})" if values else "")
            rows.append([function, method, str(seeds), *cells])
    header = ["function", "method", "seeds", *(f"n = {n:,}" for n in marks)]
    return table(header, rows)


def costs_at(runs: Sequence[Run], method: str, dim: int, n: int) -> float | None:
    """Median processor seconds of a proposal in searches of so many inputs, around n."""
    ends = f"-{dim}"
    found = [run.cost(n) for run in runs if run.method == method and run.function.endswith(ends)]
    values = [value for value in found if value is not None]
    return float(np.median(values)) if values else None


def _milliseconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000.0 else f"{value:.3g}"


def cost_table(runs: Sequence[Run], costs: Sequence[Cost]) -> str:
    """Milliseconds of a proposal: in searches, and after histories of random points."""
    by = {(cost.method, cost.dim, cost.history): 1e3 * cost.seconds for cost in costs}
    histories = sorted({cost.history for cost in costs})
    rows, marks = [], marks_of(runs)
    for dim in sorted({cost.dim for cost in costs} | set(MILLISECONDS)):
        for method in methods_of([*runs, *costs]):
            inside = [costs_at(runs, method, dim, n) for n in marks]
            after = [by.get((method, dim, n)) for n in histories]
            if any(value is not None for value in (*inside, *after)):
                cells = [None if value is None else 1e3 * value for value in inside] + after
                rows.append([str(dim), method, *map(_milliseconds, cells)])
    searches = (f"search, n = {n:,}" for n in marks)
    after_random = (f"random history, n = {n:,}" for n in histories)
    return table(["inputs", "method (ms)", *searches, *after_random], rows)


def claims_of(runs: Sequence[Run], costs: Sequence[Cost]) -> list[Claim]:
    """Medians; those of the region search have targets."""
    claims = []
    marks = marks_of(runs)
    looked_at = sorted({*marks, *(n for _, n in TARGETS)})
    for function in dict.fromkeys(run.function for run in runs):
        for method in methods_of(run for run in runs if run.function == function):
            for n in looked_at:
                values = regrets_at(runs, function, method, n)
                target = TARGETS.get((function, n)) if method == SUBJECT else None
                if not values or (n not in marks and target is None):
                    continue
                low, middle, high = quartiles(values)
                name = f"{function}: {method}, median at n = {n:,}"
                detail = f"quartiles {low:.3g}, {high:.3g} of {len(values)} seeds"
                if target is None:
                    claims.append(stated(name, middle, "", detail))
                else:
                    claims.append(at_most(name, middle, target, "", detail))
    claims += [
        comparison(runs, n)
        for n in (500, 1_000, 2_000)
        if any(run.method == SUBJECT and run.regret(n) is not None for run in runs)
    ]
    for cost in costs:
        name = f"{cost.method}, {cost.dim} inputs: a proposal after {cost.history:,} outcomes"
        longest_time = MILLISECONDS.get(cost.dim)
        if cost.method == SUBJECT and cost.history == 20_000 and longest_time is not None:
            claims.append(at_most(name, 1e3 * cost.seconds, longest_time, "ms"))
        else:
            claims.append(stated(name, 1e3 * cost.seconds, "ms"))
    return claims


def comparison(runs: Sequence[Run], n: int) -> Claim:
    """On how many of the first functions no peer's median is below that of the region search."""
    functions = list(dict.fromkeys(run.function for run in runs))
    details, held = [], 0
    for position, function in enumerate(functions):
        medians = {
            method: quartiles(values)[1]
            for method in (SUBJECT, *PEERS)
            if (values := regrets_at(runs, function, method, n))
        }
        best = min(medians, key=lambda method: medians[method], default="")
        held += position < COMPARED and best == SUBJECT
        details.append(f"{function} {best}")
    name = f"functions of the first {COMPARED} on which no peer is better, n = {n:,}"
    return at_least(name, held, NOT_ABOVE, "", f"best by median: {'; '.join(details)}")


# --- pictures -------------------------------------------------------------------------------------


def write_pictures(runs: Sequence[Run], costs: Sequence[Cost], folder: Path) -> None:
    """Write ``many_inputs.png``, regret by evaluations, and ``many_inputs_cost.png``."""
    functions = list(dict.fromkeys(run.function for run in runs))
    if functions:
        figure, axes = _panels(functions)
        for panel, function in zip(axes, functions, strict=True):
            of = [run for run in runs if run.function == function]
            for method in methods_of(of):
                _band(panel, of, function, method)
            positive = all(regret > 0.0 for run in of for regret in run.regrets)
            panel.set_yscale("log" if positive else "linear")
        _finish(figure, axes, "regret, or value if the least is unknown", folder / "many_inputs")
    dims = [dim for dim in MILLISECONDS if _cost_lines(runs, costs, dim)]
    if dims:
        figure, axes = _panels([f"{dim} inputs" for dim in dims])
        for panel, dim in zip(axes, dims, strict=True):
            for method, inside, after in _cost_lines(runs, costs, dim):
                colour = COLOURS[method]
                panel.plot(*np.reshape(inside, (-1, 2)).T, color=colour, lw=1.4, label=method)
                panel.plot(*np.reshape(after, (-1, 2)).T, "o--", color=colour, mfc="none", lw=0.8)
            panel.set_yscale("log")
        title = "ms a proposal (circles: after random points)"
        _finish(figure, axes, title, folder / "many_inputs_cost")


Points = list[tuple[float, float]]


def _cost_lines(
    runs: Sequence[Run], costs: Sequence[Cost], dim: int
) -> list[tuple[str, Points, Points]]:
    """Evaluations and ms in searches, and after random points.

    Of methods whose cost was measured, if that of any was: searches may run beside other work.
    """
    lines = []
    for method in methods_of(costs or runs):
        found = [(n, costs_at(runs, method, dim, n)) for n in MARKS]
        inside = [(float(n), 1e3 * value) for n, value in found if value is not None]
        own = [cost for cost in costs if (cost.method, cost.dim) == (method, dim)]
        after = sorted((float(cost.history), 1e3 * cost.seconds) for cost in own)
        if inside or after:
            lines.append((method, inside, after))
    return lines


def _panels(titles: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """A figure of small multiples, at most five in a row, and its used axes."""
    columns = min(5, len(titles))
    lines = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(3.0 * columns + 1.0, 2.6 * lines + 0.9), layout="constrained", dpi=150)
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel, title in zip(grid, titles, strict=False):
        panel.set_title(title, fontsize=10)
    for panel in grid[len(titles) :]:
        panel.set_visible(False)
    return figure, grid[: len(titles)]


def _band(panel: Axes, runs: Sequence[Run], function: str, method: str) -> None:
    """Median and quartiles of a method over its seeds, as far as all of them go."""
    of = [run for run in runs if run.method == method]
    seeds = {run.seed for run in of}
    numbers = sorted({n for run in of for n in run.numbers})
    values = [(n, regrets_at(runs, function, method, n)) for n in numbers]
    whole = [(n, *quartiles(each)) for n, each in values if len(each) == len(seeds)]
    if not whole:
        return
    n, low, middle, high = np.array(whole).T
    wide = method == SUBJECT
    panel.plot(n, middle, color=COLOURS[method], lw=2.4 if wide else 1.2, label=method)
    panel.fill_between(n, low, high, color=COLOURS[method], alpha=0.15, lw=0)


def _finish(figure: Figure, axes: Sequence[Axes], title: str, file: Path) -> None:
    for panel in axes:
        panel.set_xscale("log")
        panel.grid(alpha=0.25, lw=0.6)
        panel.tick_params(which="both", labelsize=7)
        panel.set_xlabel("evaluations", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supylabel(title, fontsize=9)
    handles = {line.get_label(): line for panel in axes for line in panel.get_lines()}
    shown = [method for method in COLOURS if method in handles]
    figure.legend(
        [handles[m] for m in shown],
        shown,
        loc="outside lower center",
        ncols=min(5, max(1, len(shown))),
        frameon=False,
        fontsize=8.5,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file.with_suffix(".png"))
