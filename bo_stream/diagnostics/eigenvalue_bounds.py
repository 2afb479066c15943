"""Bounds on the eigenvalues of a kernel matrix, from the kernel and the separation of its points.

Sums of kernels add bounds. A product is a Hadamard product, whose eigenvalues lie between the least
and the largest eigenvalue of one factor times the least and the largest variance of the others
(Schur).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, reduce

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
from scipy.optimize import brentq
from scipy.special import gammaln, hyp0f1, jv
from torch import Tensor

ROWS = 1024
"""Points compared with all others at a time."""

Profile = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""A function of a radius, elementwise."""

SHELLS = 2048
"""Radii at which points around a point are counted."""

FREQUENCIES = 1024
"""Intervals on which a spectral density is compared."""

CUTOFFS = 48
"""Values of R that are tried."""


@torch.no_grad()
def eigenvalue_bounds(kernel: Kernel, Z: Tensor) -> EigenvalueBounds:
    """Bound the eigenvalues of ``k(Z, Z)`` of M points, at least one, ``M x d``.

    ``lower`` is 0 where a kernel is made of others than RBF and Matérn ones, each of which costs
    O(M²).
    """
    dims = kernel.active_dims
    return _bounds(kernel, Z if dims is None else Z.index_select(-1, dims))


@dataclass(frozen=True)
class EigenvalueBounds:
    """Bounds on the eigenvalues of a batch of positive semi-definite matrices.

    Attributes:
        lower: Lower bound, ``...``; 0 always is one.
        upper: Upper bound, ``...``.
        least_variance: Least entry of the diagonal, ``...``.
        largest_variance: Largest entry of the diagonal, ``...``.
        known: Whether ``lower`` comes from a theorem about the kernel; False where there is none.
    """

    lower: Tensor
    upper: Tensor
    least_variance: Tensor
    largest_variance: Tensor
    known: bool = field(default=True, kw_only=True)

    def __add__(self, other: EigenvalueBounds) -> EigenvalueBounds:
        """Bound the sum of both matrices [Weyl]."""
        sums = (a + b for a, b in zip(self._values(), other._values(), strict=True))
        return EigenvalueBounds(*sums, known=self.known or other.known)

    def __mul__(self, other: EigenvalueBounds) -> EigenvalueBounds:
        """Bound the elementwise product of both matrices [Schur]."""
        lower = (self.lower * other.least_variance, other.lower * self.least_variance)
        upper = (self.upper * other.largest_variance, other.upper * self.largest_variance)
        return EigenvalueBounds(
            torch.maximum(*lower),
            torch.minimum(*upper),
            self.least_variance * other.least_variance,
            self.largest_variance * other.largest_variance,
            known=self.known or other.known,
        )

    def scaled(self, factor: Tensor) -> EigenvalueBounds:
        """Bound the matrix times a positive number, one for each matrix of the batch."""
        return EigenvalueBounds(*(value * factor for value in self._values()), known=self.known)

    def _values(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.lower, self.upper, self.least_variance, self.largest_variance


def _bounds(kernel: Kernel, Z: Tensor) -> EigenvalueBounds:
    """Bound the eigenvalues at the inputs that a kernel acts on; of one not known, by its trace."""
    if isinstance(kernel, ScaleKernel):
        # takes over its base kernel's active_dims, which gpytorch does not apply a second time
        return _bounds(kernel.base_kernel, Z).scaled(kernel.outputscale)
    if isinstance(kernel, AdditiveKernel | ProductKernel):
        rule = operator.add if isinstance(kernel, AdditiveKernel) else operator.mul
        return reduce(rule, (eigenvalue_bounds(part, Z) for part in kernel.kernels))
    dim = Z.shape[-1]
    if isinstance(kernel, MaternKernel):
        density = _matern_log_density(kernel.nu, dim)
        return _isotropic(Z, kernel.lengthscale, _MATERN[kernel.nu], density)
    if isinstance(kernel, RBFKernel):
        return _isotropic(
            Z,
            kernel.lengthscale,
            lambda r: np.exp(-0.5 * r * r),
            lambda frequency: 0.5 * dim * math.log(2.0 * math.pi) - 0.5 * frequency**2,
        )
    variance: Tensor = kernel.forward(Z, Z, diag=True)
    least, largest = variance.amin(-1), variance.amax(-1)
    return EigenvalueBounds(torch.zeros_like(least), variance.sum(-1), least, largest, known=False)


def _isotropic(
    Z: Tensor, lengthscale: Tensor, decay: Profile, log_density: Profile
) -> EigenvalueBounds:
    """Bound a kernel of the distance in lengthscales, ``... x 1 x d``, of unit variance."""
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


def largest_eigenvalue_bound(decay: Profile, separation: float, dim: int, count: int) -> float:
    """Bound the eigenvalues of a kernel matrix of unit variance from above.

    Gershgorin's theorem: no row sums to more. Within r of a point there are at most
    ``(2 r / separation + 1)^d − 1`` others, for balls of half the separation about them are
    disjoint, and the kernel falls with distance. [Terenin2024, proposition 19, with the number of
    points per shell free of its factor ``separation^−d``, which does not belong there]

    Args:
        decay: The kernel as a decreasing function of distance, 1 at 0.
        separation: Least distance of two points.
        dim: Number of inputs d.
        count: Number M of points.
    """
    others = count - 1
    if others < 1 or separation <= 0.0:
        return float(max(count, 0))
    last = max((count ** (1.0 / dim) - 1.0) / 2.0, 1.0)
    radii = np.geomspace(1.0, last, SHELLS)
    within = np.minimum(np.floor((2.0 * radii[1:] + 1.0) ** dim - 1.0 + 1e-9), others)
    values = decay(radii * separation)
    return float(1.0 + within @ (values[:-1] - values[1:]) + others * values[-1])


def smallest_eigenvalue_bound(log_density: Profile, separation: float, dim: int) -> float:
    """Bound the eigenvalues of a kernel matrix from below, by the kernel's spectral density.

    A function h that vanishes beyond the separation has the matrix ``h(0) I``, and the kernel's is
    no less if the transform of h is nowhere above the spectral density [Terenin2024, lemma 20].
    Here ``h ∝ (R² + Δ)(χ * χ)`` with χ the first Dirichlet eigenfunction of a ball of half the
    separation (the function of Ingham's inequality; Komornik and Loreti, 2005): its transform is
    negative beyond R and decreases up to there, so that the density is asked for on an interval
    only. Wendland's own choice (2004, theorem 12.3), which the paper quotes, has the square of a
    ball's indicator and a bound that is smaller by many orders of magnitude.

    Args:
        log_density: Logarithm of the spectral density as a decreasing function of frequency, in
            ``k(x) = (2 π)^−d ∫ density(ω) exp(i ω·x) dω``.
        separation: Least distance of two points, finite.
        dim: Number of inputs d.
    """
    if separation <= 0.0:
        return 0.0
    radius = separation / 2.0
    first, second = _bessel_zeros(dim)
    cutoffs = first + (second - first) * np.linspace(0.0, 1.0, CUTOFFS + 2)[1:-1]
    sphere = math.log(2.0) + 0.5 * dim * math.log(math.pi) - float(gammaln(0.5 * dim))
    size = 2.0 * math.log(first) - math.log(2.0) - sphere - dim * math.log(radius)
    gains = [
        math.log(T * T - first * first) + _log_room(log_density, T, radius, dim) for T in cutoffs
    ]
    return math.exp(min(size + max(gains), 0.0))


def _log_room(log_density: Profile, cutoff: float, radius: float, dim: int) -> float:
    """Bound ``log min density(t / radius) / ((T² − t²) χ̂(t)²)`` from below, by intervals of t."""
    t = np.linspace(0.0, cutoff, FREQUENCIES + 1)
    shape = np.log(cutoff * cutoff - t[:-1] ** 2) + 2.0 * np.log(_eigenfunction(t[:-1], dim))
    return float(np.min(log_density(t[1:] / radius) - shape))


def _eigenfunction(t: NDArray[np.float64], dim: int) -> NDArray[np.float64]:
    """Evaluate the transform of the unit ball's first Dirichlet eigenfunction, 1 at 0.

    ``Γ(ν + 1) (t / 2)^−ν J_ν(t) / (1 − (t / j)²)`` with ``ν = d / 2 − 1``; it decreases, and is
    positive, up to the second zero of J_ν.
    """
    first = _bessel_zeros(dim)[0]
    close = np.abs(1.0 - t / first) < 1e-4
    t = np.where(close, first * (1.0 - 1e-4), t)  # a little more, away from 0 / 0
    shape: NDArray[np.float64] = hyp0f1(0.5 * dim, -0.25 * t * t) / (1.0 - (t / first) ** 2)
    return shape


@lru_cache
def _bessel_zeros(dim: int) -> tuple[float, float]:
    """Find the first two zeros of ``J_(d/2 − 1)``."""
    order = 0.5 * dim - 1.0
    grid = np.linspace(max(order, 0.0) + 0.1, order + 4.0 * (order + 1.0) ** (1 / 3) + 8.0, 4096)
    signs = np.sign(jv(order, grid))
    places = np.flatnonzero(signs[:-1] * signs[1:] < 0.0)[:2]
    first, second = (brentq(lambda t: jv(order, t), grid[i], grid[i + 1]) for i in places)
    return float(first), float(second)


_MATERN: dict[float, Profile] = {
    0.5: lambda r: np.exp(-r),
    1.5: lambda r: (1.0 + math.sqrt(3.0) * r) * np.exp(-math.sqrt(3.0) * r),
    2.5: lambda r: (1.0 + math.sqrt(5.0) * r + 5.0 / 3.0 * r * r) * np.exp(-math.sqrt(5.0) * r),
}


def _matern_log_density(nu: float, dim: int) -> Profile:
    """Return [Rasmussen and Williams, 2006, eq. 4.15] with angular frequencies."""
    power, tail = nu + 0.5 * dim, 2.0 * nu
    constant = dim * math.log(2.0) + 0.5 * dim * math.log(math.pi) + nu * math.log(tail)
    constant += float(gammaln(power) - gammaln(nu))
    return lambda frequency: constant - power * np.log(tail + frequency**2)


def separation(Z: Tensor) -> float:
    """Return the least distance between two of M points, infinite for fewer. Cost O(M² d).

    [Terenin2024, definition 3]
    """
    least = math.inf
    for start in range(0, len(Z), ROWS):
        rows = Z[start : start + ROWS]
        distances = _distances(rows, Z)
        distances.diagonal(start).fill_(math.inf)
        least = min(least, float(distances.min()))
    return least


def resolution(Z: Tensor, X: Tensor) -> float:
    """Return the largest distance of n inputs to their nearest of M points. Cost O(n M d)."""
    if len(X) == 0:
        return 0.0
    if len(Z) == 0:
        return math.inf
    return max(float(_distances(rows, Z).amin(-1).max()) for rows in X.split(ROWS))


def _distances(A: Tensor, B: Tensor) -> Tensor:
    return torch.cdist(A, B, compute_mode="donot_use_mm_for_euclid_dist")
