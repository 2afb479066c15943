"""What a stream leaves behind: statistics on one or more grids, in a fixed amount of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from bo_stream.bases.grid.interpolation import GridBasis
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.bases.grid.statistics import (
    MeshPullBack,
    NodeStatistics,
    accumulate,
    embed,
    zero_statistics,
)
from bo_stream.process.process import PosteriorProcess
from bo_stream.sufficient_statistics import (
    G,
    SufficientStatistics,
    continued,
    weighted_statistics,
)
from bo_stream.tensors import State

Whitened = SufficientStatistics[Tensor]


class Memory(Protocol):
    """What is left of the data: what any model can ask a memory, and do to it."""

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        ...

    @property
    def counts(self) -> Tensor:
        """Number of observations, ``... x m``."""
        ...

    def mean_known_noise(self) -> Tensor | None:
        """Mean of the known noise variances, ``... x m``, or None without any."""
        ...

    def scale(self, factor: float, /) -> Memory:
        """Every observation counts ``factor`` times."""
        ...

    def select(self, outputs: list[int], /) -> Self:
        """Copy the memory of some of the outputs."""
        ...

    def to(self, device: torch.device, /) -> Self:
        """Move the memory to another device."""
        ...


class MergedMemory(Memory, Protocol):
    """A memory whose targets can be brought to the units of another."""

    def map_targets(self, matrix: Tensor, /) -> Self:
        """Return the statistics of the target columns ``[Y, 1] @ matrix``."""
        ...


class Cache(Protocol):
    """A posterior, and the state of the hyperparameters that it is of."""

    @property
    def state(self) -> State:
        """Of the model."""
        ...

    @property
    def process(self) -> PosteriorProcess:
        """The posterior."""
        ...


class Targets(NamedTuple):
    """Outcomes in a memory's units.

    Attributes:
        targets: ``batch x m x n``.
        noise: Known noise variances, ``batch x m x n``, with 1 where unknown.
        known: Whether the noise is known, ``batch x 1 x n``.
    """

    targets: Tensor
    noise: Tensor
    known: Tensor


class Measured(Protocol):
    """Anything that has outcomes in a memory's units, as :class:`Targets` has them."""

    @property
    def targets(self) -> Tensor:
        """Outcomes, ``... x m x n``."""
        ...

    @property
    def noise(self) -> Tensor:
        """Known noise variances, ``... x m x n``."""
        ...

    @property
    def known(self) -> Tensor:
        """Whether the noise is known, ``... x 1 x n``."""
        ...


@dataclass(frozen=True)
class Observations:
    """A checked batch of observations in the memory's units.

    Attributes:
        X: ``batch x n x d``, transformed inputs.
        targets: ``batch x m x n``, less the memory's shift.
        noise: Known noise variances, ``batch x m x n``, with 1 where unknown.
        known: Whether the noise is known, ``batch x 1 x n``.
        sign: 1 to add, −1 to take out.
    """

    X: Tensor
    targets: Tensor
    noise: Tensor
    known: Tensor
    sign: float

    @classmethod
    def joined(cls, batches: Sequence[Observations]) -> Observations:
        """Several batches of one sign as one."""
        return cls(
            torch.cat([batch.X for batch in batches], -2),
            torch.cat([batch.targets for batch in batches], -1),
            torch.cat([batch.noise for batch in batches], -1),
            torch.cat([batch.known for batch in batches], -1),
            batches[0].sign,
        )

    def __len__(self) -> int:
        return self.X.shape[-2]

    def rows(self, which: slice | Tensor) -> Observations:
        """Select some of them."""
        return Observations(
            self.X[..., which, :],
            self.targets[..., which],
            self.noise[..., which],
            self.known[..., which],
            self.sign,
        )

    def select(self, outputs: list[int]) -> Observations:
        """Select some of the outputs."""
        return replace(
            self, targets=self.targets[..., outputs, :], noise=self.noise[..., outputs, :]
        )

    def to(self, device: torch.device) -> Observations:
        """On another device."""
        return Observations(
            self.X.to(device),
            self.targets.to(device),
            self.noise.to(device),
            self.known.to(device),
            self.sign,
        )

    @property
    def any_known(self) -> bool:
        """Whether any noise variance is known."""
        return bool(self.known.any())

    def learned_group(self) -> tuple[Tensor, Tensor]:
        """Relative noise and weights of those with unknown noise, ``batch x 1 x n`` each."""
        weight = self.sign * (~self.known).to(self.targets)
        return torch.ones_like(weight), weight

    def known_group(self) -> tuple[Tensor, Tensor]:
        """Noise variances and weights of those with known noise, ``batch x m x n`` each."""
        weight = (self.sign * self.known.to(self.targets)).expand(self.noise.shape)
        return self.noise, weight


@dataclass(frozen=True)
class WhitenedMemory:
    """The memory in the weights of one basis, whitened or values at centres: what a solve needs.

    Attributes:
        learned: Observations whose noise level is learned.
        known: Observations with known noise, or None.
    """

    learned: Whitened
    known: Whitened | None

    def __add__(self, other: WhitenedMemory) -> WhitenedMemory:
        """Add two memories."""
        return WhitenedMemory(self.learned + other.learned, _add(self.known, other.known))

    def map(self, rule: Callable[[Whitened], Whitened]) -> WhitenedMemory:
        """Apply a rule to both kinds of noise."""
        return WhitenedMemory(rule(self.learned), None if self.known is None else rule(self.known))

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        learned, known = self.learned, self.known
        return learned.totals if known is None else learned.totals + known.totals

    def mean_known_noise(self) -> Tensor | None:
        """Mean of the known noise variances, ``... x m``, or None without any."""
        if self.known is None:
            return None
        return self.known.noise_sum / torch.where(self.known.count > 0, self.known.count, 1.0)

    def select(self, outputs: list[int]) -> WhitenedMemory:
        """Copy the memory of some of the outputs."""
        return self.map(lambda statistics: _of_outputs(statistics, outputs))

    def leading(self, rank: int) -> WhitenedMemory:
        """Keep the first weights only."""
        return self.map(lambda statistics: _leading(statistics, rank))

    def continued(self, features: Tensor, data: Observations) -> WhitenedMemory:
        """Append features of observations that are in memory, zero of all others.

        Args:
            features: All of these observations, ``... x m x n x p``, those in memory first.
            data: The observations.
        """
        known = self.known
        if known is not None:
            known = continued(known, features, data.targets, *data.known_group())
        learned = continued(self.learned, features, data.targets, *data.learned_group())
        return WhitenedMemory(learned, known)

    def observed(self, features: Tensor, data: Observations) -> WhitenedMemory:
        """Add a batch with these whitened features. Cost O(n r²)."""
        return self.observed_by(partial(weighted_statistics, features), data)

    def observed_by(
        self, rule: Callable[[Tensor, Tensor, Tensor], Whitened], data: Observations
    ) -> WhitenedMemory:
        """Add a batch.

        Args:
            rule: Makes statistics of targets, noise and weights.
            data: The batch.
        """
        learned, known = self.learned, self.known
        if not bool(data.known.all()):
            learned = learned + rule(data.targets, *data.learned_group())
        if data.any_known:
            known = _add(known, rule(data.targets, *data.known_group()))
        return WhitenedMemory(learned, known)


def _leading(statistics: Whitened, rank: int) -> Whitened:
    return replace(
        statistics,
        gram=statistics.gram[..., :rank, :rank],
        moment=statistics.moment[..., :rank, :],
    )


def _of_outputs(statistics: Whitened, outputs: list[int]) -> Whitened:
    gram = statistics.gram
    shared = gram.shape[-3] < statistics.moment.shape[-3]
    return _replaced(statistics, gram if shared else gram[..., outputs, :, :], outputs)


def _select(statistics: NodeStatistics, outputs: list[int]) -> NodeStatistics:
    return _replaced(statistics, statistics.gram.select(outputs), outputs)


def _replaced(
    statistics: SufficientStatistics[G], gram: G, outputs: list[int]
) -> SufficientStatistics[G]:
    """Replace the gram of the statistics of some outputs."""
    return SufficientStatistics(
        gram,
        statistics.moment[..., outputs, :, :],
        statistics.energy[..., outputs, :, :],
        statistics.totals[..., outputs, :, :],
        statistics.log_noise[..., outputs],
        statistics.noise_sum[..., outputs],
    )


def _add(
    first: SufficientStatistics[G] | None, second: SufficientStatistics[G] | None
) -> SufficientStatistics[G] | None:
    if first is None or second is None:
        return second if first is None else first
    return first + second


class HoldsStatistics:
    """What a memory can be asked that keeps all of it in ``statistics``."""

    statistics: WhitenedMemory

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        return self.statistics.totals

    @property
    def counts(self) -> Tensor:
        """Number of observations, ``... x m``."""
        return self.totals[..., 1, 1]

    def mean_known_noise(self) -> Tensor | None:
        """Mean of the known noise variances, ``... x m``, or None without any."""
        return self.statistics.mean_known_noise()


@dataclass(frozen=True)
class GridMemory:
    """Statistics of observations that were interpolated on one grid, or one grid per part.

    Attributes:
        grid: Its nodes.
        learned: Observations whose noise level is learned: relative noise 1, one gram for all
            outputs.
        known: Observations with known noise, one gram per output, or None while there are none.
    """

    grid: Mesh
    learned: NodeStatistics
    known: NodeStatistics | None

    @classmethod
    def empty(cls, grid: Mesh, batch: torch.Size, outputs: int, device: torch.device) -> GridMemory:
        """No observations yet."""
        return cls(grid, zero_statistics(grid, batch, 1, outputs, device), None)

    def with_noise_group_for(self, data: Observations) -> GridMemory:
        """Add a known-noise group if the batch needs one."""
        if self.known is None and data.any_known:
            return replace(self, known=self._zeros(data.noise.shape[-2]))
        return self

    def _zeros(self, noise_groups: int) -> NodeStatistics:
        lead = self.learned.moment.shape[:-3]
        outputs = self.learned.moment.shape[-3]
        return zero_statistics(self.grid, lead, noise_groups, outputs, self.learned.moment.device)

    def aligned(self, grid: Mesh, rounding: float) -> GridMemory:
        """Take another grid's nodes if they differ by rounding only."""
        return replace(self, grid=self.grid.aligned(grid, rounding))

    def on(self, grid: Mesh) -> GridMemory:
        """Pulled back to a grid with the same nodes and more; exact."""
        if grid == self.grid:
            return self
        return GridMemory(
            grid,
            embed(self.learned, self.grid, grid),
            None if self.known is None else embed(self.known, self.grid, grid),
        )

    def observe(self, data: Observations) -> None:
        """Add a batch in place, for which there is room. Cost O(n 7^d)."""
        if not bool(data.known.all()):
            accumulate(self.learned, self.grid, data.X, data.targets, *data.learned_group())
        if self.known is not None and data.any_known:
            accumulate(self.known, self.grid, data.X, data.targets, *data.known_group())

    def whitened(self, basis: GridBasis) -> WhitenedMemory:
        """Pull back to the whitened weights of a basis."""
        T = MeshPullBack(basis, self.grid)
        known = None if self.known is None else self.known.pull_back(T)
        return WhitenedMemory(self.learned.pull_back(T), known)

    def map(self, rule: Callable[[NodeStatistics], NodeStatistics]) -> GridMemory:
        """Apply a rule to both groups."""
        return GridMemory(
            self.grid, rule(self.learned), None if self.known is None else rule(self.known)
        )

    def select(self, outputs: list[int]) -> GridMemory:
        """Copy the memory of some of the outputs."""
        return self.map(lambda statistics: _select(statistics, outputs))

    def __add__(self, other: GridMemory) -> GridMemory:
        """Add two memories on the same grid."""
        return GridMemory(self.grid, self.learned + other.learned, _add(self.known, other.known))

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        if self.known is None:
            return self.learned.totals
        return self.learned.totals + self.known.totals
