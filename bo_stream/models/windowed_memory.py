"""A memory at inducing points that still holds its latest rows as they came."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from bo_stream.bases.inducing import InducingBasis, KnownValues
from bo_stream.models.inducing_memory import InducingMemory, Missed
from bo_stream.models.memory import Observations
from bo_stream.models.recent_rows import Rows, no_rows, staying
from bo_stream.sufficient_statistics import padded


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
