"""Which family takes which problem, and where its quality is in doubt."""

from __future__ import annotations

from collections.abc import Callable

from bo_stream.recommendation.costs import CostTable
from bo_stream.recommendation.problem import Problem

FEW = 10_000
"""Observations from which steps on a bound repay themselves."""

NOISE = 0.1
"""Noise over signal where it is not known, as standard deviations."""

_LOG_CONCAVE = frozenset(("gaussian", "bernoulli", "laplace", "logistic", "poisson"))

Judgement = Callable[[Problem, CostTable], str | None]


def refusal(family: str, problem: Problem) -> str | None:
    """Say what of a problem a family cannot take; None if it takes it."""
    likelihood = problem.likelihood
    if (likelihood == "classes") != (family == "DirichletWISKI"):
        takes = "takes class labels only" if likelihood != "classes" else "takes no class labels"
        return f"{family} {takes}, and the likelihood is {likelihood!r}"
    if family in ("WISKI", "DirichletWISKI") and not problem.gridded:
        widest = max(map(len, problem.groups))
        if widest > 4:
            return (
                f"{family} takes at most four inputs a grid, and a part of the kernel has {widest}"
            )
        return (
            f"{family} takes products of one-dimensional kernels only: RBF, ProductMatern (or a "
            "MaternKernel of one input), periodic and spectral mixture ones"
        )
    if family == "QSGP" and not problem.spectral:
        return "QSGP takes RBF and Matérn kernels of all inputs only"
    if family == "QSGP" and likelihood == "binomial":
        return "QSGP's default covariance is far from the posterior of counts"
    if family == "QSGP" and likelihood not in _LOG_CONCAVE:
        return f"QSGP takes log-concave likelihoods only, and the likelihood is {likelihood!r}"
    if likelihood in ("gaussian", "classes") or family in _ANY_LIKELIHOOD:
        return None
    if family in _COUNTS and likelihood == "binomial":
        return None
    taken = "Gaussian noise and counts" if family in _COUNTS else "Gaussian noise"
    return f"{family} takes {taken} only, and the likelihood is {likelihood!r}"


def _grid_doubt(problem: Problem, table: CostTable) -> str | None:
    if not problem.bounded:
        return "a grid needs the bounds of the inputs"
    if problem.rough:
        return "no default grid carries so rough a function"
    noise = NOISE if problem.noise is None else problem.noise
    error = table.interpolation_error(problem)
    if error > noise**2:
        return f"its grid errs by {error:.0e} of the variance, the noise is {noise**2:.0e}"
    return None


def _points_doubt(problem: Problem, table: CostTable) -> str | None:
    if problem.rough and problem.n > table.limits["points"]:
        return "hundreds of points cannot express so rough a function"
    return None


def _steps_doubt(problem: Problem, table: CostTable) -> str | None:
    if not problem.rough:
        return "learns by steps, where others are exact in their updates"
    if problem.n < FEW:
        return f"pays from some {FEW:,} observations on"
    return None


def _sites_doubt(problem: Problem, table: CostTable) -> str | None:
    if problem.likelihood == "gaussian":
        return "OSGPR does the same without natural-gradient steps"
    return _points_doubt(problem, table)


def _clusters_doubt(problem: Problem, table: CostTable) -> str | None:
    return f"moves inputs to at most {table.limits['centres']:,} centres: for numerical guarantees"


def _functions_doubt(problem: Problem, table: CostTable) -> str | None:
    return _steps_doubt(problem, table) or "its variance is too small: for the mean"


def _local_doubt(problem: Problem, table: CostTable) -> str | None:
    if problem.n > table.limits["local"]:
        return "a baseline: small models know nothing of each other's data"
    return None


DOUBTS: dict[str, Judgement] = {
    "exact": lambda problem, table: None,
    "WISKI": _grid_doubt,
    "OSGPR": _points_doubt,
    "OSVGP": _sites_doubt,
    "DirichletWISKI": _grid_doubt,
    "ClusteredGP": _clusters_doubt,
    "DecoupledGP": _steps_doubt,
    "QSGP": _functions_doubt,
    "LocalGP": _local_doubt,
}
"""The families, each with what says why its quality may not suffice (None: it does)."""

_ANY_LIKELIHOOD = frozenset(("OSVGP", "DecoupledGP", "QSGP"))

_COUNTS = frozenset(("exact", "WISKI"))
"""Families that take Gaussian noise and counts."""

MERITS = {
    "exact": "no approximation",
    "WISKI": "exact updates on a grid, whatever n",
    "OSGPR": "exact updates at points that place themselves, any number of inputs",
    "OSVGP": "any likelihood, at points that place themselves",
    "DirichletWISKI": "a stream of labels, whose classes may grow",
    "ClusteredGP": "guaranteed condition numbers, in float32 too",
    "DecoupledGP": "thousands of functions, learned by steps",
    "QSGP": "up to millions of functions, learned by steps",
    "LocalGP": "small exact models side by side",
}
"""What speaks for each family."""
