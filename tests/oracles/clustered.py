"""Clustered data, and the divergence between two normals."""

from __future__ import annotations

import torch
from torch import Tensor


def moved_to_nearest(X: Tensor, Z: Tensor) -> Tensor:
    """Each input replaced by the nearest centre, ``... x n x d``. [Terenin2024, eq. 22]"""
    squares = (X.unsqueeze(-2) - Z).square().sum(-1)
    return Z[squares.argmin(-1)]


def kl_of_normals(m1: Tensor, C1: Tensor, m2: Tensor, C2: Tensor) -> Tensor:
    """KL(N(m1, C1) ‖ N(m2, C2)) of vectors."""
    move = m2 - m1
    misfit = move @ torch.linalg.solve(C2, move) + torch.linalg.solve(C2, C1).trace()
    return 0.5 * (misfit - len(m1) + torch.logdet(C2) - torch.logdet(C1))
