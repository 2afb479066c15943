"""Two to ten inputs, to 200 evaluations: the optimizer's searches beside each other.

Functions over the unit cube, to be minimised, one and five points at a time: the search of the
whole box, that of a region, and that of both, each with every default. The regret is of the best
point evaluated; with noise, of the point that the optimizer recommends, by its value without noise.
Processor time is that of asking and telling. Stated are medians, on how many functions that of
another search is no larger than the box's, and how much less time it takes. Each search is a file
in ``few_inputs`` beside the results, and a run goes on where another was stopped. ``SEEDS`` of the
environment is the number of seeds.
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from botorch.test_functions import Ackley, Branin, Hartmann, Levy, Michalewicz
from botorch.test_functions.synthetic import Rosenbrock, StyblinskiTang

from benchmarks.common.harness import names, start
from benchmarks.common.report import Claim, finish, stated
from benchmarks.common.resume import Finished
from benchmarks.optimization.many_input_problems import wide
from benchmarks.optimization.many_input_results import Run, file_name, regrets_at
from benchmarks.optimization.many_inputs import OURS, Method, searched
from benchmarks.optimization.problems import Problem
from benchmarks.peers.searchers import OurSearch
from bo_stream.loops.optimization.trials import SEARCHES

SEEDS = int(os.environ.get("SEEDS", "5"))
MARKS = {1: (30, 100), 5: (100, 200)}
"""Numbers of evaluations at which regrets are compared, by points at a time."""


def ours(search: str) -> Method:
    """The optimizer with every default but its search."""
    return Method(lambda d, q, seed, noisy: OurSearch(d, q, seed, search), packages=OURS)


METHODS = {search: ours(search) for search in SEARCHES}

PROBLEMS = {
    "Branin-2": Problem(Branin(), 0.0, 0.397887),
    "Levy-3, noise 1": Problem(Levy(3), 1.0, 0.0),
    "Levy-3, noise 10": Problem(Levy(3), 10.0, 0.0),
    "Hartmann-3": Problem(Hartmann(3), 0.0, -3.86278),
    "Levy-4": Problem(Levy(4, bounds=wide(4)), 0.0, 0.0),
    "Michalewicz-5": Problem(Michalewicz(5), 0.0, -4.687658),
    "Rosenbrock-5": Problem(Rosenbrock(5, bounds=wide(5)), 0.0, 0.0),
    "Ackley-5, noise 0.5": Problem(Ackley(5, bounds=wide(5)), 0.5, 0.0),
    "Hartmann-6": Problem(Hartmann(6), 0.0, -3.32237),
    "Hartmann-6, noise 0.1": Problem(Hartmann(6), 0.1, -3.32237),
    "StyblinskiTang-6": Problem(StyblinskiTang(6), 0.0, -39.16616570377142 * 6),
    "Levy-8": Problem(Levy(8, bounds=wide(8)), 0.0, 0.0),
    "Ackley-8, noise 0.5": Problem(Ackley(8, bounds=wide(8)), 0.5, 0.0),
    "Rosenbrock-10": Problem(Rosenbrock(10, bounds=wide(10)), 0.0, 0.0),
    "Ackley-10": Problem(Ackley(10, bounds=wide(10)), 0.0, 0.0),
}
"""By name, in order of the number of inputs."""


def claims_of(
    runs: Sequence[Run], functions: Sequence[str], q: int, marks: Sequence[int]
) -> list[Claim]:
    """State medians, where a search is no worse than the box's, and how much less time it takes."""
    claims, medians = list[Claim](), dict[tuple[str, str], float]()
    for n in marks:
        for function in functions:
            for method in METHODS:
                found = regrets_at(runs, function, method, n)
                medians[method, function] = statistics.median(found)
                name = f"{function}, {q} at a time, {n} evaluations: {method}"
                seeds = ", ".join(f"{regret:.3g}" for regret in found)
                claims.append(stated(name, medians[method, function], "", seeds))
        for method in ("both", "region"):
            no_worse = [f for f in functions if medians[method, f] <= medians["box", f]]
            name = f"{q} at a time, {n} evaluations: functions on which {method} is no worse"
            detail = f"of {len(functions)}: {'; '.join(no_worse)}"
            claims.append(stated(name, float(len(no_worse)), "", detail))
    spent = {m: sum(run.seconds[-1] for run in runs if run.method == m) for m in METHODS}
    return claims + [
        stated(f"{q} at a time: processor time of box over {m}", spent["box"] / spent[m])
        for m in ("both", "region")
    ]


def main() -> None:
    """Run it."""
    options = start(__doc__, values={"batch": ("all", "points at a time, separated by ';'")})
    warnings.simplefilter("ignore")
    folder = options.out / f"few_inputs{options.pick('', '.smoke')}"
    functions = options.pick(list(PROBLEMS), ["Branin-2"])
    known = {str(q): q for q in MARKS}
    claims = list[Claim]()
    for q in names(options.values["batch"], known, "number of points"):
        marks = options.pick(MARKS[known[q]], (15,))
        runs = searched_all(folder, functions, known[q], marks[-1], options.pick(SEEDS, 1))
        claims += claims_of(runs, functions, known[q], marks)
    finish("few_inputs", claims, options, {"seeds": SEEDS})


def searched_all(
    folder: Path, functions: Sequence[str], q: int, evaluations: int, seeds: int
) -> list[Run]:
    """Run the searches that the folder lacks, and read the others."""
    runs = []
    for seed in range(seeds):
        for function in functions:
            for method, way in METHODS.items():
                name = f"search--{file_name(q, method, function, seed, evaluations)}"
                what = (method, function), way, PROBLEMS[function], seed, q, evaluations
                runs.append(Finished(folder / name, {}).part("run", Run, partial(searched, *what)))
                print(f"{function}, {method}, {q} at a time, seed {seed}: {runs[-1]}", flush=True)
    return runs


if __name__ == "__main__":
    main()
