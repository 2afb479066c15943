"""No more inducing points than a cap: which of them go."""

from __future__ import annotations

import math

import torch
from gpytorch.kernels import Kernel
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.allocation.oips import correlation
from bo_stream.bases.inducing import members
from bo_stream.linalg import safe_cholesky, solve_lower

BETTER = 2.0
"""A new point takes an old one's place if the others leave this many times more of it unknown."""

SWAPS = 32
"""Most points that change place at a time."""


@torch.no_grad()
def capped(Z: Tensor, wanted: Tensor, kernel: Kernel, cap: int) -> Tensor:
    """At most ``cap`` of the points that an allocator wants, given those of before.

    Old points that are still wanted stay, then new ones enter while there is room. Beyond that a
    new point enters only in place of the old one that the others explain best, and only if its own
    conditional variance is more than ``BETTER`` times that one's. Cost O(M³) once where the cap
    binds, and O(M²) an exchange.

    Args:
        Z: Points of before, ``M x d``.
        wanted: ``M' x d``.
        kernel: Of the variances.
        cap: Largest number.
    """
    if len(wanted) <= cap:
        return wanted
    old = members(wanted, Z)
    kept, new = wanted[old][:cap], torch.cat((wanted[old][cap:], wanted[~old]))
    room = cap - len(kept)
    kept, new = torch.cat((kept, new[:room])), new[room:]
    try:
        factor = safe_cholesky(correlation(kernel, kept, kept))
    except NotPSDError:  # values too wrong to compare points by
        return kept
    exchange = _Exchange(kept, new, factor, kernel)
    for _ in range(min(SWAPS, len(new))):
        if not exchange.step():
            break
    return exchange.kept


class _Exchange:
    """Points that are in and points that wait, with what the former leave unknown of each.

    Kept by the inverse of the correlation matrix of those that are in, in which an exchange is of
    rank two.
    """

    def __init__(self, points: Tensor, waiting: Tensor, factor: Tensor, kernel: Kernel) -> None:
        """Begin; ``factor`` is the root of the points' correlations. Cost O(M³ + M² n)."""
        self._points, self._waiting, self._kernel = points.clone(), waiting, kernel
        self._order = list(range(len(points)))
        self._inverse = torch.cholesky_inverse(factor)
        self._cross = correlation(kernel, points, waiting)
        self._left = 1.0 - solve_lower(factor, self._cross).square().sum(-2)

    @property
    def kept(self) -> Tensor:
        """The points that are in, ``M x d``, those that entered last."""
        return self._points[self._order]

    def step(self) -> bool:
        """Do the best exchange, and say whether there was one that pays. Cost O(M² + M n)."""
        own = self._inverse.diagonal().reciprocal()
        leaves, enters = int(own.argmin()), int(self._left.argmax())
        if not float(self._left[enters]) > BETTER * float(own[leaves]):
            return False
        self._remove(leaves)
        self._insert(leaves, enters)
        return True

    def _remove(self, i: int) -> None:
        column, precision = self._inverse[i].clone(), float(self._inverse[i, i])
        self._left += (column @ self._cross).square() / precision
        self._inverse.addr_(column, column, alpha=-1.0 / precision)
        self._inverse[i] = self._inverse[:, i] = 0.0
        self._cross[i] = 0.0

    def _insert(self, i: int, j: int) -> None:
        """Put the waiting point j in the empty place i."""
        gain, left = self._inverse @ self._cross[:, j], float(self._left[j])
        point = self._waiting[j : j + 1]
        alike = correlation(self._kernel, point, self._waiting)[0]
        self._left -= (alike - gain @ self._cross).square() / left
        self._left[j] = -math.inf
        self._inverse.addr_(gain, gain, alpha=1.0 / left)
        self._inverse[i] = self._inverse[:, i] = -gain / left
        self._inverse[i, i] = 1.0 / left
        self._cross[i], self._points[i] = alike, point[0]
        self._order.remove(i)
        self._order.append(i)
