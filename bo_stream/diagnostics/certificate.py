"""Stability certificates: guarantees for a model's linear systems before they are solved.

First the certificate, then bounds on the eigenvalues of kernel matrices, on which it rests.

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
from typing import Any

import numpy as np
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from linear_operator.utils.lanczos import lanczos_tridiag
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln, hyp0f1, jv
from torch import Tensor

from bo_stream.bases.inducing import frozen, kernel_matrix
from bo_stream.models.auto.auto import AutoGP, family_model
from bo_stream.models.base import StreamingGP
from bo_stream.models.clustered.solver import cross_matrix

_EXACT_POINTS = 2048
"""Up to this size the condition number is computed from all singular values."""

_LANCZOS_STEPS = 200

_NO_POINT = "Expected at least one point, got none: put data in first."

TRUSTED = 1e13
"""Condition numbers of float64 matrices beyond this are rounding errors: they are only larger."""


def stability(model: StreamingGP, X: Tensor | None = None) -> Stability:
    """Certify the linear system of a model's present points and hyperparameters.

    Nothing is factorised by Cholesky for it. Cost O(M³) up to 2,048 points, O(M²) beyond. The
    matrix is

    - with inducing points their kernel matrix;
    - with clusters ``I + S k(Z, Z) S`` at their centres Z, S² the precisions of the clusters;
    - on a grid the precision ``I + gram`` of its whitened weights, of local models the worst such
      precision, of an exact model ``I + S K S``, S² the observations' precisions: these are nowhere
      less than the identity, for all data.

    Args:
        model: With inducing points or clusters, on a grid, of local models, or an AutoGP.
        X: Inputs that the points should stand for, ``... x n x d``, in the model's own units.

    Raises:
        UnsupportedError: It is none of these.
        ValueError: It has no point yet.

    Example:
        >>> print(stability(OSGPR(train_X, train_Y), train_X))
    """
    model = family_model(model)
    kind: Any = model  # what it has besides is not known to a type checker
    if isinstance(model, AutoGP):  # an exact one
        gram = kind._memory.inference.solved_gram(kind._memory.inner, model.prior)
        return stability_of_precision(gram)
    if hasattr(model, "solved_gram"):
        return stability_of_precision(kind.solved_gram())
    inputs = None if X is None else model.transform_inputs(X).detach().flatten(0, -2).double()
    if hasattr(model, "cluster_precision"):
        Z, precision = kind.centres.double(), kind.cluster_precision()
        return stability_of_points(kind.covar_module, Z, kind.num_outputs, inputs, precision)
    if hasattr(model, "inducing_points"):
        Z = kind.inducing_points.double()
        return stability_of_points(kind.covar_module, Z, kind.num_outputs, inputs)
    raise UnsupportedError(
        "Expected a model with inducing points or clusters, on a grid, or of local models, got a "
        f"{type(model).__name__}, whose linear systems have no certificate."
    )


@torch.no_grad()
def stability_of_points(
    kernel: Kernel,
    Z: Tensor,
    outputs: int = 1,
    X: Tensor | None = None,
    precision: Tensor | None = None,
) -> Stability:
    """Certify ``k(Z, Z)``, or ``I + S k(Z, Z) S``; the worst of a batch of kernels.

    The second matrix is ``k(Z, Z) + Λ`` in units of the noise, ``S² = Λ⁻¹``. Its condition number
    is bounded for any kernel. [Terenin2024, corollaries 5 and 7]

    Args:
        kernel: A kernel of batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs.
        Z: Points, ``M x d``, float64.
        outputs: Number m of outputs.
        X: Inputs for the resolution, ``n x d``.
        precision: The diagonal of S², ``... x m x M`` or ``M``, not negative.

    Raises:
        ValueError: There is no point.
    """
    if len(Z) == 0:
        raise ValueError(_NO_POINT)
    still = frozen(kernel)
    whole = kernel_matrix if precision is None else cross_matrix  # what the model factorises
    matrix, bounds = whole(still, Z, Z, outputs), eigenvalue_bounds(still, Z)
    lower, upper, system = bounds.lower, bounds.upper, "kernel matrix of the points"
    if precision is not None:
        precision, system = precision.to(Z), "noise and kernel matrix of the points"
        root = precision.sqrt()
        matrix = root.unsqueeze(-1) * matrix * root.unsqueeze(-2) + torch.eye(len(Z)).to(Z)
        lower, upper = 1.0 + lower * precision.min(), 1.0 + upper * precision.max()
    known = bounds.known or precision is not None
    bound = float((upper / lower).max()) if known else None
    away = None if X is None else resolution(Z, X)
    return _certificate(system, matrix, bound, float(lower.min()), separation(Z), away)


@torch.no_grad()
def stability_of_precision(gram: Tensor) -> Stability:
    """Certify ``I + gram`` for a positive semi-definite gram, ``... x r x r``.

    Its condition number is at most 1 plus the largest eigenvalue of gram, hence at most 1 plus its
    largest absolute row sum, and 1 plus its Frobenius norm.

    Raises:
        ValueError: It has no row.
    """
    if gram.shape[-1] == 0:
        raise ValueError(_NO_POINT)
    norm = torch.minimum(gram.abs().sum(-1).amax(-1), torch.linalg.matrix_norm(gram))
    matrix, bound = torch.eye(gram.shape[-1]).to(gram) + gram, 1.0 + float(norm.max())
    return _certificate("identity plus gram", matrix, bound, 1.0, None, None)


def _certificate(
    system: str,
    matrix: Tensor,
    bound: float | None,
    least: float,
    apart: float | None,
    away: float | None,
) -> Stability:
    size, estimate = matrix.shape[-1], condition_number(matrix)
    sure = min(math.inf if bound is None else bound, estimate.value if estimate.exact else math.inf)
    largest = matrix.mean(-1).sum(-1).clamp_min(0.0)  # at least this: the ones' Rayleigh quotient
    least_eigenvalue = (largest / sure).clamp_min(max(least, 0.0))
    trace = float((matrix.diagonal(dim1=-2, dim2=-1).sum(-1) / least_eigenvalue).max())
    verdicts = []
    for dtype in (torch.float32, torch.float64):
        limit = condition_limit(size, dtype)
        verdicts.append(Verdict(limit, max(limit / sure, trace_limit(size, dtype) / trace)))
    return Stability(system, size, apart, away, bound, estimate, *verdicts)


@dataclass(frozen=True)
class Stability:
    """A certificate of how well a linear system can be solved in floating point.

    Attributes:
        system: Its matrix, in words.
        size: Number of its rows.
        separation: Least distance between two points, in transformed inputs; None without points.
        resolution: Largest distance of an input to its nearest point; None if not requested.
        condition_bound: Upper bound on the condition number for any arrangement of as many points
            at this separation; from the kernel alone. None where no theorem is known.
        condition: The condition number itself, or an estimate.
        float32: Whether Cholesky is sure to succeed in single precision.
        float64: Whether it is in double precision.
    """

    system: str
    size: int
    separation: float | None
    resolution: float | None
    condition_bound: float | None
    condition: Estimate
    float32: Verdict
    float64: Verdict

    def __str__(self) -> str:
        bound = "none is known" if self.condition_bound is None else f"{self.condition_bound:.3g}"
        at_least = "" if self.condition.exact else "at least "
        rows = {"system": f"{self.system}, {self.size:,} rows"}
        if self.separation is not None:
            rows["separation"] = f"{self.separation:.3g}"
        if self.resolution is not None:
            rows["resolution"] = f"{self.resolution:.3g}"
        rows |= {"condition number": f"{at_least}{self.condition.value:.3g}", "its bound": bound}
        for name, verdict in (("float32", self.float32), ("float64", self.float64)):
            unsure = f"not sure: safe up to a condition number of {verdict.limit:.3g}"
            spare = f"safe, {verdict.to_spare:.3g} times to spare"
            rows[name] = spare if verdict.safe else unsure
        return "\n".join(f"{name:<18}{text}" for name, text in rows.items())


@torch.no_grad()
def condition_number(matrix: Tensor) -> Estimate:
    """Compute the largest condition number of positive semi-definite matrices, ``... x M x M``.

    From all singular values up to 2,048 rows, O(M³); beyond, from 200 Ritz values, O(M²) each,
    which lie inside the spectrum: the true number is at least the returned one.
    """
    if matrix.shape[-1] <= _EXACT_POINTS:
        value = float(torch.linalg.cond(matrix).max())
        return Estimate(value, value < TRUSTED) if value == value else Estimate(math.inf, False)
    largest = []
    for one in matrix.flatten(0, -3):
        start = torch.ones_like(one[:, :1])
        start[::2] = -0.5
        _, tridiagonal = lanczos_tridiag(
            one.matmul, _LANCZOS_STEPS, one.dtype, one.device, one.shape, init_vecs=start
        )
        ritz = torch.linalg.eigvalsh(tridiagonal)
        largest.append(float(ritz[-1] / ritz[0]) if float(ritz[0]) > 0.0 else math.inf)
    return Estimate(max(largest), False)


@dataclass(frozen=True)
class Estimate:
    """An estimate of a condition number.

    Attributes:
        value: The number; a lower bound on it if it is not exact.
        exact: Whether it is from all singular values and small enough to be known in float64.
    """

    value: float
    exact: bool


@dataclass(frozen=True)
class Verdict:
    """A guarantee that a Cholesky factorisation in a dtype succeeds, or the lack of one.

    Attributes:
        limit: Condition number up to which it succeeds, for all values of the other eigenvalues.
        to_spare: Factor by which a theorem's condition is met, the larger of two: the limit over
            the condition number, and :func:`trace_limit` over the trace in least eigenvalues.
    """

    limit: float
    to_spare: float

    @property
    def safe(self) -> bool:
        """Whether the guarantee holds; without it, it may succeed all the same."""
        return self.to_spare >= 1.0


def condition_limit(size: int, dtype: torch.dtype) -> float:
    """Return the condition number up to which Cholesky succeeds, ``1 / (3.9 · 2^−t M^(3/2))``.

    M is the size, t the length of the dtype's mantissa, and ``30 M < 2^t``. The theorem is for more
    than ten rows; fewer are factorised as the corner of a matrix of eleven. [Terenin2024, result 1,
    from Kiełbasiński, 1987]
    """
    unit = torch.finfo(dtype).eps / 2.0
    if 30.0 * size * unit >= 1.0:
        return 0.0
    return 1.0 / (unit * 3.9 * max(size, 11) ** 1.5)


def trace_limit(size: int, dtype: torch.dtype) -> float:
    """Return the trace over least eigenvalue up to which Cholesky succeeds, ``(1 − γ) / γ``.

    ``γ = (M + 2) u / (1 − (M + 2) u)`` with M the size and u the dtype's unit roundoff: the factor
    of a computed one is within ``γ / (1 − γ) √(a_ii a_jj)`` of each entry, its rounding included.
    Few large eigenvalues are allowed much more than by :func:`condition_limit`. [Demmel, 1989;
    Higham, 2002, theorem 10.7, without the scaling of rows]
    """
    steps = (size + 2) * torch.finfo(dtype).eps / 2.0
    return max(0.0, 1.0 / steps - 2.0)


# --- bounds on the eigenvalues of kernel matrices -------------------------------------------------


_ROWS = 1024
"""Points compared with all others at a time."""

_Profile = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""A function of a radius, elementwise."""

_SHELLS = 2048
"""Radii at which points around a point are counted."""

_FREQUENCIES = 1024
"""Intervals on which a spectral density is compared."""

_CUTOFFS = 48
"""Values of R that are tried."""


@torch.no_grad()
def eigenvalue_bounds(kernel: Kernel, Z: Tensor) -> EigenvalueBounds:
    """Bound the eigenvalues of ``k(Z, Z)`` of M points, at least one, ``M x d``.

    ``lower`` is 0 where a kernel is not made of RBF and Matérn kernels, each of which costs O(M²).
    [Terenin2024, proposition 4 and result 6]
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
    """Bound the eigenvalues at the inputs that a kernel acts on; of other kernels, by the trace."""
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
    Z: Tensor, lengthscale: Tensor, decay: _Profile, log_density: _Profile
) -> EigenvalueBounds:
    """Bound a kernel of the distance in lengthscales, ``... x 1 x d``, of unit variance."""
    dim, pairs = Z.shape[-1], []
    for scale in lengthscale.expand(*lengthscale.shape[:-1], dim).flatten(0, -2):
        least = largest = 1.0
        if len(Z) > 1:
            apart = separation(Z / scale)
            largest = largest_eigenvalue_bound(decay, apart, dim, len(Z))
            least = max(2.0 - largest, smallest_eigenvalue_bound(log_density, apart, dim))
        pairs.append((least, largest))
    lower, upper = Z.new_tensor(pairs).mT.reshape(2, *lengthscale.shape[:-2])
    one = torch.ones_like(lower)
    return EigenvalueBounds(lower, upper, one, one)


def largest_eigenvalue_bound(decay: _Profile, separation: float, dim: int, count: int) -> float:
    """Bound the eigenvalues of a kernel matrix of unit variance from above.

    Gershgorin's theorem: no row sums to more than the bound. Within r of a point there are at most
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
    radii = np.geomspace(1.0, last, _SHELLS)
    within = np.minimum(np.floor((2.0 * radii[1:] + 1.0) ** dim - 1.0 + 1e-9), others)
    values = decay(radii * separation)
    return float(1.0 + within @ (values[:-1] - values[1:]) + others * values[-1])


def smallest_eigenvalue_bound(log_density: _Profile, separation: float, dim: int) -> float:
    """Bound the eigenvalues of a kernel matrix from below, by the kernel's spectral density.

    A function h that vanishes beyond the separation has the matrix ``h(0) I``, and the kernel's is
    no less if the transform of h is nowhere above the spectral density. [Terenin2024, result 6
    and lemma 20] Here ``h ∝ (R² + Δ)(χ * χ)`` with χ the first Dirichlet eigenfunction of a ball of
    half the separation (the function of Ingham's inequality; Komornik and Loreti, 2005): its
    transform is negative beyond R and decreases up to there, so that the density is needed on an
    interval only. Wendland's own choice (2004, theorem 12.3), which the paper quotes, has the
    square of a ball's indicator and a bound that is smaller by many orders of magnitude.

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
    cutoffs = first + (second - first) * np.linspace(0.0, 1.0, _CUTOFFS + 2)[1:-1]
    sphere = math.log(2.0) + 0.5 * dim * math.log(math.pi) - float(gammaln(0.5 * dim))
    size = 2.0 * math.log(first) - math.log(2.0) - sphere - dim * math.log(radius)
    gains = []
    for T in cutoffs:
        # log min density(t / radius) / ((T² − t²) χ̂(t)²) from below, by intervals of t
        t = np.linspace(0.0, T, _FREQUENCIES + 1)
        shape = np.log(T * T - t[:-1] ** 2) + 2.0 * np.log(_eigenfunction(t[:-1], dim))
        room = float(np.min(log_density(t[1:] / radius) - shape))
        gains.append(math.log(T * T - first * first) + room)
    return math.exp(min(size + max(gains), 0.0))


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
    changes = np.flatnonzero(signs[:-1] * signs[1:] < 0.0)[:2]
    first, second = (brentq(lambda t: jv(order, t), grid[i], grid[i + 1]) for i in changes)
    return float(first), float(second)


_MATERN: dict[float, _Profile] = {
    0.5: lambda r: np.exp(-r),
    1.5: lambda r: (1.0 + math.sqrt(3.0) * r) * np.exp(-math.sqrt(3.0) * r),
    2.5: lambda r: (1.0 + math.sqrt(5.0) * r + 5.0 / 3.0 * r * r) * np.exp(-math.sqrt(5.0) * r),
}


def _matern_log_density(nu: float, dim: int) -> _Profile:
    """Return the log spectral density of a Matérn kernel at angular frequencies.

    [Rasmussen and Williams, 2006, eq. 4.15]
    """
    power, tail = nu + 0.5 * dim, 2.0 * nu
    constant = dim * math.log(2.0) + 0.5 * dim * math.log(math.pi) + nu * math.log(tail)
    constant += float(gammaln(power) - gammaln(nu))
    return lambda frequency: constant - power * np.log(tail + frequency**2)


def separation(Z: Tensor) -> float:
    """Return the least distance between two of M points, infinite for fewer. Cost O(M² d).

    [Terenin2024, definition 3]
    """
    least = math.inf
    for start in range(0, len(Z), _ROWS):
        rows = Z[start : start + _ROWS]
        distances = _distances(rows, Z)
        distances.diagonal(start).fill_(math.inf)
        least = min(least, float(distances.min()))
    return least


def resolution(Z: Tensor, X: Tensor) -> float:
    """Return the largest distance of n inputs to their nearest of M points. Cost O(n M d).

    [Terenin2024, definition 8]
    """
    if len(X) == 0:
        return 0.0
    if len(Z) == 0:
        return math.inf
    return max(float(_distances(rows, Z).amin(-1).max()) for rows in X.split(_ROWS))


def _distances(A: Tensor, B: Tensor) -> Tensor:
    return torch.cdist(A, B, compute_mode="donot_use_mm_for_euclid_dist")
