"""What a model is to be used for, checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bo_stream.bases.product_matern import radial_parts

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
"""Classes of likelihoods, the most special first, and what :func:`recommend` calls them."""

LENGTHSCALE = 0.3
"""Lengthscale over √d in the unit cube where none is given: that of a smooth function."""

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
        noise: Standard deviation of the noise over that of the function; None: unknown.
        likelihood: A value of ``LIKELIHOODS``.
        rough: Whether hundreds of points cannot express the function.
        bounded: Whether the box of the inputs is known.
        lengthscale: Of the kernel, the inputs' box being the unit cube.
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
        TypeError: The likelihood is neither a name nor a likelihood or its class.
        ValueError: A number is out of range.
    """
    for name, value, least in (("n", n, 0), ("d", d, 1), ("m", m, 1), ("q", q, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"Expected {name} to be a whole number from {least}, got {value!r}.")
    for name, number in (("noise", noise), ("lengthscale", lengthscale)):
        if number is not None and not (math.isfinite(number) and number >= 0.0):
            raise ValueError(f"Expected {name} to be at least 0 and finite, got {number!r}.")
    parts = list(_parts(covar_module)) if covar_module is not None else []
    groups = tuple(_inputs(part, d) for part in parts) or (tuple(range(d)),)
    if not lengthscale:
        lengthscale = _lengthscale(parts) or LENGTHSCALE * max(map(len, groups)) ** 0.5
    kinds = [{type(leaf).__name__ for leaf in _leaves(part)} for part in parts] or [set()]
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
    if likelihood is None:
        return "gaussian"
    if isinstance(likelihood, str):
        if likelihood.lower() not in LIKELIHOODS.values():
            names = ", ".join(LIKELIHOODS.values())
            raise ValueError(f"Expected likelihood to be one of {names}, got {likelihood!r}.")
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


def _parts(kernel: Any) -> Iterator[Any]:
    """Yield the summands of a kernel, scales taken off."""
    return _operands(kernel, "AdditiveKernel")


def _leaves(kernel: Any) -> Iterator[Any]:
    """Yield the factors of a summand, scales taken off."""
    return _operands(kernel, "ProductKernel")


def _operands(kernel: Any, compound: str) -> Iterator[Any]:
    """Yield what compound kernels of one class are made of, scales taken off."""
    name = type(kernel).__name__
    if name == "ScaleKernel":
        yield from _operands(kernel.base_kernel, compound)
    elif name == compound:
        for each in kernel.kernels:
            yield from _operands(each, compound)
    else:
        yield kernel


def _inputs(part: Any, d: int) -> tuple[int, ...]:
    """Return the inputs that a summand looks at."""
    found: set[int] = set()
    for leaf in _leaves(part):
        active = getattr(leaf, "active_dims", None)
        found |= set(range(d)) if active is None else {int(i) for i in active}
    return tuple(sorted(found))


def _lengthscale(parts: list[Any]) -> float | None:
    """Return the geometric mean of a kernel's lengthscales, None where it has none."""
    logs = [
        math.log(float(value))
        for part in parts
        for leaf in _leaves(part)
        if getattr(leaf, "has_lengthscale", False)
        for value in leaf.lengthscale.detach().flatten()
    ]
    return math.exp(sum(logs) / len(logs)) if logs else None
