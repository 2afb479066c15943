"""A memory at inducing points that still holds its latest rows as they came."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.inducing import InducingBasis, KnownValues
from bo_stream.models.inducing_memory import InducingMemory
from bo_stream.models.memory import Observations, Whitened


@dataclass(frozen=True)
class WindowedMemory:
    """All observations in statistics, and the latest of them also as rows.

    Rows are worth more than statistics when points or hyperparameters move: they are expressed
    anew, exactly, and hyperparameters are learned from their full covariance.

    Attributes:
        whole: Statistics of all observations.
        absorbed: Of all but the recent ones.
        recent: The latest, at most ``window``.
        window: Number of rows to hold.
    """

    whole: InducingMemory
    absorbed: InducingMemory
    recent: Observations
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
        memory = InducingMemory.empty(basis, torch.Size((*batch, outputs)))
        return cls(memory, memory, no_rows(basis.Z, batch, outputs), window)

    @property
    def values(self) -> KnownValues:
        """The points, and the root of the kernel at them when last expressed."""
        return self.whole.values

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
        absorbed = self.absorbed.in_basis(basis)
        return replace(self, absorbed=absorbed, whole=_with_rows(absorbed, basis, self.recent))

    def after(self, data: Observations, basis: InducingBasis, features: Tensor) -> WindowedMemory:
        """With a batch more, or less, of these features in the memory's basis. Cost O(n M²)."""
        whole = self.whole.after(data, features, basis.residual_variance(data.X, features))
        if data.sign < 0:
            recent, others = taken_out(self.recent, data)
        else:
            everything = Observations.joined([self.recent, data])
            gone = max(0, len(everything) - self.window)
            recent, others = everything.rows(slice(gone, None)), everything.rows(slice(gone))
        absorbed = _with_rows(self.absorbed, basis, others) if len(recent) > 0 else whole
        return WindowedMemory(whole, absorbed, recent, self.window)

    def plus(self, other: InducingMemory) -> WindowedMemory:
        """With another memory's statistics, of the same basis."""
        return replace(self, whole=self.whole.plus(other), absorbed=self.absorbed.plus(other))

    def scale(self, factor: float) -> WindowedMemory:
        """Every observation counts ``factor`` times; the recent ones become statistics."""
        scaled = self.whole.scale(factor)
        return replace(self, whole=scaled, absorbed=scaled, recent=self.recent.rows(slice(0)))

    def select(self, outputs: list[int]) -> WindowedMemory:
        """A copy for some of the outputs."""
        return replace(
            self,
            whole=self.whole.select(outputs),
            absorbed=self.absorbed.select(outputs),
            recent=self.recent.select(outputs),
        )

    def to(self, device: torch.device) -> WindowedMemory:
        """On another device."""
        return replace(
            self,
            whole=self.whole.to(device),
            absorbed=self.absorbed.to(device),
            recent=self.recent.to(device),
        )

    def as_values(self) -> InducingMemory:
        """The recent rows as values at their own inputs, beside the absorbed ones' points.

        In it nothing of the rows is missed, whatever the kernel becomes.
        """
        n = len(self.recent)
        if n == 0:
            return self.whole
        root, M = self.absorbed.values.root, self.absorbed.values.root.shape[-1]
        X = self.recent.X
        Z = self.absorbed.values.Z.expand(*X.shape[:-2], M, X.shape[-1])
        eye = torch.eye(n, dtype=root.dtype, device=root.device)
        units = torch.cat((root.new_zeros(n, M), eye), -1).expand(*root.shape[:-2], n, M + n)
        statistics = self.absorbed.statistics.map(lambda s: _padded(s, n))
        return InducingMemory(
            KnownValues(torch.cat((Z, X), -2), _beside_identity(root, eye)),
            statistics.observed(units, self.recent),
            self.absorbed.missed,
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


def no_rows(like: Tensor, batch: torch.Size, outputs: int) -> Observations:
    """No observations of inputs as wide as ``like``, ``M x d``."""
    none = like.new_zeros(*batch, outputs, 0)
    known = torch.zeros(*batch, 1, 0, dtype=torch.bool, device=like.device)
    return Observations(like.new_zeros(*batch, 0, like.shape[-1]), none, none, known, 1.0)


def taken_out(rows: Observations, data: Observations) -> tuple[Observations, Observations]:
    """Rows without those of a batch that are among them, and the rest of the batch."""
    stay = torch.ones(len(rows), dtype=torch.bool, device=rows.X.device)
    absent = torch.ones(len(data), dtype=torch.bool, device=rows.X.device)
    for i in range(len(data)):
        found = torch.nonzero(stay & _equal(rows, data.rows(slice(i, i + 1)))).flatten()
        if len(found) > 0:
            stay[found[0]] = absent[i] = False
    return rows.rows(stay), data.rows(absent)


def _equal(rows: Observations, one: Observations) -> Tensor:
    """Which rows are the same observation as one, in all batch elements and outputs, ``n``."""
    inputs = (rows.X == one.X).all(-1).unsqueeze(-2)
    same = inputs & (rows.targets == one.targets) & (rows.noise == one.noise)
    same = same & (rows.known == one.known)
    return same.movedim(-1, 0).flatten(1).all(-1)


def _with_rows(memory: InducingMemory, basis: InducingBasis, rows: Observations) -> InducingMemory:
    if len(rows) == 0:
        return memory
    features = basis.features(rows.X).expand(*memory.counts.shape, -1, -1)
    return memory.after(rows, features, basis.residual_variance(rows.X, features))


def _beside_identity(root: Tensor, eye: Tensor) -> Tensor:
    """The block-diagonal matrix of both, ``... x (M + n) x (M + n)``."""
    M, n = root.shape[-1], len(eye)
    whole = root.new_zeros(*root.shape[:-2], M + n, M + n)
    whole[..., :M, :M] = root
    whole[..., M:, M:] = eye
    return whole


def _padded(statistics: Whitened, n: int) -> Whitened:
    """The same with n weights more, of which nothing is known."""
    return replace(
        statistics,
        gram=torch.nn.functional.pad(statistics.gram, (0, n, 0, n)),
        moment=torch.nn.functional.pad(statistics.moment, (0, 0, 0, n)),
    )
