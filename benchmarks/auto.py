"""AutoGP beside the exact GP while few observations are there, and over its hand-over.

Searches of 60 evaluations by qLogNEI as in ``benchmarks.small_search``, all models from the same
first points, on five functions: regret, its paired differences, and processor time of a whole step
(refit, search, update). Then streams of Levy-3 (noise of sd 10) and Hartmann-6 over the hand-over:
the update that hands over in ordinary refits, the error it brings in, and a step afterwards beside
one of the family that the model is then in. ``SEEDS`` of the environment is the number of runs.
"""

from __future__ import annotations

import statistics
import warnings
from dataclasses import dataclass

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.test_functions import Ackley, Branin, Hartmann, Levy
from gpytorch.mlls import ExactMarginalLogLikelihood
from scipy.stats import wilcoxon
from torch import Tensor

from benchmarks import small_search
from benchmarks.harness import Options, processor_seconds, start
from benchmarks.optimization import Problem, spelled, unit_cube
from benchmarks.players import StreamPlayer
from benchmarks.report import Claim, at_least, at_most, finish, stated
from benchmarks.small_search import SEEDS, Run, Task, searched
from bo_stream import OSGPR, WISKI, AutoGP
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
    """Processor seconds around a hand-over: of each kind of step, in the order they came."""

    refit: float
    handing: float
    after: list[float]
    own: list[float]


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
    """Fill a model to its last exact observation, refit it, and go on by one."""
    torch.manual_seed(seed)
    box = unit_cube(task.dim)
    generator = torch.Generator().manual_seed(seed)
    first = torch.rand(10, task.dim, dtype=torch.float64)
    model = AutoGP(first, task.problem.measure(first, generator), bounds=box, max_exact=most)
    X = torch.rand(model.max_exact - 10 + beyond, task.dim, dtype=torch.float64)
    Y = task.problem.measure(X, generator)
    n = model.max_exact - 10
    model.update(X[:n], Y[:n])
    before = statistics.median(processor_seconds(lambda: refit(model)) for _ in range(3))
    handing = processor_seconds(lambda: _step(model, X[n : n + 1], Y[n : n + 1]))
    own: StreamingGP = _family_of(
        model, torch.cat((first, X[: n + 1])), Y[: n + 1], task, generator
    )
    own.load_state_dict(model.state_dict(), strict=False)
    after, theirs = [], []
    for i in range(n + 1, n + beyond):
        x, y = X[i : i + 1], Y[i : i + 1]
        after.append(processor_seconds(lambda x=x, y=y: _refit_step(model, x, y)))
        theirs.append(processor_seconds(lambda x=x, y=y: _refit_step(own, x, y)))
    return model, Crossing(before, handing, after, theirs)


def _family_of(
    model: AutoGP, X: Tensor, Y: Tensor, task: Task, generator: torch.Generator
) -> StreamingGP:
    """Build the public model of the family that a model is in, from the same data."""
    outcomes = torch.cat((task.problem.measure(X[:10], generator), Y))
    if model.family == "WISKI":
        return WISKI(X, outcomes, bounds=unit_cube(X.shape[-1]))
    return OSGPR(X, outcomes, max_points=model._memory.inference.max_points)


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
    errors = [model.history[0].mean_error for model, _ in runs]
    return [
        stated(f"{title}: observations at the hand-over to {move.after}", move.observations, ""),
        at_most(f"{title}: the hand-over in refits before it", ratio, REFITS, "refits"),
        stated(f"{title}: largest error of the mean", statistics.median(errors), "prior sd"),
        at_most(
            f"{title}: a step after it over {move.after}'s own",
            statistics.median(steps),
            SLOWER,
            "times",
            spelled(steps),
        ),
    ]


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
