"""Product kernels of gpytorch taken apart into one stationary kernel per dimension."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

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

from bo_stream.bases.factor import Factor, weighted_sum
from bo_stream.bases.formulas import (
    MATERN,
    PERIODIC,
    SPECTRAL_COMPONENT,
    SQUARED_EXPONENTIAL,
    Formula,
)

SUPPORTED = (
    "RBFKernel, MaternKernel (nu 0.5, 1.5, 2.5), PeriodicKernel, SpectralMixtureKernel, "
    "ScaleKernel and ProductKernel of these, AdditiveKernel of those that act on one and the same "
    "input dimension"
)


LEAST = 1e-100
"""Lengthscales and prior variances that an optimiser lets underflow are taken as this, not 0."""


@dataclass(frozen=True)
class KernelFactors:
    """``k(x, x') = Π scales · Π factors``: what a grid can represent as a Kronecker product.

    Attributes:
        scales: Output scales, each one number per batch element.
        factors: One-dimensional kernels; several may share a dimension.
    """

    scales: tuple[Tensor, ...]
    factors: tuple[Factor, ...]

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


def kernel_factors(kernel: Kernel, dim: int) -> KernelFactors:
    """Take a kernel over ``dim`` inputs apart. Matérn kernels are products over dimensions here.

    A spectral mixture in several dimensions is what gpytorch computes: the product over dimensions
    of the mixtures in one dimension (not the mixture of products of Wilson and Adams, 2013), with
    the prior variance ``(Σ weights)^d``.

    Raises:
        UnsupportedError: The kernel is no product of one-dimensional stationary kernels.
    """
    dims = kernel.active_dims
    active = tuple(range(dim)) if dims is None else tuple(int(i) for i in dims)
    if active and max(active) >= dim:
        raise UnsupportedError(
            f"covar_module has active_dims {active}, but the inputs have {dim} dimension(s)."
        )
    return _factors(kernel, active)


@singledispatch
def _factors(kernel: Kernel, active: tuple[int, ...]) -> KernelFactors:
    raise UnsupportedError(
        f"covar_module of type {type(kernel).__name__} is not a product over dimensions that a "
        f"grid can represent. Expected one of: {SUPPORTED}."
    )


@_factors.register
def _(kernel: RBFKernel, active: tuple[int, ...]) -> KernelFactors:
    return _of_columns(kernel, active, SQUARED_EXPONENTIAL, kernel.lengthscale)


@_factors.register
def _(kernel: MaternKernel, active: tuple[int, ...]) -> KernelFactors:
    return _of_columns(kernel, active, MATERN[kernel.nu], kernel.lengthscale)


@_factors.register
def _(kernel: PeriodicKernel, active: tuple[int, ...]) -> KernelFactors:
    frequency = kernel.period_length.to(torch.float64).reciprocal()
    return _of_columns(kernel, active, PERIODIC, frequency, kernel.lengthscale)


@_factors.register
def _(kernel: SpectralMixtureKernel, active: tuple[int, ...]) -> KernelFactors:
    weights = kernel.mixture_weights.unbind(-1)
    means, scales = kernel.mixture_means.unbind(-3), kernel.mixture_scales.unbind(-3)
    components = [
        _of_columns(kernel, active, SPECTRAL_COMPONENT, *parameters).factors
        for parameters in zip(means, scales, strict=True)
    ]
    return _product(
        _sum(dimension, weights, [(factor,) for factor in mixture])
        for dimension, mixture in zip(active, zip(*components, strict=True), strict=True)
    )


@_factors.register
def _(kernel: ScaleKernel, active: tuple[int, ...]) -> KernelFactors:
    # takes over its base kernel's active_dims, which gpytorch does not apply a second time
    inner = _factors(kernel.base_kernel, active)
    return KernelFactors((kernel.outputscale, *inner.scales), inner.factors)


@_factors.register
def _(kernel: ProductKernel, active: tuple[int, ...]) -> KernelFactors:
    return _product(_nested(part, active) for part in kernel.kernels)


@_factors.register
def _(kernel: AdditiveKernel, active: tuple[int, ...]) -> KernelFactors:
    parts = [_nested(part, active) for part in kernel.kernels]
    if len(parts) == 1:
        return parts[0]
    dimensions = {factor.dimension for part in parts for factor in part.factors}
    if len(dimensions) != 1:
        raise UnsupportedError(
            "covar_module of type AdditiveKernel is not a product over dimensions that a grid can "
            f"represent: its parts act on the input dimensions {sorted(dimensions)}. Give all "
            f"parts the same single one, e.g. active_dims=(0,). Expected one of: {SUPPORTED}."
        )
    return _sum(dimensions.pop(), [p.scale() for p in parts], [p.factors for p in parts])


def _nested(kernel: Kernel, active: tuple[int, ...]) -> KernelFactors:
    """A kernel inside another sees the outer one's active inputs only."""
    inner = kernel_factors(kernel, len(active))
    moved = (replace(factor, dimension=active[factor.dimension]) for factor in inner.factors)
    return KernelFactors(inner.scales, tuple(moved))


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
