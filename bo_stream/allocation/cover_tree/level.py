"""A level of a cover tree: centres of balls of one radius, and who lives near whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PAIRS = 1 << 21
"""About as many pairs as :meth:`Ragged.pairs_by_parts` makes at a time."""


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
        """Pairs of a list's number and an item, in any order, as ``count`` lists. Cost O(n log n).

        Items of a list keep the order that they come in.
        """
        order = torch.argsort(rows, stable=True)
        sizes = torch.bincount(rows, minlength=count)
        return cls(torch.cat((sizes.new_zeros(1), sizes.cumsum(0))), items[order])

    def to(self, device: torch.device) -> Ragged:
        """The lists on another device."""
        return Ragged(self.offsets.to(device), self.items.to(device))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def pairs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Each of some lists' items beside its position in ``rows``.

        Args:
            rows: Numbers of lists, ``n``, repetitions allowed.

        Returns:
            Positions in ``rows``, ascending, and items.
        """
        begins = self.offsets[rows]
        sizes = self.offsets[rows + 1] - begins
        where = torch.repeat_interleave(sizes)
        within = torch.arange(len(where), device=where.device) - (sizes.cumsum(0) - sizes)[where]
        return where, self.items[begins[where] + within]

    def pairs_by_parts(self, rows: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """:meth:`pairs` of a slice of the rows after the other, about ``PAIRS`` pairs each.

        Yields:
            The slice, positions within it, items.
        """
        ends = (self.offsets[rows + 1] - self.offsets[rows]).cumsum(0)
        parts = torch.unique_consecutive(ends // PAIRS, return_counts=True)[1].tolist()
        begin = 0
        for size in parts:
            part = slice(begin, begin + size)
            yield part, *self.pairs(rows[part])
            begin += size


def nothing_yet(device: torch.device) -> Ragged:
    """No lists."""
    empty = torch.zeros(0, dtype=torch.long, device=device)
    return Ragged(empty.new_zeros(1), empty)


NEIGHBOURHOOD = 4.05
"""In radii: centres within it are neighbours; a little more than four, for rounding errors.

The children of two parents can be neighbours only if the parents are: two radii of the parents and
four of the children, which are half as long, are four of the parents. The paper's narrower
``4 (1 − 2^(l−L))`` is two at the last level but one, where children half a radius apart can have
parents two and a half radii apart, so that it loses some.
"""

REACH = 1.51
"""In radii of a parent: where the centre of a child's ball is that meets its own; as above."""


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
        """One ball.

        Args:
            centre: ``d``.
            radius: Of the ball.
        """
        zero = torch.zeros(1, dtype=torch.long, device=centre.device)
        return cls(radius, centre.unsqueeze(0), zero, Ragged.of(zero, zero, 1))

    @classmethod
    def empty(cls, radius: float, like: Tensor) -> CoverLevel:
        """No ball yet."""
        none = torch.zeros(0, dtype=torch.long, device=like.device)
        return cls(radius, like.new_zeros(0, like.shape[-1]), none, Ragged.of(none, none, 0))

    def to(self, like: Tensor) -> CoverLevel:
        """The level in another dtype, on another device."""
        return CoverLevel(
            self.radius,
            self.centres.to(like),
            self.parents.to(like.device),
            self.neighbours.to(like.device),
        )

    def __len__(self) -> int:
        return len(self.centres)

    def with_centres(self, centres: Tensor, parents: Tensor, above: CoverLevel) -> CoverLevel:
        """The level with some more, each in its parent's ball and apart from all others.

        Cost O(new centres), and a sort of the lists of neighbours.
        """
        first = len(self)
        everyone = torch.cat((self.centres, centres))
        all_parents = torch.cat((self.parents, parents))
        new = torch.arange(first, len(everyone), device=parents.device)
        rows, items = near_pairs(
            everyone[new],
            above.neighbours,
            parents,
            children(all_parents, len(above)),
            everyone,
            NEIGHBOURHOOD * self.radius,
        )
        rows = new[rows]
        older = items < first
        former_rows, former_items = self.neighbours.pairs(
            torch.arange(first, device=parents.device)
        )
        return CoverLevel(
            self.radius,
            everyone,
            all_parents,
            Ragged.of(
                torch.cat((former_rows, items[older], rows)),
                torch.cat((former_items, rows[older], items)),
                len(everyone),
            ),
        )

    def reach(self, above: CoverLevel) -> Ragged:
        """Of each centre of the level above, the centres here whose balls can meet its ball."""
        rows, items = near_pairs(
            above.centres,
            above.neighbours,
            torch.arange(len(above), device=self.parents.device),
            children(self.parents, len(above)),
            self.centres,
            REACH * above.radius,
        )
        return Ragged.of(rows, items, len(above))


def children(parents: Tensor, count: int) -> Ragged:
    """The lists of children of ``count`` parents."""
    return Ragged.of(parents, torch.arange(len(parents), device=parents.device), count)


def near_pairs(
    points: Tensor,
    neighbours: Ragged,
    parents: Tensor,
    families: Ragged,
    centres: Tensor,
    distance: float,
) -> tuple[Tensor, Tensor]:
    """Points beside centres within a distance, sought among the children of parents' neighbours.

    Args:
        points: ``n x d``.
        neighbours: Of the level above.
        parents: In the level above, of each point, ``n``.
        families: Children of each centre of the level above.
        centres: That the children are.
        distance: Largest.

    Returns:
        Positions in ``points``, ascending, and indices of centres.
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
    """Between rows, ``n x d`` each: the same whichever comes first, to the last bit."""
    return (A - B).square().sum(-1)
