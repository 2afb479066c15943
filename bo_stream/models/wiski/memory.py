"""A model's whole memory: the grid of now and, after a refinement, the grids of before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
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
from bo_stream.models.memory import Observations, WhitenedMemory, added, of_outputs

MAX_GROWTH = 4
"""How many times wider than at first a grid may grow, per dimension."""


@dataclass(frozen=True)
class StreamMemory:
    """Statistics of all observations, on the grids that they were interpolated on.

    Attributes:
        current: New observations go here.
        earlier: Observations from before a refinement, or merged from another grid.
        first: The current grid before it grew.
        rounding: Relative rounding error of the inputs, by which nodes that are the same differ.
    """

    current: GridMemory
    earlier: tuple[GridMemory, ...]
    first: Mesh
    rounding: float = torch.finfo(torch.float64).eps

    @classmethod
    def empty(
        cls, grid: Mesh, batch: torch.Size, outputs: int, device: torch.device
    ) -> StreamMemory:
        """No observations yet."""
        return cls(GridMemory.empty(grid, batch, outputs, device), (), grid)

    @property
    def grid(self) -> Mesh:
        """The current grid."""
        return self.current.grid

    def __iter__(self) -> Iterator[GridMemory]:
        """Iterate over the current grid's memory, then the earlier ones."""
        return iter((self.current, *self.earlier))

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        return torch.stack([memory.totals for memory in self]).sum(0)

    @property
    def counts(self) -> Tensor:
        """Number of observations, ``... x m``."""
        return self.totals[..., 1, 1]

    def mean_known_noise(self) -> Tensor | None:
        """Mean of the known noise variances, ``... x m``, or None without any."""
        groups = [memory.known for memory in self if memory.known is not None]
        if not groups:
            return None
        total = torch.stack([group.noise_sum for group in groups]).sum(0)
        count = torch.stack([group.count for group in groups]).sum(0)
        return total / torch.where(count > 0, count, 1.0)

    def typical_known_noise(self) -> Tensor | None:
        """Harmonic mean of the known noise variances, ``... x m``, or None without any.

        It is near the least ones: a few imprecise observations do not move it.
        """
        groups = [memory.known for memory in self if memory.known is not None]
        if not groups:
            return None
        precision = torch.stack([group.energy[..., 1, 1] for group in groups]).sum(0)
        count = torch.stack([group.count for group in groups]).sum(0)
        return torch.where(count > 0, count / precision, torch.inf)

    def covering(self, X: Tensor) -> StreamMemory:
        """Grow the grid by whole cells so that its box holds X; exact.

        Raises:
            InputDataError: The grid would become more than ``MAX_GROWTH`` times as wide.
            ValueError: The grown grid is too large for memory.
        """
        if self.grid.contains(X):
            return self
        return replace(self, current=self.current.on(grown_to(self.grid, self.first, X)))

    def grid_past(self, X: Tensor) -> Mesh:
        """Return the grid to predict at X from, with the nodes of the current one and more.

        It depends on X and on the current grid only, not on earlier queries.

        Raises:
            InputDataError: It would become more than ``MAX_GROWTH`` times as wide as at first.
        """
        return grid_past(self.grid, self.first, X)

    def with_noise_group_for(self, data: Observations) -> StreamMemory:
        """Add a group for known noise where a batch needs one."""
        return replace(self, current=self.current.with_noise_group_for(data))

    def observe(self, data: Observations) -> None:
        """Add a batch in place, for which there is room. Cost O(n 7^d)."""
        self.current.observe(data)

    def check_holds(self, X: Tensor) -> None:
        """Check that observations at X can be in memory, and that it is known on which grid.

        Raises:
            InputDataError: X lies outside the box of the grid that all observations are on.
            UnsupportedError: There are observations on several grids.
        """
        if not self._holder().grid.contains(X):
            low, high = self._holder().grid.bounds.tolist()
            raise InputDataError(
                f"Expected X of observations in memory, got some outside the bounds {low} to "
                f"{high} that hold them all: they were never put in."
            )

    def _holder(self) -> GridMemory:
        """Return the memory of the one grid that has observations, the current one if none has."""
        held = [memory for memory in self if bool((memory.totals[..., 1, 1] > 0.0).any())]
        if len(held) > 1:
            raise UnsupportedError(
                f"Cannot take observations out of a memory on {len(held)} grids, one more since "
                "each refine or merge of another grid: which of them they are on is not kept, and "
                "on another they would be taken out wrongly. Retract before refine or merge, or "
                "clear() the model and update it with the observations to keep."
            )
        return held[0] if held else self.current

    @property
    def all_on_current(self) -> bool:
        """Whether observations, if there are any, are on the current grid."""
        return self._holder() is self.current

    def without(self, data: Observations) -> StreamMemory:
        """Copy without observations, on whichever grid they are. Cost O(7^d p)."""
        holder = self._holder()
        copied = holder.with_noise_group_for(data).map(lambda statistics: statistics.scale(1.0))
        copied.observe(data)
        if holder is self.current:
            return replace(self, current=copied)
        rest = tuple(copied if memory is holder else memory for memory in self.earlier)
        return replace(self, earlier=rest)

    def whitened(self, basis: GridBasis) -> WhitenedMemory:
        """Pull all statistics back to the whitened weights of a basis."""
        parts = [memory.whitened(basis) for memory in self]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def map(self, rule: Callable[[NodeStatistics], NodeStatistics]) -> StreamMemory:
        """Apply a rule to all statistics."""
        current, *earlier = (memory.map(rule) for memory in self)
        return replace(self, current=current, earlier=tuple(earlier))

    def map_targets(self, matrix: Tensor) -> StreamMemory:
        """Copy with the target columns ``[Y, 1] @ matrix``, ``... x m x 2 x 2``."""
        return self.map(lambda statistics: statistics.map_targets(matrix).scale(1.0))

    def scale(self, factor: float) -> StreamMemory:
        """Every observation counts ``factor`` times."""
        return self.map(lambda statistics: statistics.scale(factor))

    def select(self, outputs: list[int]) -> StreamMemory:
        """Copy the memory of some of the outputs."""
        current, *earlier = (memory.select(outputs) for memory in self)
        return replace(self, current=current, earlier=tuple(earlier))

    def to(self, device: torch.device) -> StreamMemory:
        """Move the memory to another device."""
        return self.map(lambda statistics: statistics.to(device))

    def aligned(self, grid: Mesh, rounding: float) -> StreamMemory:
        """At another grid's nodes where its own are them but for rounding."""
        current, *earlier = (memory.aligned(grid, rounding) for memory in self)
        first = self.first.aligned(grid, rounding)
        return replace(self, current=current, earlier=tuple(earlier), first=first)

    def absorb(self, other: StreamMemory) -> StreamMemory:
        """Join both memories: grids that share their nodes become one, others are kept beside.

        The other's tensors are taken as they are: pass a copy of a memory that goes on changing.

        Both are of grids over the same groups of inputs.

        Raises:
            InputDataError: The common grid would become too wide.
        """
        grid = self.grid.grown_over(other.grid)
        _check_growth(grid, self.grid, self.first)
        result = replace(self, current=self.current.on(grid))
        for memory in other:
            result = result._absorb_one(memory)
        return result

    def _absorb_one(self, memory: GridMemory) -> StreamMemory:
        if not memory.grid.lies_in(self.grid):
            same = [part for part in self.earlier if part.grid == memory.grid]
            others = tuple(part for part in self.earlier if part.grid != memory.grid)
            return replace(self, earlier=(*others, sum(same, start=memory)))
        aligned = replace(memory.on(self.grid), grid=self.grid)
        return replace(self, current=self.current + aligned)

    def refined(self, grid: Mesh) -> StreamMemory:
        """Begin an empty current grid; what was observed stays on the grid it was observed on."""
        lead, outputs = self.counts.shape[:-1], self.counts.shape[-1]
        fresh = StreamMemory.empty(grid, lead, outputs, self.counts.device)
        kept = tuple(memory for memory in self if bool(memory.totals[..., 1, 1].any()))
        return replace(fresh, earlier=kept, rounding=self.rounding)


def grown_to(grid: Mesh, first: Mesh, X: Tensor) -> Mesh:
    """Return the smallest grid with the nodes of a memory's grid and more, whose box holds X.

    Args:
        grid: The memory's.
        first: The memory's grid before it grew.
        X: ``... x d``.

    Raises:
        InputDataError: It would become more than ``MAX_GROWTH`` times as wide as at first.
    """
    larger = grid.grown_to(X)
    _check_growth(larger, grid, first)
    return larger


def grid_past(grid: Mesh, first: Mesh, X: Tensor) -> Mesh:
    """Return the grid to predict at X from; see :meth:`StreamMemory.grid_past`.

    Args and errors as for :func:`grown_to`.
    """
    larger = grid.grown_past(X)
    fits = larger.outgrown(first, MAX_GROWTH) is None
    return larger if fits else grown_to(grid, first, X)


def _check_growth(larger: Mesh, present: Mesh, first: Mesh) -> None:
    i = larger.outgrown(first, MAX_GROWTH)
    if i is not None:
        low, high = present.bounds[:, i].tolist()
        raise InputDataError(
            f"X lies too far outside the bounds [{low:g}, {high:g}] of dimension {i}: the grid "
            f"would grow to more than {MAX_GROWTH} times its first width. Build the model with "
            "wider bounds."
        )


def check_same_groups(grid: Mesh, other: Mesh) -> None:
    """Check that two memories are of grids over the same groups of inputs.

    Raises:
        UnsupportedError: They are not.
    """
    if grid.groups != other.groups:
        raise UnsupportedError(
            "Cannot merge models whose covar_module is a sum over different groups of inputs: "
            f"{grid.groups} and {other.groups}."
        )


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
        return GridMemory(self.grid, self.learned + other.learned, added(self.known, other.known))

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        if self.known is None:
            return self.learned.totals
        return self.learned.totals + self.known.totals


def _select(statistics: NodeStatistics, outputs: list[int]) -> NodeStatistics:
    return of_outputs(statistics, statistics.gram.select(outputs), outputs)
