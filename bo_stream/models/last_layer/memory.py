"""Statistics of all observations in a network's features, and the latest rows to learn it from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import Module

from bo_stream.models.last_layer.network import frozen_network, is_as, layer_features
from bo_stream.models.memory import HoldsStatistics, Observations, WhitenedMemory, check_remainder
from bo_stream.sufficient_statistics import MatrixMap, weighted_statistics
from bo_stream.tensors import map_tensors

RIDGE = 1e-6
"""Weight of the identity where rows say how features changed, in parts of the features' squares."""

_NOTHING = 1e-9
"""Part of an observation that counts as none."""


@dataclass(frozen=True)
class LastLayerMemory(HoldsStatistics):
    """Statistics of all observations in features φ, and the latest observations as rows.

    Attributes:
        network: φ when the statistics were last expressed, frozen, but for the constant.
        statistics: Of all observations, in φ itself: prior variances of weights are not in them.
        rows: The latest ones, at most ``window``.
        weight: How many times each of these counts, ``n``.
        window: Number of rows to hold.
    """

    network: Module
    statistics: WhitenedMemory
    rows: Observations
    weight: Tensor
    window: int

    @classmethod
    def empty(
        cls, network: Module, X: Tensor, batch: torch.Size, rank: int, window: int
    ) -> LastLayerMemory:
        """Begin without observations, of inputs like X and outputs ``batch_shape x m``."""
        rows = Observations.none(X, batch)
        none, shared = rows.targets, rows.targets[..., :1, :]
        features = none.new_zeros(*shared.shape, rank)
        statistics = WhitenedMemory(weighted_statistics(features, none, shared, shared))
        return cls(frozen_network(network), statistics, rows, none.new_zeros(0), window)

    @property
    def rank(self) -> int:
        """Number r of features, the constant among them."""
        return self.statistics.learned.gram.shape[-1]

    def features(self, X: Tensor) -> Tensor:
        """Compute φ, ``batch x n x d -> batch x 1 x n x r``."""
        return layer_features(self.network, X).unsqueeze(-3)

    def after(self, data: Observations, features: Tensor) -> LastLayerMemory:
        """Add or take out a batch of these features, if it is in memory. Cost O(n r²)."""
        statistics = self.statistics.observed(features, data)
        if data.sign > 0.0:
            one = self.weight.new_ones(len(data))
            return self._joined(statistics, (self.rows, self.weight), (data, one))
        check_remainder(statistics, self.statistics)
        weight = _left(self.rows, self.weight, data)
        held = torch.nonzero(weight > _NOTHING).flatten()
        return replace(self, statistics=statistics, rows=self.rows.rows(held), weight=weight[held])

    def _joined(
        self,
        statistics: WhitenedMemory,
        former: tuple[Observations, Tensor],
        later: tuple[Observations, Tensor],
    ) -> Self:
        """Hold the last rows of two batches with the weights of these, as many as may be."""
        left = max(0, self.window - len(later[0]))
        first = slice(max(0, len(former[0]) - left), None)
        last = slice(max(0, len(later[0]) - self.window), None)
        rows = Observations.joined([former[0].rows(first), later[0].rows(last)])
        weight = torch.cat((former[1][first], later[1][last]))
        return replace(self, statistics=statistics, rows=rows, weight=weight)

    def at(self, network: Module) -> LastLayerMemory:
        """Express the memory in another state of the network; see :class:`Carried`."""
        if is_as(network, self.network):
            return self
        moved = frozen_network(network)
        features = layer_features(moved, self.rows.X).unsqueeze(-3)
        return replace(self, network=moved, statistics=self.carried().into(features))

    @torch.no_grad()
    def carried(self) -> Carried:
        """Return what the memory has to say in other features. Cost O(w r² + r³) for w rows."""
        features, others = self.features(self.rows.X), self.statistics.map(lambda s: s.scale(0.0))
        counts, held = self.counts, float(self.weight.sum())
        if bool((counts - held > _NOTHING * (1.0 + counts)).any()):
            rows = _observed(others, features, self.rows, self.weight)
            others = self.statistics + rows.map(lambda s: s.scale(-1.0))
        return Carried(self.rows, self.weight, features, others, _regression(features))

    def plus(self, other: LastLayerMemory) -> LastLayerMemory:
        """Add both memories, in the same features; this one's rows are the latest."""
        statistics = self.statistics + other.statistics
        theirs, mine = (other.rows, other.weight), (self.rows, self.weight)
        return self._joined(statistics, theirs, mine)

    def scale(self, factor: float) -> LastLayerMemory:
        """Let every observation count ``factor`` times."""
        statistics = self.statistics.map(lambda s: s.scale(factor))
        return replace(self, statistics=statistics, weight=self.weight * factor)

    def map_targets(self, matrix: Tensor) -> LastLayerMemory:
        """Turn targets into ``[Y, 1] @ matrix``, exactly."""
        statistics = self.statistics.map(lambda s: s.map_targets(matrix))
        factor, shift = (matrix[..., i, 0].unsqueeze(-1) for i in (0, 1))
        rows = replace(self.rows, targets=self.rows.targets * factor + shift)
        return replace(self, statistics=statistics, rows=rows)

    def select(self, outputs: list[int]) -> LastLayerMemory:
        """Copy the memory of some of the outputs."""
        statistics, rows = self.statistics.select(outputs), self.rows.select(outputs)
        return replace(self, statistics=statistics, rows=rows)

    def to(self, device: torch.device) -> LastLayerMemory:
        """Move the memory to another device."""
        moved = map_tensors(self, lambda tensor: tensor.to(device))
        return replace(moved, network=frozen_network(self.network).to(device))


def _left(rows: Observations, weight: Tensor, data: Observations) -> Tensor:
    """Return weights without a batch, of which each observation takes one from its like."""
    weight = weight.clone()
    for i in range(len(data)):
        found = torch.nonzero(rows.equal(data.rows(slice(i, i + 1))) & (weight > _NOTHING))
        weight[found.flatten()[-1:]] -= 1.0
    return weight


@dataclass(frozen=True)
class Carried:
    """A memory as it goes over to other features ψ of the same number.

    Rows that are held have their features ψ(x): exact. Of the others there are sums of φ only. They
    count as if theirs were ``A φ(x)``, with A the regression of ψ on φ over the rows, from which it
    departs to the identity in directions that rows say nothing of. Counts, sums and squares of
    outcomes stay exact. Differentiable in ψ.

    Attributes:
        rows: Those held, w.
        weight: How many times each counts, ``w``.
        former: φ at them, ``batch x 1 x w x r``.
        others: Statistics of the other observations in φ.
        regression: ``Φ (Φᵀ Φ + ε I)⁻¹``, ``batch x 1 x w x r``.
    """

    rows: Observations
    weight: Tensor
    former: Tensor
    others: WhitenedMemory
    regression: Tensor

    def into(self, features: Tensor) -> WhitenedMemory:
        """Return all statistics in ψ, ``batch x 1 x w x r`` at the rows. Cost O(w r² + r³)."""
        start = self.others
        if bool(start.totals.any()):
            change = (features - self.former).mT @ self.regression
            A = change + torch.eye(change.shape[-1], dtype=change.dtype, device=change.device)
            T = MatrixMap(A.mT)
            start = start.map(lambda s: s.pull_back(T))
        return _observed(start, features, self.rows, self.weight)

    def thinned(self, index: Tensor) -> Carried:
        """Drop the rows at ``k`` places, and keep the weight of all."""
        share = len(index) / len(self.rows)
        rows, weight, former = self.rows.rows(index), self.weight[index], self.former[..., index, :]
        others = self.others.map(lambda s: s.scale(share))
        return Carried(rows, weight, former, others, _regression(former))


def _regression(features: Tensor) -> Tensor:
    """Compute ``Φ (Φᵀ Φ + ε I)⁻¹``, ``... x w x r``."""
    gram = features.mT @ features
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ridge = RIDGE * diagonal.mean(-1, keepdim=True).clamp_min(1.0)
    factor = torch.linalg.cholesky(gram + torch.diag_embed(ridge.expand_as(diagonal)))
    return torch.cholesky_solve(features.mT, factor).mT


def _observed(
    memory: WhitenedMemory, features: Tensor, rows: Observations, weight: Tensor
) -> WhitenedMemory:
    """Add rows that count some times each."""
    if len(rows) == 0:
        return memory
    return memory.observed_by(lambda y, D, w: weighted_statistics(features, y, D, w * weight), rows)
