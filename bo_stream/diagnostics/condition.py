"""Condition numbers, and their limits for a Cholesky factorisation in floating point."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from linear_operator.utils.lanczos import lanczos_tridiag
from torch import Tensor

EXACT_POINTS = 2048
"""Up to this size the condition number is computed from all singular values."""

LANCZOS_STEPS = 200

TRUSTED = 1e13
"""Condition numbers of float64 matrices beyond this are rounding errors: they are only larger."""


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
    def of(
        cls, condition: float, size: int, dtype: torch.dtype, trace: float = math.inf
    ) -> Verdict:
        """Judge a matrix by bounds on its condition number and its trace in least eigenvalues.

        Infinite: unknown, or singular.
        """
        limit = condition_limit(size, dtype)
        return cls(limit, max(limit / condition, trace_limit(size, dtype) / trace))


def condition_limit(size: int, dtype: torch.dtype) -> float:
    """Return the condition number up to which Cholesky succeeds, ``1 / (3.9 · 2^−t M^(3/2))``.

    t is the length of the mantissa. The theorem is for more than ten rows; fewer are factorised as
    the corner of a matrix of eleven. [Terenin2024, result 1, from Kiełbasiński, 1987]

    Args:
        size: Number M of rows; the theorem asks for ``30 M < 2^t``.
        dtype: Floating-point type of the factorisation.
    """
    unit = torch.finfo(dtype).eps / 2.0
    if 30.0 * size * unit >= 1.0:
        return 0.0
    return 1.0 / (unit * 3.9 * max(size, 11) ** 1.5)


def trace_limit(size: int, dtype: torch.dtype) -> float:
    """Return the trace over least eigenvalue up to which Cholesky succeeds, ``(1 − γ) / γ``.

    ``γ = (M + 2) u / (1 − (M + 2) u)`` with u the unit roundoff: the factor of a computed one is
    within ``γ / (1 − γ) √(a_ii a_jj)`` of each entry, its rounding included. Few large eigenvalues
    are allowed much more than by :func:`condition_limit`. [Demmel, 1989; Higham, 2002, theorem
    10.7, without the scaling of rows]

    Args:
        size: Number M of rows.
        dtype: Floating-point type of the factorisation.
    """
    steps = (size + 2) * torch.finfo(dtype).eps / 2.0
    return max(0.0, 1.0 / steps - 2.0)
