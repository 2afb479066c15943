"""Statistics of few observations as what they are: of low rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.linalg import solve_lower
from bo_stream.models.memory import Whitened

SHARE = 4
"""A root pays where it has at most one column for so many features."""

_LEFT = 1e-15
"""Part of the trace that counts as nothing."""


@dataclass(frozen=True)
class ThinRoot:
    """Whitened statistics with ``gram = G Gᵀ`` and ``moment = G b``.

    Attributes:
        G: ``... x m x r x k``.
        b: ``... x m x k x 2``.
    """

    G: Tensor
    b: Tensor

    def at_noise(self, level: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Root of the evidence's gram and its moment's coordinates, at an actual noise level.

        Args:
            level: ``... x m``.
            residual: Combination of [Y, 1] to explain, ``... x m x 2 x 1``.
        """
        scale = level.sqrt()[..., None, None]
        return self.G / scale, self.b @ residual / scale


def thin_root(statistics: Whitened) -> ThinRoot | None:
    """By Cholesky with pivots. Cost O(r k²) for k columns; None where it would not pay."""
    most = statistics.gram.shape[-1] // SHARE
    if bool((statistics.count > most).any()):
        return None
    G, pivots = _pivoted(statistics.gram, most)
    if G.shape[-1] > most:
        return None
    corner, moment = (_rows(matrix, pivots) for matrix in (G, statistics.moment))
    used_up = corner.diagonal(dim1=-2, dim2=-1) == 0.0
    return ThinRoot(G, solve_lower(corner.tril() + torch.diag_embed(used_up.to(G)), moment))


def _pivoted(matrix: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Columns ``... x r x k`` and pivots ``... x k``; one column more than ``most``: no end yet.

    Batch elements of lower rank than others get columns of zeros.
    """
    left = matrix.diagonal(dim1=-2, dim2=-1).clone()
    nothing = _LEFT * left.sum(-1, keepdim=True)
    G = matrix.new_zeros(*matrix.shape[:-1], most + 1)
    pivots = torch.zeros(*matrix.shape[:-2], most + 1, dtype=torch.long, device=matrix.device)
    for k in range(most + 1):
        largest, pivot = left.max(-1, keepdim=True)
        if bool((largest <= nothing).all()):
            return G[..., :k], pivots[..., :k]
        known = (G[..., :k] @ _rows(G[..., :k], pivot).mT).squeeze(-1)
        column = (_rows(matrix, pivot).squeeze(-2) - known) / largest.clamp_min(nothing).sqrt()
        G[..., k] = torch.where(largest > nothing, column, 0.0)
        pivots[..., k] = pivot.squeeze(-1)
        left = (left - G[..., k].square()).scatter(-1, pivot, 0.0)
    return G, pivots


def _rows(matrix: Tensor, index: Tensor) -> Tensor:
    """Some rows of each matrix, ``... x k x c``."""
    return matrix.gather(-2, index.unsqueeze(-1).expand(*index.shape, matrix.shape[-1]))
