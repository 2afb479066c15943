"""Optimization through Ax's client: as good as Ax's default, in small and in larger searches.

Small ones: Branin in 40 trials and Hartmann-6 in 60, with and without noise, ten seeds each. The
median of the paired differences of regret is no more than a tie, and the time no more than Ax's.
Larger ones: 150 trials on Hartmann-6 with noise 0.2, where the strategy takes ``OSGPR``, and on
noisy Ackley in 3-D, where it is ``WISKI``. Both strategies have the same Sobol points, the same
noise, Ax's acquisition function (qLogNEI) and Ax's search. Each finished run is written to a file,
so that an interrupted benchmark goes on where it was; the file is removed at the end.

``SEEDS`` of the environment is the number of small runs, and ``ONLY`` the names of functions to
run, with semicolons between them. The file stays after such a part, for the rest to go on from.
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from botorch.test_functions import Branin

from benchmarks.common.harness import Options, processor_seconds, start
from benchmarks.common.report import Claim, at_most, finish, stated
from benchmarks.common.resume import Finished
from benchmarks.optimization.hartmann import PROBLEM as HARTMANN
from benchmarks.optimization.problems import PROBLEMS, Problem, spelled
from benchmarks.peers.ax_client import client_of, complete, inputs_of, quiet

FUNCTIONS = {"Hartmann-6 with noise 0.2": HARTMANN, "Ackley-3 with noise 4": PROBLEMS["Ackley"]}
BRANIN = Problem(Branin(), 0.0, 0.397887)
SMALL: dict[str, tuple[Problem, int]] = {
    "Branin": (BRANIN, 40),
    "Branin with noise 1": (replace(BRANIN, noise=1.0), 40),
    "Hartmann-6": (replace(HARTMANN, noise=0.0), 60),
    "Hartmann-6 with noise 0.1": (replace(HARTMANN, noise=0.1), 60),
}
"""Functions and numbers of trials."""

STRATEGIES = {"bo_stream": True, "Ax's default": False}
FIRST = 10
TIE = 1e-3
"""Differences of regret that do not count."""

SMALL_SEEDS = 10
SEEDS = int(os.environ.get("SEEDS", str(SMALL_SEEDS)))
ONLY = tuple(name for name in os.environ.get("ONLY", "").split(";") if name)


@dataclass(frozen=True)
class Run:
    """A strategy on a function from a seed.

    Attributes:
        regret: Least one of the points evaluated, without noise.
        recommended: That of the point which the client says is best.
        seconds: Of processor time in ``get_next_trials``.
    """

    regret: float
    recommended: float
    seconds: float


def run(problem: Problem, streams: bool, trials: int, seed: int) -> Run:
    """Trials one after another."""
    noise = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    client = client_of(problem, streams, FIRST, seed)
    regrets, spent = [], 0.0
    for index in range(trials):
        spent += processor_seconds(partial(client.get_next_trials, 1))
        X = inputs_of(client._experiment.trials[index].arms[0].parameters)
        complete(client, index, problem, X, noise)
        regrets.append(float(problem.regret(X)))
    best, *_ = client.get_best_parameterization()
    return Run(min(regrets), float(problem.regret(inputs_of(best))), spent)


def claims_of(name: str, ours: list[Run], theirs: list[Run]) -> list[Claim]:
    """Our mean over seeds against the other's worst seed, and what was recommended."""
    best = [[one.regret for one in runs] for runs in (ours, theirs)]
    told = [[one.recommended for one in runs] for runs in (ours, theirs)]
    spent = [statistics.fmean(one.seconds for one in runs) for runs in (ours, theirs)]
    return [
        at_most(
            f"{name}: regret of the best point evaluated",
            statistics.fmean(best[0]),
            max(best[1]),
            "",
            f"{spelled(best[0])}; Ax {spelled(best[1])}, mean {statistics.fmean(best[1]):.3g}",
        ),
        stated(
            f"{name}: regret of the best point evaluated, Ax's default", statistics.fmean(best[1])
        ),
        stated(
            f"{name}: regret of the point recommended",
            statistics.fmean(told[0]),
            "",
            f"{spelled(told[0])}; Ax {spelled(told[1])}",
        ),
        stated(
            f"{name}: seconds in get_next_trials over Ax's",
            spent[0] / spent[1],
            "",
            f"{spent[0]:.0f} s",
        ),
    ]


def small_claims_of(name: str, ours: list[Run], theirs: list[Run]) -> list[Claim]:
    """Medians of paired differences, and of the times."""
    pairs = list(zip(ours, theirs, strict=True))
    best = [[one.regret for one in runs] for runs in (ours, theirs)]
    told = [mine.recommended - axs.recommended for mine, axs in pairs]
    spent = [statistics.median(one.seconds for one in runs) for runs in (ours, theirs)]
    return [
        at_most(
            f"{name}: regret less Ax's, median of {len(pairs)} seeds",
            statistics.median(mine.regret - axs.regret for mine, axs in pairs),
            TIE,
            "",
            f"{spelled(best[0])}; Ax {spelled(best[1])}",
        ),
        stated(
            f"{name}: regret of the point recommended, less Ax's",
            statistics.median(told),
            "",
            f"median of {len(pairs)}",
        ),
        at_most(
            f"{name}: seconds in get_next_trials over Ax's",
            spent[0] / spent[1],
            1.0,
            "",
            f"{spent[0]:.0f} s, median",
        ),
    ]


def runs_of(
    name: str, problem: Problem, trials: int, seeds: int, finished: Finished
) -> list[list[Run]]:
    """Of each strategy; seeds in turn."""
    runs: dict[str, list[Run]] = {strategy: [] for strategy in STRATEGIES}
    for seed in range(seeds):
        for strategy, streams in STRATEGIES.items():
            key = f"{name}, {trials} trials, {strategy}, seed {seed}"
            compute = partial(run, problem, streams, trials, seed)
            runs[strategy].append(finished.part(key, Run, compute))
            print(f"{key}: {runs[strategy][-1]}", flush=True)
    return list(runs.values())


def asked(names: Iterable[str]) -> list[str]:
    """Those of the names that are to be run."""
    return [name for name in names if not ONLY or name in ONLY]


def main() -> None:
    """Run it."""
    options: Options = start(__doc__)
    warnings.simplefilter("ignore")
    quiet()
    trials, seeds = options.pick((150, 3), (12, 1))
    small_seeds = options.pick(SEEDS, 1)
    settings = {"trials": trials, "seeds": seeds, "small seeds": small_seeds, "first": FIRST}
    file = options.out / f"ax_quality{'.smoke' if options.smoke else ''}.runs.json"
    finished, claims = Finished(file, {"first": FIRST}), list[Claim]()
    small = options.pick(SMALL, {"Branin": (BRANIN, 12)})
    for name in asked(small):
        problem, count = small[name]
        runs = runs_of(name, problem, count, small_seeds, finished)
        claims += small_claims_of(f"{name}, {count} trials", *runs)
    for name in asked(FUNCTIONS):
        runs = runs_of(name, FUNCTIONS[name], trials, seeds, finished)
        claims += claims_of(name, *runs)
    if not ONLY and SEEDS == SMALL_SEEDS:
        finished.remove()
    finish("ax_quality", claims, options, settings)


if __name__ == "__main__":
    main()
