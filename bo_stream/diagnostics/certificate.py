"""Stability certificates: guarantees for a model's linear systems before they are solved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel
from linear_operator.utils.lanczos import lanczos_tridiag
from torch import Tensor

from bo_stream.bases.inducing import frozen, kernel_matrix
from bo_stream.diagnostics.eigenvalue_bounds import eigenvalue_bounds, resolution, separation
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.auto.view import family_model
from bo_stream.models.base import StreamingGP
from bo_stream.models.clustered.solver import cross_matrix

EXACT_POINTS = 2048
"""Up to this size the condition number is computed from all singular values."""

LANCZOS_STEPS = 200

TRUSTED = 1e13
"""Condition numbers of float64 matrices beyond this are rounding errors: they are only larger."""


def stability(model: StreamingGP, X: Tensor | None = None) -> Stability:
    """Certify the linear system of a model's present points and hyperparameters.

    Nothing is factorised by Cholesky for it. Cost O(M³) up to 2,048 points, O(M²) beyond. The
    matrix is

    - with inducing points their kernel matrix;
    - with clusters ``I + S k(Z, Z) S`` at their centres Z, S² the precisions of the clusters;
    - on a grid the precision ``I + gram`` of its whitened weights, of local models the worst of
      theirs, of an exact model ``I + S K S``, S² the observations' precisions: these are nowhere
      less than the identity, whatever the data.

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
        gram = kind._memory.inference.solved_gram(kind._memory.inner, model._prior)
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
        raise ValueError("Expected at least one point, got none: put data in first.")
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
    """
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
    verdicts = (Verdict.of(sure, size, dtype, trace) for dtype in (torch.float32, torch.float64))
    return Stability(system, size, apart, away, bound, estimate, *verdicts)


@dataclass(frozen=True)
class Stability:
    """A certificate of how well a linear system can be solved in floating point.

    Attributes:
        system: Its matrix, in words.
        size: Number of its rows.
        separation: Least distance between two points, in transformed inputs; None without points.
        resolution: Largest distance of an input to its nearest point; None if not asked for.
        condition_bound: Upper bound on the condition number, whatever the arrangement of as many
            points at this separation; from the kernel alone. None where no theorem is known.
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
        bound = "none is known" if self.condition_bound is None else _short(self.condition_bound)
        at_least = "" if self.condition.exact else "at least "
        rows = [
            ("system", f"{self.system}, {self.size:,} rows"),
            ("separation", None if self.separation is None else _short(self.separation)),
            ("resolution", None if self.resolution is None else _short(self.resolution)),
            ("condition number", at_least + _short(self.condition.value)),
            ("its bound", bound),
            ("float32", _in_words(self.float32)),
            ("float64", _in_words(self.float64)),
        ]
        return "\n".join(f"{name:<18}{text}" for name, text in rows if text is not None)


def _short(value: float) -> str:
    return f"{value:.3g}"


def _in_words(verdict: Verdict) -> str:
    if verdict.safe:
        return f"safe, {_short(verdict.to_spare)} times to spare"
    return f"not sure: safe up to a condition number of {_short(verdict.limit)}"


@torch.no_grad()
def condition_number(matrix: Tensor) -> Estimate:
    """Compute the largest condition number of positive semi-definite matrices, ``... x M x M``.

    From all singular values up to ``EXACT_POINTS``, O(M³); beyond, from ``LANCZOS_STEPS`` Ritz
    values, O(M²) each, which lie inside the spectrum: the number is at least what is returned.
    """
    if matrix.shape[-1] <= EXACT_POINTS:
        value = float(torch.linalg.cond(matrix).max())
        return Estimate(value, value < TRUSTED) if value == value else Estimate(math.inf, False)
    return Estimate(max(_ritz(m) for m in matrix.flatten(0, -3).split(1)), False)


def _ritz(matrix: Tensor) -> float:
    """Return the ratio of the largest and least Ritz value of one matrix, ``1 x M x M``."""
    start = torch.ones_like(matrix[0, :, :1])
    start[::2] = -0.5
    _, tridiagonal = lanczos_tridiag(
        lambda v: matrix[0] @ v,
        LANCZOS_STEPS,
        matrix.dtype,
        matrix.device,
        matrix[0].shape,
        init_vecs=start,
    )
    values = torch.linalg.eigvalsh(tridiagonal)
    return float(values[-1] / values[0]) if float(values[0]) > 0.0 else math.inf


@dataclass(frozen=True)
class Estimate:
    """An estimate of a condition number.

    Attributes:
        value: The number; a lower bound on it if it is not exact.
        exact: Whether it is from all singular values and small enough to be told in float64.
    """

    value: float
    exact: bool


@dataclass(frozen=True)
class Verdict:
    """A guarantee that a Cholesky factorisation in a dtype succeeds, or the lack of one.

    Attributes:
        limit: Condition number up to which it succeeds, whatever the other eigenvalues are.
        to_spare: Factor by which a theorem's condition is met, the larger of two: the limit over
            the condition number, and :func:`trace_limit` over the trace in least eigenvalues.
    """

    limit: float
    to_spare: float

    @property
    def safe(self) -> bool:
        """Whether the guarantee holds; without it, it may succeed all the same."""
        return self.to_spare >= 1.0

    @classmethod
    def of(cls, condition: float, size: int, dtype: torch.dtype, trace: float) -> Verdict:
        """Judge by bounds, maybe infinite, on condition number and trace over least eigenvalue."""
        limit = condition_limit(size, dtype)
        return cls(limit, max(limit / condition, trace_limit(size, dtype) / trace))


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
