"""Fits in the logarithms of hyperparameters beside fits in the hyperparameters, as BoTorch's are.

Exact models (``AutoGP``) of functions in two to eight inputs: a first fit by ``fit_gpytorch_mll``
from BoTorch's start, then refits after a tenth more rows, and after three more, both ways with the
same options and starts; and first fits of BoTorch's ``SingleTaskGP``, which is the same model.
Evaluations are of the marginal likelihood with its gradient. The log density where a fit ends, of
outcomes and priors, says which end is the better: the likelihood has several maxima, so that single
fits may end higher or lower. ``AutoGP`` begins a first fit again at shorter lengthscales where it
found much noise. Both ways end at SciPy's tolerance here, and a third one at ours, a thousandth of
a nat; all three forget the last fit, from which the default, the fourth, takes the curvature, and
when a fit last began at two starts.
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
from bo_stream.models.lbfgs import SCIPYS_FTOL, fit_in_logarithms

FEWER = 0.6
"""Evaluations, in those of fits in the hyperparameters themselves, at most."""

ENDED, ENDED_AGAIN = 0.9, 0.8
"""Evaluations of a first fit and a refit at the default tolerance, in those at SciPy's, at most."""

KNOWN, KNOWN_SOON = 0.95, 0.85
"""Evaluations of a refit after a tenth and after three more rows, in those of one that forgets the
last fit, at most."""

SOON = 3
"""Rows after which the second refit follows."""

LOWER = -0.1
"""Nats by which ends may be lower on average."""

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
    mll: MarginalLogLikelihood,
    closure: Callable[..., Any] | None = None,
    scales: object = None,
    **kwargs: Any,
) -> OptimizationResult:
    """Fit as BoTorch does; a function of ours, so that its name decides nothing."""
    return fit_gpytorch_mll_scipy(mll, closure=closure, **kwargs)


SCIPY_S = {"options": {"ftol": SCIPYS_FTOL}}

WAYS: dict[str, tuple[Callable[..., OptimizationResult], dict[str, Any]]] = {
    "default": (fit_in_logarithms, {}),
    "forgets": (fit_in_logarithms, {}),
    "logarithms": (fit_in_logarithms, SCIPY_S),
    "hyperparameters": (in_the_hyperparameters, SCIPY_S),
}
"""Optimizers and their options."""

DEFAULT, FORGETS, OURS, THEIRS = WAYS


@contextmanager
def counted(way: str) -> Iterator[list[None]]:
    """Let models be fitted one way; the list has an entry for each evaluation."""
    calls = list[None]()
    evaluate = NdarrayOptimizationClosure.__call__

    def counting(self: NdarrayOptimizationClosure, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return evaluate(self, *args, **kwargs)

    NdarrayOptimizationClosure.__call__ = counting  # type: ignore[method-assign]
    lbfgs.fit_in_logarithms = WAYS[way][0]
    try:
        yield calls
    finally:
        NdarrayOptimizationClosure.__call__ = evaluate  # type: ignore[method-assign]
        lbfgs.fit_in_logarithms = fit_in_logarithms


def fitted(model: Model, rows: int, way: str, **kwargs: Any) -> Fit:
    """Fit a model of some rows."""
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    with counted(way) as calls:
        kwargs["optimizer_kwargs"] = WAYS[way][1]
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
    """A first fit and two refits of ours, and a first fit of BoTorch's model, by way."""
    generator = torch.Generator().manual_seed(seed)
    rows, d = n + n // 10 + 1, problem.function.dim
    X = torch.rand(rows + SOON, d, generator=generator)
    Y = problem.measure(X, generator)
    found = {}
    for way, (optimizer, _) in WAYS.items():
        torch.manual_seed(seed)
        model = AutoGP(X[:n], Y[:n], bounds=unit_cube(d))
        ours = [fitted(model, n, way)]
        for begin, end in ((n, rows), (rows, rows + SOON)):
            model.update(X[begin:end], Y[begin:end])
            if way != DEFAULT:
                model._last_fit = None
            ours.append(fitted(model, end, way))
        theirs = fitted(SingleTaskGP(X[:n], Y[:n]), n, way, optimizer=optimizer)
        found[way] = [*ours, theirs]
    return found


Runs = dict[str, list[dict[str, list[Fit]]]]
"""Fits of each set and seed, by way."""

FIRST, AGAIN, LATER, PEER = range(4)


def taken(
    found: Runs, what: str, ours: tuple[str, int], theirs: tuple[str, int], target: float
) -> list[Claim]:
    """Compare what two fits took, each given by its way and which of the three it is."""

    def total(fit: tuple[str, int], runs: list[dict[str, list[Fit]]]) -> int:
        return sum(run[fit[0]][fit[1]].evaluations for run in runs)

    def seconds(fit: tuple[str, int]) -> float:
        return sum(run[fit[0]][fit[1]].seconds for runs in found.values() for run in runs)

    ratios = {case: total(ours, runs) / total(theirs, runs) for case, runs in found.items()}
    least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    runs = [run for some in found.values() for run in some]
    means = [total(fit, runs) / len(runs) for fit in (ours, theirs)]
    return [
        at_most(
            f"evaluations of {what}",
            statistics.median(ratios.values()),
            target,
            "",
            f"median of {len(ratios)} sets; {ratios[least]:.2f} ({least}) to {ratios[most]:.2f} "
            f"({most}); means {means[0]:.0f} and {means[1]:.0f}",
        ),
        stated(f"processor time of {what}", seconds(ours) / seconds(theirs)),
    ]


def gained(found: Runs, what: str, ours: tuple[str, int], theirs: tuple[str, int]) -> Claim:
    """Compare the log densities where two fits end."""
    gains = {
        case: [run[ours[0]][ours[1]].density - run[theirs[0]][theirs[1]].density for run in runs]
        for case, runs in found.items()
    }
    each = [gain for some in gains.values() for gain in some]
    means = {case: statistics.mean(some) for case, some in gains.items()}
    least, most = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    return at_least(
        f"log density gained by {what}",
        statistics.mean(each),
        LOWER,
        "nats",
        f"mean of {len(each)}; {sum(gain > 1 for gain in each)} more than a nat higher, "
        f"{sum(gain < -1 for gain in each)} lower; sets {means[least]:+.1f} ({least}) to "
        f"{means[most]:+.1f} ({most})",
    )


def main() -> None:
    """Run it."""
    options: Options = start(__doc__)
    warnings.simplefilter("ignore")
    seeds = options.pick(SEEDS, 1)
    found: Runs = {}
    for title, (problem, sizes) in CASES.items():
        for n in options.pick(sizes, sizes[:1]):
            case = f"{title}, {n} rows"
            found[case] = [fits(problem, n, seed) for seed in range(seeds)]
    lines = [
        [
            case,
            *(
                f"{statistics.mean(run[way][which].evaluations for run in runs):.0f}"
                for which in (FIRST, AGAIN, LATER, PEER)
                for way in WAYS
            ),
        ]
        for case, runs in found.items()
    ]
    kinds = ("first fit", "refit", f"after {SOON} rows", "SingleTaskGP")
    header = [f"{what}, {way}" for what in kinds for way in WAYS]
    print(table(["evaluations", *header], lines) + "\n")
    other, tight = "in logarithms over the other way", "at the default tolerance over SciPy's"
    knowing = "that knows the last fit over one that does not"
    compared = {
        f"a first fit {other}": ((OURS, FIRST), (THEIRS, FIRST), FEWER),
        f"a refit {other}": ((OURS, AGAIN), (THEIRS, AGAIN), FEWER),
        "a first fit of SingleTaskGP in logarithms over BoTorch's": (
            (OURS, PEER),
            (THEIRS, PEER),
            FEWER,
        ),
        f"a first fit {tight}": ((FORGETS, FIRST), (OURS, FIRST), ENDED),
        f"a refit {tight}": ((FORGETS, AGAIN), (OURS, AGAIN), ENDED_AGAIN),
        f"a refit {knowing}": ((DEFAULT, AGAIN), (FORGETS, AGAIN), KNOWN),
        f"a refit after {SOON} more rows {knowing}": (
            (DEFAULT, LATER),
            (FORGETS, LATER),
            KNOWN_SOON,
        ),
        "a first fit over BoTorch's of SingleTaskGP": ((DEFAULT, FIRST), (THEIRS, PEER), FEWER),
    }
    claims = [claim for what, fits in compared.items() for claim in taken(found, what, *fits)]
    claims += [gained(found, what, *fits[:2]) for what, fits in compared.items()]
    finish("fits", claims, options, {"seeds": seeds, "sets": len(found)})


if __name__ == "__main__":
    main()
