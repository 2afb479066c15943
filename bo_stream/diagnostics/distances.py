"""How far points are from each other, and from what they stand for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROWS = 1024
"""Points compared with all others at a time."""


def separation(Z: Tensor) -> float:
    """Least distance between two of M points, infinite for fewer than two. Cost O(M² d).

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
    """Largest distance of an input to its nearest point, ``M x d`` and ``n x d``. Cost O(n M d)."""
    if len(X) == 0:
        return 0.0
    if len(Z) == 0:
        return math.inf
    return max(float(_distances(rows, Z).amin(-1).max()) for rows in X.split(ROWS))


def _distances(A: Tensor, B: Tensor) -> Tensor:
    return torch.cdist(A, B, compute_mode="donot_use_mm_for_euclid_dist")
