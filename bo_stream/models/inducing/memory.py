"""A memory at inducing points that still holds its latest rows as they came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from bo_stream.bases.inducing import InducingBasis, KnownValues
from bo_stream.models.memory import HoldsStatistics, Observations, Whitened, WhitenedMemory
from bo_stream.sufficient_statistics import MatrixMap, padded, weighted_statistics


@dataclass(frozen=True)
class Rows:
    """Observations with what a basis makes of their inputs.

    Attributes:
        data: n of them.
        features: ``... x m x n x M``.
        residual: Variance that these miss, ``... x m x n``.
    """

    data: Observations
    features: Tensor
    residual: Tensor

    @classmethod
    def of(cls, data: Observations, basis: InducingBasis, batch: torch.Size) -> Rows:
        """In a basis, for a model of batch shape and outputs ``batch``. Cost O(n M²)."""
        features = basis.features(data.X).expand(*batch, -1, -1)
        return cls(data, features, basis.residual_variance(data.X, features))

    def grown(self, basis: InducingBasis) -> Rows:
        """In a basis with points more, after this one's. Cost O(n M g) for g of them."""
        former, features = self.features.shape[-1], basis.continued(self.data.X, self.features)
        gained = features[..., former:].square().sum(-1)
        return Rows(self.data, features, (self.residual - gained).clamp_min(0.0))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, which: slice | Tensor) -> Rows:
        """Some of them."""
        return Rows(self.data.rows(which), self.features[..., which, :], self.residual[..., which])

    def followed_by(self, others: Rows) -> Rows:
        """Both, in one basis."""
        return Rows(
            Observations.joined([self.data, others.data]),
            torch.cat((self.features, others.features), -2),
            torch.cat((self.residual, others.residual), -1),
        )

    def taken_out(self) -> Rows:
        """The same, to leave a memory."""
        return replace(self, data=replace(self.data, sign=-1.0))

    def select(self, outputs: list[int]) -> Rows:
        """Of some of the outputs."""
        return Rows(
            self.data.select(outputs),
            self.features[..., outputs, :, :],
            self.residual[..., outputs, :],
        )

    def to(self, device: torch.device) -> Rows:
        """On another device."""
        return Rows(self.data.to(device), self.features.to(device), self.residual.to(device))


def no_rows(like: Tensor, batch: torch.Size, outputs: int) -> Observations:
    """No observations of inputs as wide as ``like``, ``M x d``."""
    none = like.new_zeros(*batch, outputs, 0)
    known = torch.zeros(*batch, 1, 0, dtype=torch.bool, device=like.device)
    return Observations(like.new_zeros(*batch, 0, like.shape[-1]), none, none, known, 1.0)


def staying(rows: Observations, data: Observations) -> Tensor:
    """Which rows stay when a batch is taken out, each of its observations once, ``n``."""
    stay = torch.ones(len(rows), dtype=torch.bool, device=rows.X.device)
    for i in range(len(data)):
        found = torch.nonzero(stay & _equal(rows, data.rows(slice(i, i + 1)))).flatten()
        stay[found[:1]] = False
    return stay


def _equal(rows: Observations, one: Observations) -> Tensor:
    """Which rows are the same observation as one, in all batch elements and outputs, ``n``."""
    inputs = (rows.X == one.X).all(-1).unsqueeze(-2)
    same = inputs & (rows.targets == one.targets) & (rows.noise == one.noise)
    same = same & (rows.known == one.known)
    return same.movedim(-1, 0).flatten(1).all(-1)


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


@dataclass(frozen=True)
class WindowedMemory:
    """All observations in statistics, and the latest of them also as rows.

    Rows are worth more than statistics when points or hyperparameters move: they are expressed
    anew, exactly, and hyperparameters are learned from their full covariance.

    Attributes:
        whole: Statistics of all observations.
        rows: The latest, at most ``window``.
        window: Number of rows to hold.
    """

    whole: InducingMemory
    rows: Rows
    window: int

    @classmethod
    def empty(
        cls, basis: InducingBasis, batch: torch.Size, outputs: int, window: int
    ) -> WindowedMemory:
        """No observations yet.

        Args:
            basis: Whatever its points.
            batch: Batch shape of the model.
            outputs: Number m of outputs.
            window: Rows to hold.
        """
        shape = torch.Size((*batch, outputs))
        none = no_rows(basis.Z, batch, outputs)
        return cls(InducingMemory.empty(basis, shape), Rows.of(none, basis, shape), window)

    @property
    def recent(self) -> Observations:
        """The latest observations."""
        return self.rows.data

    @property
    def values(self) -> KnownValues:
        """The points, and the root of the kernel at them when last expressed."""
        return self.whole.values

    @cached_property
    def absorbed(self) -> InducingMemory:
        """Statistics of all but the recent rows. Cost O(w M²)."""
        if bool((self.counts == len(self.rows)).all()):
            return self.whole.scale(0.0)
        return _with(self.whole, self.rows.taken_out())

    def is_in(self, basis: InducingBasis) -> bool:
        """Whether the statistics are expressed in a basis already."""
        return self.whole.is_in(basis)

    def as_statistics(self) -> InducingMemory:
        """All observations as statistics."""
        return self.whole

    def in_basis(self, basis: InducingBasis) -> WindowedMemory:
        """Expressed by other points and another kernel; the recent rows exactly. O(M³ + w M²)."""
        if self.is_in(basis):
            return self
        rows = Rows.of(self.recent, basis, self.counts.shape)
        return replace(self, whole=_with(self.absorbed.in_basis(basis), rows), rows=rows)

    def grown(self, basis: InducingBasis) -> WindowedMemory:
        """In a basis with points more, after this one's; the recent rows exactly.

        Cost O(M² + w M g) for g points more.
        """
        rows = self.rows.grown(basis)
        whole = InducingMemory(
            basis.values,
            self.whole.statistics.continued(rows.features, rows.data),
            self.whole.missed + Missed.of(rows.data, rows.residual - self.rows.residual),
        )
        return replace(self, whole=whole, rows=rows)

    def after(self, data: Observations, basis: InducingBasis, features: Tensor) -> WindowedMemory:
        """With a batch more, or less, of these features in the memory's basis. Cost O(n M²)."""
        new = Rows(data, features, basis.residual_variance(data.X, features))
        if data.sign < 0:
            rows = self.rows[staying(self.recent, data)]
        else:
            left = max(0, self.window - len(new))
            former = self.rows[max(0, len(self.rows) - left) :]
            rows = former.followed_by(new[max(0, len(new) - self.window) :])
        return WindowedMemory(_with(self.whole, new), rows, self.window)

    def plus(self, other: InducingMemory) -> WindowedMemory:
        """With another memory's statistics, of the same basis."""
        return replace(self, whole=self.whole.plus(other))

    def scale(self, factor: float) -> WindowedMemory:
        """Every observation counts ``factor`` times; the recent ones become statistics."""
        return replace(self, whole=self.whole.scale(factor), rows=self.rows[:0])

    def select(self, outputs: list[int]) -> WindowedMemory:
        """A copy for some of the outputs."""
        return replace(self, whole=self.whole.select(outputs), rows=self.rows.select(outputs))

    def to(self, device: torch.device) -> WindowedMemory:
        """On another device."""
        return replace(self, whole=self.whole.to(device), rows=self.rows.to(device))

    def as_values(self) -> InducingMemory:
        """The recent rows as values at their own inputs, beside the absorbed ones' points.

        In it nothing of the rows is missed, whatever the kernel becomes. Kept: a refit asks often.
        """
        return self._values

    @cached_property
    def _values(self) -> InducingMemory:
        n = len(self.recent)
        if n == 0:
            return self.whole
        absorbed, X = _told(self.absorbed), self.recent.X
        root, M = absorbed.values.root, len(absorbed.values.Z)
        Z = absorbed.values.Z.expand(*X.shape[:-2], M, X.shape[-1])
        eye = torch.eye(n, dtype=root.dtype, device=root.device)
        units = torch.cat((root.new_zeros(n, M), eye), -1).expand(*root.shape[:-2], n, M + n)
        statistics = absorbed.statistics.map(lambda s: padded(s, n))
        return InducingMemory(
            KnownValues(torch.cat((Z, X), -2), root),
            statistics.observed(units, self.recent),
            absorbed.missed,
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


def _with(memory: InducingMemory, rows: Rows) -> InducingMemory:
    return memory.after(rows.data, rows.features, rows.residual) if len(rows) > 0 else memory


def _told(memory: InducingMemory) -> InducingMemory:
    """A memory, at none of its points where it is of no observations."""
    if bool(memory.counts.any()):
        return memory
    values = KnownValues(memory.values.Z[:0], memory.values.root[..., :0, :0])
    return replace(memory, values=values, statistics=memory.statistics.leading(0))
