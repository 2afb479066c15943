"""Bounds on the eigenvalues of a kernel matrix, from the kernel and the separation of its points.

Sums of kernels add bounds. A product is a Hadamard product, whose eigenvalues lie between the least
and the largest eigenvalue of one factor times the least and the largest variance of the others
(Schur).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce, singledispatch

import numpy as np
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from numpy.typing import NDArray
from scipy.special import gammaln
from torch import Tensor

from bo_stream.diagnostics.distances import separation
from bo_stream.diagnostics.separated_points import (
    Profile,
    largest_eigenvalue_bound,
    smallest_eigenvalue_bound,
)


@dataclass(frozen=True)
class EigenvalueBounds:
    """Of a positive semi-definite matrix, or of a batch of them.

    Attributes:
        lower: Below all eigenvalues, ``...``; 0 is below always.
        upper: Above all eigenvalues, ``...``.
        least_variance: Least entry of the diagonal, ``...``.
        largest_variance: Largest entry of the diagonal, ``...``.
        known: Whether ``lower`` comes from a theorem about the kernel; False where there is none.
    """

    lower: Tensor
    upper: Tensor
    least_variance: Tensor
    largest_variance: Tensor
    known: bool = True

    def __add__(self, other: EigenvalueBounds) -> EigenvalueBounds:
        """Of the sum of both matrices [Weyl]."""
        return EigenvalueBounds(
            self.lower + other.lower,
            self.upper + other.upper,
            self.least_variance + other.least_variance,
            self.largest_variance + other.largest_variance,
            self.known or other.known,
        )

    def __mul__(self, other: EigenvalueBounds) -> EigenvalueBounds:
        """Of the elementwise product of both matrices [Schur]."""
        lower = (self.lower * other.least_variance, other.lower * self.least_variance)
        upper = (self.upper * other.largest_variance, other.upper * self.largest_variance)
        return EigenvalueBounds(
            torch.maximum(*lower),
            torch.minimum(*upper),
            self.least_variance * other.least_variance,
            self.largest_variance * other.largest_variance,
            self.known or other.known,
        )

    def scaled(self, factor: Tensor) -> EigenvalueBounds:
        """Of the matrix times a positive number, one for each matrix of the batch."""
        return EigenvalueBounds(
            self.lower * factor,
            self.upper * factor,
            self.least_variance * factor,
            self.largest_variance * factor,
            self.known,
        )


@torch.no_grad()
def eigenvalue_bounds(kernel: Kernel, Z: Tensor) -> EigenvalueBounds:
    """Of ``k(Z, Z)``; cost O(M²) for each RBF and Matérn kernel in it.

    Args:
        kernel: Any; ``lower`` is 0 where it is made of others than RBF and Matérn kernels.
        Z: ``M x d``, at least one.
    """
    return _bounds(kernel, _seen(kernel, Z))


def _seen(kernel: Kernel, Z: Tensor) -> Tensor:
    """The inputs that a kernel acts on."""
    return Z if kernel.active_dims is None else Z.index_select(-1, kernel.active_dims)


@singledispatch
def _bounds(kernel: Kernel, Z: Tensor) -> EigenvalueBounds:
    """No more than the trace is known of any kernel."""
    variance: Tensor = kernel.forward(Z, Z, diag=True)
    least, largest = variance.amin(-1), variance.amax(-1)
    zero = torch.zeros_like(least)
    return EigenvalueBounds(zero, variance.sum(-1), least, largest, known=False)


@_bounds.register
def _(kernel: RBFKernel, Z: Tensor) -> EigenvalueBounds:
    return _isotropic(Z, kernel.lengthscale, _rbf, _rbf_log_density(Z.shape[-1]))


@_bounds.register
def _(kernel: MaternKernel, Z: Tensor) -> EigenvalueBounds:
    density = _matern_log_density(kernel.nu, Z.shape[-1])
    return _isotropic(Z, kernel.lengthscale, _MATERN[kernel.nu], density)


@_bounds.register
def _(kernel: ScaleKernel, Z: Tensor) -> EigenvalueBounds:
    # takes over its base kernel's active_dims, which gpytorch does not apply a second time
    return _bounds(kernel.base_kernel, Z).scaled(kernel.outputscale)


@_bounds.register
def _(kernel: AdditiveKernel, Z: Tensor) -> EigenvalueBounds:
    return _combined(kernel, Z, EigenvalueBounds.__add__)


@_bounds.register
def _(kernel: ProductKernel, Z: Tensor) -> EigenvalueBounds:
    return _combined(kernel, Z, EigenvalueBounds.__mul__)


def _combined(
    kernel: AdditiveKernel | ProductKernel,
    Z: Tensor,
    rule: Callable[[EigenvalueBounds, EigenvalueBounds], EigenvalueBounds],
) -> EigenvalueBounds:
    return reduce(rule, (_bounds(part, _seen(part, Z)) for part in kernel.kernels))


def _isotropic(
    Z: Tensor, lengthscale: Tensor, decay: Profile, log_density: Profile
) -> EigenvalueBounds:
    """Of a kernel of the distance in lengthscales (``... x 1 x d``), with unit variance."""
    scales = lengthscale.expand(*lengthscale.shape[:-1], Z.shape[-1]).flatten(0, -2)
    pairs = [_unit_bounds(Z / scale, decay, log_density) for scale in scales]
    lower, upper = Z.new_tensor(pairs).mT.reshape(2, *lengthscale.shape[:-2])
    one = torch.ones_like(lower)
    return EigenvalueBounds(lower, upper, one, one)


def _unit_bounds(Z: Tensor, decay: Profile, log_density: Profile) -> tuple[float, float]:
    if len(Z) == 1:
        return 1.0, 1.0
    apart, dim = separation(Z), Z.shape[-1]
    upper = largest_eigenvalue_bound(decay, apart, dim, len(Z))
    return max(2.0 - upper, smallest_eigenvalue_bound(log_density, apart, dim)), upper


def _rbf(r: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(-0.5 * r * r)


_MATERN: dict[float, Profile] = {
    0.5: lambda r: np.exp(-r),
    1.5: lambda r: (1.0 + math.sqrt(3.0) * r) * np.exp(-math.sqrt(3.0) * r),
    2.5: lambda r: (1.0 + math.sqrt(5.0) * r + 5.0 / 3.0 * r * r) * np.exp(-math.sqrt(5.0) * r),
}


def _rbf_log_density(dim: int) -> Profile:
    return lambda frequency: 0.5 * dim * math.log(2.0 * math.pi) - 0.5 * frequency**2


def _matern_log_density(nu: float, dim: int) -> Profile:
    """[Rasmussen and Williams, 2006, eq. 4.15, with angular frequencies]."""
    power, tail = nu + 0.5 * dim, 2.0 * nu
    constant = dim * math.log(2.0) + 0.5 * dim * math.log(math.pi) + nu * math.log(tail)
    constant += float(gammaln(power) - gammaln(nu))
    return lambda frequency: constant - power * np.log(tail + frequency**2)
