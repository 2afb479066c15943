"""The memory of a model with inducing points: statistics at the points, and the latest rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.bases.inducing import InducingBasis, KnownValues
from bo_stream.linalg import solve_lower
from bo_stream.models.memory import (
    HoldsStatistics,
    Observations,
    WhitenedMemory,
    added,
    never_in,
    staying,
)
from bo_stream.models.outcomes.base import subset_moments
from bo_stream.tensors import map_tensors
from bo_stream.weights import MatrixMap, Whitened, padded, weighted_statistics


@dataclass(frozen=True)
class InducingMemory(HoldsStatistics):
    """Statistics of all observations at inducing points, and the latest of them also as rows.

    When points or hyperparameters move, rows are expressed again, exactly, and hyperparameters are
    learned from their full covariance.

    Attributes:
        whole: Statistics of all observations.
        rows: The latest of them; none in a model without a window.
        allocator: Where the points go as the stream goes by; None: they stay.
        moments: Adam's, where updates learn hyperparameters and have done so.
        held: The latest outcomes of another likelihood than a Gaussian one; None: none are stored.
    """

    whole: PointStatistics
    rows: Rows
    allocator: Allocator | None
    moments: dict[str, Any] | None = None
    held: HeldOutcomes | None = None

    @classmethod
    def empty(
        cls, values: KnownValues, batch: torch.Size, allocator: Allocator | None
    ) -> InducingMemory:
        """Return a memory of no observations, for a model of ``batch_shape x m``."""
        Z, none = values.Z, values.Z.new_zeros(*batch, 0)
        features, zero = none.new_zeros(*none.shape, len(Z)), none.sum(-1)
        learned = weighted_statistics(features, none, none, none)
        whole = PointStatistics(values, WhitenedMemory(learned), TraceTerm(zero, zero))
        return cls(whole, Rows(Observations.none(Z, batch), features, none), allocator)

    @property
    def statistics(self) -> WhitenedMemory:  # type: ignore[override]
        """Statistics of all observations."""
        return self.whole.statistics

    @property
    def values(self) -> KnownValues:
        """Return the points, and the root of their kernel matrix for which the statistics are."""
        return self.whole.values

    @property
    def settled(self) -> PointStatistics:
        """Statistics of all but the outcomes that are stored."""
        return self.whole if self.held is None else self.held.before

    @cached_property
    def absorbed(self) -> PointStatistics:
        """Statistics of all but the recent rows. Cost O(w M²)."""
        if bool((self.counts == len(self.rows)).all()):
            return self.whole.scale(0.0)
        gone = replace(self.rows.data, sign=-1.0)
        return self.whole.with_rows(replace(self.rows, data=gone))

    def is_in(self, basis: InducingBasis) -> bool:
        """Say whether the statistics are expressed in a basis already."""
        return self.values.root is basis.root

    def in_basis(self, basis: InducingBasis) -> InducingMemory:
        """Express by other points and another kernel; the recent rows exactly. O(M³ + w M²)."""
        if self.is_in(basis):
            return self
        rows = Rows.of(self.rows.data, basis, self.counts.shape)
        whole = self.absorbed.in_basis(basis).with_rows(rows)
        held = self.held and replace(self.held, before=self.held.before.in_basis(basis))
        return replace(self, whole=whole, rows=rows, held=held)

    def grown(self, basis: InducingBasis) -> InducingMemory:
        """Express in a basis with g points more, after this one's, exactly. O(M² + w M g)."""
        data, features = self.rows.data, self.rows.features
        if len(data) == 0:
            rows = Rows.of(data, basis, self.rows.residual.shape[:-1])
            whole = self.whole.padded(basis)
        else:
            former, features = features.shape[-1], basis.continued(data.X, features)
            gained = features[..., former:].square().sum(-1)
            rows = Rows(data, features, (self.rows.residual - gained).clamp_min(0.0))
            statistics = self.statistics.continued(rows.features, rows.data)
            gone = TraceTerm.of(rows.data, rows.residual - self.rows.residual)
            whole = PointStatistics(basis.values, statistics, self.whole.trace + gone)
        held = self.held and replace(self.held, before=self.held.before.padded(basis))
        return replace(self, whole=whole, rows=rows, held=held)

    def after(self, new: Rows, window: int) -> InducingMemory:
        """Add a batch in this basis, or take it out; hold the latest ``window`` rows. O(n M²).

        Raises:
            InputDataError: More are to be taken out that are not among the rows than were not kept.
        """
        if new.data.sign < 0:
            stay = staying(self.rows.data, new.data)
            missing = len(new) - int((~stay).sum())
            if bool((self.counts - len(self.rows) < missing - 0.5).any()):
                raise never_in()
            rows = self.rows[stay]
        else:
            left = max(0, window - len(new))
            one, other = (
                self.rows[max(0, len(self.rows) - left) :],
                new[max(0, len(new) - window) :],
            )
            rows = Rows(
                Observations.joined([one.data, other.data]),
                torch.cat((one.features, other.features), -2),
                torch.cat((one.residual, other.residual), -1),
            )
        return replace(self, whole=self.whole.with_rows(new), rows=rows)

    def scale(self, factor: float) -> InducingMemory:
        """Let every observation count ``factor`` times; the recent ones become statistics."""
        return replace(self, whole=self.whole.scale(factor), rows=self.rows[:0], held=None)

    def map_targets(self, matrix: Tensor) -> InducingMemory:
        """Turn targets into ``[Y, 1] @ matrix``, exactly; the recent ones become statistics."""
        whole = self.whole.map_targets(matrix)
        return replace(self, whole=whole, rows=self.rows[:0], held=None)

    def select(self, outputs: list[int]) -> InducingMemory:
        """Return a copy for some of the outputs."""
        moments, (*batch, of) = self.moments, self.counts.shape
        if moments is not None:
            moments = subset_moments(moments, torch.Size(batch), of, outputs)
        whole, rows = self.whole.select(outputs), self.rows
        features, residual = rows.features[..., outputs, :, :], rows.residual[..., outputs, :]
        rows = Rows(rows.data.select(outputs), features, residual)
        held = self.held
        if held is not None:
            held = HeldOutcomes(held.data.select(outputs), held.before.select(outputs))
        return InducingMemory(whole, rows, self.allocator, moments, held)

    def to(self, device: torch.device) -> InducingMemory:
        """Return a copy on a device."""
        moved, allocator = super().to(device), self.allocator
        return moved if allocator is None else replace(moved, allocator=allocator.to(moved.totals))

    @cached_property
    def as_values(self) -> PointStatistics:
        """Statistics in which each recent row is a value at its own input, alongside the points.

        So nothing of the rows enters the trace term, whatever the kernel becomes.
        """
        n = len(self.rows.data)
        if n == 0:
            return self.whole
        absorbed, X = self.absorbed, self.rows.data.X
        M = len(self.values.Z) if bool(absorbed.counts.any()) else 0  # else nothing is known there
        root = absorbed.values.root[..., :M, :M]
        Z = absorbed.values.Z[:M].expand(*X.shape[:-2], M, X.shape[-1])
        eye = torch.eye(n, dtype=root.dtype, device=root.device)
        units = torch.cat((root.new_zeros(n, M), eye), -1).expand(*root.shape[:-2], n, M + n)
        statistics = absorbed.statistics.leading(M).map(lambda s: padded(s, n))
        values = KnownValues(torch.cat((Z, X), -2), root)
        return PointStatistics(values, statistics.observed(units, self.rows.data), absorbed.trace)


@dataclass(frozen=True)
class PointStatistics(HoldsStatistics):
    """Statistics of observations in weights that are values of the process at some points.

    Attributes:
        values: The points, and the root of the kernel when the statistics were last expressed.
        statistics: Of all observations.
        trace: What the features leave out of their prior variance.
        anchors: Of another likelihood than a Gaussian one, the means at which sites were found, as
            observations with the precisions that the sites lack; see ``lacking_precision``.
    """

    values: KnownValues
    statistics: WhitenedMemory
    trace: TraceTerm
    anchors: Whitened | None = None

    def in_basis(self, basis: InducingBasis) -> PointStatistics:
        """Express by other points and another kernel: a congruence. Cost O(M³).

        What was observed acts as observations of the process at the old points. Exact where these
        are among the new ones; else what those do not determine enters the trace term. [Bui2017,
        eq. 5, with the old posterior over the old prior as the old statistics; Galy-Fajou2021, A.1]
        """
        if self.values.root is basis.root:
            return self
        features = basis.features(self.values.Z)
        # E[v_old | v] = T v, T = L_old⁻¹ k(Z_old, Z) L⁻ᵀ
        T = MatrixMap(solve_lower(self.values.root, features))
        lost = basis.missed(self.values, features)
        statistics, none = self.statistics, torch.zeros_like(self.trace.known)
        groups = (statistics.learned, statistics.known)
        gone = TraceTerm(*(none if s is None else (s.gram * lost).sum((-2, -1)) for s in groups))
        statistics = statistics.map(lambda s: s.pull_back(T))
        anchors = self.anchors and self.anchors.pull_back(T)
        return PointStatistics(basis.values, statistics, self.trace + gone, anchors)

    def padded(self, basis: InducingBasis) -> PointStatistics:
        """Express in a basis with more points, after these, of which nothing is known. O(M²)."""
        more = basis.rank - len(self.values.Z)
        statistics = self.statistics.map(lambda s: padded(s, more))
        anchors = self.anchors and padded(self.anchors, more)
        return PointStatistics(basis.values, statistics, self.trace, anchors)

    def with_rows(self, rows: Rows) -> PointStatistics:
        """Add rows in this basis, or take them out if their sign is negative. Cost O(n M²).

        [Galy-Fajou2021, A.3]
        """
        if len(rows) == 0:
            return self
        statistics = self.statistics.observed(rows.features, rows.data)
        trace = self.trace + TraceTerm.of(rows.data, rows.residual)
        return replace(self, statistics=statistics, trace=trace)

    def __add__(self, other: PointStatistics) -> PointStatistics:
        """Add statistics that are in the same basis."""
        statistics, trace = self.statistics + other.statistics, self.trace + other.trace
        return PointStatistics(self.values, statistics, trace, added(self.anchors, other.anchors))

    def scale(self, factor: float) -> PointStatistics:
        """Let every observation count ``factor`` times."""
        trace = map_tensors(self.trace, lambda total: total * factor)
        return replace(super().scale(factor), trace=trace)

    def select(self, outputs: list[int]) -> PointStatistics:
        """Return a copy for some of the outputs."""
        values = replace(self.values, root=self.values.root[..., outputs, :, :])
        trace = map_tensors(self.trace, lambda total: total[..., outputs])
        anchors = self.anchors and self.anchors.select(outputs)
        return PointStatistics(values, self.statistics.select(outputs), trace, anchors)


@dataclass(frozen=True)
class HeldOutcomes:
    """The latest outcomes of another likelihood, whose sites are found again at each update.

    Attributes:
        data: The outcomes as they came, with the sites that they have in the statistics of all.
        before: Statistics of all outcomes before them, whose sites stay.
    """

    data: Observations
    before: PointStatistics


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
    def of(cls, data: Observations, basis: InducingBasis, batch: torch.Size) -> Rows:
        """Compute features, for a model of batch shape and outputs ``batch``. Cost O(n M²)."""
        if len(data) == 0:
            none = data.noise.new_zeros(*batch, 0)  # targets may have several columns an output
            return cls(data, none.new_zeros(*batch, 0, basis.rank), none)
        features = basis.features(data.X).expand(*batch, -1, -1)
        return cls(data, features, basis.residual_variance(data.X, features))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, which: slice | Tensor) -> Rows:
        """Select some of them."""
        return Rows(self.data.rows(which), self.features[..., which, :], self.residual[..., which])
