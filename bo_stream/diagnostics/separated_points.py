"""How large and how small eigenvalues of a stationary kernel are where points keep apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, hyp0f1, jv

Profile = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""A function of a radius, elementwise."""

SHELLS = 2048
"""Radii at which points around a point are counted."""

FREQUENCIES = 1024
"""Intervals on which a spectral density is compared."""

CUTOFFS = 48
"""Values of R that are tried."""


def largest_eigenvalue_bound(decay: Profile, separation: float, dim: int, count: int) -> float:
    """Upper bound on the eigenvalues of a kernel matrix of unit variance.

    Gershgorin's theorem: no row sums to more. Within r of a point there are at most
    ``(2 r / separation + 1)^d − 1`` others, for balls of half the separation about them are
    disjoint, and the kernel falls with distance. [Terenin2024, proposition 19, with the number of
    points per shell free of its factor ``separation^−d``, which does not belong there]

    Args:
        decay: The kernel as a decreasing function of distance, 1 at 0.
        separation: Least distance of two points.
        dim: Of the points.
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
    """Lower bound on the eigenvalues of a kernel matrix, by the kernel's spectral density.

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
        dim: Of the points.
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
    """``log min density(t / radius) / ((T² − t²) χ̂(t)²)``, below on every interval of t."""
    t = np.linspace(0.0, cutoff, FREQUENCIES + 1)
    shape = np.log(cutoff * cutoff - t[:-1] ** 2) + 2.0 * np.log(_eigenfunction(t[:-1], dim))
    return float(np.min(log_density(t[1:] / radius) - shape))


def _eigenfunction(t: NDArray[np.float64], dim: int) -> NDArray[np.float64]:
    """Transform of the first Dirichlet eigenfunction of the unit ball, 1 at 0.

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
    """The first two zeros of ``J_(d/2 − 1)``."""
    order = 0.5 * dim - 1.0
    grid = np.linspace(max(order, 0.0) + 0.1, order + 4.0 * (order + 1.0) ** (1 / 3) + 8.0, 4096)
    signs = np.sign(jv(order, grid))
    places = np.flatnonzero(signs[:-1] * signs[1:] < 0.0)[:2]
    first, second = (brentq(lambda t: jv(order, t), grid[i], grid[i + 1]) for i in places)
    return float(first), float(second)
