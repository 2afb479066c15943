"""Which points are among others."""

from __future__ import annotations

import torch
from torch import Tensor


def members(points: Tensor, others: Tensor) -> Tensor:
    """Which rows of ``n x d`` are rows of ``n' x d`` too, ``n``. Cost O(n n' d), O(n n') memory."""
    same = torch.ones(len(points), len(others), dtype=torch.bool, device=points.device)
    for own, column in zip(points.unbind(-1), others.unbind(-1), strict=True):
        same &= own.unsqueeze(-1) == column
    return same.any(-1)
