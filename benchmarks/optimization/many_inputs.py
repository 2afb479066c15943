"""Ten to a hundred inputs, to 5,000 evaluations: the optimizer's region search beside its peers.

Ten functions over the unit cube, to be minimised, ten points at a time: TuRBO with one trust region
and with five (BoTorch's tutorial), TuRBO-ENN, CMA-ES from the middle and from a random point, Ax's
default to 200 evaluations, random points, this package's Thompson sampling in the whole box and its
search in a region, to 500 also from 20 first points. Other methods without a start of their own
have 2d first points, from the seed. The regret (the value where the least one is not known) is of
the best point evaluated; with noise, of the point that the method recommends, by its value without
noise. Processor time is that of asking and telling alone. It is measured in the searches, and again
after 1,000, 5,000 and 20,000 outcomes of random points: so no search of that length is needed, but
a history of random points has no region to which it has narrowed.

Each search is a file in ``many_inputs`` beside the results; a run goes on where another was
stopped, also in another environment, and the tables and pictures are of all files in the folder.

The searches of other packages want these: ``cma``, ``ax-platform``, ``ennbo[with-deps]``
(measured: 0.3.17 with Python 3.12; its extension wants a BLAS in LD_PRELOAD); the simulators
``gymnasium[box2d]`` and ``nevergrad``.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.common.harness import Options, names, start
from benchmarks.common.report import finish
from benchmarks.common.resume import Finished
from benchmarks.optimization.many_input_problems import PROBLEMS
from benchmarks.optimization.many_input_results import (
    Cost,
    Run,
    claims_of,
    cost_table,
    file_name,
    longest,
    read_costs,
    read_runs,
    regret_table,
    write_pictures,
)
from benchmarks.optimization.problems import Problem
from benchmarks.optimization.simulators import Simulator
from benchmarks.peers.ax_client import quiet
from benchmarks.peers.searchers import (
    AxSearch,
    CmaSearch,
    EnnSearch,
    OurSearch,
    RandomSearch,
    Searcher,
    absent,
    knows_searches,
)
from benchmarks.peers.turbo import Turbo

T = TypeVar("T")

Q = 10
RECORDED = tuple(m * 10**k for k in (1, 2, 3) for m in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9))
"""Numbers of evaluations at which a search is looked at, as far as it goes."""

HISTORIES = (1_000, 5_000, 20_000)
"""Outcomes of random points after which processor time is measured."""

TIMED = {20: "Ackley-20", 100: "Ackley-100"}
"""Function on which it is measured, by the number of inputs."""


@dataclass(frozen=True)
class Method:
    """A way to search.

    Attributes:
        begin: Makes a searcher of d, q and seed, and of whether there is noise.
        missing: Says what has to be installed; None if all is there.
        most: Evaluations beyond which it is not run.
        history: Longest history after which its processor time is measured.
        batches: Of how many batches that is the mean, after a first one that is left out.
        packages: Whose versions are kept with the results.
    """

    begin: Callable[[int, int, int, bool], Searcher]
    missing: Callable[[], str | None] = lambda: None
    most: int = 5_000
    history: int = 20_000
    batches: int = 10
    packages: tuple[str, ...] = ("botorch",)


def turbo(regions: int) -> Method:
    """TuRBO; its exact model of all rows since a start bounds what can be measured."""
    return Method(
        lambda d, q, seed, noisy: Turbo(d, q, seed, regions, noisy),
        most=2_000,
        history=5_000,
        batches=1,
    )


def cma(middle: bool) -> Method:
    """CMA-ES."""
    return Method(
        lambda d, q, seed, noisy: CmaSearch(d, q, seed, middle),
        lambda: absent("cma", "cma"),
        packages=("cma",),
    )


OURS = ("bo-stream", "botorch", "torch")

METHODS = {
    "region": Method(
        lambda d, q, seed, noisy: OurSearch(d, q, seed, search="region"),
        lambda: None if knows_searches() else "a version of bo-stream that has search='region'",
        packages=OURS,
    ),
    "region, 20 first": Method(
        lambda d, q, seed, noisy: OurSearch(d, q, seed, search="region", initial=20),
        most=500,
        history=0,
        packages=OURS,
    ),
    "box, TS": Method(
        lambda d, q, seed, noisy: OurSearch(
            d, q, seed, search="box", acquisition="TS", initial=2 * d
        ),
        most=1_000,
        packages=OURS,
    ),
    "TuRBO-1": turbo(1),
    "TuRBO-5": turbo(5),
    "TuRBO-ENN": Method(
        lambda d, q, seed, noisy: EnnSearch(d, q, seed),
        lambda: absent("enn", "ennbo[with-deps]>=0.3.17"),
        packages=("ennbo",),
    ),
    "CMA-ES": cma(middle=True),
    "CMA-ES, random start": cma(middle=False),
    "Ax": Method(
        lambda d, q, seed, noisy: AxSearch(d, q, seed),
        lambda: absent("ax", "ax-platform"),
        most=200,
        history=0,
        packages=("ax-platform", "botorch"),
    ),
    "random": Method(lambda d, q, seed, noisy: RandomSearch(d, q, seed), packages=()),
}


# --- one search, and one measurement of its cost --------------------------------------------------


def timed(task: Callable[[], T]) -> tuple[T, float]:
    """What a call returns, and its processor seconds."""
    begin = time.process_time()
    found = task()
    return found, time.process_time() - begin


def searched(
    labels: tuple[str, str], way: Method, problem: Problem, seed: int, q: int, evaluations: int
) -> Run:
    """Search once, q points at a time to a number of evaluations; labels: method and function."""
    torch.manual_seed(seed)
    noise = torch.Generator().manual_seed(seed)
    searcher = way.begin(int(problem.function.dim), q, seed, problem.noise > 0.0)
    due = [int(n) for n in RECORDED if n < evaluations] + [evaluations]
    numbers, regrets, seconds, spent = [], [], [], 0.0
    truths, least, lucky = torch.empty(0), float("inf"), torch.empty(0)
    while due:
        X, asking = timed(searcher.ask)
        true = problem.regret(X)
        Y = true + problem.optimum + problem.noise * torch.randn(len(X), generator=noise)
        _, telling = timed(partial(searcher.tell, X, Y))
        spent += asking + telling
        truths = torch.cat((truths, true))
        if float(Y.min()) < least:
            least, lucky = float(Y.min()), X[Y.argmin()].unsqueeze(0)
        while due and len(truths) >= due[0]:
            numbers.append(due.pop(0))
            seconds.append(spent)
            if problem.noise > 0.0:
                recommended = searcher.recommended()
                at = lucky if recommended is None else recommended
                regrets.append(float(problem.regret(at)))
            else:
                regrets.append(float(truths[: numbers[-1]].min()))
    return Run(*labels, seed, numbers, regrets, seconds, versions(way))


def versions(way: Method) -> dict[str, str]:
    """Of the packages that a method is made of."""
    return {name: version(name) for name in way.packages}


def cost_of(method: str, dim: int, history: int, batches: int) -> Cost:
    """Processor time of a proposal after so many outcomes of random points.

    The first batch afterwards is left out: it brings the whole history into a model. The mean is of
    those that follow.
    """
    way, problem = METHODS[method], PROBLEMS[TIMED[dim]]
    torch.manual_seed(0)
    searcher = way.begin(dim, Q, 0, False)
    X = torch.rand(history, dim)
    searcher.take(X, problem.value(X))
    spent, proposals = 0.0, 0
    for batch in range(1 + batches):
        points, asking = timed(searcher.ask)
        _, telling = timed(partial(searcher.tell, points, problem.value(points)))
        if batch:
            spent, proposals = spent + asking + telling, proposals + len(points)
    return Cost(method, dim, history, spent / proposals, versions(way))


# --- all of them ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What the command line asks for.

    Attributes:
        methods: Names.
        functions: Names.
        seeds: Numbers.
        evaluations: Of each search, where the method is run that long.
    """

    methods: tuple[str, ...]
    functions: tuple[str, ...]
    seeds: tuple[int, ...]
    evaluations: int

    def missing(self) -> list[str]:
        """What has to be installed before any of it can run, a line each."""
        lacks = {name: METHODS[name].missing() for name in self.methods}
        for name in self.functions:
            function = PROBLEMS[name].function
            lacks[name] = function.missing if isinstance(function, Simulator) else None
        return [f"{name} needs {what}" for name, what in lacks.items() if what]


def search_all(folder: Path, asked: Asked) -> None:
    """Run the searches that the folder lacks, seed by seed."""
    for seed in asked.seeds:
        for function in asked.functions:
            for method in asked.methods:
                evaluations = min(asked.evaluations, METHODS[method].most)
                found = longest(read_runs(folder, method, function, seed))
                if found is None or found.numbers[-1] < evaluations:
                    name = f"search--{file_name(method, function, seed, evaluations)}"
                    kept = Finished(folder / name, {"q": Q, "evaluations": evaluations})
                    what = (method, function), METHODS[method], PROBLEMS[function]
                    compute = partial(searched, *what, seed, Q, evaluations)
                    found = kept.part("run", Run, compute)
                print(f"{function}, {method}, seed {seed}: {found}", flush=True)


def measure_all(folder: Path, asked: Asked, smoke: bool) -> None:
    """Measure the costs that the folder lacks."""
    for history in (60,) if smoke else HISTORIES:
        for dim in tuple(TIMED)[:1] if smoke else TIMED:
            for method in asked.methods:
                way = METHODS[method]
                if history > way.history:
                    continue
                batches = 1 if smoke else way.batches
                name = f"cost--{file_name(method, dim, history)}"
                kept = Finished(folder / name, {"q": Q, "batches": batches})
                found = kept.part("cost", Cost, partial(cost_of, method, dim, history, batches))
                print(f"{method}, {dim} inputs, n = {history:,}: {found}", flush=True)


def asked_of(options: Options) -> Asked:
    """Read the options.

    Raises:
        SystemExit: A name or number is none.
    """
    first, _, last = options.values["seeds"].partition("-")
    if not (
        first.isdigit() and (last or first).isdigit() and options.values["evaluations"].isdigit()
    ):
        sys.exit("Expected --seeds as 3 or 0-9, and --evaluations as a number.")
    seeds = tuple(range(int(first), int(last or first) + 1))
    methods = names(options.values["methods"], METHODS, "method")
    functions = names(options.values["functions"], PROBLEMS, "function")
    return Asked(methods, functions, seeds, int(options.values["evaluations"]))


SMOKE = Asked(("box, TS", "TuRBO-1", "CMA-ES", "random"), ("Ackley-20, noise 0.5",), (0,), 50)

OPTIONS = {
    "methods": ("all", "names separated by ';'"),
    "functions": ("all", "names separated by ';'"),
    "seeds": ("0-9", "a number, or the first and the last"),
    "evaluations": ("5000", "of each search, where its method is run that long"),
}
FLAGS = {
    "searches": "searches only, no costs",
    "costs": "costs only, no searches",
    "report": "tables and pictures of what is in the folder only",
}


def main() -> None:
    """Run it."""
    options = start(__doc__, flags=FLAGS, values=OPTIONS)
    warnings.simplefilter("ignore")
    quiet()
    asked = options.pick(asked_of(options), SMOKE)
    if options.smoke:  # with the packages that are there
        here = tuple(name for name in asked.methods if METHODS[name].missing() is None)
        asked = replace(asked, methods=here)
    folder = options.out / f"many_inputs{options.pick('', '.smoke')}"
    if "report" not in options.flags:
        lacks = asked.missing()
        if lacks:
            sys.exit("pip install first, or choose --methods and --functions:\n" + "\n".join(lacks))
        if "costs" not in options.flags:
            search_all(folder, asked)
        if "searches" not in options.flags:
            measure_all(folder, asked, options.smoke)
    order = list(PROBLEMS)
    runs = sorted(read_runs(folder), key=lambda run: order.index(run.function))
    costs = read_costs(folder)
    text = f"{regret_table(runs)}\n\n{cost_table(runs, costs)}\n"
    (options.out / f"many_inputs{options.pick('', '.smoke')}.md").write_text(text)
    print(text)
    write_pictures(runs, costs, options.out)
    settings = {"q": Q, "searches": len(runs), "costs": len(costs)}
    finish("many_inputs", claims_of(runs, costs), options, settings)


if __name__ == "__main__":
    main()
