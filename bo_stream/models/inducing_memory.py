"""What a stream leaves behind at inducing points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.inducing import InducingBasis, KnownValues
from bo_stream.models.memory import HoldsStatistics, Observations, Whitened, WhitenedMemory
from bo_stream.sufficient_statistics import MatrixMap, padded, weighted_statistics


@dataclass(frozen=True)
class Missed:
    """``Σ (k − |z|²) / D`` of observations: prior variance that the features missed of them.

    Attributes:
        learned: Of those whose noise level is learned, ``... x m``.
        known: Of those with known noise, ``... x m``.
    """

    learned: Tensor
    known: Tensor

    @classmethod
    def of(cls, data: Observations, residual: Tensor) -> Missed:
        """Of observations and the variance that features miss of each, ``... x m x n``."""
        groups = (data.learned_group(), data.known_group())
        return cls(*((residual * weight / noise).sum(-1) for noise, weight in groups))

    def __add__(self, other: Missed) -> Missed:
        """Of both."""
        return Missed(self.learned + other.learned, self.known + other.known)

    def map(self, rule: Callable[[Tensor], Tensor]) -> Missed:
        """A rule applied to both."""
        return Missed(rule(self.learned), rule(self.known))


@dataclass(frozen=True)
class InducingMemory(HoldsStatistics):
    """Statistics of all observations in weights that are values of the process at some points.

    Attributes:
        values: The points, and the root of the kernel at them when the statistics were last
            expressed.
        statistics: Of all observations.
        missed: What the features missed of them.
    """

    values: KnownValues
    statistics: WhitenedMemory
    missed: Missed

    @classmethod
    def empty(cls, basis: InducingBasis, batch: torch.Size) -> InducingMemory:
        """No observations yet.

        Args:
            basis: Whatever its points.
            batch: ``batch_shape x m``.
        """
        features = basis.Z.new_zeros(*batch, 0, basis.rank)
        none, zero = basis.Z.new_zeros(*batch, 0), basis.Z.new_zeros(batch)
        learned = weighted_statistics(features, none, none, none)
        return cls(basis.values, WhitenedMemory(learned, None), Missed(zero, zero))

    def in_basis(self, basis: InducingBasis) -> InducingMemory:
        """Expressed by other points and another kernel: a congruence. Cost O(M³).

        What was observed acts as observations of the process at the old points, whatever kernel
        it has now. Exact where all old points are among the new ones; else what the new ones do
        not determine is counted as missed. [Bui2017, eq. 5, with the old posterior over the old
        prior as the old statistics]
        """
        if self.is_in(basis):
            return self
        features = basis.features(self.values.Z)
        T = MatrixMap(basis.transfer(self.values, features))
        lost = basis.missed(self.values, features)
        learned, known = self.statistics.learned, self.statistics.known
        gone = Missed(
            _trace(learned, lost),
            torch.zeros_like(self.missed.known) if known is None else _trace(known, lost),
        )
        statistics = self.statistics.map(lambda s: s.pull_back(T))
        return InducingMemory(basis.values, statistics, self.missed + gone)

    def grown(self, basis: InducingBasis) -> InducingMemory:
        """In a basis with points more, after this one's: exact, by zeros. Cost O(M²)."""
        more = basis.rank - len(self.values.Z)
        statistics = self.statistics.map(lambda s: padded(s, more))
        return replace(self, values=basis.values, statistics=statistics)

    def as_statistics(self) -> InducingMemory:
        """Itself."""
        return self

    def as_values(self) -> InducingMemory:
        """Itself."""
        return self

    def is_in(self, basis: InducingBasis) -> bool:
        """Whether the statistics are expressed in a basis already."""
        return self.values.root is basis.root

    def after(self, data: Observations, features: Tensor, residual: Tensor) -> InducingMemory:
        """The memory with a batch more, or less. Cost O(n M²).

        Args:
            data: The batch.
            features: Of its inputs, ``... x m x n x M``.
            residual: Variance that these miss, ``... x m x n``.
        """
        return replace(
            self,
            statistics=self.statistics.observed(features, data),
            missed=self.missed + Missed.of(data, residual),
        )

    def plus(self, other: InducingMemory) -> InducingMemory:
        """Both memories, in one basis."""
        return InducingMemory(
            self.values, self.statistics + other.statistics, self.missed + other.missed
        )

    def scale(self, factor: float) -> InducingMemory:
        """Every observation counts ``factor`` times."""
        return replace(
            self,
            statistics=self.statistics.map(lambda s: s.scale(factor)),
            missed=self.missed.map(lambda total: total * factor),
        )

    def map_targets(self, matrix: Tensor) -> InducingMemory:
        """Statistics of the target columns ``[Y, 1] @ matrix``; exact."""
        return replace(self, statistics=self.statistics.map(lambda s: s.map_targets(matrix)))

    def select(self, outputs: list[int]) -> InducingMemory:
        """A copy for some of the outputs."""
        return InducingMemory(
            self.values.select(outputs),
            self.statistics.select(outputs),
            self.missed.map(lambda total: total[..., outputs]),
        )

    def to(self, device: torch.device) -> InducingMemory:
        """On another device."""
        return InducingMemory(
            self.values.to(device),
            self.statistics.map(lambda s: s.to(device)),
            self.missed.map(lambda total: total.to(device)),
        )


def _trace(statistics: Whitened, lost: Tensor) -> Tensor:
    return (statistics.gram * lost).sum((-2, -1))
