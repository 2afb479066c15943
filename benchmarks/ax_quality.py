"""Optimization through Ax's client: as good as Ax's default after 150 trials.

Hartmann-6 with noise 0.2, where the strategy takes ``OSGPR``, and noisy Ackley in 3-D, where it is
``WISKI``. Both strategies have the same Sobol points, the same noise, Ax's acquisition function
(qLogNEI) and Ax's search. Each finished run is written to a file, so that an interrupted benchmark
goes on where it was; the file is removed at the end.
"""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.ax_client import client_of, complete, inputs_of, quiet
from benchmarks.harness import Options, start
from benchmarks.hartmann import PROBLEM as HARTMANN
from benchmarks.optimization import PROBLEMS, Problem, spelled
from benchmarks.report import Claim, at_most, finish, stated
from benchmarks.resume import Finished

FUNCTIONS: dict[str, Problem] = {"Hartmann-6": HARTMANN, "Ackley-3": PROBLEMS["Ackley"]}
STRATEGIES = {"bo_stream": True, "Ax's default": False}
FIRST = 10


@dataclass(frozen=True)
class Run:
    """A strategy on a function from a seed.

    Attributes:
        regret: Least one of the points evaluated, without noise.
        recommended: That of the point which the client says is best.
        seconds: Spent in ``get_next_trials``.
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
    for _ in range(trials):
        began = time.perf_counter()
        ((index, parameters),) = client.get_next_trials(1).items()
        spent += time.perf_counter() - began
        X = inputs_of(parameters)
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


def runs_of(name: str, trials: int, seeds: int, finished: Finished) -> list[list[Run]]:
    """Of each strategy; seeds in turn."""
    runs: dict[str, list[Run]] = {strategy: [] for strategy in STRATEGIES}
    for seed in range(seeds):
        for strategy, streams in STRATEGIES.items():
            key = f"{name}, {strategy}, seed {seed}"
            compute = partial(run, FUNCTIONS[name], streams, trials, seed)
            runs[strategy].append(finished.part(key, Run, compute))
            print(f"{key}: {runs[strategy][-1]}", flush=True)
    return list(runs.values())


def main() -> None:
    """Run it."""
    options: Options = start(__doc__)
    warnings.simplefilter("ignore")
    quiet()
    trials, seeds = options.pick((150, 3), (12, 1))
    settings = {"trials": trials, "seeds": seeds, "first": FIRST}
    file = options.out / f"ax_quality{'.smoke' if options.smoke else ''}.runs.json"
    finished, claims = Finished(file, settings), list[Claim]()
    for name in FUNCTIONS:
        claims += claims_of(name, *runs_of(name, trials, seeds, finished))
    finished.remove()
    finish("ax_quality", claims, options, settings)


if __name__ == "__main__":
    main()
