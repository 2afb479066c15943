"""Kernels of gpytorch taken apart into products of one stationary kernel per dimension."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from itertools import product
from typing import Any, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from torch import Tensor

from bo_stream.bases.grid.factors import (
    MATERN,
    PERIODIC,
    SPECTRAL_COMPONENT,
    SQUARED_EXPONENTIAL,
    Factor,
    Formula,
    weighted_sum,
)

Groups = tuple[tuple[int, ...], ...]
"""The input dimensions that each part of a sum acts on."""

LEAST = 1e-100
"""Lengthscales and prior variances that an optimiser lets underflow are taken as this, not 0."""


class GridKernel(ABC):
    """A sum of one or more product kernels, each over a few input dimensions of its own."""

    @property
    @abstractmethod
    def parts(self) -> tuple[KernelFactors, ...]:
        """The products, each in the dimensions of its own grid."""

    @abstractmethod
    def groups(self, dim: int) -> Groups:
        """The input dimensions that each part's grid covers, of ``dim``."""

    @abstractmethod
    def scale(self) -> Tensor:
        """The prior variance, one per batch element."""

    @abstractmethod
    def spread(self, widths: Sequence[float]) -> Self:
        """A kernel whose span holds also the derivatives in frequencies, for a box's widths."""

    @abstractmethod
    def for_single_output(self) -> Self:
        """The same kernel with an output dimension of one behind its batch shape."""

    @abstractmethod
    def detached(self) -> Self:
        """The kernel at its present hyperparameters, which stays when these change."""


@dataclass(frozen=True)
class KernelFactors(GridKernel):
    """``k(x, x') = Π scales · Π factors``: what a grid can represent as a Kronecker product.

    Attributes:
        scales: Output scales, each one number per batch element.
        factors: One-dimensional kernels; several may share a dimension.
    """

    scales: tuple[Tensor, ...]
    factors: tuple[Factor, ...]

    @property
    def parts(self) -> tuple[KernelFactors, ...]:
        """This kernel alone."""
        return (self,)

    def groups(self, dim: int) -> Groups:
        """All dimensions: one grid covers them."""
        return (tuple(range(dim)),)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions that a factor acts on."""
        return tuple(sorted({factor.dimension for factor in self.factors}))

    def scale(self) -> Tensor:
        """The prior variance, one per batch element."""
        scale = torch.ones((), dtype=torch.float64)
        for factor in self.scales:
            scale = scale.to(factor.device) * factor.to(torch.float64)
        return scale.clamp_min(LEAST)

    def correlation(self, dimension: int, x: Tensor, x2: Tensor) -> Tensor:
        """One dimension's correlation matrix, ``batch x g x g'``, differentiable."""
        distance = (x.unsqueeze(-1) - x2.unsqueeze(-2)).abs()
        matrix = torch.ones_like(distance)
        for factor in self.factors:
            if factor.dimension == dimension:
                matrix = matrix * factor(distance)
        return matrix

    @property
    def smoothness(self) -> float:
        """The roughest factor's smoothness ν."""
        return min((factor.formula.smoothness for factor in self.factors), default=math.inf)

    @property
    def device(self) -> torch.device | None:
        """Where the factors' parameters are."""
        return next((p.device for factor in self.factors for p in factor.parameters), None)

    def spread(self, widths: Sequence[float]) -> KernelFactors:
        """A kernel whose span holds also the derivatives in frequencies, for a box's widths."""
        spread = (factor.spread(widths[factor.dimension]) for factor in self.factors)
        return KernelFactors(self.scales, tuple(spread))

    def for_single_output(self) -> KernelFactors:
        """The same kernel with an output dimension of one behind its batch shape."""
        return KernelFactors(
            tuple(scale.unsqueeze(-1) for scale in self.scales),
            tuple(
                replace(factor, parameters=tuple(p.unsqueeze(-1) for p in factor.parameters))
                for factor in self.factors
            ),
        )

    def detached(self) -> KernelFactors:
        """The kernel at its present hyperparameters, which stays when these change."""
        return KernelFactors(
            tuple(scale.detach().clone() for scale in self.scales),
            tuple(
                replace(factor, parameters=tuple(p.detach().clone() for p in factor.parameters))
                for factor in self.factors
            ),
        )

    def in_own_dims(self) -> KernelFactors:
        """The same kernel of those inputs only that it acts on."""
        position = {dimension: i for i, dimension in enumerate(self.dims)}
        moved = (replace(factor, dimension=position[factor.dimension]) for factor in self.factors)
        return KernelFactors(self.scales, tuple(moved))


@dataclass(frozen=True)
class KernelSum(GridKernel):
    """``k(x, x') = Σ_g k_g(x_g, x'_g)``, each part a product over its own group of inputs.

    Attributes:
        terms: The parts, each in the dimensions of its group.
        dims: The groups; they may overlap.
    """

    terms: tuple[KernelFactors, ...]
    dims: Groups

    @classmethod
    def of(cls, terms: Sequence[KernelFactors]) -> KernelSum:
        """The sum of products in the inputs' own dimensions."""
        return cls(tuple(term.in_own_dims() for term in terms), tuple(term.dims for term in terms))

    @property
    def parts(self) -> tuple[KernelFactors, ...]:
        """The terms."""
        return self.terms

    def groups(self, dim: int) -> Groups:
        """The inputs of each term."""
        return self.dims

    def scale(self) -> Tensor:
        """The prior variance, one per batch element: the sum of the parts'."""
        scales = (term.scale().to(self.terms[0].device) for term in self.terms)
        return torch.stack(torch.broadcast_tensors(*scales)).sum(0)

    def spread(self, widths: Sequence[float]) -> KernelSum:
        """See :class:`GridKernel`."""
        own = ([widths[i] for i in group] for group in self.dims)
        spread = (term.spread(w) for term, w in zip(self.terms, own, strict=True))
        return replace(self, terms=tuple(spread))

    def for_single_output(self) -> KernelSum:
        """See :class:`GridKernel`."""
        return replace(self, terms=tuple(term.for_single_output() for term in self.terms))

    def detached(self) -> KernelSum:
        """See :class:`GridKernel`."""
        return replace(self, terms=tuple(term.detached() for term in self.terms))


SUPPORTED = (
    "RBFKernel, MaternKernel (nu 0.5, 1.5, 2.5), PeriodicKernel, SpectralMixtureKernel, and "
    "ScaleKernel, ProductKernel and AdditiveKernel of these"
)

Terms = tuple[KernelFactors, ...]
"""Products whose sum a kernel is, in the inputs' own dimensions."""


def kernel_factors(kernel: Kernel, dim: int) -> GridKernel:
    """Take a kernel over ``dim`` inputs apart. Matérn kernels are products over dimensions here.

    A spectral mixture in several dimensions is what gpytorch computes: the product over dimensions
    of the mixtures in one dimension (not the mixture of products of Wilson and Adams, 2013), with
    the prior variance ``(Σ weights)^d``. A sum of products over different dimensions is a
    :class:`KernelSum`; products of sums are multiplied out.

    Raises:
        UnsupportedError: The kernel is no sum of products of one-dimensional stationary kernels.
    """
    if not isinstance(kernel, Kernel):
        raise _unsupported(kernel)
    terms = _terms(kernel, _active(kernel, tuple(range(dim))))
    return terms[0] if len(terms) == 1 else KernelSum.of(terms)


def _active(kernel: Kernel, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """The inputs that a kernel sees, of those that it is given."""
    dims = kernel.active_dims
    positions = range(len(inputs)) if dims is None else [int(i) for i in dims]
    if positions and max(positions) >= len(inputs):
        raise UnsupportedError(
            f"covar_module has active_dims {tuple(positions)}, but the inputs have {len(inputs)} "
            "dimension(s)."
        )
    return tuple(inputs[i] for i in positions)


def _terms(kernel: Kernel, active: tuple[int, ...]) -> Terms:
    """Take a kernel apart, unless a class derived from a supported one computes another one."""
    known: Any = next(kind for kind in type(kernel).__mro__ if kind in _terms_of.registry)
    if known is not object and type(kernel).forward is not known.forward:
        raise _unsupported(kernel)
    return _terms_of(kernel, active)


def _unsupported(kernel: object) -> UnsupportedError:
    return UnsupportedError(
        f"covar_module of type {type(kernel).__name__} is not a sum of products over dimensions "
        f"that a grid can represent. Expected one of: {SUPPORTED}."
    )


@singledispatch
def _terms_of(kernel: Kernel, active: tuple[int, ...]) -> Terms:
    raise _unsupported(kernel)


@_terms_of.register
def _(kernel: RBFKernel, active: tuple[int, ...]) -> Terms:
    return (_of_columns(kernel, active, SQUARED_EXPONENTIAL, kernel.lengthscale),)


@_terms_of.register
def _(kernel: MaternKernel, active: tuple[int, ...]) -> Terms:
    return (_of_columns(kernel, active, MATERN[kernel.nu], kernel.lengthscale),)


@_terms_of.register
def _(kernel: PeriodicKernel, active: tuple[int, ...]) -> Terms:
    frequency = kernel.period_length.to(torch.float64).reciprocal()
    return (_of_columns(kernel, active, PERIODIC, frequency, kernel.lengthscale),)


@_terms_of.register
def _(kernel: SpectralMixtureKernel, active: tuple[int, ...]) -> Terms:
    weights = kernel.mixture_weights.unbind(-1)
    means, scales = kernel.mixture_means.unbind(-3), kernel.mixture_scales.unbind(-3)
    components = [
        _of_columns(kernel, active, SPECTRAL_COMPONENT, *parameters).factors
        for parameters in zip(means, scales, strict=True)
    ]
    lines = (
        _sum(dimension, weights, [(factor,) for factor in mixture])
        for dimension, mixture in zip(active, zip(*components, strict=True), strict=True)
    )
    return (_product(lines),)


@_terms_of.register
def _(kernel: ScaleKernel, active: tuple[int, ...]) -> Terms:
    # takes over its base kernel's active_dims, which gpytorch does not apply a second time
    inner = _terms(kernel.base_kernel, active)
    return tuple(KernelFactors((kernel.outputscale, *t.scales), t.factors) for t in inner)


@_terms_of.register
def _(kernel: ProductKernel, active: tuple[int, ...]) -> Terms:
    sums = [_terms(part, _active(part, active)) for part in kernel.kernels]
    return tuple(_product(choice) for choice in product(*sums))


@_terms_of.register
def _(kernel: AdditiveKernel, active: tuple[int, ...]) -> Terms:
    if len(kernel.kernels) == 0:
        raise UnsupportedError(
            "Expected an AdditiveKernel in covar_module to have parts, got none."
        )
    return _joined(t for part in kernel.kernels for t in _terms(part, _active(part, active)))


def _joined(terms: Iterable[KernelFactors]) -> Terms:
    """Terms in which those that act on one and the same single dimension are one."""
    same: dict[object, list[KernelFactors]] = {}
    for i, term in enumerate(terms):
        key = term.dims if len(term.dims) == 1 else i
        same.setdefault(key, []).append(term)
    return tuple(own[0] if len(own) == 1 else _line_sum(own) for own in same.values())


def _line_sum(terms: Sequence[KernelFactors]) -> KernelFactors:
    (dimension,) = terms[0].dims
    return _sum(dimension, [t.scale() for t in terms], [t.factors for t in terms])


def _product(parts: Iterable[KernelFactors]) -> KernelFactors:
    known = list(parts)
    return KernelFactors(
        tuple(scale for part in known for scale in part.scales),
        tuple(factor for part in known for factor in part.factors),
    )


def _sum(
    dimension: int, scales: Sequence[Tensor], parts: Sequence[Sequence[Factor]]
) -> KernelFactors:
    """``Σ scale_j Π part_j`` in one dimension: the sum of scales times one correlation."""
    total = torch.stack(torch.broadcast_tensors(*scales)).to(torch.float64).sum(0)
    weights = [scale.to(torch.float64) / total for scale in scales]
    return KernelFactors((total,), (weighted_sum(dimension, weights, parts),))


def _of_columns(
    kernel: Kernel, active: tuple[int, ...], formula: Formula, *parameters: Tensor
) -> KernelFactors:
    """A product over dimensions; each parameter is ``batch x 1 x d``, or ``batch x 1 x 1``."""
    if kernel.ard_num_dims not in (None, len(active)):
        raise UnsupportedError(
            f"covar_module has a {type(kernel).__name__} with ard_num_dims={kernel.ard_num_dims} "
            f"that acts on {len(active)} dimension(s) {active}. Expected ard_num_dims="
            f"{len(active)}, or active_dims that choose {kernel.ard_num_dims}."
        )
    rows = (parameter.to(torch.float64).squeeze(-2).clamp_min(LEAST) for parameter in parameters)
    columns = [row.expand(*row.shape[:-1], len(active)).unbind(-1) for row in rows]
    factors = (
        Factor(dimension, formula, tuple(own))
        for dimension, *own in zip(active, *columns, strict=True)
    )
    return KernelFactors((), tuple(factors))
