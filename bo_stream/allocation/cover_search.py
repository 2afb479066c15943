"""Which centre of a cover tree's level covers a point."""

from __future__ import annotations

import torch
from torch import Tensor

from bo_stream.allocation.cover_level import CoverLevel, squared_distances
from bo_stream.allocation.ragged import Ragged

ROWS = 1024
"""Points compared with all centres at a time, where the tree does not say which are near."""


def inside_root(root: CoverLevel, X: Tensor) -> Tensor:
    """0 for points in the root's ball, −1 for others."""
    near = squared_distances(X, root.centres[0]) <= root.radius * root.radius
    return near.long() - 1


def nearest(level: CoverLevel, reach: Ragged, X: Tensor, parents: Tensor) -> Tensor:
    """The nearest centre whose ball holds each point, or −1: ``n``."""
    best = X.new_full((len(X),), torch.inf)
    pairs = _candidates(level, reach, X, parents)
    for where, _, square in pairs:
        best.scatter_reduce_(0, where, square, "amin")
    found = parents.new_full((len(X),), len(level))
    for where, centre, square in pairs:
        hit = square <= best[where]
        found.scatter_reduce_(0, where[hit], centre[hit], "amin")
    return torch.where(best <= level.radius * level.radius, found, -1)


def first_covering(level: CoverLevel, reach: Ragged, X: Tensor, parents: Tensor) -> Tensor:
    """The oldest centre whose ball holds each point, or −1: ``n``."""
    found = parents.new_full((len(X),), len(level))
    for where, centre, square in _candidates(level, reach, X, parents):
        hit = square <= level.radius * level.radius
        found.scatter_reduce_(0, where[hit], centre[hit], "amin")
    return torch.where(found < len(level), found, -1)


def _candidates(
    level: CoverLevel, reach: Ragged, X: Tensor, parents: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Points, centres that may cover them, and the square of their distance."""
    parts = []
    for part, position, centre in reach.pairs_by_parts(parents):
        where = position + part.start
        square = squared_distances(X[where], level.centres[centre])
        near = square <= level.radius * level.radius
        parts.append((where[near], centre[near], square[near]))
    return parts


def nearest_of_all(centres: Tensor, X: Tensor) -> Tensor:
    """The nearest of all centres, however far, ``n x d -> n``. Cost O(n M)."""
    parts = [
        torch.cdist(rows, centres, compute_mode="donot_use_mm_for_euclid_dist").argmin(-1)
        for rows in X.split(ROWS)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long, device=X.device)
