"""Statistics of all observations in a network's features, and the latest rows to learn it from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn import Module

from bo_stream.models.last_layer.network import frozen_network, is_as, layer_features
from bo_stream.models.memory import HoldsStatistics, Observations, WhitenedMemory, check_remainder
from bo_stream.sufficient_statistics import MatrixMap, SufficientStatistics, weighted_statistics

RIDGE = 1e-6
"""Weight of the identity where rows say how features changed, in parts of the features' squares."""

_NOTHING = 1e-9
"""Part of an observation that counts as none."""

Weighed = tuple[Observations, Tensor]
"""Rows, and how many times each counts."""


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
        """No observations yet.

        Args:
            network: Of d inputs; copied.
            X: Inputs on the device of the memory, ``... x d``.
            batch: ``batch_shape x m``.
            rank: Number r of features.
            window: Rows to hold.
        """
        none = torch.zeros(*batch, 0, dtype=torch.float64, device=X.device)
        shared = none[..., :1, :]
        features = none.new_zeros(*shared.shape, rank)
        inputs = none.new_zeros(*batch[:-1], 0, X.shape[-1])
        rows = Observations(inputs, none, none, shared.bool(), 1.0)
        learned = weighted_statistics(features, none, shared, shared)
        statistics = WhitenedMemory(learned, None)
        return cls(frozen_network(network), statistics, rows, none.new_zeros(0), window)

    @property
    def rank(self) -> int:
        """Number r of features, the constant among them."""
        return self.statistics.learned.gram.shape[-1]

    def features(self, X: Tensor) -> Tensor:
        """Compute φ, ``batch x n x d -> batch x 1 x n x r``."""
        return layer_features(self.network, X).unsqueeze(-3)

    def after(self, data: Observations, features: Tensor) -> LastLayerMemory:
        """Add or take out a batch of these features. Cost O(n r²).

        Raises:
            InputDataError: What is taken out is not in memory.
        """
        statistics = self.statistics.observed(features, data)
        if data.sign > 0.0:
            one = self.weight.new_ones(len(data))
            return self._joined(statistics, (self.rows, self.weight), (data, one))
        check_remainder(statistics, self.statistics)
        weight = _left(self.rows, self.weight, data)
        held = torch.nonzero(weight > _NOTHING).flatten()
        return replace(self, statistics=statistics, rows=self.rows.rows(held), weight=weight[held])

    def _joined(self, statistics: WhitenedMemory, former: Weighed, later: Weighed) -> Self:
        """Copy the last rows of two batches, as many as may be held."""
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

    def carried(self) -> Carried:
        """Return what the memory has to say in other features. Cost O(w r² + r³) for w rows."""
        return Carried.of(self)

    def plus(self, other: LastLayerMemory) -> LastLayerMemory:
        """Add both memories, in the same features; this one's rows are the latest."""
        statistics = self.statistics + other.statistics
        theirs, mine = (other.rows, other.weight), (self.rows, self.weight)
        return self._joined(statistics, theirs, mine)

    def scale(self, factor: float) -> LastLayerMemory:
        """Every observation counts ``factor`` times."""
        statistics = self.statistics.map(lambda s: s.scale(factor))
        return replace(self, statistics=statistics, weight=self.weight * factor)

    def map_targets(self, matrix: Tensor) -> LastLayerMemory:
        """Statistics of the target columns ``[Y, 1] @ matrix``, and rows of the first; exact."""
        statistics = self.statistics.map(lambda s: s.map_targets(matrix))
        factor, shift = (matrix[..., i, 0].unsqueeze(-1) for i in (0, 1))
        rows = replace(self.rows, targets=self.rows.targets * factor + shift)
        return replace(self, statistics=statistics, rows=rows)

    def select(self, outputs: list[int]) -> LastLayerMemory:
        """Copy the memory of some of the outputs."""
        statistics, rows = self.statistics.select(outputs), self.rows.select(outputs)
        return replace(self, statistics=statistics, rows=rows)

    def to(self, device: torch.device) -> LastLayerMemory:
        """On another device."""
        return replace(
            self,
            network=frozen_network(self.network).to(device),
            statistics=self.statistics.map(lambda s: s.to(device)),
            rows=self.rows.to(device),
            weight=self.weight.to(device),
        )


def _left(rows: Observations, weight: Tensor, data: Observations) -> Tensor:
    """Weights of rows without a batch, of which each observation takes one from its like."""
    weight = weight.clone()
    for i in range(len(data)):
        found = torch.nonzero(_equal(rows, data.rows(slice(i, i + 1))) & (weight > _NOTHING))
        weight[found.flatten()[-1:]] -= 1.0
    return weight


def _equal(rows: Observations, one: Observations) -> Tensor:
    """Find rows that are the same observation as one, in all batch elements and outputs, ``n``."""
    inputs = (rows.X == one.X).all(-1).unsqueeze(-2)
    same = inputs & (rows.targets == one.targets) & (rows.noise == one.noise)
    same = same & (rows.known == one.known)
    return same.movedim(-1, 0).flatten(1).all(-1)


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
        others: Statistics of the other observations in φ, or None without any.
        regression: ``Φ (Φᵀ Φ + ε I)⁻¹``, ``batch x 1 x w x r``.
        nothing: Statistics of no observation.
    """

    rows: Observations
    weight: Tensor
    former: Tensor
    others: WhitenedMemory | None
    regression: Tensor
    nothing: WhitenedMemory

    @classmethod
    @torch.no_grad()
    def of(cls, memory: LastLayerMemory) -> Carried:
        """Cost O(w r² + r³)."""
        features, nothing = memory.features(memory.rows.X), memory.statistics.map(_zero)
        counts, held = memory.counts, float(memory.weight.sum())
        others = None
        if bool((counts - held > _NOTHING * (1.0 + counts)).any()):
            gone = _observed(nothing, features, memory.rows, memory.weight).map(
                lambda s: s.scale(-1.0)
            )
            others = memory.statistics + gone
        return cls(memory.rows, memory.weight, features, others, _regression(features), nothing)

    def into(self, features: Tensor) -> WhitenedMemory:
        """Statistics of all observations in ψ. Cost O(w r² + r³).

        Args:
            features: ψ at the rows, ``batch x 1 x w x r``.
        """
        start = self.nothing
        if self.others is not None:
            change = (features - self.former).mT @ self.regression
            A = change + torch.eye(change.shape[-1], dtype=change.dtype, device=change.device)
            T = MatrixMap(A.mT)
            start = self.others.map(lambda s: s.pull_back(T))
        return _observed(start, features, self.rows, self.weight)

    def thinned(self, index: Tensor) -> Carried:
        """Drop the rows at ``k`` places, and keep the weight of all."""
        share = len(index) / len(self.rows)
        features = self.former[..., index, :]
        return replace(
            self,
            rows=self.rows.rows(index),
            weight=self.weight[index],
            former=features,
            others=None if self.others is None else self.others.map(lambda s: s.scale(share)),
            regression=_regression(features),
        )


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
    rule = partial(_weighted, features, weight)
    return memory.observed_by(rule, rows)


def _weighted(
    features: Tensor, times: Tensor, targets: Tensor, noise: Tensor, weight: Tensor
) -> SufficientStatistics[Tensor]:
    return weighted_statistics(features, targets, noise, weight * times)


def _zero(statistics: SufficientStatistics[Tensor]) -> SufficientStatistics[Tensor]:
    return statistics.scale(0.0)
