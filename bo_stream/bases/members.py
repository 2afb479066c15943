"""Which points are among others, and which are near the middle of all."""

from __future__ import annotations

import torch
from torch import Tensor

FAR = 1e4
"""Median distances from the middle beyond which a point spoils the others' kernel values."""


def members(points: Tensor, others: Tensor) -> Tensor:
    """Which rows of ``n x d`` are rows of ``n' x d`` too, ``n``. Cost O(n n' d), O(n n') memory."""
    same = torch.ones(len(points), len(others), dtype=torch.bool, device=points.device)
    for own, column in zip(points.unbind(-1), others.unbind(-1), strict=True):
        same &= own.unsqueeze(-1) == column
    return same.any(-1)


def central(Z: Tensor) -> Tensor:
    """Which of some points, ``M x d``, are at most ``FAR`` from the middle of all, ``M``.

    All of two, for neither is in the middle.
    """
    distances = torch.linalg.vector_norm(Z - Z.median(0).values, dim=-1)
    return (distances <= FAR * distances.median()) | (len(Z) < 3)
