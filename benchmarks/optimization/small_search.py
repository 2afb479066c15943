"""Small searches, as most are: some tens of evaluations by qLogNEI, against the exact GP.

Branin (noise of sd 1) and Hartmann-3 (sd 0.05) with 40 evaluations, Hartmann-6 (sd 0.05) with 60,
one a step, each model refitted in every step, all from the same first points and with the same
search for the next one. The regret is of the observed point with the largest posterior mean, by its
value without noise. ``SEEDS`` of the environment is the number of runs. WISKI takes up to four
inputs, and so no part in Hartmann-6.
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.optim.optimize import optimize_acqf
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.test_functions import Branin, Hartmann
from torch import Tensor
from torch.quasirandom import SobolEngine

from benchmarks.common.harness import Options, processor_seconds, start
from benchmarks.common.report import Claim, at_most, finish, stated
from benchmarks.optimization.hartmann import OsgprPlayer
from benchmarks.optimization.problems import Problem, Search, best_mean, spelled, unit_cube
from benchmarks.peers.players import ExactPlayer, Player, StreamPlayer
from bo_stream import WISKI

SEEDS = int(os.environ.get("SEEDS", "10"))
SEARCH = Search(q=1, restarts=8, raw_samples=256, samples=64, maxiter=100)
MOST_WISKI_INPUTS = 4
SLOWER = 1.5
"""Processor time of a step, in that of the exact GP's."""

BOX = 1e-9
"""Added to the exact GP's upper quartile of regrets, for optima that are found to rounding."""


@dataclass(frozen=True)
class Task:
    """A problem and how many evaluations it is given.

    Attributes:
        problem: To minimise.
        evaluations: The first ones included.
    """

    problem: Problem
    evaluations: int

    @property
    def dim(self) -> int:
        """Number of inputs."""
        return int(self.problem.function.dim)


TASKS = {
    "Branin": Task(Problem(Branin(), 1.0, 0.397887), 40),
    "Hartmann-3": Task(Problem(Hartmann(3), 0.05, -3.86278), 40),
    "Hartmann-6": Task(Problem(Hartmann(6), 0.05, -3.32237), 60),
}


class WiskiPlayer(StreamPlayer):
    """WISKI with every default, on the unit cube."""

    def __init__(self, X: Tensor, Y: Tensor) -> None:
        """Begin."""
        super().__init__(WISKI(X, Y, bounds=unit_cube(X.shape[-1])))


PLAYERS: dict[str, Callable[[Tensor, Tensor], Player]] = {
    "exact": ExactPlayer,
    "OSGPR": OsgprPlayer,
    "WISKI": WiskiPlayer,
}


@dataclass(frozen=True)
class Run:
    """What a search came to.

    Attributes:
        regret: At its end.
        seconds: Of processor time a step.
    """

    regret: float
    seconds: float


class Seeker:
    """A search by one model, from first points that its seed decides."""

    def __init__(self, name: str, task: Task, seed: int) -> None:
        """Begin with the first points; nothing is learned yet."""
        self._problem, self._seed = task.problem, seed
        self._generator = torch.Generator().manual_seed(seed)
        sobol = SobolEngine(task.dim, scramble=True, seed=seed)
        self._X = sobol.draw(2 * (task.dim + 1), dtype=torch.float64)
        self._player = PLAYERS[name](self._X, task.problem.measure(self._X, self._generator))

    @property
    def evaluations(self) -> int:
        """So far."""
        return len(self._X)

    def step(self) -> None:
        """Refit, ask for a point, evaluate it, and take its outcome."""
        self._player.refit()
        point = self._next()
        self._player.update(point, self._problem.measure(point, self._generator))
        self._X = torch.cat((self._X, point))

    def regret(self) -> float:
        """Of the observed point with the largest posterior mean, after a last refit."""
        self._player.refit()
        return float(self._problem.regret(best_mean(self._player.model, self._X)))

    def _next(self) -> Tensor:
        """The maximiser of qLogNEI, ``1 x d``."""
        seed = 1000 * self._seed + len(self._X)
        sampler = SobolQMCNormalSampler(torch.Size([SEARCH.samples]), seed=seed)
        torch.manual_seed(seed)
        point, _ = optimize_acqf(
            qLogNoisyExpectedImprovement(self._player.model, self._X, sampler, prune_baseline=True),
            bounds=unit_cube(self._X.shape[-1]),
            q=SEARCH.q,
            num_restarts=SEARCH.restarts,
            raw_samples=SEARCH.raw_samples,
            options={"maxiter": SEARCH.maxiter},
        )
        return point


def searched(name: str, task: Task, evaluations: int, seed: int) -> Run:
    """One search by one model."""
    seeker = Seeker(name, task, seed)
    taken = [processor_seconds(seeker.step) for _ in range(seeker.evaluations, evaluations)]
    return Run(seeker.regret(), statistics.mean(taken))


def claims_of(title: str, runs: dict[str, list[Run]]) -> list[Claim]:
    """Each model's regret and time beside the exact GP's."""
    exact = [run.regret for run in runs["exact"]]
    quartile = float(torch.tensor(exact).quantile(0.75))
    claims = [
        stated(f"{title}: median regret, exact", statistics.median(exact), "", spelled(exact))
    ]
    for name in (name for name in runs if name != "exact"):
        regrets = [run.regret for run in runs[name]]
        ratios = [a.seconds / b.seconds for a, b in zip(runs[name], runs["exact"], strict=True)]
        claims += [
            at_most(
                f"{title}: median regret, {name}",
                statistics.median(regrets),
                quartile + BOX,
                "",
                spelled(regrets),
            ),
            at_most(
                f"{title}: processor time a step over the exact GP's, {name}",
                statistics.median(ratios),
                SLOWER,
                "",
                spelled(ratios),
            ),
        ]
    return claims


def measured(title: str, options: Options) -> list[Claim]:
    """All models on one problem, taking turns."""
    task, seeds = TASKS[title], options.pick(SEEDS, 1)
    evaluations = options.pick(task.evaluations, 2 * (task.dim + 1) + 1)
    names = [name for name in PLAYERS if name != "WISKI" or task.dim <= MOST_WISKI_INPUTS]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for seed in range(seeds):
        for name in names:
            runs[name].append(searched(name, task, evaluations, seed))
            print(f"{title}, seed {seed}, {name}: {runs[name][-1]}", flush=True)
    return claims_of(title, runs)


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore")
    titles = options.pick(tuple(TASKS), ("Branin",))
    claims = [claim for title in titles for claim in measured(title, options)]
    finish("small_search", claims, options, {"seeds": SEEDS, **vars(SEARCH)})


if __name__ == "__main__":
    main()
