"""The memory of a model with inducing points: statistics at the points, and the latest rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.bases.inducing import InducingBasis, KnownValues
from bo_stream.models.memory import HoldsStatistics, Observations, WhitenedMemory
from bo_stream.models.outcomes.selection import (
    subset_moments,
)
from bo_stream.sufficient_statistics import MatrixMap, Whitened, padded, weighted_statistics
from bo_stream.tensors import map_tensors


@dataclass(frozen=True)
class InducingMemory:
    """Statistics of all observations at inducing points, and the latest of them also as rows.

    Rows are worth more than statistics when points or hyperparameters move: they are expressed
    anew, exactly, and hyperparameters are learned from their full covariance.

    Attributes:
        whole: Statistics of all observations.
        rows: The latest of them; none in a model without a window.
        allocator: Where the points go as the stream goes by; None: they stay.
        moments: Adam's, where updates learn hyperparameters and have done so.
    """

    whole: PointStatistics
    rows: Rows
    allocator: Allocator | None
    moments: dict[str, Any] | None = None

    @classmethod
    def empty(
        cls, values: KnownValues, batch: torch.Size, allocator: Allocator | None
    ) -> InducingMemory:
        """Return a memory of no observations.

        Args:
            values: At the first points.
            batch: ``batch_shape x m``.
            allocator: Of the points.
        """
        whole = PointStatistics.empty(values, batch)
        return cls(whole, Rows.none(values.Z, batch), allocator)

    def emptied(self) -> InducingMemory:
        """Drop all observations; the points stay."""
        values, batch = self.values, self.counts.shape
        whole = PointStatistics.empty(values, batch)
        return replace(self, whole=whole, rows=Rows.none(values.Z, batch))

    @property
    def recent(self) -> Observations:
        """The latest observations."""
        return self.rows.data

    @property
    def values(self) -> KnownValues:
        """The points, and the root of the kernel at them when last expressed."""
        return self.whole.values

    @cached_property
    def absorbed(self) -> PointStatistics:
        """Statistics of all but the recent rows. Cost O(w M²)."""
        if bool((self.counts == len(self.rows)).all()):
            return self.whole.scale(0.0)
        return self.whole.with_rows(self.rows.taken_out())

    def is_in(self, basis: InducingBasis) -> bool:
        """Say whether the statistics are expressed in a basis already."""
        return self.whole.is_in(basis)

    def in_basis(self, basis: InducingBasis) -> InducingMemory:
        """Express by other points and another kernel; the recent rows exactly. O(M³ + w M²)."""
        if self.is_in(basis):
            return self
        rows = Rows.of(self.recent, basis, self.counts.shape)
        return replace(self, whole=self.absorbed.in_basis(basis).with_rows(rows), rows=rows)

    def grown(self, basis: InducingBasis) -> InducingMemory:
        """Express in a basis with points more, after this one's; the recent rows exactly.

        Cost O(M² + w M g) for g points more.
        """
        rows = self.rows.grown(basis)
        if len(rows) == 0:
            return replace(self, whole=self.whole.grown(basis), rows=rows)
        whole = PointStatistics(
            basis.values,
            self.whole.statistics.continued(rows.features, rows.data),
            self.whole.trace + TraceTerm.of(rows.data, rows.residual - self.rows.residual),
        )
        return replace(self, whole=whole, rows=rows)

    def after(self, new: Rows, window: int) -> InducingMemory:
        """Add a batch, or take it out, and hold the latest rows. Cost O(n M²).

        Args:
            new: The batch in the memory's basis.
            window: How many rows to hold.
        """
        if new.data.sign < 0:
            rows = self.rows[staying(self.recent, new.data)]
        else:
            left = max(0, window - len(new))
            former = self.rows[max(0, len(self.rows) - left) :]
            rows = former.followed_by(new[max(0, len(new) - window) :])
        return replace(self, whole=self.whole.with_rows(new), rows=rows)

    def plus(self, other: PointStatistics) -> InducingMemory:
        """Add statistics that are in the same basis."""
        return replace(self, whole=self.whole + other)

    def scale(self, factor: float) -> InducingMemory:
        """Let every observation count ``factor`` times; the recent ones become statistics."""
        return replace(self, whole=self.whole.scale(factor), rows=self.rows[:0])

    def map_targets(self, matrix: Tensor) -> InducingMemory:
        """Turn targets into ``[Y, 1] @ matrix``, exactly; the recent ones become statistics."""
        return replace(self, whole=self.whole.map_targets(matrix), rows=self.rows[:0])

    def select(self, outputs: list[int]) -> InducingMemory:
        """Return a copy for some of the outputs."""
        moments, (*batch, of) = self.moments, self.counts.shape
        if moments is not None:
            moments = subset_moments(moments, torch.Size(batch), of, outputs)
        whole, rows = self.whole.select(outputs), self.rows.select(outputs)
        return InducingMemory(whole, rows, self.allocator, moments)

    def to(self, device: torch.device) -> InducingMemory:
        """Return a copy on a device."""
        moved, allocator = map_tensors(self, lambda t: t.to(device)), self.allocator
        return moved if allocator is None else replace(moved, allocator=allocator.to(moved.totals))

    @cached_property
    def as_values(self) -> PointStatistics:
        """Statistics in which each recent row is a value at its own input, beside the points.

        So nothing of the rows enters the trace term, whatever the kernel becomes. Kept, for a refit
        asks often.
        """
        n = len(self.recent)
        if n == 0:
            return self.whole
        absorbed, X = self.absorbed.at_known_points(), self.recent.X
        root, M = absorbed.values.root, len(absorbed.values.Z)
        Z = absorbed.values.Z.expand(*X.shape[:-2], M, X.shape[-1])
        eye = torch.eye(n, dtype=root.dtype, device=root.device)
        units = torch.cat((root.new_zeros(n, M), eye), -1).expand(*root.shape[:-2], n, M + n)
        statistics = absorbed.statistics.map(lambda s: padded(s, n))
        return PointStatistics(
            KnownValues(torch.cat((Z, X), -2), root),
            statistics.observed(units, self.recent),
            absorbed.trace,
        )

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        return self.whole.totals

    @property
    def counts(self) -> Tensor:
        """Number of observations, ``... x m``."""
        return self.whole.counts

    def mean_known_noise(self) -> Tensor | None:
        """Mean of the known noise variances, ``... x m``, or None without any."""
        return self.whole.mean_known_noise()


@dataclass(frozen=True)
class PointStatistics(HoldsStatistics):
    """Statistics of observations in weights that are values of the process at some points.

    Attributes:
        values: The points, and the root of the kernel at them when the statistics were last
            expressed.
        statistics: Of all observations.
        trace: What the features leave out of their prior variance.
    """

    values: KnownValues
    statistics: WhitenedMemory
    trace: TraceTerm

    @classmethod
    def empty(cls, values: KnownValues, batch: torch.Size) -> PointStatistics:
        """Return statistics of no observations.

        Args:
            values: At any points.
            batch: ``batch_shape x m``.
        """
        Z = values.Z
        none, zero = Z.new_zeros(*batch, 0), Z.new_zeros(batch)
        learned = weighted_statistics(Z.new_zeros(*batch, 0, len(Z)), none, none, none)
        return cls(values, WhitenedMemory(learned, None), TraceTerm(zero, zero))

    def in_basis(self, basis: InducingBasis) -> PointStatistics:
        """Express by other points and another kernel: a congruence. Cost O(M³).

        What was observed acts as observations of the process at the old points, whatever kernel
        it has now. Exact where all old points are among the new ones; else what the new ones do
        not determine enters the trace term. [Bui2017, eq. 5, with the old posterior over the old
        prior as the old statistics]
        """
        if self.is_in(basis):
            return self
        features = basis.features(self.values.Z)
        T = MatrixMap(basis.transfer(self.values, features))
        lost = basis.missed(self.values, features)
        learned, known = self.statistics.learned, self.statistics.known
        gone = TraceTerm(
            _trace(learned, lost),
            torch.zeros_like(self.trace.known) if known is None else _trace(known, lost),
        )
        statistics = self.statistics.map(lambda s: s.pull_back(T))
        return PointStatistics(basis.values, statistics, self.trace + gone)

    def grown(self, basis: InducingBasis) -> PointStatistics:
        """Express in a basis with points more, after this one's: exact, by zeros. Cost O(M²)."""
        more = basis.rank - len(self.values.Z)
        statistics = self.statistics.map(lambda s: padded(s, more))
        return replace(self, values=basis.values, statistics=statistics)

    def is_in(self, basis: InducingBasis) -> bool:
        """Say whether the statistics are expressed in a basis already."""
        return self.values.root is basis.root

    def with_rows(self, rows: Rows) -> PointStatistics:
        """Add rows in this basis, or take them out if their sign is negative. Cost O(n M²)."""
        if len(rows) == 0:
            return self
        return replace(
            self,
            statistics=self.statistics.observed(rows.features, rows.data),
            trace=self.trace + TraceTerm.of(rows.data, rows.residual),
        )

    def at_known_points(self) -> PointStatistics:
        """Drop the points where nothing has been observed at all."""
        if bool(self.counts.any()):
            return self
        values = KnownValues(self.values.Z[:0], self.values.root[..., :0, :0])
        return replace(self, values=values, statistics=self.statistics.leading(0))

    def __add__(self, other: PointStatistics) -> PointStatistics:
        """Add statistics that are in the same basis."""
        statistics, trace = self.statistics + other.statistics, self.trace + other.trace
        return PointStatistics(self.values, statistics, trace)

    def scale(self, factor: float) -> PointStatistics:
        """Let every observation count ``factor`` times."""
        statistics = self.statistics.map(lambda s: s.scale(factor))
        trace = map_tensors(self.trace, lambda total: total * factor)
        return PointStatistics(self.values, statistics, trace)

    def map_targets(self, matrix: Tensor) -> PointStatistics:
        """Turn targets into ``[Y, 1] @ matrix``, exactly."""
        return replace(self, statistics=self.statistics.map(lambda s: s.map_targets(matrix)))

    def select(self, outputs: list[int]) -> PointStatistics:
        """Return a copy for some of the outputs."""
        return PointStatistics(
            self.values.select(outputs),
            self.statistics.select(outputs),
            map_tensors(self.trace, lambda total: total[..., outputs]),
        )


def _trace(statistics: Whitened, lost: Tensor) -> Tensor:
    return (statistics.gram * lost).sum((-2, -1))


@dataclass(frozen=True)
class TraceTerm:
    """``Σ (k − |z|²) / D`` of observations: prior variance that features leave out, over noise.

    Attributes:
        learned: Of those whose noise level is learned, ``... x m``.
        known: Of those with known noise, ``... x m``.
    """

    learned: Tensor
    known: Tensor

    @classmethod
    def of(cls, data: Observations, residual: Tensor) -> TraceTerm:
        """Sum over observations the variance left out of each, ``... x m x n``."""
        groups = (data.learned_group(), data.known_group())
        return cls(*((residual * weight / noise).sum(-1) for noise, weight in groups))

    def __add__(self, other: TraceTerm) -> TraceTerm:
        """Add that of other observations."""
        return TraceTerm(self.learned + other.learned, self.known + other.known)


@dataclass(frozen=True)
class Rows:
    """Observations with their features in a basis.

    Attributes:
        data: n of them.
        features: Whitened, ``... x m x n x M``.
        residual: Prior variance that these leave out, ``... x m x n``.
    """

    data: Observations
    features: Tensor
    residual: Tensor

    @classmethod
    def none(cls, Z: Tensor, batch: torch.Size) -> Rows:
        """Return no observations at points Z, for a model of batch shape and outputs ``batch``."""
        none = Z.new_zeros(*batch, 0)
        known = torch.zeros(*batch[:-1], 1, 0, dtype=torch.bool, device=Z.device)
        data = Observations(Z.new_zeros(*batch[:-1], 0, Z.shape[-1]), none, none, known, 1.0)
        return cls(data, Z.new_zeros(*batch, 0, len(Z)), none)

    @classmethod
    def of(cls, data: Observations, basis: InducingBasis, batch: torch.Size) -> Rows:
        """Compute features, for a model of batch shape and outputs ``batch``. Cost O(n M²)."""
        if len(data) == 0:
            none = data.targets
            return cls(data, none.new_zeros(*none.shape, basis.rank), none)
        features = basis.features(data.X).expand(*batch, -1, -1)
        return cls(data, features, basis.residual_variance(data.X, features))

    def grown(self, basis: InducingBasis) -> Rows:
        """Continue the features by points more, after this one's. Cost O(n M g) for g of them."""
        if len(self) == 0:
            return Rows.of(self.data, basis, self.residual.shape[:-1])
        former, features = self.features.shape[-1], basis.continued(self.data.X, self.features)
        gained = features[..., former:].square().sum(-1)
        return Rows(self.data, features, (self.residual - gained).clamp_min(0.0))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, which: slice | Tensor) -> Rows:
        """Select some of them."""
        return Rows(self.data.rows(which), self.features[..., which, :], self.residual[..., which])

    def followed_by(self, others: Rows) -> Rows:
        """Append others in the same basis."""
        return Rows(
            Observations.joined([self.data, others.data]),
            torch.cat((self.features, others.features), -2),
            torch.cat((self.residual, others.residual), -1),
        )

    def taken_out(self) -> Rows:
        """Return the same, to leave a memory."""
        return replace(self, data=replace(self.data, sign=-1.0))

    def select(self, outputs: list[int]) -> Rows:
        """Select some of the outputs."""
        features, residual = self.features[..., outputs, :, :], self.residual[..., outputs, :]
        return Rows(self.data.select(outputs), features, residual)


def staying(rows: Observations, data: Observations) -> Tensor:
    """Say which rows stay when a batch is taken out, each of its observations once, ``n``."""
    stay = torch.ones(len(rows), dtype=torch.bool, device=rows.X.device)
    for i in range(len(data)):
        found = torch.nonzero(stay & _equal(rows, data.rows(slice(i, i + 1)))).flatten()
        stay[found[:1]] = False
    return stay


def _equal(rows: Observations, one: Observations) -> Tensor:
    """Say which rows equal one observation in all batch elements and outputs, ``n``."""
    inputs = (rows.X == one.X).all(-1).unsqueeze(-2)
    same = inputs & (rows.targets == one.targets) & (rows.noise == one.noise)
    same = same & (rows.known == one.known)
    return same.movedim(-1, 0).flatten(1).all(-1)
