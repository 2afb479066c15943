"""Fits in the logarithms of hyperparameters beside fits in the hyperparameters, as BoTorch's are.

Exact models (``AutoGP``) of functions in two to eight inputs: a first fit by ``fit_gpytorch_mll``
from BoTorch's start, then a refit after a tenth more rows, both with the same options and starts.
Evaluations are of the marginal likelihood with its gradient. The log density where a fit ends, of
outcomes and priors, says which end is the better: the likelihood has several maxima, so that single
fits may end higher or lower. First fits of BoTorch's ``SingleTaskGP`` are done both ways, too.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.optim.closures import NdarrayOptimizationClosure
from botorch.optim.core import OptimizationResult
from botorch.optim.fit import fit_gpytorch_mll_scipy
from botorch.test_functions import Ackley, Branin, Hartmann, Levy, Rosenbrock
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood

from benchmarks.common.harness import Options, processor_seconds, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated, table
from benchmarks.optimization.problems import Problem, unit_cube
from bo_stream import AutoGP
from bo_stream.models import lbfgs
from bo_stream.models.lbfgs import fit_in_logarithms

FEWER = 0.6
"""Evaluations, in those of fits in the hyperparameters themselves, at most."""

SEEDS = 10
CASES = {
    "Branin": (Problem(Branin(), 0.0, 0.397887), (10, 40)),
    "Levy-3": (Problem(Levy(3), 0.0, 0.0), (20, 60, 200)),
    "Levy-3, noise 10": (Problem(Levy(3), 10.0, 0.0), (20, 100, 400)),
    "Ackley-5": (Problem(Ackley(5), 0.0, 0.0), (50, 200)),
    "Hartmann-6": (Problem(Hartmann(6), 0.0, -3.32237), (20, 60, 200)),
    "Hartmann-6, noise 0.2": (Problem(Hartmann(6), 0.2, -3.32237), (60, 300)),
    "Rosenbrock-8": (Problem(Rosenbrock(8), 0.0, 0.0), (60, 200)),
}
"""Functions, and numbers of rows of the first fit."""


@dataclass(frozen=True)
class Fit:
    """What a fit took, and where it ended.

    Attributes:
        evaluations: Of the objective with its gradient.
        seconds: Of the processor.
        density: Logarithm of the density of outcomes and hyperparameters there, in nats.
    """

    evaluations: int
    seconds: float
    density: float


def in_the_hyperparameters(
    mll: MarginalLogLikelihood, closure: Callable[..., Any] | None = None, **kwargs: Any
) -> OptimizationResult:
    """Fit as BoTorch does; a function of ours, so that its name decides nothing."""
    return fit_gpytorch_mll_scipy(mll, closure=closure, **kwargs)


WAYS: dict[str, Callable[..., OptimizationResult]] = {
    "logarithms": fit_in_logarithms,
    "hyperparameters": in_the_hyperparameters,
}


@contextmanager
def counted(way: str) -> Iterator[list[None]]:
    """Let models be fitted one way; the list has an entry for each evaluation."""
    calls = list[None]()
    evaluate = NdarrayOptimizationClosure.__call__

    def counting(self: NdarrayOptimizationClosure, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return evaluate(self, *args, **kwargs)

    NdarrayOptimizationClosure.__call__ = counting  # type: ignore[method-assign]
    lbfgs.fit_in_logarithms = WAYS[way]
    try:
        yield calls
    finally:
        NdarrayOptimizationClosure.__call__ = evaluate  # type: ignore[method-assign]
        lbfgs.fit_in_logarithms = WAYS["logarithms"]


def fitted(model: Model, rows: int, way: str, **kwargs: Any) -> Fit:
    """Fit a model of some rows."""
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    with counted(way) as calls:
        seconds = processor_seconds(lambda: fit_gpytorch_mll(mll, **kwargs))
    evaluations = len(calls)
    mll.train()
    with torch.no_grad():
        if isinstance(model, AutoGP):
            density = -model.compute_custom_loss(mll).sum()
        else:
            density = mll(model(*model.train_inputs), model.train_targets).sum()
    mll.eval()
    return Fit(evaluations, seconds, float(density) * rows)


def fits(problem: Problem, n: int, seed: int) -> dict[str, list[Fit]]:
    """A first fit and a refit of ours, and a first fit of BoTorch's model, by way."""
    generator = torch.Generator().manual_seed(seed)
    rows, d = n + n // 10 + 1, problem.function.dim
    X = torch.rand(rows, d, generator=generator)
    Y = problem.measure(X, generator)
    found = {}
    for way, optimizer in WAYS.items():
        torch.manual_seed(seed)
        model = AutoGP(X[:n], Y[:n], bounds=unit_cube(d))
        first = fitted(model, n, way)
        model.update(X[n:], Y[n:])
        again = fitted(model, rows, way)
        theirs = fitted(SingleTaskGP(X[:n], Y[:n]), n, way, optimizer=optimizer)
        found[way] = [first, again, theirs]
    return found


def compared(found: dict[str, list[dict[str, list[Fit]]]], which: int, what: str) -> list[Claim]:
    """Compare both ways by what one of the fits took."""

    def total(way: str, runs: list[dict[str, list[Fit]]]) -> int:
        return sum(run[way][which].evaluations for run in runs)

    ratios = {
        case: total("logarithms", runs) / total("hyperparameters", runs)
        for case, runs in found.items()
    }
    runs = [run for runs in found.values() for run in runs]
    least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    means = [total(way, runs) / len(runs) for way in WAYS]
    return [
        at_most(
            f"evaluations of {what}, in logarithms over others",
            statistics.median(ratios.values()),
            FEWER,
            "",
            f"median of {len(ratios)} sets; {ratios[least]:.2f} ({least}) to {ratios[most]:.2f} "
            f"({most}); means {means[0]:.0f} and {means[1]:.0f}",
        ),
        stated(
            f"processor time of {what}, in logarithms over others",
            sum(run["logarithms"][which].seconds for run in runs)
            / sum(run["hyperparameters"][which].seconds for run in runs),
        ),
    ]


def gained(found: dict[str, list[dict[str, list[Fit]]]], which: int, what: str) -> Claim:
    """Compare both ways by the log density where they end."""
    gains = {
        case: [
            run["logarithms"][which].density - run["hyperparameters"][which].density for run in runs
        ]
        for case, runs in found.items()
    }
    each = [gain for some in gains.values() for gain in some]
    means = {case: statistics.mean(some) for case, some in gains.items()}
    worst = min(means, key=means.__getitem__)
    return at_least(
        f"log density where {what} ends, gained",
        statistics.mean(each),
        0.0,
        "nats",
        f"mean of {len(each)}; {sum(gain > 1 for gain in each)} more than a nat higher, "
        f"{sum(gain < -1 for gain in each)} lower; worst set {worst}, {means[worst]:+.1f}",
    )


def main() -> None:
    """Run it."""
    options: Options = start(__doc__)
    warnings.simplefilter("ignore")
    seeds = options.pick(SEEDS, 1)
    found: dict[str, list[dict[str, list[Fit]]]] = {}
    for title, (problem, sizes) in CASES.items():
        for n in options.pick(sizes, sizes[:1]):
            case = f"{title}, {n} rows"
            found[case] = [fits(problem, n, seed) for seed in range(seeds)]
    lines = [
        [
            case,
            *(
                f"{statistics.mean(run[way][which].evaluations for run in runs):.0f}"
                for which in range(3)
                for way in WAYS
            ),
        ]
        for case, runs in found.items()
    ]
    header = [f"{what}, {way}" for what in ("first fit", "refit", "SingleTaskGP") for way in WAYS]
    print(table(["evaluations", *header], lines) + "\n")
    kinds = ("a first fit", "a refit", "a first fit of SingleTaskGP")
    claims = [claim for which, what in enumerate(kinds) for claim in compared(found, which, what)]
    claims += [gained(found, which, what) for which, what in enumerate(kinds[:2])]
    finish("fits", claims, options, {"seeds": seeds, "sets": len(found)})


if __name__ == "__main__":
    main()
