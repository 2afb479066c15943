"""New centres for points that no ball covers, for many parents at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.allocation.cover_tree.level import (
    CoverLevel,
    Ragged,
    children,
    near_pairs,
    squared_distances,
)


@dataclass(frozen=True)
class Uncovered:
    """Points that lie in no ball of a level.

    Attributes:
        X: ``n x d``.
        parents: Whose ball in the level above holds each of them, ``n``.
    """

    X: Tensor
    parents: Tensor

    def __len__(self) -> int:
        return len(self.X)

    def only(self, which: Tensor) -> Uncovered:
        """Some of them."""
        return Uncovered(self.X[which], self.parents[which])


@dataclass(frozen=True)
class Round:
    """Centres chosen at once, at most one a parent.

    Attributes:
        centres: ``w x d``.
        parents: ``w``.
    """

    centres: Tensor
    parents: Tensor


def settle(level: CoverLevel, above: CoverLevel, points: Uncovered, average: bool) -> CoverLevel:
    """A level with new centres, so that its balls cover some points more.

    In every round each parent proposes its first uncovered point; of proposals nearer than a radius
    the earlier one stands. Such rounds are Algorithm 9's loop over parents in another order, of
    which its guarantees do not depend. [Terenin2024, algorithm 9, lines 5 to 14]

    Args:
        level: To add to.
        above: The level of the parents.
        points: None within a radius of a centre.
        average: Move a centre to the mean of the uncovered points around it, where that keeps it
            apart from the others.
    """
    centres, parents = level.centres, level.parents
    while len(points) > 0:
        chosen = _stand_outs(points, above, level.radius)
        if average:
            means = _means(points, chosen, len(above), level.radius)
            taken = near_pairs(
                means,
                above.neighbours,
                chosen.parents,
                children(parents, len(above)),
                centres,
                level.radius,
            )[0]
            chosen = _moved(chosen, means, taken, above, level.radius)
        centres = torch.cat((centres, chosen.centres))
        parents = torch.cat((parents, chosen.parents))
        points = points.only(~_covered(points, chosen, above, level.radius))
    return level.with_centres(centres[len(level) :], parents[len(level) :], above)


def _stand_outs(points: Uncovered, above: CoverLevel, radius: float) -> Round:
    """The first point of every family, but for those too near to an earlier one."""
    parents, family = torch.unique(points.parents, return_inverse=True)
    numbers = torch.arange(len(points), device=family.device)
    first = numbers.new_full((len(parents),), len(points))
    first = first.scatter_reduce(0, family, numbers, "amin")
    stands = _stands(points.X[first], first, parents, above, radius)
    return Round(points.X[first[stands]], parents[stands])


def _stands(
    proposals: Tensor, priority: Tensor, parents: Tensor, above: CoverLevel, radius: float
) -> Tensor:
    """Which proposals have no earlier one within a radius."""
    one, other = _rivals(parents, parents, above)
    near = squared_distances(proposals[one], proposals[other]) <= radius * radius
    beaten = one[near & (priority[other] < priority[one])]
    stands = torch.ones(len(parents), dtype=torch.bool, device=parents.device)
    stands[beaten] = False
    return stands


def _rivals(parents: Tensor, others: Tensor, above: CoverLevel) -> tuple[Tensor, Tensor]:
    """Positions in ``parents`` beside positions in ``others`` (each once) of neighbours."""
    place = parents.new_full((len(above),), -1)
    place[others] = torch.arange(len(others), device=parents.device)
    one, neighbour = above.neighbours.pairs(parents)
    known = place[neighbour] >= 0
    return one[known], place[neighbour[known]]


def _means(points: Uncovered, chosen: Round, families: int, radius: float) -> Tensor:
    """Mean of the family's points within a radius of each centre, ``w x d``."""
    place = chosen.parents.new_full((families,), -1)
    place[chosen.parents] = torch.arange(len(chosen.parents), device=place.device)
    family = place[points.parents]
    points, family = points.only(family >= 0), family[family >= 0]
    near = squared_distances(points.X, chosen.centres[family]) <= radius * radius
    sums = torch.zeros_like(chosen.centres).index_add(0, family[near], points.X[near])
    return sums / torch.bincount(family[near], minlength=len(sums)).unsqueeze(-1)


def _moved(chosen: Round, means: Tensor, taken: Tensor, above: CoverLevel, radius: float) -> Round:
    """The centres at their means, but for those that would come too near to another.

    Args:
        chosen: As they are.
        means: Of the points around them.
        taken: Positions of means that older centres stand too near to.
        above: The level of the parents.
        radius: What is too near.
    """
    one, other = _rivals(chosen.parents, chosen.parents, above)
    one, other = one[one != other], other[one != other]
    square = radius * radius
    near = (squared_distances(means[one], chosen.centres[other]) <= square) | (
        squared_distances(means[one], means[other]) <= square
    )
    free = torch.ones(len(means), dtype=torch.bool, device=means.device)
    free[taken] = False
    free[one[near]] = False
    return Round(torch.where(free.unsqueeze(-1), means, chosen.centres), chosen.parents)


def _covered(points: Uncovered, chosen: Round, above: CoverLevel, radius: float) -> Tensor:
    """Which points lie in a new ball."""
    parents, family = torch.unique(points.parents, return_inverse=True)
    one, new = _rivals(parents, chosen.parents, above)
    nearby = Ragged.of(one, new, len(parents))
    covered = torch.zeros(len(points), dtype=torch.bool, device=family.device)
    for part, position, centre in nearby.pairs_by_parts(family):
        here = points.X[part][position]
        hit = squared_distances(here, chosen.centres[centre]) <= radius * radius
        covered[position[hit] + part.start] = True
    return covered
