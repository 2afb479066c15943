"""Kernel matrices of points of which some are far away, with all digits of the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FAR = 100.0
"""Median distances from the middle beyond which points are evaluated apart from the others."""

Matrix = Callable[[Tensor, Tensor], Tensor]
"""``k(A, B)``, ``n x d`` and ``n' x d`` to ``... x n x n'``."""


def matrix_of_points(matrix: Matrix, Z: Tensor) -> Tensor:
    """``k(Z, Z)``, by blocks of points that are about as far from the middle.

    gpytorch squares distances from the mean of the points: one that is far from the others spoils
    all their values, in float32 from some thousand lengthscales on. Without such a point it is one
    block. Cost O(M² d).

    Args:
        matrix: Of the kernel.
        Z: ``M x d``.
    """
    groups = _groups(Z)
    if len(groups) < 2:
        return matrix(Z, Z)
    blocks: dict[tuple[int, int], Tensor] = {}
    for i, one in enumerate(groups):
        for j, other in enumerate(groups[i:], i):
            blocks[i, j] = matrix(Z[one], Z[other])
            blocks[j, i] = blocks[i, j].mT
    rows = [torch.cat([blocks[i, j] for j in range(len(groups))], -1) for i in range(len(groups))]
    places = torch.cat(groups).argsort()
    return torch.cat(rows, -2)[..., places, :][..., places]


def matrix_between(matrix: Matrix, A: Tensor, B: Tensor) -> Tensor:
    """``k(A, B)``, ``... x n x n'``, as :func:`matrix_of_points` where A is B.

    Else by blocks of those points that are the same for all batches, from whose mean the others are
    measured. If both differ in batches: as gpytorch has it. Cost O(n n' d).

    Args:
        matrix: Of the kernel.
        A: ``... x n x d``.
        B: ``... x n' x d``.
    """
    if B.ndim > 2:
        return matrix(A, B) if A.ndim > 2 else matrix_between(matrix, B, A).mT
    if A is B:
        return matrix_of_points(matrix, A)
    groups = _groups(B)
    if len(groups) < 2:
        return matrix(B, A).mT
    columns = torch.cat([matrix(B[group], A).mT for group in groups], -1)
    return columns[..., torch.cat(groups).argsort()]


def _groups(Z: Tensor) -> list[Tensor]:
    """Indices of the points near the middle, then of those near the middle of the others, ...

    Points that are not finite are near, so that each round takes some.
    """
    groups, left = [], torch.arange(len(Z), device=Z.device)
    while len(left) > 0:
        away = torch.linalg.vector_norm(Z[left] - Z[left].median(0).values, dim=-1)
        near = ~(away > FAR * away.median())
        groups.append(left[near])
        left = left[~near]
    return groups
