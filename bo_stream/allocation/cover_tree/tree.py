"""The cover tree: centres with a guaranteed separation and resolution on every level."""

from __future__ import annotations

import math
from typing import Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.allocation.cover_tree.level import (
    CoverLevel,
    Members,
    Ragged,
    settle,
    squared_distances,
)
from bo_stream.allocation.selection import shortest_lengthscale

ROWS = 1024
"""Number of points compared with all centres at a time, where the tree does not help."""


class CoverTree(Allocator):
    """Centres within ``resolution`` of every point inserted and more than ``resolution`` apart.

    The same holds, with a radius twice as long, on every level above the finest. Built top-down and
    breadth first, with lists of the neighbours of each centre, so that a point is compared with a
    bounded number of centres on each level: near-linear time in low (intrinsic) dimensions. Points
    may be inserted at any time; centres stay where they are.

    - Memory: the centres of all levels and their neighbours; points are not kept.
    - Cost: O(n log(extent / resolution)) for n points, with a factor that grows exponentially in
      the intrinsic dimension.
    - Source: Terenin et al. (2024), algorithm 9, with a wider neighbourhood on the last levels
      (``bo_stream.allocation.cover_tree.level.NEIGHBOURHOOD``), without which separation can fail.

    Args:
        resolution: Largest distance from a point to its centre, in units of the inputs.
        average: Set a new centre to the mean of the points around it where it stays apart from the
            others: fewer centres. [Terenin2024, algorithm 9, lines 9 and 10]
        voronoi: Assign each point to its nearest centre, not to the first that covers it: more even
            families. [line 17]
        per_lengthscale: As an allocator, select the coarsest level whose radius is at most this
            part of the kernel's shortest lengthscale, adding finer levels where there is none; the
            level of ``resolution`` if omitted.

    Raises:
        ValueError: A length is not positive and finite.

    Example:
        >>> tree = CoverTree(0.1).insert(X)
        >>> tree.centres, tree.assign(X)
    """

    def __init__(
        self,
        resolution: float,
        average: bool = True,
        voronoi: bool = True,
        per_lengthscale: float | None = None,
    ) -> None:
        for name, value in (("resolution", resolution), ("per_lengthscale", per_lengthscale)):
            if value is not None and not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"Expected {name} to be positive and finite, got {value}.")
        self.resolution = resolution
        self.average = average
        self.voronoi = voronoi
        self.per_lengthscale = per_lengthscale
        self._levels: list[CoverLevel] = []
        self._reaches: dict[int, tuple[CoverLevel, CoverLevel, Ragged]] = {}

    @property
    def levels(self) -> list[Tensor]:
        """Centres of each level, ``M x d``, coarse to fine."""
        return [level.centres for level in self._levels]

    @property
    def radii(self) -> list[float]:
        """Separation and resolution of each level, coarse to fine; the last is ``resolution``."""
        return [level.radius for level in self._levels]

    @property
    def centres(self) -> Tensor:
        """Centres of the finest level, ``M x d``, in the order in which they were made.

        Raises:
            ValueError: Nothing was inserted yet.
        """
        self._check_not_empty()
        return self._levels[-1].centres

    def level(self, resolution: float) -> Tensor:
        """Return the coarsest level of a radius of at most ``resolution``: its centres, ``M x d``.

        Raises:
            ValueError: Nothing was inserted yet, or even the finest level is coarser.
        """
        return self.coarsened(resolution).centres

    @torch.no_grad()
    def refine(self) -> Self:
        """Add a level of half the radius, in place, which becomes the finest.

        It begins with the centres of the level above. Points inserted from now on are covered by
        it; earlier ones, which are not kept, only as the level above covers them.

        Raises:
            ValueError: Nothing was inserted yet.
        """
        self._check_not_empty()
        finest = self._levels[-1]
        self.resolution = finest.radius / 2.0
        empty = CoverLevel.empty(self.resolution, finest.centres)
        own = torch.arange(len(finest), device=finest.parents.device)
        self._levels = [*self._levels, empty.with_centres(finest.centres, own, finest)]
        return self

    def fresh(self) -> CoverTree:
        """Return an empty tree of the same settings."""
        return CoverTree(self.resolution, self.average, self.voronoi, self.per_lengthscale)

    def coarsened(self, resolution: float) -> CoverTree:
        """Return a tree of the coarser levels, the finest as :meth:`level` chooses it.

        Raises:
            ValueError: Nothing was inserted yet, or even the finest level is coarser.
        """
        self._check_not_empty()
        coarse = [level for level in self._levels if level.radius > resolution]
        if len(coarse) == len(self._levels):
            raise ValueError(
                f"Expected resolution of at least {self.resolution:g}, that of the finest level, "
                f"got {resolution:g}. Use refine before the points are inserted."
            )
        tree = self.fresh()
        tree._levels = self._levels[: len(coarse) + 1]
        tree.resolution = tree._levels[-1].radius
        return tree

    def to(self, like: Tensor) -> CoverTree:
        """Return the tree in another dtype, on another device."""
        tree = self.fresh()
        tree._levels = [level.to(like) for level in self._levels]
        return tree

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        if not self._levels:
            self.insert(Z)
        if not self._levels and len(X_new) == 0:
            return Z
        if self.per_lengthscale is None:
            return self.insert(X_new).centres
        wanted = self.per_lengthscale * float(shortest_lengthscale(kernel))
        if not self._levels:
            self.insert(X_new[:1])
        while self.resolution > wanted:
            self.refine()
        return self.insert(X_new).level(wanted)

    @torch.no_grad()
    def insert(self, X: Tensor) -> Self:
        """Cover more points, in place.

        Args:
            X: ``n x d``; n = 0 changes nothing.

        Raises:
            BotorchTensorDimensionError: X is not a matrix of the tree's width.
            InputDataError: X has a dtype or device that is not the tree's, NaN or infinity.
        """
        self._check(X)
        if len(X) == 0:
            return self
        levels = _raised(list(self._levels) or self._first_levels(X), X)
        parents = torch.zeros(len(X), dtype=torch.long, device=X.device)
        for depth in range(1, len(levels)):
            levels[depth], parents = self._taken(levels, depth, X, parents)
        self._levels = levels
        return self

    @torch.no_grad()
    def assign(self, X: Tensor) -> Tensor:
        """Return the index of the nearest of ``centres``, ``n x d -> n``.

        Args:
            X: Inserted points or others. Cost O(1) a point near to inserted ones, O(M) for others.

        Raises:
            ValueError: Nothing was inserted yet.
            BotorchTensorDimensionError: X is not a matrix of the tree's width.
            InputDataError: X has a dtype or device that is not the tree's, NaN or infinity.
        """
        self._check_not_empty()
        self._check(X)
        root = self._levels[0]
        inside = squared_distances(X, root.centres[0]) <= root.radius * root.radius
        found = inside.long() - 1
        for depth in range(1, len(self._levels)):
            known = found >= 0
            reach = self._reach(self._levels, depth)
            found[known] = nearest(self._levels[depth], reach, X[known], found[known])
        centres = self._levels[-1].centres
        for rows in torch.nonzero(found < 0).flatten().split(ROWS):
            distances = torch.cdist(X[rows], centres, compute_mode="donot_use_mm_for_euclid_dist")
            found[rows] = distances.argmin(-1)
        return found

    def _first_levels(self, X: Tensor) -> list[CoverLevel]:
        root = X.mean(0)
        extent = float(squared_distances(X, root).max())
        radii = [self.resolution]
        while extent > radii[0] * radii[0]:
            radii.insert(0, 2.0 * radii[0])
        first = CoverLevel.of_root(root, radii[0])
        return [first, *(CoverLevel.empty(radius, X) for radius in radii[1:])]

    def _taken(
        self, levels: list[CoverLevel], depth: int, X: Tensor, parents: Tensor
    ) -> tuple[CoverLevel, Tensor]:
        """Return a level that covers all points, and the centre that each belongs to."""
        find = nearest if self.voronoi else first_covering
        level, above = levels[depth], levels[depth - 1]
        found = find(level, self._reach(levels, depth), X, parents)
        free = found < 0
        if not bool(free.any()):
            return level, found
        level = settle(level, above, Members(X[free], parents[free]), self.average)
        return level, find(level, self._reach([*levels[:depth], level], depth), X, parents)

    def _reach(self, levels: list[CoverLevel], depth: int) -> Ragged:
        """Return :meth:`CoverLevel.reach` of a level, kept until the level gets new centres."""
        level, above = levels[depth], levels[depth - 1]
        kept = self._reaches.get(depth)
        if kept is None or kept[0] is not level or kept[1] is not above:
            kept = (level, above, level.reach(above))
            self._reaches = {**self._reaches, depth: kept}  # copies of the tree keep their own
        return kept[2]

    def _check_not_empty(self) -> None:
        if not self._levels:
            raise ValueError("Expected a tree of some points, got an empty one. Use insert first.")

    def _check(self, X: Tensor) -> None:
        if X.ndim != 2 or (self._levels and X.shape[-1] != self._levels[0].centres.shape[-1]):
            width = self._levels[0].centres.shape[-1] if self._levels else "d"
            raise BotorchTensorDimensionError(
                f"Expected X of shape `n x {width}`, got {tuple(X.shape)}."
            )
        like = self._levels[0].centres if self._levels else X
        if X.dtype != like.dtype or X.device != like.device or not X.is_floating_point():
            raise InputDataError(
                f"Expected X of a floating dtype and on the device of the tree ({like.dtype}, "
                f"{like.device}), got {X.dtype} on {X.device}."
            )
        if not bool(X.isfinite().all()):
            raise InputDataError("Expected finite X, got NaN or infinity. Drop those rows.")


def _raised(levels: list[CoverLevel], X: Tensor) -> list[CoverLevel]:
    """Add levels above the root until its ball holds the points."""
    root = levels[0].centres[0]
    extent = float(squared_distances(X, root).max())
    while extent > levels[0].radius * levels[0].radius:
        levels = [CoverLevel.of_root(root, 2.0 * levels[0].radius), *levels]
    return levels


def nearest(level: CoverLevel, reach: Ragged, X: Tensor, parents: Tensor) -> Tensor:
    """Return the nearest centre whose ball holds each point, or −1: ``n``."""
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
    """Return the oldest centre whose ball holds each point, or −1: ``n``."""
    found = parents.new_full((len(X),), len(level))
    for where, centre, square in _candidates(level, reach, X, parents):
        hit = square <= level.radius * level.radius
        found.scatter_reduce_(0, where[hit], centre[hit], "amin")
    return torch.where(found < len(level), found, -1)


def _candidates(
    level: CoverLevel, reach: Ragged, X: Tensor, parents: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """List points, centres that cover them, and the square of their distance."""
    parts = []
    for part, position, centre in reach.pairs_by_parts(parents):
        where = position + part.start
        square = squared_distances(X[where], level.centres[centre])
        near = square <= level.radius * level.radius
        parts.append((where[near], centre[near], square[near]))
    return parts
