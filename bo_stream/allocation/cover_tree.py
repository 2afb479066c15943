"""The cover tree: centres with a guaranteed separation and resolution on every level."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.allocation.allocator import Allocator, check_points, shortest_lengthscale
from bo_stream.tensors import map_tensors, zip_tensors

NEIGHBOURHOOD = 4.05
"""Distance of neighbours, in radii: a little more than four, for rounding errors.

The children of two parents can be neighbours only if the parents are: two radii of the parents and
four of the children, which are half as long, are four of the parents. The paper's narrower
``4 (1 − 2^(l−L))`` is two at the last level but one, where children half a radius apart can have
parents two and a half radii apart, so that it loses some.
"""

_REACH = 1.51
"""Distance within which a child's ball can meet its parent's, in radii of the parent."""

_PAIRS = 1 << 21
"""Number of pairs, about, that :meth:`Ragged.pairs_by_parts` makes at a time."""

_ROWS = 1024
"""Number of points compared with all centres at a time, where the tree does not help."""


class CoverTree(Allocator):
    """Centres within ``resolution`` of every point inserted and more than ``resolution`` apart.

    The same holds, with a radius twice as long, on every level above the finest. Built top-down and
    breadth first, with lists of the neighbours of each centre, so that a point is compared with a
    bounded number of centres on each level: near-linear time in low (intrinsic) dimensions. Points
    may be inserted at any time; centres stay where they are.

    - Memory: the centres of all levels and their neighbours; points are not stored.
    - Cost: O(n log(extent / resolution)) for n points, with a factor that grows exponentially in
      the intrinsic dimension.
    - Source: [Terenin2024, algorithm 9, eq. 20], with a wider neighbourhood on the last levels
      (``NEIGHBOURHOOD``), without which separation can fail.

    Args:
        resolution: Largest distance from a point to its centre, in units of the inputs.
        average: Set a new centre to the mean of the points around it where it stays apart from the
            others: fewer centres. [Terenin2024, algorithm 9, lines 9 and 10, corrected]
        voronoi: Assign each point to its nearest centre, not to the first that covers it: more even
            families. [line 17]
        per_lengthscale: As an allocator, select the coarsest level whose radius is at most this
            fraction of the kernel's shortest lengthscale, adding finer levels where there is none;
            the level of ``resolution`` if omitted.

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

        It starts with the centres of the level above. Points inserted from now on are covered by
        it; earlier ones, which are not stored, only as the level above covers them.

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

    def fresh(self) -> Self:
        """Return an empty tree of the same settings."""
        return type(self)(self.resolution, self.average, self.voronoi, self.per_lengthscale)

    def coarsened(self, resolution: float) -> Self:
        """Return a tree of the coarser levels, down to :meth:`level`'s; errors as there."""
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

    def to(self, like: Tensor) -> Self:
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
        check_points("X", X, self._levels[0].centres if self._levels else X)
        if len(X) == 0:
            return self
        levels = list(self._levels)
        if not levels:  # a root at the mean, and empty levels down to the resolution
            root = X.mean(0)
            extent = float(_squared_distances(X, root).max())
            radii = [self.resolution]
            while extent > radii[0] * radii[0]:
                radii.insert(0, 2.0 * radii[0])
            empty = [CoverLevel.empty(radius, X) for radius in radii[1:]]
            levels = [CoverLevel.of_root(root, radii[0]), *empty]
        root = levels[0].centres[0]
        extent = float(_squared_distances(X, root).max())
        while extent > levels[0].radius * levels[0].radius:  # until the root's ball holds X
            levels = [CoverLevel.of_root(root, 2.0 * levels[0].radius), *levels]
        parents = torch.zeros(len(X), dtype=torch.long, device=X.device)
        for depth in range(1, len(levels)):
            found = self._covering(levels, depth, X, parents, self.voronoi)
            free = found < 0
            if bool(free.any()):
                points = Members(X[free], parents[free])
                levels[depth] = settle(levels[depth], levels[depth - 1], points, self.average)
                found = self._covering(levels, depth, X, parents, self.voronoi)
            parents = found
        self._levels = levels
        return self

    @torch.no_grad()
    def assign(self, X: Tensor) -> Tensor:
        """Return the index of the nearest of ``centres``, ``n x d -> n``. [Terenin2024, eq. 22].

        Args:
            X: Inserted points or others. Cost O(1) a point near to inserted ones, O(M) for others.

        Raises:
            ValueError: Nothing was inserted yet.
            BotorchTensorDimensionError: X is not a matrix of the tree's width.
            InputDataError: X has a dtype or device that is not the tree's, NaN or infinity.
        """
        self._check_not_empty()
        check_points("X", X, self._levels[0].centres)
        root = self._levels[0]
        inside = _squared_distances(X, root.centres[0]) <= root.radius * root.radius
        found = inside.long() - 1
        for depth in range(1, len(self._levels)):
            known = found >= 0
            found[known] = self._covering(self._levels, depth, X[known], found[known], True)
        centres = self._levels[-1].centres
        for rows in torch.nonzero(found < 0).flatten().split(_ROWS):
            distances = torch.cdist(X[rows], centres, compute_mode="donot_use_mm_for_euclid_dist")
            found[rows] = distances.argmin(-1)
        return found

    def _covering(
        self, levels: list[CoverLevel], depth: int, X: Tensor, parents: Tensor, nearest: bool
    ) -> Tensor:
        """Return a centre whose ball holds each point, the nearest or the oldest; −1 without one.

        The centres that can hold a parent's points are cached until there are new centres.
        """
        level, above = levels[depth], levels[depth - 1]
        cached = self._reaches.get(depth)
        if cached is None or cached[0] is not level or cached[1] is not above:
            cached = (level, above, level.reach(above))
            self._reaches = {**self._reaches, depth: cached}  # copies of the tree have their own
        pairs = []
        for part, position, centre in cached[2].pairs_by_parts(parents):
            where = position + part.start
            square = _squared_distances(X[where], level.centres[centre])
            near = square <= level.radius * level.radius
            pairs.append((where[near], centre[near], square[near]))
        best = X.new_full((len(X),), torch.inf)
        if nearest:
            for where, _, square in pairs:
                best.scatter_reduce_(0, where, square, "amin")
        found = parents.new_full((len(X),), len(level))
        for where, centre, square in pairs:
            hit = square <= best[where]
            found.scatter_reduce_(0, where[hit], centre[hit], "amin")
        return torch.where(found < len(level), found, -1)

    def _check_not_empty(self) -> None:
        if not self._levels:
            raise ValueError("Expected a tree of some points, got an empty one. Use insert first.")


@dataclass(frozen=True)
class CoverLevel:
    """Centres more than ``radius`` apart, whose balls cover all points inserted.

    Attributes:
        radius: Of the balls.
        centres: ``M x d``.
        parents: Index of each centre's parent, whose ball holds it, in the level above, ``M``.
        neighbours: For each centre the centres within ``NEIGHBOURHOOD`` radii, itself included.
    """

    radius: float
    centres: Tensor
    parents: Tensor
    neighbours: Ragged

    @classmethod
    def of_root(cls, centre: Tensor, radius: float) -> CoverLevel:
        """Make a level of one ball, around ``d`` coordinates."""
        zero = torch.zeros(1, dtype=torch.long, device=centre.device)
        return cls(radius, centre.unsqueeze(0), zero, Ragged.of(zero, zero, 1))

    @classmethod
    def empty(cls, radius: float, like: Tensor) -> CoverLevel:
        """Make a level of no balls."""
        none = torch.zeros(0, dtype=torch.long, device=like.device)
        return cls(radius, like.new_zeros(0, like.shape[-1]), none, Ragged.of(none, none, 0))

    def to(self, like: Tensor) -> CoverLevel:
        """Move the level to a tensor's device, and its centres to the dtype."""
        return map_tensors(self, lambda t: t.to(like if t.is_floating_point() else like.device))

    def __len__(self) -> int:
        return len(self.centres)

    def with_centres(self, centres: Tensor, parents: Tensor, above: CoverLevel) -> CoverLevel:
        """Add centres, each in its parent's ball and apart from all others.

        Cost O(new centres), and a sort of the lists of neighbours.
        """
        first = len(self)
        everyone = torch.cat((self.centres, centres))
        all_parents = torch.cat((self.parents, parents))
        new = torch.arange(first, len(everyone), device=parents.device)
        among = Members(everyone, all_parents)
        rows, items = _near_pairs(among.only(new), among, above, NEIGHBOURHOOD * self.radius)
        rows = new[rows]
        older = items < first
        present = torch.arange(first, device=parents.device)
        former_rows, former_items = self.neighbours.pairs(present)
        neighbours = Ragged.of(
            torch.cat((former_rows, items[older], rows)),
            torch.cat((former_items, rows[older], items)),
            len(everyone),
        )
        return CoverLevel(self.radius, everyone, all_parents, neighbours)

    def reach(self, above: CoverLevel) -> Ragged:
        """List for each centre of the level above the centres here whose balls can meet its own."""
        own = torch.arange(len(above), device=self.parents.device)
        centres = Members(self.centres, self.parents)
        rows, items = _near_pairs(
            Members(above.centres, own), centres, above, _REACH * above.radius
        )
        return Ragged.of(rows, items, len(above))


@dataclass(frozen=True)
class Ragged:
    """M lists of indices: list i is ``items[offsets[i] : offsets[i + 1]]``.

    Attributes:
        offsets: ``M + 1``, ascending from 0.
        items: All lists in a row.
    """

    offsets: Tensor
    items: Tensor

    @classmethod
    def of(cls, rows: Tensor, items: Tensor, count: int) -> Ragged:
        """Group pairs of a list's number and an item into ``count`` lists. Cost O(n log n).

        Items of a list keep their order.
        """
        order = torch.argsort(rows, stable=True)
        sizes = torch.bincount(rows, minlength=count)
        return cls(torch.cat((sizes.new_zeros(1), sizes.cumsum(0))), items[order])

    def pairs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return each item of some lists, after the position of its list in ``rows``, ascending."""
        begins = self.offsets[rows]
        sizes = self.offsets[rows + 1] - begins
        where = torch.repeat_interleave(sizes)
        within = torch.arange(len(where), device=where.device) - (sizes.cumsum(0) - sizes)[where]
        return where, self.items[begins[where] + within]

    def pairs_by_parts(self, rows: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield slices of the rows with their :meth:`pairs`, about ``_PAIRS`` each."""
        ends = (self.offsets[rows + 1] - self.offsets[rows]).cumsum(0)
        parts = torch.unique_consecutive(ends // _PAIRS, return_counts=True)[1].tolist()
        begin = 0
        for size in parts:
            part = slice(begin, begin + size)
            yield part, *self.pairs(rows[part])
            begin += size


def _near_pairs(
    points: Members, centres: Members, above: CoverLevel, distance: float
) -> tuple[Tensor, Tensor]:
    """Pair points, ascending, with centres in a distance: children of their parents' neighbours."""
    numbers = torch.arange(len(centres), device=centres.parents.device)
    families = Ragged.of(centres.parents, numbers, len(above))
    rows, items = [numbers[:0]], [numbers[:0]]
    for part, position, aunt in above.neighbours.pairs_by_parts(points.parents):
        which, cousin = families.pairs(aunt)
        where = position[which] + part.start
        near = _squared_distances(points.X[where], centres.X[cousin]) <= distance * distance
        rows.append(where[near])
        items.append(cousin[near])
    return torch.cat(rows), torch.cat(items)


def _squared_distances(A: Tensor, B: Tensor) -> Tensor:
    """Compute distances between rows, ``n x d`` each; symmetric to the last bit."""
    return (A - B).square().sum(-1)


@dataclass(frozen=True)
class Members:
    """Points in balls of the level above: uncovered ones, or centres chosen in a round.

    Attributes:
        X: ``n x d``.
        parents: The centre above whose ball holds each point, ``n``.
    """

    X: Tensor
    parents: Tensor

    def __len__(self) -> int:
        return len(self.X)

    def only(self, which: Tensor) -> Members:
        """Select some of the points."""
        return Members(self.X[which], self.parents[which])


def settle(level: CoverLevel, above: CoverLevel, points: Members, average: bool) -> CoverLevel:
    """Add centres to a level until its balls cover points that have no centre within a radius yet.

    In every round each parent proposes its first uncovered point; of proposals nearer than a radius
    the earlier one stands. Such rounds are Algorithm 9's loop over parents in another order, on
    which its guarantees do not depend. [Terenin2024, algorithm 9, lines 5 to 14] To ``average`` is
    to move a centre to the mean of the uncovered points around it, where it stays apart from the
    others.
    """
    settled, radius = Members(level.centres, level.parents), level.radius
    while len(points) > 0:
        chosen = _proposals(points, above, radius)
        if average:
            chosen = _moved(chosen, points, settled, above, radius)
        settled = zip_tensors(lambda old, new: torch.cat((old, new)), settled, chosen)
        parents, family = torch.unique(points.parents, return_inverse=True)
        nearby = Ragged.of(*_rivals(parents, chosen.parents, above), len(parents))
        left = torch.ones(len(points), dtype=torch.bool, device=family.device)
        for part, position, centre in nearby.pairs_by_parts(family):
            square = _squared_distances(points.X[part][position], chosen.X[centre])
            left[position[square <= radius * radius] + part.start] = False
        points = points.only(left)
    return level.with_centres(settled.X[len(level) :], settled.parents[len(level) :], above)


def _proposals(points: Members, above: CoverLevel, radius: float) -> Members:
    """Choose the first point of every family, but for points too near to an earlier one."""
    parents, family = torch.unique(points.parents, return_inverse=True)
    numbers = torch.arange(len(points), device=family.device)
    first = numbers.new_full((len(parents),), len(points))
    first = first.scatter_reduce(0, family, numbers, "amin")
    proposed = Members(points.X[first], parents)
    one, other = _rivals(parents, parents, above)
    near = _squared_distances(proposed.X[one], proposed.X[other]) <= radius * radius
    stands = torch.ones(len(parents), dtype=torch.bool, device=parents.device)
    stands[one[near & (first[other] < first[one])]] = False
    return proposed.only(stands)


def _rivals(parents: Tensor, others: Tensor, above: CoverLevel) -> tuple[Tensor, Tensor]:
    """Pair positions in ``parents`` with positions in ``others`` (each once) of neighbours."""
    position = parents.new_full((len(above),), -1)
    position[others] = torch.arange(len(others), device=parents.device)
    one, neighbour = above.neighbours.pairs(parents)
    known = position[neighbour] >= 0
    return one[known], position[neighbour[known]]


def _moved(
    chosen: Members, points: Members, settled: Members, above: CoverLevel, radius: float
) -> Members:
    """Move chosen centres to the means of their families' points within a radius.

    A centre stays where its mean is within a radius of a settled or another chosen centre.
    """
    position = chosen.parents.new_full((len(above),), -1)
    position[chosen.parents] = torch.arange(len(chosen), device=position.device)
    family = position[points.parents]
    points, family = points.only(family >= 0), family[family >= 0]
    near = _squared_distances(points.X, chosen.X[family]) <= radius * radius
    sums = torch.zeros_like(chosen.X).index_add(0, family[near], points.X[near])
    means = sums / torch.bincount(family[near], minlength=len(sums)).unsqueeze(-1)
    taken, _ = _near_pairs(Members(means, chosen.parents), settled, above, radius)
    one, other = _rivals(chosen.parents, chosen.parents, above)
    one, other = one[one != other], other[one != other]
    square = radius * radius
    near = (_squared_distances(means[one], chosen.X[other]) <= square) | (
        _squared_distances(means[one], means[other]) <= square
    )
    free = torch.ones(len(means), dtype=torch.bool, device=means.device)
    free[taken] = False
    free[one[near]] = False
    return Members(torch.where(free.unsqueeze(-1), means, chosen.X), chosen.parents)
