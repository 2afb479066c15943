"""What a stream leaves behind at the centres of clusters: sums, and the tree that places them."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from bo_stream.allocation.cover_tree import CoverTree
from bo_stream.models.memory import HoldsStatistics, Observations, WhitenedMemory, check_remainder
from bo_stream.sufficient_statistics import Regrouping, Whitened, grouped_statistics
from bo_stream.tensors import map_tensors

EMPTY = 1e-6
"""A cluster from which observations were taken out is empty when fewer than this are left."""


@dataclass(frozen=True)
class ClusterMemory(HoldsStatistics):
    """Statistics of all observations in the values of the process at the centres.

    The feature of an observation is the indicator of its cluster, hence the gram is diagonal: the
    sums of precisions, kept as a column. Sums are in float64 whatever the dtype of the centres.

    Attributes:
        tree: Finds centres; never changed in place.
        centres: Its finest, ``M x d``.
        statistics: Grams ``... x m x M x 1``, moments ``... x m x M x 2``.
        sizes: Number of observations in each cluster, ``... x M x 1``.
        moves: Squared distances from the observations' inputs to where they act, summed, for each
            dimension of the inputs, ``... x d``.
    """

    tree: CoverTree
    centres: Tensor
    statistics: WhitenedMemory
    sizes: Tensor
    moves: Tensor

    @classmethod
    def empty(cls, tree: CoverTree, like: Tensor, batch: torch.Size) -> ClusterMemory:
        """Begin without observations, for ``batch_shape x m`` and centres like ``... x d``."""
        centres = tree.centres if tree.levels else like.new_zeros(0, like.shape[-1])
        none = torch.zeros(*batch, 0, dtype=torch.float64, device=like.device)
        nobody = none[..., 0, :].long()
        statistics = grouped_statistics(nobody, len(centres), none, none, none)
        sizes = none.new_zeros(*batch[:-1], len(centres), 1)
        moves = none.new_zeros(*batch[:-1], like.shape[-1])
        return cls(tree, centres, WhitenedMemory(statistics), sizes, moves)

    def grown(self, tree: CoverTree) -> ClusterMemory:
        """Take a tree that has the same centres first; exact."""
        if not tree.levels or len(tree.centres) == len(self.centres):
            return replace(self, tree=tree)
        index = torch.arange(len(self.centres), device=self.centres.device)
        return self.regrouped(tree, index)

    def regrouped(self, tree: CoverTree, index: Tensor) -> ClusterMemory:
        """Move clusters to a tree's centres of an ``index``, ``M``, and add sums. Cost O(M)."""
        T = Regrouping(index, len(tree.centres))
        statistics = self.statistics.map(lambda s: s.pull_back(T))
        steps = (tree.centres[index] - self.centres).double().square()
        moves = self.moves + (self.sizes * steps).sum(-2)
        return ClusterMemory(tree, tree.centres, statistics, T.transpose(self.sizes), moves)

    def after(self, data: Observations, clusters: Tensor) -> ClusterMemory:
        """Add or take out a batch in clusters ``... x n``. Cost O(n + M).

        Raises:
            InputDataError: A cluster would hold fewer than no observation, or sums of none.
        """
        rule = partial(grouped_statistics, clusters, len(self.centres))
        statistics = self.statistics.observed_by(rule, data)
        one = torch.full_like(clusters, data.sign, dtype=torch.float64)
        sizes = self.sizes.squeeze(-1).scatter_add(-1, clusters, one).unsqueeze(-1)
        steps = (data.X - self.centres[clusters]).square().sum(-2)
        moves = self.moves + data.sign * steps
        if data.sign > 0:
            return replace(self, statistics=statistics, sizes=sizes, moves=moves)
        if bool((sizes < -EMPTY).any()):
            raise InputDataError(
                "Expected X of observations in memory, got more in one cluster than it holds: they "
                "were never put in, or forgotten, or centres nearer to them have been added since."
            )
        check_remainder(statistics, self.statistics)
        held = (sizes > EMPTY).to(sizes)  # of empty clusters rounding errors may be left

        def without_remainders(sums: Whitened) -> Whitened:
            there = held.unsqueeze(-3)
            return replace(sums, gram=sums.gram * there, moment=sums.moment * there)

        statistics = statistics.map(without_remainders)
        return replace(self, statistics=statistics, sizes=sizes * held, moves=moves)

    def joined(self, other: ClusterMemory) -> tuple[ClusterMemory, bool]:
        """Join two memories at the union of their centres; say whether all clusters stayed.

        A centre of the other tree within the resolution of one of this tree's is no new centre.
        """
        Z = other.centres.to(self.centres)
        if len(Z) == 0:
            return self, True
        tree = copy(self.tree)
        tree.average = False  # new centres are at such points
        tree.insert(Z)
        tree.average = self.tree.average
        index = tree.assign(Z)
        mine, theirs = self.grown(tree), other.regrouped(tree, index)
        moved = (tree.centres[index] != Z).any(-1)
        held = (other.sizes != 0).reshape(-1, len(Z)).any(0)
        both = replace(
            mine,
            statistics=mine.statistics + theirs.statistics,
            sizes=mine.sizes + theirs.sizes,
            moves=mine.moves + theirs.moves,
        )
        return both, not bool((moved & held).any())

    def typical_move(self) -> Tensor:
        """Compute the root mean square move of inputs to where they act, ``... x d``."""
        return (self.moves / self.sizes.sum(-2).clamp_min(1.0)).clamp_min(0.0).sqrt()

    def at_resolution(self, resolution: float) -> ClusterMemory:
        """Cut the tree's levels at a resolution; a finer one is for what comes from now on."""
        if not self.tree.levels:
            tree = copy(self.tree)
            tree.resolution = resolution
            return replace(self, tree=tree)
        if resolution >= self.tree.resolution:
            tree = self.tree.coarsened(resolution)
            return self.regrouped(tree, tree.assign(self.centres))
        tree = copy(self.tree)
        while tree.resolution > resolution:
            tree.refine()
        return replace(self, tree=tree)

    def scale(self, factor: float) -> ClusterMemory:
        """Let every observation count ``factor`` times."""
        statistics = self.statistics.map(lambda s: s.scale(factor))
        moves = self.moves * factor
        return replace(self, statistics=statistics, sizes=self.sizes * factor, moves=moves)

    def map_targets(self, matrix: Tensor) -> ClusterMemory:
        """Turn targets into ``[Y, 1] @ matrix``, exactly."""
        return replace(self, statistics=self.statistics.map(lambda s: s.map_targets(matrix)))

    def select(self, outputs: list[int]) -> ClusterMemory:
        """Copy the memory of some of the outputs."""
        return replace(self, statistics=self.statistics.select(outputs))

    def to(self, device: torch.device) -> ClusterMemory:
        """Move the memory to another device."""
        moved = map_tensors(self, lambda tensor: tensor.to(device))
        return replace(moved, tree=self.tree.to(moved.centres))
