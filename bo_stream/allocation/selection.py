"""Selection of points by a kernel: apart from each other, of greatest variance, under a cap."""

from __future__ import annotations

import math
from typing import Any

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.bases.inducing import members
from bo_stream.linalg import safe_cholesky, solve_lower

TOLERANCE = 1e-10
"""Part of the prior variance below which a point adds nothing that arithmetic can tell."""

BETTER = 2.0
"""Least ratio of the conditional variances of a point that enters and the one that it replaces."""

SWAPS = 32
"""Most points replaced at a time."""


@torch.no_grad()
def correlation(kernel: Kernel, A: Tensor, B: Tensor) -> Tensor:
    """Compute ``k(a, b) / √(k(a, a) k(b, b))``, ``n x d`` and ``m x d`` to ``n x m``.

    Of a batch of kernels the least: points are similar only if they are so to every kernel. A point
    without prior variance is correlated with nothing. Cost O(n m d) a kernel.
    """
    raw: Tensor = kernel(A, B).to_dense()
    first, second = (kernel(X, diag=True) for X in (A, B))
    scale = (first.unsqueeze(-1) * second.unsqueeze(-2)).sqrt()
    values = torch.where(scale > 0.0, raw / scale, torch.zeros_like(raw))
    return values.flatten(0, -3).amin(0) if values.ndim > 2 else values


def first_apart(X: Tensor, kernel: Kernel, threshold: float) -> Tensor:
    """Select rows in order, each less correlated than a threshold with all selected before it.

    Returns their indices. Cost O(n²), and O(n) more for each one selected.
    """
    return first_unlike(correlation(kernel, X, X) >= threshold)


def first_unlike(alike: Tensor) -> Tensor:
    """Select rows in order, each similar to none selected before it, and return their indices.

    ``alike`` says which pairs are similar, ``n x n``, symmetric. Only rows that are similar to
    others are looked at one by one.
    """
    itself = torch.eye(len(alike), dtype=torch.bool, device=alike.device)
    free = (alike & ~itself).any(-1)
    accepted = ~free
    while bool(free.any()):
        i = int(free.to(torch.uint8).argmax())
        accepted[i] = True
        free &= ~alike[i]
        free[i] = False
    return torch.nonzero(accepted).flatten()


@torch.no_grad()
def greedy_points(
    X: Tensor,
    kernel: Kernel,
    count: int,
    first: Tensor | None = None,
    tolerance: float = TOLERANCE,
) -> Tensor:
    """Select the pivots of a partial Cholesky factorisation of the prior covariance, ``M x d``.

    Each next point is where those before it leave most of the prior variance, in the mean over a
    batch of kernels. BoTorch's ``GreedyVarianceReduction`` makes the same choice, without given
    points. Cost O(n M²) time, O(n M) memory. [Chen2018, algorithm 1; Burt2020, section 4]

    Args:
        X: Candidates, ``n x d``.
        kernel: Of the covariance.
        count: Largest number M, those given included.
        first: Points given, ``k x d``; they come first in what is returned.
        tolerance: Stop when no candidate keeps this part of its prior variance.
    """
    given = X[:0] if first is None else first
    pool = torch.cat((given, X))
    if len(pool) == 0:
        return pool
    variance = kernel(pool, diag=True).reshape(-1, len(pool))
    left = torch.ones_like(variance)
    root = variance.new_zeros(len(variance), count, len(pool))
    chosen: list[int] = []
    for i in range(min(count, len(pool))):
        pivot = i if i < len(given) else int(left.mean(0).argmax())
        if i >= len(given) and float(left[:, pivot].mean()) <= tolerance:
            break
        chosen.append(pivot)
        covariance = kernel(pool[pivot : pivot + 1], pool).to_dense().reshape(variance.shape)
        own, scale = left[:, pivot : pivot + 1], (variance * variance[:, pivot : pivot + 1]).sqrt()
        row = covariance / scale - (root[:, :i, pivot].unsqueeze(-2) @ root[:, :i]).squeeze(-2)
        row = torch.where(own > TOLERANCE, row / own.clamp_min(TOLERANCE).sqrt(), 0.0)
        root[:, i] = row
        left = (left - row.square()).clamp_min(0.0)
        left[:, pivot] = 0.0
    return pool[chosen]


@torch.no_grad()
def capped(Z: Tensor, wanted: Tensor, kernel: Kernel, cap: int) -> Tensor:
    """Select at most ``cap`` of the points that an allocator wants, ``M' x d``, given those before.

    Old points that are still wanted stay, then new ones enter while there is room. Beyond that a
    new point enters only in place of the old one that the others explain best, and only if its own
    conditional variance is more than ``BETTER`` times that one's. Cost O(M³) once where the cap
    binds, and O(M²) an exchange.
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
    return _exchanged(kept, new, factor, kernel)


def _exchanged(points: Tensor, waiting: Tensor, factor: Tensor, kernel: Kernel) -> Tensor:
    """Exchange selected points for waiting ones, ``M x d``; those that entered come last.

    The inverse of the selected points' correlation matrix, of which ``factor`` is the root, changes
    by rank two an exchange. Cost O(M³ + M² n), and O(M² + M n) an exchange.
    """
    points, order = points.clone(), list(range(len(points)))
    inverse, cross = torch.cholesky_inverse(factor), correlation(kernel, points, waiting)
    left = 1.0 - solve_lower(factor, cross).square().sum(-2)  # conditional variances of the waiting
    for _ in range(min(SWAPS, len(waiting))):
        own = inverse.diagonal().reciprocal()
        i, j = int(own.argmin()), int(left.argmax())
        if not float(left[j]) > BETTER * float(own[i]):
            break
        column, precision = inverse[i].clone(), float(inverse[i, i])  # i leaves
        left += (column @ cross).square() / precision
        inverse.addr_(column, column, alpha=-1.0 / precision)
        inverse[i] = inverse[:, i] = 0.0
        cross[i] = 0.0
        gain, variance = inverse @ cross[:, j], float(left[j])  # j enters in its place
        alike = correlation(kernel, waiting[j : j + 1], waiting)[0]
        left -= (alike - gain @ cross).square() / variance
        left[j] = -math.inf
        inverse.addr_(gain, gain, alpha=1.0 / variance)
        inverse[i] = inverse[:, i] = -gain / variance
        inverse[i, i] = 1.0 / variance
        cross[i], points[i] = alike, waiting[j]
        order.remove(i)
        order.append(i)
    return points[order]


def shortest_lengthscale(kernel: Kernel) -> Tensor:
    """Return the least of all lengthscales in a kernel and its parts, a scalar.

    Raises:
        UnsupportedError: It has none.
    """
    found = [part.lengthscale.detach().min() for part in _with_lengthscale(kernel)]
    if not found:
        raise UnsupportedError(
            f"{type(kernel).__name__} has no lengthscale that a resolution could follow. Leave out "
            "per_lengthscale and give the resolution in units of the inputs."
        )
    return torch.stack(found).min()


def norms_in_lengthscales(kernel: Kernel, offsets: Tensor) -> list[Tensor]:
    """Compute the norms of ``n x d`` offsets, each input relative to its lengthscale.

    Returns:
        ``batch x n`` for each part of the kernel that has a lengthscale, of the inputs that it is
        of.
    """
    return [
        torch.linalg.vector_norm(
            (offsets if part.active_dims is None else offsets[..., part.active_dims])
            / part.lengthscale.detach(),
            dim=-1,
        )
        for part in _with_lengthscale(kernel)
    ]


def _with_lengthscale(kernel: Kernel) -> list[Any]:
    return [part for part in kernel.modules() if isinstance(part, Kernel) and part.has_lengthscale]
