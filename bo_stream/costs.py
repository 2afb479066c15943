"""A problem's size, and the cost of a model's operations on it, calibrated on a machine.

A family's cost of an operation is a sum of terms: a coefficient, times a product of sizes such as
``n n d``, times the speed of the machine at that kind of work.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel

from bo_stream.bases.grid.kernel import DEFAULT_SIZES
from bo_stream.bases.kernels import radial_parts
from bo_stream.errors import as_real, check_one_of, check_whole

LIKELIHOODS = {
    "_GaussianLikelihoodBase": "gaussian",
    "BernoulliLikelihood": "bernoulli",
    "LogisticLikelihood": "logistic",
    "LaplaceLikelihood": "laplace",
    "StudentTLikelihood": "student-t",
    "BetaLikelihood": "beta",
    "PoissonLikelihood": "poisson",
    "SoftmaxLikelihood": "classes",
    "BinomialLikelihood": "binomial",
    "Likelihood": "other",
}
"""Classes of likelihoods, the most special first, and their names in :func:`recommend`."""

LENGTHSCALE = 0.3
"""Lengthscale over √d in the unit cube where none is given, as of a smooth function."""

_MATERN = frozenset(("MaternKernel", "ProductMatern"))

_GRID_KERNELS = _MATERN | {"RBFKernel", "PeriodicKernel", "SpectralMixtureKernel"}


@dataclass(frozen=True)
class Problem:
    """A use of a model.

    Attributes:
        n: Observations.
        d: Inputs.
        m: Outputs, or classes.
        q: Points of an update and of a candidate.
        noise: Standard deviation of the noise over the function's; None: unknown.
        likelihood: A value of ``LIKELIHOODS``.
        rough: Whether hundreds of points cannot express the function.
        bounded: Whether the box of the inputs is known.
        lengthscale: Lengthscale of the kernel if the inputs' box is the unit cube.
        groups: Inputs of each part of a kernel that is a sum; one group of all of any other.
        matern: Whether each part is Matérn, of the distance or a product.
        gridded: Whether the kernel is one that a grid takes as it is, with at most four inputs a
            group: a sum of products of one-dimensional ones.
        spectral: Whether Fourier features of the kernel are known: RBF or Matérn, of all inputs.
    """

    n: int
    d: int
    m: int = 1
    q: int = 1
    noise: float | None = None
    likelihood: str = "gaussian"
    rough: bool = False
    bounded: bool = True
    lengthscale: float = LENGTHSCALE
    groups: tuple[tuple[int, ...], ...] = ()
    matern: tuple[bool, ...] = (False,)
    gridded: bool = True
    spectral: bool = True


def problem_of(
    n: int,
    d: int,
    m: int,
    q: int,
    noise: float | None,
    likelihood: object,
    rough: bool,
    bounded: bool,
    lengthscale: float | None,
    covar_module: Any,
) -> Problem:
    """Check the arguments of :func:`recommend` and look at the kernel.

    Raises:
        TypeError: The likelihood is neither a name nor a likelihood or its class, or the kernel is
            none.
        ValueError: A number is out of range, or none.
    """
    n, d = check_whole("n", n, 0), check_whole("d", d, 1)
    m, q = check_whole("m", m, 1), check_whole("q", q, 1)
    sizes = [None if value is None else as_real(value) for value in (noise, lengthscale)]
    if noise is not None and not (sizes[0] is not None and 0.0 <= sizes[0] < math.inf):
        raise ValueError(f"Expected noise to be at least 0 and finite, got {noise!r}.")
    if lengthscale is not None and not (sizes[1] is not None and 0.0 < sizes[1] < math.inf):
        raise ValueError(f"Expected lengthscale to be positive and finite, got {lengthscale!r}.")
    noise, lengthscale = sizes
    if not isinstance(covar_module, Kernel | None):
        raise TypeError(
            f"Expected covar_module to be a kernel, such as RBFKernel(), got {covar_module!r}."
        )
    parts = () if covar_module is None else _operands(covar_module, "AdditiveKernel")
    factors = [list(_operands(part, "ProductKernel")) for part in parts]
    groups: tuple[tuple[int, ...], ...] = ()  # the inputs that each summand depends on
    for leaves in factors:
        dims = [getattr(leaf, "active_dims", None) for leaf in leaves]
        inputs = {int(i) for each in dims for i in (range(d) if each is None else each)}
        groups = (*groups, tuple(sorted(inputs)))
    groups = groups or (tuple(range(d)),)
    if lengthscale is None:
        logs = [
            math.log(float(value))
            for leaf in chain.from_iterable(factors)
            if getattr(leaf, "has_lengthscale", False)
            for value in leaf.lengthscale.detach().flatten()
        ]
        geometric_mean = math.exp(sum(logs) / len(logs)) if logs else None
        lengthscale = geometric_mean or LENGTHSCALE * max(map(len, groups)) ** 0.5
    kinds = [{type(leaf).__name__ for leaf in leaves} for leaves in factors] or [set()]
    names = set().union(*kinds)
    return Problem(
        max(n, 1),
        d,
        m,
        q,
        noise,
        _likelihood_name(likelihood),
        rough,
        bounded,
        lengthscale,
        groups,
        tuple(not _MATERN.isdisjoint(each) for each in kinds),
        names <= _GRID_KERNELS and max(map(len, groups)) <= 4 and not radial_parts(covar_module, d),
        len(groups) == 1 and names <= {"RBFKernel", "MaternKernel"},
    )


def _likelihood_name(likelihood: object) -> str:
    """Return the name of a likelihood, its class or its name; errors as :func:`problem_of`."""
    if likelihood is None:
        return "gaussian"
    if isinstance(likelihood, str):
        check_one_of("likelihood", likelihood.lower(), LIKELIHOODS.values())
        return likelihood.lower()
    given = likelihood if isinstance(likelihood, type) else type(likelihood)
    ancestors = [each.__name__ for each in given.__mro__]
    for name, kind in LIKELIHOODS.items():
        if name in ancestors:
            return kind
    raise TypeError(
        "Expected likelihood to be a name, one of gpytorch's likelihoods or its class, got "
        f"{given.__name__}."
    )


def _operands(kernel: Any, compound: str) -> Iterator[Any]:
    """Yield the operands of nested compound kernels of one class, scales taken off."""
    name = type(kernel).__name__
    if name == "ScaleKernel":
        yield from _operands(kernel.base_kernel, compound)
    elif name == compound:
        for each in kernel.kernels:
            yield from _operands(each, compound)
    else:
        yield kernel


# --- the speed of this machine -------------------------------------------------------------------


Clock = Callable[[], float]

_REPEATS = 5
"""Timings of a probe, of which the least counts."""

PLAIN = {"calls": 100, "gradients": 20, "factors": 0}
"""Plain tensor expressions for each Cholesky factor and its gradient in three probes. LAPACK starts
threads for the smallest matrix, plain expressions start none: on two threads the probes take 1.3,
1.9 and 3 times as long as on one.
"""

KINDS = (*PLAIN, "flops", "elements")
"""Kinds of work: many small operations, among which factorizations of small matrices and their
gradients are few, many or most; dense linear algebra; passes over large arrays.
"""


@cache
def speeds(threads: int, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Time probes on this machine, once a process for each number of threads.

    It takes a fifth of a second or so.

    Args:
        threads: The result of ``torch.get_num_threads()``, which is not changed.
        clock: Seconds so far.

    Returns:
        Seconds of a probe of each of ``KINDS``, the least of some repeats.
    """
    least = {}
    for kind, probe in _probes().items():
        probe()  # the first time it is slow
        seconds = []
        for _ in range(_REPEATS):
            start = clock()
            probe()
            seconds.append(clock() - start)
        least[kind] = min(seconds)
    return least


def _probes() -> dict[str, Callable[[], object]]:
    """Return a probe of each of ``KINDS``."""
    small = torch.eye(6, dtype=torch.float64).requires_grad_()
    square = torch.eye(512, dtype=torch.float64) + 0.001
    long = torch.linspace(0.0, 1.0, 200_000, dtype=torch.float64)
    result = torch.empty_like(long)  # allocated once: a first touch of memory would count, too

    def small_operations(repeats: int, plain: int) -> None:
        for _ in range(repeats):
            factor = torch.linalg.cholesky(small + small.mT + 1.0)
            (factor * factor).sum().backward()
            for _ in range(plain):
                (factor.unsqueeze(-2) * 2.0).sum(-1)

    def elements() -> None:
        for _ in range(5):
            torch.mul(long, long, out=result).exp_().sum()

    return {
        "calls": lambda: small_operations(6, PLAIN["calls"]),
        "gradients": lambda: small_operations(16, PLAIN["gradients"]),
        "factors": lambda: small_operations(30, PLAIN["factors"]),
        "flops": lambda: torch.linalg.cholesky(square @ square),
        "elements": elements,
    }


# --- predicted seconds and bytes -----------------------------------------------------------------


OPERATIONS = ("update", "refit", "posterior", "fantasy")

_COUNTED = ("exact", "WISKI", "OSVGP")
"""Families whose costs with counts differ from their costs with Gaussian outcomes or labels."""

Sizes = dict[str, float]
Terms = list[tuple[str, str, float]]


class CostTable:
    """The table of costs.

    A cost is a sum of terms ``[kind, symbols, coefficient]``: one of ``KINDS``, empty for bytes;
    the sizes that are multiplied, ``"n n d"`` for n² d, empty for a constant; and seconds on the
    machine of the table, or bytes.

    Attributes:
        speeds: Seconds of the probes of :func:`speeds` on the machine of the table.
        limits: Defaults of the models that sizes depend on.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        """Read the record of a file."""
        self.speeds: dict[str, float] = record["speeds"]
        self.limits: dict[str, int] = record["limits"]
        self._sizes: dict[str, Any] = record["sizes"]
        self._terms: dict[str, dict[str, Terms]] = record["terms"]

    @classmethod
    @cache
    def shipped(cls) -> CostTable:
        """Read the table of the package, once a process."""
        text = files("bo_stream").joinpath("costs.json").read_text("utf-8")
        return cls(json.loads(text))

    def seconds(
        self, family: str, problem: Problem, speeds: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Predict the seconds of each of ``OPERATIONS``.

        Args:
            family: A model's name.
            problem: Its use.
            speeds: Seconds of the probes on this machine; None: as on the table's machine.
        """
        terms, sizes = self._terms[self.stage(family, problem)], self.sizes(family, problem)
        factors = {kind: speeds[kind] / self.speeds[kind] for kind in speeds} if speeds else {}
        return {name: _cost(terms[name], sizes, factors) for name in OPERATIONS}

    def bytes(self, family: str, problem: Problem) -> float:
        """Predict the bytes of the model between operations."""
        terms = self._terms[self.stage(family, problem)]["bytes"]
        return _cost(terms, self.sizes(family, problem), {})

    def stage(self, family: str, problem: Problem) -> str:
        """Name the row of the table: rows stored as such, sums and counts have their own."""
        if family == "OSGPR":
            return "OSGPR" if problem.n > self.limits["window"] else "OSGPR, rows"
        name = f"{family}, sum" if family == "WISKI" and len(problem.groups) > 1 else family
        if problem.likelihood == "binomial" and family in _COUNTED:
            name = f"{name}, counts"
        if family not in ("WISKI", "DirichletWISKI"):
            return name
        as_rows = problem.n <= min(self.limits["rows"], _nodes(problem))
        return f"{name}, rows" if as_rows else name

    def sizes(self, family: str, problem: Problem) -> Sizes:
        """Predict the sizes that costs depend on.

        Returns:
            n, d, q and m of the problem; w rows of a window and b of a minibatch. For a grid model:
            g grids of p nodes, c of them around an input, k entries of the kernel's factors, r
            features, f of them in a fit. M inducing points or centres, a = 1 while new ones enter,
            else 0. C local models of s rows.
        """
        n, limits = problem.n, self.limits
        sizes = {"n": float(n), "d": float(problem.d), "q": float(problem.q), "m": float(problem.m)}
        window = limits["counts" if problem.likelihood == "binomial" else "window"]
        sizes["w"], sizes["b"] = float(min(n, window)), float(min(n, limits["batch"]))
        if family in ("WISKI", "DirichletWISKI"):
            grids = list(_grids(problem))
            sizes["g"], sizes["p"] = float(len(grids)), float(_nodes(problem))
            sizes["c"] = float(sum(7**inputs for inputs, _, _ in grids))
            sizes["k"] = float(sum(inputs * side**2 for inputs, side, _ in grids))
            each = [self._count(family, inputs, problem, matern) for inputs, _, matern in grids]
            sizes["r"] = min(sum(each), sizes["p"], float(limits[f"{family} rank"]))
            sizes["f"] = min(sizes["r"], float(limits["learning"]))
        elif family in ("OSGPR", "OSVGP"):
            count = self._count("OSGPR", problem.d, problem, any(problem.matern))
            sizes["M"] = min(n, count)
            sizes["a"] = float(n < count or count > 0.8 * limits["points"])
        elif family == "ClusteredGP":
            centres, sizes["M"], sizes["a"] = self._sizes["centres"], float(n), 1.0
            if n > limits["centres"]:
                sizes["M"], sizes["a"] = _in_table(centres, centres["n"], n, problem.d), 0.0
        elif family == "LocalGP":
            sizes["C"] = max(
                1.0, min(self._count("LocalGP", problem.d, problem, any(problem.matern)), n / 2.0)
            )
            sizes["s"] = min(float(limits["local"]), n / sizes["C"])
        return sizes

    def interpolation_error(self, problem: Problem) -> float:
        """Predict the largest error of WISKI's covariance, as a fraction of the prior variance."""
        return max(
            self._count("error", inputs, problem, matern) for inputs, _, matern in _grids(problem)
        )

    def _count(self, name: str, d: int, problem: Problem, matern: bool) -> float:
        """Interpolate the table's values for a lengthscale and d."""
        curves = self._sizes[name]["rough" if matern else "smooth"]
        return _in_table(curves, self._sizes["lengthscales"], problem.lengthscale / d**0.5, d)


def _cost(terms: Terms, sizes: Sizes, factors: Mapping[str, float]) -> float:
    """Evaluate a sum of terms, with factors by their kinds."""
    return sum(
        factors.get(kind, 1.0) * (coefficient * math.prod(sizes[s] for s in symbols.split()))
        for kind, symbols, coefficient in terms
    )


def _grids(problem: Problem) -> Iterator[tuple[int, int, bool]]:
    """Yield each default grid: its inputs, its nodes in a dimension, and whether it is Matérn."""
    for group, matern in zip(problem.groups, problem.matern, strict=True):
        yield len(group), DEFAULT_SIZES["rough" if matern else "smooth"][len(group)], matern


def _nodes(problem: Problem) -> int:
    """Count the nodes of default grids."""
    return sum(side**inputs for inputs, side, _ in _grids(problem))


def _in_table(
    curves: Mapping[str, Sequence[float]], x: Sequence[float], at: float, d: int
) -> float:
    """Interpolate curves over x, one for each of some numbers of inputs, in logarithms.

    Constant beyond the ends.
    """
    known = sorted(int(key) for key in curves if key.isdigit())
    ends = [np.interp(math.log(at), np.log(x), np.log(curves[str(key)])) for key in known]
    return math.exp(np.interp(d, known, ends))
