"""A level of a cover tree: centres of balls of one radius, their neighbours, and new centres."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.tensors import map_tensors

NEIGHBOURHOOD = 4.05
"""Distance of neighbours, in radii: a little more than four, for rounding errors.

The children of two parents can be neighbours only if the parents are: two radii of the parents and
four of the children, which are half as long, are four of the parents. The paper's narrower
``4 (1 − 2^(l−L))`` is two at the last level but one, where children half a radius apart can have
parents two and a half radii apart, so that it loses some.
"""

REACH = 1.51
"""Distance within which a child's ball can meet its parent's, in radii of the parent."""

PAIRS = 1 << 21
"""Number of pairs, about, that :meth:`Ragged.pairs_by_parts` makes at a time."""


@dataclass(frozen=True)
class CoverLevel:
    """Centres more than ``radius`` apart, whose balls cover all points inserted.

    Attributes:
        radius: Of the balls.
        centres: ``M x d``.
        parents: Index of each centre's parent, whose ball holds it, in the level above, ``M``.
        neighbours: Of each centre the centres within ``NEIGHBOURHOOD`` radii, itself included.
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
        families = children(all_parents, len(above))
        distance = NEIGHBOURHOOD * self.radius
        rows, items = near_pairs(
            everyone[new], above.neighbours, parents, families, everyone, distance
        )
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
        everyone = torch.arange(len(above), device=self.parents.device)
        families = children(self.parents, len(above))
        distance = REACH * above.radius
        rows, items = near_pairs(
            above.centres, above.neighbours, everyone, families, self.centres, distance
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

        Items of a list keep the order that they come in.
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
        """Yield slices of the rows with their :meth:`pairs`, about ``PAIRS`` each."""
        ends = (self.offsets[rows + 1] - self.offsets[rows]).cumsum(0)
        parts = torch.unique_consecutive(ends // PAIRS, return_counts=True)[1].tolist()
        begin = 0
        for size in parts:
            part = slice(begin, begin + size)
            yield part, *self.pairs(rows[part])
            begin += size


def children(parents: Tensor, count: int) -> Ragged:
    """List the children of ``count`` parents."""
    return Ragged.of(parents, torch.arange(len(parents), device=parents.device), count)


def near_pairs(
    points: Tensor,
    neighbours: Ragged,
    parents: Tensor,
    families: Ragged,
    centres: Tensor,
    distance: float,
) -> tuple[Tensor, Tensor]:
    """Find centres within a distance of points, among the children of their parents' neighbours.

    Parents, neighbours and families (lists of children) are those of the level above. Returns
    positions in ``points``, ascending, and indices of centres.
    """
    rows, items = [parents.new_zeros(0)], [parents.new_zeros(0)]
    for part, position, aunt in neighbours.pairs_by_parts(parents):
        which, cousin = families.pairs(aunt)
        where = position[which] + part.start
        near = squared_distances(points[where], centres[cousin]) <= distance * distance
        rows.append(where[near])
        items.append(cousin[near])
    return torch.cat(rows), torch.cat(items)


def squared_distances(A: Tensor, B: Tensor) -> Tensor:
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
    the earlier one stands. Such rounds are Algorithm 9's loop over parents in another order, of
    which its guarantees do not depend. [Terenin2024, algorithm 9, lines 5 to 14] To ``average`` is
    to move a centre to the mean of the uncovered points around it, where it stays apart from the
    others.
    """
    centres, parents, radius = level.centres, level.parents, level.radius
    while len(points) > 0:
        chosen = _proposals(points, above, radius)
        if average:
            means = _means(points, chosen, len(above), radius)
            present, near = children(parents, len(above)), above.neighbours
            taken, _ = near_pairs(means, near, chosen.parents, present, centres, radius)
            chosen = _moved(chosen, means, taken, above, radius)
        centres = torch.cat((centres, chosen.X))
        parents = torch.cat((parents, chosen.parents))
        points = points.only(~_covered(points, chosen, above, radius))
    return level.with_centres(centres[len(level) :], parents[len(level) :], above)


def _proposals(points: Members, above: CoverLevel, radius: float) -> Members:
    """Choose the first point of every family, but for those too near to an earlier one."""
    parents, family = torch.unique(points.parents, return_inverse=True)
    numbers = torch.arange(len(points), device=family.device)
    first = numbers.new_full((len(parents),), len(points))
    first = first.scatter_reduce(0, family, numbers, "amin")
    proposed = Members(points.X[first], parents)
    one, other = _rivals(parents, parents, above)
    near = squared_distances(proposed.X[one], proposed.X[other]) <= radius * radius
    stands = torch.ones(len(parents), dtype=torch.bool, device=parents.device)
    stands[one[near & (first[other] < first[one])]] = False
    return proposed.only(stands)


def _rivals(parents: Tensor, others: Tensor, above: CoverLevel) -> tuple[Tensor, Tensor]:
    """Pair positions in ``parents`` with positions in ``others`` (each once) of neighbours."""
    place = parents.new_full((len(above),), -1)
    place[others] = torch.arange(len(others), device=parents.device)
    one, neighbour = above.neighbours.pairs(parents)
    known = place[neighbour] >= 0
    return one[known], place[neighbour[known]]


def _means(points: Members, chosen: Members, families: int, radius: float) -> Tensor:
    """Average the family's points within a radius of each chosen centre, ``w x d``."""
    place = chosen.parents.new_full((families,), -1)
    place[chosen.parents] = torch.arange(len(chosen), device=place.device)
    family = place[points.parents]
    points, family = points.only(family >= 0), family[family >= 0]
    near = squared_distances(points.X, chosen.X[family]) <= radius * radius
    sums = torch.zeros_like(chosen.X).index_add(0, family[near], points.X[near])
    return sums / torch.bincount(family[near], minlength=len(sums)).unsqueeze(-1)


def _moved(
    chosen: Members, means: Tensor, taken: Tensor, above: CoverLevel, radius: float
) -> Members:
    """Move centres to their means, but for those nearer than a radius to another.

    ``taken`` are the positions of means that older centres stand too near to.
    """
    one, other = _rivals(chosen.parents, chosen.parents, above)
    one, other = one[one != other], other[one != other]
    square = radius * radius
    near = (squared_distances(means[one], chosen.X[other]) <= square) | (
        squared_distances(means[one], means[other]) <= square
    )
    free = torch.ones(len(means), dtype=torch.bool, device=means.device)
    free[taken] = False
    free[one[near]] = False
    return Members(torch.where(free.unsqueeze(-1), means, chosen.X), chosen.parents)


def _covered(points: Members, chosen: Members, above: CoverLevel, radius: float) -> Tensor:
    """Say which points lie in a new ball."""
    parents, family = torch.unique(points.parents, return_inverse=True)
    one, new = _rivals(parents, chosen.parents, above)
    nearby = Ragged.of(one, new, len(parents))
    covered = torch.zeros(len(points), dtype=torch.bool, device=family.device)
    for part, position, centre in nearby.pairs_by_parts(family):
        here = points.X[part][position]
        hit = squared_distances(here, chosen.X[centre]) <= radius * radius
        covered[position[hit] + part.start] = True
    return covered
