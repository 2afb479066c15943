"""Product kernels of gpytorch taken apart into one stationary kernel per dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel, MaternKernel, ProductKernel, RBFKernel, ScaleKernel
from torch import Tensor

SUPPORTED = "RBFKernel, MaternKernel (nu 0.5, 1.5, 2.5), ScaleKernel and ProductKernel of these"

Profile = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Factor:
    """One stationary one-dimensional kernel, ``profile(|x − x'| / lengthscale)``.

    Attributes:
        dimension: The input dimension it acts on.
        lengthscale: One per batch element of the kernel.
        profile: Correlation as a function of the scaled distance.
        smoothness: ν of a Matérn kernel, infinite for the squared exponential.
    """

    dimension: int
    lengthscale: Tensor
    profile: Profile
    smoothness: float

    def __call__(self, distance: Tensor) -> Tensor:
        """Correlations at ``g x g'`` distances, ``batch x g x g'``."""
        return self.profile(distance / self.lengthscale[..., None, None])


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
        return scale

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
        return min((factor.smoothness for factor in self.factors), default=math.inf)

    def for_single_output(self) -> KernelFactors:
        """The same kernel with an output dimension of one behind its batch shape."""
        return KernelFactors(
            tuple(scale.unsqueeze(-1) for scale in self.scales),
            tuple(replace(f, lengthscale=f.lengthscale.unsqueeze(-1)) for f in self.factors),
        )


def kernel_factors(kernel: Kernel, dim: int) -> KernelFactors:
    """Take a kernel over ``dim`` inputs apart. Matérn kernels are products over dimensions here.

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
    return _lengthscaled(kernel, active, _squared_exponential, math.inf)


@_factors.register
def _(kernel: MaternKernel, active: tuple[int, ...]) -> KernelFactors:
    return _lengthscaled(kernel, active, _MATERN[kernel.nu], kernel.nu)


@_factors.register
def _(kernel: ScaleKernel, active: tuple[int, ...]) -> KernelFactors:
    # takes over its base kernel's active_dims, which gpytorch does not apply a second time
    inner = _factors(kernel.base_kernel, active)
    return KernelFactors((kernel.outputscale, *inner.scales), inner.factors)


@_factors.register
def _(kernel: ProductKernel, active: tuple[int, ...]) -> KernelFactors:
    parts = [_nested(part, active) for part in kernel.kernels]
    return KernelFactors(
        tuple(scale for part in parts for scale in part.scales),
        tuple(factor for part in parts for factor in part.factors),
    )


def _nested(kernel: Kernel, active: tuple[int, ...]) -> KernelFactors:
    """A kernel inside another sees the outer one's active inputs only."""
    inner = kernel_factors(kernel, len(active))
    moved = (replace(factor, dimension=active[factor.dimension]) for factor in inner.factors)
    return KernelFactors(inner.scales, tuple(moved))


def _lengthscaled(
    kernel: Kernel, active: tuple[int, ...], profile: Profile, smoothness: float
) -> KernelFactors:
    lengthscale = kernel.lengthscale.to(torch.float64).squeeze(-2)
    columns = lengthscale.expand(*lengthscale.shape[:-1], len(active)).unbind(-1)
    factors = (
        Factor(i, column, profile, smoothness) for i, column in zip(active, columns, strict=True)
    )
    return KernelFactors((), tuple(factors))


def _squared_exponential(r: Tensor) -> Tensor:
    return torch.exp(-0.5 * r.square())


def _matern12(r: Tensor) -> Tensor:
    return torch.exp(-r)


def _matern32(r: Tensor) -> Tensor:
    scaled = math.sqrt(3.0) * r
    return (1.0 + scaled) * torch.exp(-scaled)


def _matern52(r: Tensor) -> Tensor:
    scaled = math.sqrt(5.0) * r
    return (1.0 + scaled + scaled.square() / 3.0) * torch.exp(-scaled)


_MATERN: dict[float, Profile] = {0.5: _matern12, 1.5: _matern32, 2.5: _matern52}
