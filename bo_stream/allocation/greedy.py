"""Greedy variance: the next inducing point is where the others leave most variance."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

TOLERANCE = 1e-10
"""Part of the prior variance below which a point adds nothing that arithmetic can tell."""


@torch.no_grad()
def greedy_points(
    X: Tensor,
    kernel: Kernel,
    count: int,
    first: Tensor | None = None,
    tolerance: float = TOLERANCE,
) -> Tensor:
    """Pivots of a partial Cholesky factorisation of the prior covariance, ``M x d``.

    Of a batch of kernels the mean of the variances left, in parts of the prior variance, decides.
    BoTorch's ``GreedyVarianceReduction`` makes the same choice, without given points. Cost
    O(n M²) time, O(n M) memory. [Chen2018, algorithm 1; Burt2020, section 4]

    Args:
        X: Candidates, ``n x d``.
        kernel: Of the covariance.
        count: Largest number M, those given included.
        first: Points that are in already, ``k x d``; they come first in what is returned.
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
        row = _next_row(pool, kernel, variance, root[:, :i], left, pivot)
        root[:, i] = row
        left = (left - row.square()).clamp_min(0.0)
        left[:, pivot] = 0.0
    return pool[chosen]


def _next_row(
    pool: Tensor, kernel: Kernel, variance: Tensor, root: Tensor, left: Tensor, pivot: int
) -> Tensor:
    """A pivot's row of the root of the correlation, ``b x n``; zero where it has nothing left."""
    covariance = kernel(pool[pivot : pivot + 1], pool).to_dense().reshape(variance.shape)
    scale = (variance * variance[:, pivot : pivot + 1]).sqrt()
    raw = covariance / scale - (root[..., pivot].unsqueeze(-2) @ root).squeeze(-2)
    own = left[:, pivot : pivot + 1]
    return torch.where(own > TOLERANCE, raw / own.clamp_min(TOLERANCE).sqrt(), 0.0)
