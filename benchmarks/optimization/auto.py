"""AutoGP beside the exact GP while few observations are there, and over its hand-over.

Searches of 60 evaluations by qLogNEI as in ``benchmarks.optimization.small_search``, all models
from the same first points, on five functions: regret, its paired differences, and processor time of
a whole step (refit, search, update). Then streams of Levy-3 (noise of sd 10) and Hartmann-6 over
the hand-over: the update that hands over in ordinary refits, the error it brings in, and a step
afterwards beside one of the public model of its family, which begins with a copy of its memory: the
same points and hyperparameters. ``SEEDS`` of the environment is the number of runs.
"""

from __future__ import annotations

import statistics
import warnings
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.test_functions import Ackley, Branin, Hartmann, Levy
from gpytorch.mlls import ExactMarginalLogLikelihood
from scipy.stats import wilcoxon
from torch import Tensor

from benchmarks.common.harness import Options, processor_seconds, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from benchmarks.optimization import small_search
from benchmarks.optimization.problems import Problem, spelled, unit_cube
from benchmarks.optimization.small_search import SEEDS, Run, Task, searched
from benchmarks.peers.players import StreamPlayer
from bo_stream import AutoGP
from bo_stream.loops.models import REFIT
from bo_stream.models.auto.auto import family_model
from bo_stream.models.auto.families import MOST_EXACT
from bo_stream.models.base import StreamingGP

SLOWER = 1.1
"""Processor time of a step, in that of the exact GP's, or of the family's own."""

REFITS = 3.0
"""Most refits that the update which hands over may be worth."""

DOUBT = 0.05
"""Least one-sided p-value of equal regrets."""

TASKS = {
    "Branin": Task(Problem(Branin(), 1.0, 0.397887), 60),
    "Hartmann-3": Task(Problem(Hartmann(3), 0.05, -3.86278), 60),
    "Hartmann-6": Task(Problem(Hartmann(6), 0.05, -3.32237), 60),
    "Ackley-4": Task(Problem(Ackley(4), 0.1, 0.0), 60),
    "Levy-3": Task(Problem(Levy(3), 10.0, 0.0), 60),
}
STREAMS = ("Levy-3", "Hartmann-6")


class AutoPlayer(StreamPlayer):
    """AutoGP with every default, on the unit cube."""

    def __init__(self, X: Tensor, Y: Tensor) -> None:
        """Begin."""
        super().__init__(AutoGP(X, Y, bounds=unit_cube(X.shape[-1])))


@dataclass(frozen=True)
class Crossing:
    """Processor seconds around a hand-over, and evaluations of the objective after it.

    Attributes:
        refit: Of the exact model.
        handing: The update that hands over.
        after: Steps afterwards, in the order they came.
        own: The same steps of the family's public model, which began with a copy of the memory.
        evaluations: Of the objective, in each step.
        own_evaluations: The same of the public model.
    """

    refit: float
    handing: float
    after: list[float]
    own: list[float]
    evaluations: list[int]
    own_evaluations: list[int]


def searches(title: str, options: Options) -> list[Claim]:
    """Compare searches by AutoGP and by the exact GP, which take turns."""
    small_search.PLAYERS["AutoGP"] = AutoPlayer
    task, names = TASKS[title], ("exact", "AutoGP")
    evaluations = options.pick(task.evaluations, 2 * (task.dim + 1) + 1)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for seed in range(options.pick(SEEDS, 2)):
        for name in names if seed % 2 else reversed(names):
            runs[name].append(searched(name, task, evaluations, seed))
            print(f"{title}, seed {seed}, {name}: {runs[name][-1]}", flush=True)
    pairs = list(zip(runs["AutoGP"], runs["exact"], strict=True))
    ratios = [a.seconds / b.seconds for a, b in pairs]
    differences = [a.regret - b.regret for a, b in pairs]
    ranks = [1.5 + 0.5 * ((a.regret > b.regret) - (a.regret < b.regret)) for a, b in pairs]
    same = all(d == 0.0 for d in differences)
    doubt = 1.0 if same else float(wilcoxon(differences, alternative="greater").pvalue)
    details = {name: spelled([run.regret for run in own]) for name, own in runs.items()}
    return [
        at_most(f"{title}: step over the exact GP's", statistics.median(ratios), SLOWER, "times"),
        stated(f"{title}: median regret, exact", _median(runs["exact"]), "", details["exact"]),
        stated(f"{title}: median regret, AutoGP", _median(runs["AutoGP"]), "", details["AutoGP"]),
        stated(f"{title}: median paired difference", statistics.median(differences), ""),
        stated(f"{title}: mean rank of AutoGP, of two", statistics.mean(ranks), ""),
        at_least(f"{title}: p-value of no worse regrets (Wilcoxon)", doubt, DOUBT, ""),
    ]


def _median(runs: list[Run]) -> float:
    return statistics.median(run.regret for run in runs)


def refit(model: StreamingGP) -> None:
    """Learn hyperparameters, by no more iterations than a loop takes."""
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 30}})


def crossing(task: Task, seed: int, beyond: int, most: int | None) -> tuple[AutoGP, Crossing]:
    """Fill a model to its last exact observation, refit it, and go on by one.

    The refit before the hand-over is that of a loop: rows have grown ``REFIT``-fold since. Where
    the family that follows is far from exact, the model stays until the next one is cheaper.
    """
    torch.manual_seed(seed)
    box = unit_cube(task.dim)
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(10, task.dim, dtype=torch.float64)
    model = AutoGP(first, task.problem.measure(first, generator), bounds=box, max_exact=most)
    X = torch.rand((most or MOST_EXACT) - 10 + beyond, task.dim, dtype=torch.float64)
    Y = task.problem.measure(X, generator)
    n, end = 0, model.max_exact
    while model.family == "exact":
        fitted = max(n, int(end / REFIT) - 10)
        model.update(X[n:fitted], Y[n:fitted])
        refit(model)
        n = end - 10
        model.update(X[fitted:n], Y[fitted:n])
        before = processor_seconds(lambda: refit(model))
        handing = processor_seconds(lambda n=n: _step(model, X[n : n + 1], Y[n : n + 1]))
        n, end = n + 1, model._memory.waits_until
    players = (model, deepcopy(family_model(model)))
    counts = [Evaluations(player) for player in players]
    found = Crossing(before, handing, [], [], [], [])
    for i in range(n, n - 1 + beyond):
        x, y = X[i : i + 1], Y[i : i + 1]
        for k in (0, 1) if i % 2 else (1, 0):
            counts[k].number = 0
            seconds = processor_seconds(lambda k=k, x=x, y=y: _refit_step(players[k], x, y))
            (found.own if k else found.after).append(seconds)
            (found.own_evaluations if k else found.evaluations).append(counts[k].number)
    return model, found


class Evaluations:
    """A count of the objective's evaluations by a model's refits."""

    def __init__(self, model: StreamingGP) -> None:
        """Count from now on."""
        self.number, self._objective = 0, model.compute_custom_loss
        object.__setattr__(model, "compute_custom_loss", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Evaluate the objective."""
        self.number += 1
        return self._objective(*args, **kwargs)


def _step(model: StreamingGP, X: Tensor, Y: Tensor) -> None:
    """Update, and predict once."""
    model.update(X, Y).posterior(X).variance.sum()


def _refit_step(model: StreamingGP, X: Tensor, Y: Tensor) -> None:
    """Update, refit, and predict a hundred points with gradients, as a search does."""
    model.update(X, Y)
    refit(model)
    at = torch.rand(100, 1, X.shape[-1], dtype=torch.float64).requires_grad_()
    posterior = model.posterior(at)
    (posterior.mean.sum() + posterior.variance.sum()).backward()


def crossings(title: str, options: Options) -> list[Claim]:
    """Measure the hand-over, and the steps that follow."""
    runs = [
        crossing(TASKS[title], seed, options.pick(8, 3), options.pick(None, 30))
        for seed in range(options.pick(5, 1))
    ]
    (move,) = runs[0][0].history
    ratio = statistics.median(run.handing / run.refit for _, run in runs)
    steps = [statistics.median(run.after) / statistics.median(run.own) for _, run in runs]
    each = [_per_evaluation(run) for _, run in runs]
    counted = [sum(run.evaluations) / sum(run.own_evaluations) for _, run in runs]
    moves = [model.history[0] for model, _ in runs]
    ratios = [f for each in moves for f in (each.least_ratio, each.largest_ratio)]
    far = max(max(ratios), 1.0 / min(ratios))
    return [
        stated(f"{title}: observations at the hand-over to {move.after}", move.observations, ""),
        at_most(f"{title}: the hand-over in refits before it", ratio, REFITS, "refits"),
        stated(
            f"{title}: largest error of a mean, at rows, between them and in the box",
            max(each.deviation for each in moves),
            "posterior sd",
        ),
        stated(f"{title}: largest ratio of variances, or inverse", far, "times"),
        at_most(
            f"{title}: a step after it over {move.after}'s own",
            statistics.median(steps),
            SLOWER,
            "times",
            spelled(steps),
        ),
        stated(
            f"{title}: an evaluation of the objective over {move.after}'s own",
            statistics.median(each),
            "times",
            f"{spelled(each)}; numbers of evaluations, the same way: {spelled(counted)}",
        ),
    ]


def _per_evaluation(run: Crossing) -> float:
    """Seconds of all steps by their evaluations, over the same of the public model."""
    own = sum(run.own) / sum(run.own_evaluations)
    return sum(run.after) / sum(run.evaluations) / own


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore")
    claims = [claim for title in STREAMS for claim in crossings(title, options)]
    chosen = options.pick(list(TASKS), ["Branin"])
    claims += [claim for title in chosen for claim in searches(title, options)]
    finish("auto", claims, options, {"seeds": SEEDS})


if __name__ == "__main__":
    main()
