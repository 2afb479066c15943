"""Recommend a model for a problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from botorch.exceptions.errors import UnsupportedError

from bo_stream.costs import CostTable, Problem, problem_of, speeds
from bo_stream.errors import plain

if TYPE_CHECKING:
    from gpytorch.kernels import Kernel
    from gpytorch.likelihoods import Likelihood


_EVALUATIONS = 30
"""Evaluations of its objective that a refit takes in a loop."""

_PREDICTIONS = 100
"""Posteriors with gradients that the search for one candidate takes."""

_PREFERENCE = 1.25
"""How many times a step of the exact model may cost more than an approximate model's."""

_MOST = 1 << 20
"""Largest number of observations that is tried for the exact model."""

Budget = float | Mapping[str, float]


@dataclass(frozen=True)
class Recommendation:
    """A family of models for a problem, with its predicted costs.

    Attributes:
        family: Name of the model's class in ``bo_stream``, or ``"exact"``: the first
            stage of ``AutoGP``.
        update_seconds: An update of q points and the first prediction after it.
        refit_seconds: One evaluation of a fit's objective with its gradient; of ``DecoupledGP`` and
            ``QSGP`` one step of ``fit``.
        posterior_seconds: Mean and variance with their gradient at ten batches of q points.
        fantasy_seconds: Sixteen fantasies of q points, and their mean and variance at twenty.
        bytes: Size of the model between operations.
        suffices: Whether its quality is not in doubt and its cost within the budget.
        reason: The main reason for the family, or the reasons against it.
    """

    family: str
    update_seconds: float
    refit_seconds: float
    posterior_seconds: float
    fantasy_seconds: float
    bytes: float
    suffices: bool
    reason: str

    @property
    def step_seconds(self) -> float:
        """A step of a loop: an update, 30 evaluations of a refit, 100 posteriors of a search."""
        search = _PREDICTIONS * self.posterior_seconds
        return self.update_seconds + _EVALUATIONS * self.refit_seconds + search


class Recommendations(tuple[Recommendation, ...]):
    """Families in order, the first the one to take; printed as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        """Lay out the table."""
        head = ("", "family", "step", "update", "refit", "posterior", "fantasy", "memory", "")
        rows: list[tuple[str, ...]] = [head]
        for position, each in enumerate(self, 1):
            steps = each.step_seconds, each.update_seconds, each.refit_seconds
            seconds = (*steps, each.posterior_seconds, each.fantasy_seconds)
            formatted = (_seconds(value) for value in seconds)
            rows.append((f"{position}.", each.family, *formatted, _bytes(each.bytes), each.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i in (1, len(head) - 1) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def recommend(
    n: int,
    d: int,
    *,
    noise: float | None = None,
    likelihood: str | type | Likelihood | None = None,
    rough: bool = False,
    budget: Budget | None = None,
    bounds: bool = True,
    covar_module: Kernel | None = None,
    lengthscale: float | None = None,
    m: int = 1,
    q: int = 1,
    families: Iterable[str] | None = None,
    calibrate: bool = True,
) -> Recommendations:
    """Order the families of models for a problem, with predicted seconds and bytes.

    First come families whose quality suffices, by the seconds of a step of a loop: an update, a
    refit (30 evaluations) and a search (100 posteriors). The exact model, which approximates
    nothing, stays before others until it takes 1.25 times as long. Then come families whose quality
    is in doubt, last families beyond the budget, in the same order; ``reason`` says why. Families
    that cannot take the problem are left out. ``BayesianLastLayer`` is not considered, though it
    often predicts best from some 8,000 rows of four and more inputs on: its costs are not in the
    table.

    Costs are for default options, from a table that ``benchmarks/speed/cost_model.py`` fits,
    rescaled by a probe of this machine of a fifth of a second, once a process.

    Args:
        n: Observations that the model will hold.
        d: Inputs.
        noise: Standard deviation of the noise over the function's; None: unknown, taken as 0.1.
        likelihood: None (Gaussian), one of gpytorch's likelihoods, its class, or a name:
            ``"bernoulli"``, ``"poisson"``, ``"student-t"``, ``"laplace"``, ``"logistic"``,
            ``"beta"``, ``"binomial"`` (counts), ``"other"`` (any of one function value), or
            ``"classes"`` (labels 0, 1, 2).
        rough: Whether the function is too rough for hundreds of inducing points.
        budget: Seconds that a step may take, or a mapping with ``"seconds"``, ``"bytes"`` or both.
        bounds: Whether the box of the inputs is known.
        covar_module: The kernel; None: squared-exponential in all inputs. Its lengthscales count.
        lengthscale: Of the kernel where the inputs' box is the unit cube; default: the kernel's, or
            0.3 √d.
        m: Outputs, or classes.
        q: Points of an update and of a candidate.
        families: Only these; default all.
        calibrate: Whether to time this machine; False: costs are for the table's machine. The
            order hardly depends on it.

    Raises:
        TypeError: The likelihood or the kernel is none.
        UnsupportedError: A family of ``families``, or every family, cannot take the likelihood,
            the kernel, or the number of inputs.
        ValueError: A number is out of range, or a family or a key of the budget unknown.
    """
    problem = problem_of(n, d, m, q, noise, likelihood, rough, bounds, lengthscale, covar_module)
    return ordered(problem, budget, families, calibrate)


def exact_until(problem: Problem, families: Iterable[str] | None = None) -> int:
    """Find how many observations the exact model stays first for, without timing anything.

    The order of two families hardly depends on the machine's speed.

    Args:
        problem: Its n does not matter.
        families: As for :func:`recommend`; without ``"exact"`` the answer is 0.

    Returns:
        The largest such n, up to 2²⁰ − 1.
    """
    names = _admissible(problem, families)
    least, beyond = 0, _MOST
    while beyond - least > 1:
        middle = (least + beyond) // 2
        order = ordered(replace(problem, n=middle), families=names, calibrate=False)
        if order[0].family == "exact":
            least = middle
        else:
            beyond = middle
    return least


def ordered(
    problem: Problem,
    budget: Budget | None = None,
    families: Iterable[str] | None = None,
    calibrate: bool = True,
) -> Recommendations:
    """Order the families for a problem; see :func:`recommend`."""
    limits = {"seconds": math.inf, "bytes": math.inf}
    given = plain({} if budget is None else budget)
    given = given if isinstance(given, Mapping) else {"seconds": given}
    if unknown := given.keys() - limits.keys():
        raise ValueError(f"Expected budget to have seconds, bytes or both, got {sorted(unknown)}.")
    for name, value in given.items():
        if isinstance(value, bool) or not (isinstance(value, int | float) and value > 0.0):
            raise ValueError(
                f"Expected the budget's {name} to be a positive number, got {value!r}."
            )
    limits |= given

    names, table = _admissible(problem, families), CostTable.shipped()
    probed = speeds(torch.get_num_threads()) if calibrate else None
    result: list[tuple[tuple[bool, bool, float], Recommendation]] = []
    for name in names:
        seconds, size = table.seconds(name, problem, probed), table.bytes(name, problem)
        costs = (seconds["update"], seconds["refit"], seconds["posterior"], seconds["fantasy"])
        step = Recommendation(name, *costs, size, True, "").step_seconds
        doubt, excess = DOUBTS[name](problem, table), None
        if step > limits["seconds"]:
            budgeted = _seconds(limits["seconds"])
            excess = f"a step of {_seconds(step)} is beyond the budget of {budgeted}"
        elif size > limits["bytes"]:
            budgeted = _bytes(limits["bytes"])
            excess = f"{_bytes(size)} of memory are beyond the budget of {budgeted}"
        against = "; ".join(reason for reason in (doubt, excess) if reason)
        weighed = step / (_PREFERENCE if name == "exact" else 1.0)
        key = excess is not None, doubt is not None, weighed
        row = Recommendation(name, *costs, size, not against, against or MERITS[name])
        result.append((key, row))
    return Recommendations(each for _, each in sorted(result, key=lambda pair: pair[0]))


def _admissible(problem: Problem, families: Iterable[str] | None) -> list[str]:
    """Check the requested families, or choose all that take the problem."""
    known = ", ".join(DOUBTS)
    if isinstance(families, str) or not isinstance(families, Iterable | None):
        raise ValueError(f"Expected families as a list of some of {known}, got {families!r}.")
    names = list(DOUBTS if families is None else families)
    unknown = [str(name) for name in names if name not in list(DOUBTS)]
    if unknown or not names:
        raise ValueError(f"Expected families among {known}, got {', '.join(unknown) or 'none'}.")
    names = list(dict.fromkeys(names))
    refusals = {name: refusal(name, problem) for name in names}
    taken = [name for name, why in refusals.items() if why is None]
    reasons = [why for why in refusals.values() if why is not None]
    if families is not None and reasons:
        raise UnsupportedError(f"{'; '.join(reasons)}: leave it out of families.")
    if not taken:
        raise UnsupportedError(f"No family takes this problem: {'; '.join(reasons)}.")
    return taken


def _seconds(value: float) -> str:
    for limit, unit, name in ((1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if value < limit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 3600.0:,.0f} h"


def _bytes(value: float) -> str:
    for limit, unit, name in ((1e6, 1e3, "kB"), (1e9, 1e6, "MB")):
        if value < limit:
            digits = ".2g" if value < 10 * unit else ".0f"
            return f"{value / unit:{digits}} {name}"
    return f"{value / 1e9:,.3g} GB"


# --- the families: what they refuse, doubts and merits --------------------------------------------


_FEW = 10_000
"""Observations from which steps on a bound repay themselves."""

_NOISE = 0.1
"""Noise over signal where it is not known, as standard deviations."""

_LOG_CONCAVE = frozenset(("gaussian", "bernoulli", "laplace", "logistic", "poisson"))

_Judgement = Callable[[Problem, CostTable], str | None]


def refusal(family: str, problem: Problem) -> str | None:
    """Return why a family cannot take a problem; None if it takes it."""
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
    noise = _NOISE if problem.noise is None else problem.noise
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
    if problem.n < _FEW:
        return f"pays from some {_FEW:,} observations on"
    return None


DOUBTS: dict[str, _Judgement] = {
    "exact": lambda problem, table: None,
    "WISKI": _grid_doubt,
    "OSGPR": _points_doubt,
    "OSVGP": lambda problem, table: (
        "OSGPR does the same without natural-gradient steps"
        if problem.likelihood == "gaussian"
        else _points_doubt(problem, table)
    ),
    "DirichletWISKI": _grid_doubt,
    "ClusteredGP": lambda problem, table: (
        f"moves inputs to at most {table.limits['centres']:,} centres: for numerical guarantees"
    ),
    "DecoupledGP": _steps_doubt,
    "QSGP": lambda problem, table: (
        _steps_doubt(problem, table) or "its variance can be far off: for the mean"
    ),
    "LocalGP": lambda problem, table: (
        "a baseline: small models know nothing of each other's data"
        if problem.n > table.limits["local"]
        else None
    ),
}
"""The families, each with a rule: why its quality may not suffice; None: it suffices."""

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
"""The main reason for each family."""
