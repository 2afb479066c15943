"""The memory of a grid model: rows at first, then sufficient statistics."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from torch import Tensor

from bo_stream.bases.grid.contraction import MeshPullBack
from bo_stream.bases.grid.interpolation import (
    GridBasis,
    InterpolatedKernel,
    Pairs,
    covariance_of_pairs,
    grid_basis,
    interpolation_lines,
    pairs_of,
)
from bo_stream.bases.grid.kernel import GridKernel
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.bases.grid.statistics import NodeGram, accumulate, check_room, embed, zero_statistics
from bo_stream.models.memory import Memory, NoiseGroups, Observations, WhitenedMemory
from bo_stream.observation_space import ObservationSpacePrior
from bo_stream.tensors import none_set, outside_inference_mode, read_expected
from bo_stream.weights import target_columns, weighted_statistics

MAX_GROWTH = 4
"""How many times wider than at first a grid may grow, per dimension."""

WAITING = 64
"""Most observations that wait to enter the statistics as one batch: a few take as long as all."""

EPS = torch.finfo(torch.float64).eps


class OnGrid(Memory):
    """A memory of rows, or of statistics, that grows with its grid.

    Attributes:
        grid: The nodes that new observations are interpolated from.
        first: The grid before it grew.
    """

    grid: Mesh
    first: Mesh

    @abstractmethod
    def _on(self, grid: Mesh) -> Self:
        """Move to a grid with the same nodes and more; exact."""

    def typical_known_noise(self) -> Tensor | None:
        """Harmonic mean of the known noise variances, ``... x m``, or None without any.

        It is near the least ones: a few imprecise observations do not move it.
        """
        sums = self.known_sums()
        return None if sums is None else torch.where(sums[2] > 0, sums[2] / sums[1], torch.inf)

    def covering(self, X: Tensor) -> Self:
        """Grow the grid by whole cells so that its box holds X; exact.

        Raises:
            InputDataError: The grid would become more than ``MAX_GROWTH`` times as wide.
            ValueError: The grown grid is too large for memory.
        """
        return self if self.grid.contains(X) else self._on(self._grown_to(X))

    def grid_past(self, X: Tensor) -> Mesh:
        """Return the grid to predict at X from, with the nodes of the current one and more.

        It depends on X and on the current grid only, not on earlier queries.

        Raises:
            InputDataError: It would become more than ``MAX_GROWTH`` times as wide as at first.
        """
        larger = self.grid.grown_past(X)
        return larger if larger.outgrown(self.first, MAX_GROWTH) is None else self._grown_to(X)

    def _grown_to(self, X: Tensor) -> Mesh:
        larger = self.grid.grown_to(X)
        _check_growth(larger, self.grid, self.first)
        return larger


def _check_growth(larger: Mesh, present: Mesh, first: Mesh) -> None:
    i = larger.outgrown(first, MAX_GROWTH)
    if i is not None:
        low, high = present.bounds[:, i].tolist()
        raise InputDataError(
            f"X lies too far outside the bounds [{low:g}, {high:g}] of dimension {i}: the grid "
            f"would grow to more than {MAX_GROWTH} times its first width. Build the model with "
            "wider bounds."
        )


@dataclass(frozen=True)
class GridMemory(NoiseGroups[NodeGram]):
    """Statistics of observations that were interpolated on one grid, or one grid per part.

    Attributes:
        grid: Its nodes.
    """

    grid: Mesh = field(kw_only=True)

    @classmethod
    def empty(cls, grid: Mesh, batch: torch.Size, outputs: int, device: torch.device) -> GridMemory:
        """Make a memory of no observations."""
        return cls(zero_statistics(grid, batch, 1, outputs, device), grid=grid)

    def on(self, grid: Mesh) -> GridMemory:
        """Pull back to a grid with the same nodes and more; exact."""
        if grid == self.grid:
            return self
        return replace(self.map(lambda statistics: embed(statistics, self.grid, grid)), grid=grid)

    def observe(self, data: Observations) -> GridMemory:
        """Add a batch in the box to the group of its kind of noise; see :func:`accumulate`."""
        none = not data.known.is_cpu and self.known is None and none_set(data.known)
        memory, known = self, 0 if none else int(data.known.sum())
        if known > 0 and self.known is None:
            *lead, outputs, _, _ = self.learned.moment.shape
            groups, device = data.noise.shape[-2], self.learned.moment.device
            zeros = zero_statistics(self.grid, torch.Size(lead), groups, outputs, device)
            memory = replace(self, known=zeros)
        if known < data.known.numel():
            weight = data.noise.new_full(data.known.shape, data.sign).masked_fill(data.known, 0.0)
            rows = data.X, data.targets, torch.ones_like(weight), weight
            memory = replace(memory, learned=accumulate(self.learned, self.grid, *rows))
        if known > 0 and memory.known is not None:
            rows = data.X, data.targets, *data.known_group()
            memory = replace(memory, known=accumulate(memory.known, self.grid, *rows))
        return memory

    def whitened(self, basis: GridBasis) -> WhitenedMemory:
        """Pull back to the whitened weights of a basis."""
        T = MeshPullBack(basis, self.grid)
        known = None if self.known is None else self.known.pull_back(T)
        return WhitenedMemory(self.learned.pull_back(T), known)


@dataclass(frozen=True)
class StreamMemory(OnGrid):
    """Statistics of all observations, on the grids that they were interpolated on.

    Attributes:
        current: New observations go here.
        earlier: Observations from before a refinement, or merged from another grid.
        first: The current grid before it grew.
        rounding: Relative rounding error of the inputs, by which nodes that are the same differ.
        held: The latest outcomes of another likelihood than a Gaussian one, in the box of the
            current grid, with their sites, which are in none of the statistics; None: none are.
        waiting: The latest small batches, in the box of the current grid, still to be added to its
            statistics.
    """

    current: GridMemory
    earlier: tuple[GridMemory, ...]
    first: Mesh
    rounding: float = EPS
    held: Observations | None = None
    waiting: tuple[Observations, ...] = ()

    @classmethod
    def empty(
        cls, grid: Mesh, batch: torch.Size, outputs: int, device: torch.device
    ) -> StreamMemory:
        """Make a memory of no observations."""
        return cls(GridMemory.empty(grid, batch, outputs, device), (), grid)

    @property
    def grid(self) -> Mesh:  # type: ignore[override]
        """The current grid."""
        return self.current.grid

    def __iter__(self) -> Iterator[GridMemory]:
        return iter((self.current, *self.earlier))

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        totals = [memory.totals for memory in self]
        for rows in self._rows:
            columns = target_columns(rows.targets)
            totals.append(columns.mT @ columns)
        return torch.stack(totals).sum(0)

    def known_sums(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """See :meth:`Memory.known_sums`."""
        sums = [each for memory in self if (each := memory.known_sums()) is not None]
        sums += [rows.known_sums() for rows in self._rows if rows.any_known]
        if not sums:
            return None
        noise, precision, count = (torch.stack(each).sum(0) for each in zip(*sums, strict=True))
        return noise, precision, count

    def _on(self, grid: Mesh) -> StreamMemory:
        self._check_room(grid, self.waiting)
        return replace(self, current=self.current.on(grid))

    def _check_room(self, grid: Mesh, waiting: Iterable[Observations]) -> None:
        """Check that memory suffices on a grid for the first known noise among rows that wait."""
        *batch, outputs, _, _ = self.current.learned.moment.shape
        if outputs > 1 and self.current.known is None and any(rows.any_known for rows in waiting):
            check_room(grid, math.prod(batch) * outputs)

    @property
    def _waiting(self) -> list[Observations]:
        """All that waits as one batch; none if nothing does."""
        return [Observations.joined(self.waiting)] if self.waiting else []

    @property
    def _rows(self) -> list[Observations]:
        """The observations that are in none of the statistics, as a Gaussian process has them."""
        return self._waiting + ([] if self.held is None else [self.held.told])

    def observed(self, data: Observations) -> StreamMemory:
        """Add a batch in the box of the current grid: it waits, or enters with all that waits.

        Then gram and moment change in place: a conditioned model, which shares them, reads neither.
        Cost O(n 7^d), and no more than to store it for most batches that are small.

        Raises:
            ValueError: Known noise needs a grid for each output, which are too large for memory.
        """
        if not data.X.is_cpu:
            read_expected()
        self._check_room(self.grid, (data,))  # before anything changes
        if data.sign > 0.0 and len(data) + sum(map(len, self.waiting)) <= WAITING:
            stored = replace(data, X=data.X.clone())  # the caller's own may change
            return replace(self, waiting=(*self.waiting, stored))
        current = self.current
        for batch in (*self._waiting, data):
            current = current.observe(batch)
        return replace(self, current=current, waiting=())

    def entered(self) -> StreamMemory:
        """Copy the memory with all that waits in the statistics. Cost O(7^d p), if any does."""
        if not self.waiting:
            return self
        (batch,) = self._waiting
        return replace(self, current=self.current.scale(1.0).observe(batch), waiting=())

    def check_holds(self, X: Tensor) -> None:
        """Check that observations at X can be in memory, and that it is known on which grid."""
        grid = self._holder().grid
        if not grid.contains(X):
            low, high = grid.bounds.tolist()
            raise InputDataError(
                f"Expected X of observations in memory, got some outside the bounds {low} to "
                f"{high} that hold them all: they were never put in."
            )

    def _holder(self) -> GridMemory:
        """Return the memory of the one grid that has observations, the current one if none has."""
        held = [
            memory
            for memory in self
            if (memory is self.current and self.waiting) or bool((memory.counts > 0.0).any())
        ]
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
        whole = self.entered()
        holder = whole._holder()
        left = holder.scale(1.0).observe(data)
        return whole.each(lambda memory: left if memory is holder else memory)

    def whitened(self, basis: GridBasis) -> WhitenedMemory:
        """Pull all statistics back to the whitened weights of a basis, and add what is stored."""
        first, *others = (memory.whitened(basis) for memory in self)
        statistics = sum(others, start=first)
        for rows in self._waiting:
            statistics = statistics.observed(basis.features(rows.X), rows)
        return self.with_held(statistics, basis)

    def with_held(self, statistics: WhitenedMemory, basis: GridBasis) -> WhitenedMemory:
        """Add the sites that are stored to statistics in the weights of a basis. Cost O(n r²)."""
        if self.held is None:
            return statistics
        return statistics.observed(basis.features(self.held.X), self.held.told)

    def learned_squares(self, basis: GridBasis) -> Tensor:
        """Sum squares of features over the observations of learned noise, ``... x m x r``.

        The diagonal of a gram of :meth:`whitened`: stored sites have known noise. Cost
        O((7 g)^d Σ r_i).
        """
        pairs = ((MeshPullBack(basis, memory.grid), memory.learned.gram) for memory in self)
        first, *others = (T.diagonal(gram) for T, gram in pairs)
        for rows in self._waiting:
            weight = rows.learned_group()[1].unsqueeze(-1)
            others.append((basis.features(rows.X).square() * weight).sum(-2))
        return sum(others, start=first)

    def settled(self) -> StreamMemory:
        """Copy the memory with the sites that are stored in the statistics, for good."""
        if self.held is None:
            return self
        current = self.current.scale(1.0).observe(self.held.told)
        return replace(self, current=current, held=None)

    def each(self, rule: Callable[[GridMemory], GridMemory]) -> StreamMemory:
        """Apply a rule to the statistics on each grid, once all that waits is in them."""
        whole = self.entered()
        current, *earlier = map(rule, whole)
        return replace(whole, current=current, earlier=tuple(earlier))

    def map_targets(self, matrix: Tensor) -> StreamMemory:
        """Copy with the target columns ``[Y, 1] @ matrix``, ``... x m x 2 x 2``.

        Those of outcomes that are stored stay: outcomes with sites have no other units.
        """
        return self.each(lambda memory: memory.map_targets(matrix).scale(1.0))

    def scale(self, factor: float) -> StreamMemory:
        """Let every observation count ``factor`` times: what is stored enters the statistics."""
        if self.held is not None:
            return self if factor == 1.0 else self.settled().scale(factor)
        return self.each(lambda memory: memory.scale(factor))

    def aligned(self, grid: Mesh, rounding: float) -> StreamMemory:
        """Move to another grid's nodes where its own are them but for rounding."""
        moved = self.each(lambda own: replace(own, grid=own.grid.aligned(grid, rounding)))
        return replace(moved, first=self.first.aligned(grid, rounding))

    def absorb(self, other: StreamMemory) -> StreamMemory:
        """Join both memories: grids that share their nodes become one, others are kept alongside.

        Both are of grids over the same groups of inputs. The other's tensors are taken as they are:
        pass a copy of a memory that goes on changing. What the other holds comes last.

        Raises:
            InputDataError: The common grid would become too wide.
        """
        grid = self.grid.grown_over(other.grid)
        _check_growth(grid, self.grid, self.first)
        whole = self.entered()
        current, earlier = whole.current.on(grid), list(self.earlier)
        for memory in other.entered():
            if memory.grid.lies_in(grid):
                current = current + replace(memory.on(grid), grid=grid)
            else:
                same = [part for part in earlier if part.grid == memory.grid]
                earlier = [part for part in earlier if part.grid != memory.grid]
                earlier.append(sum(same, start=memory))
        rows = [part.held for part in (self, other) if part.held is not None]
        held = Observations.joined(rows) if rows else None
        return replace(whole, current=current, earlier=tuple(earlier), held=held)

    def refined(self, grid: Mesh) -> StreamMemory:
        """Begin an empty current grid, which takes what is stored; statistics stay on theirs."""
        lead, outputs = self.counts.shape[:-1], self.counts.shape[-1]
        fresh = StreamMemory.empty(grid, lead, outputs, self.counts.device)
        kept = tuple(memory for memory in self.entered() if bool(memory.counts.any()))
        return replace(fresh, earlier=kept, rounding=self.rounding, held=self.held)


# --- a stream's first observations as rows, while these are fewer than a grid's features ---------


MOST_ROWS = 300
"""Up to this many observations are stored as rows, if a model may have as many features."""

NODES_OF_PAIRS = 40
"""Square of the number of nodes in a dimension, in numbers of rows, from which a covariance is
cheaper from pairs of rows than from the nodes' matrix. Measured with its gradient on a processor.
"""


@dataclass(frozen=True)
class RowMemory(OnGrid):
    """Observations as they came, before any is interpolated onto the grid.

    So long as they are few, a model solves in the n x n system of the rows. Beyond ``bound`` they
    are interpolated onto the grid and dropped. Memory O(n d), and O(n²) once a fit has looked at
    pairs of a few of them; nothing of the grid is allocated.

    Attributes:
        grid: The nodes that the kernel is interpolated from.
        first: The grid before it grew.
        rows: The observations, each to be added.
        most: Up to how many are stored.
        rounding: Relative rounding error of the inputs, by which nodes that are the same differ.
    """

    grid: Mesh
    first: Mesh
    rows: Observations
    most: int
    rounding: float = EPS

    @classmethod
    def empty(
        cls,
        grid: Mesh,
        batch: torch.Size,
        outputs: int,
        device: torch.device,
        most: int,
        columns: int = 1,
    ) -> RowMemory:
        """Make a memory of no observations, of so many columns of outcomes an output.

        Raises:
            ValueError: The grid that they would later be moved to is too large for memory.
        """
        check_room(grid, math.prod(batch))
        X = torch.empty(0, len(set().union(*grid.groups)), device=device)
        rows = Observations.none(X, torch.Size((*batch, outputs)), columns)
        return cls(grid, grid, rows, most)

    @property
    def bound(self) -> int:
        """Up to how many rows are stored: no more than there are nodes, hence features."""
        return min(self.most, sum(grid.num_nodes for grid in self.grid.parts))

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        columns = target_columns(self.rows.told.targets)
        return columns.mT @ columns

    def known_sums(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """See :meth:`Memory.known_sums`."""
        told = self.rows.told
        return told.known_sums() if told.any_known else None

    @cached_property
    @outside_inference_mode()
    def lines(self) -> Tensor:
        """Interpolation weights of the rows, ``... x 1 x n x G``."""
        return interpolation_lines(self.grid, self.rows.X).unsqueeze(-3)

    @cached_property
    @outside_inference_mode()
    def pairs(self) -> tuple[Pairs, ...]:
        """All pairs of the rows."""
        return pairs_of(self.grid, self.rows.X)

    def covariance(self, kernel: GridKernel) -> Tensor:
        """Compute the rows' interpolated covariance, ``... x m x n x n``, differentiable."""
        nodes = min(size for grid in self.grid.parts for size in grid.size)
        if NODES_OF_PAIRS * len(self.rows) <= nodes**2:
            return covariance_of_pairs(kernel, self.grid, self.pairs)
        interpolated = InterpolatedKernel.of(kernel, self.grid)
        return interpolated.covariance(self.lines, interpolated.images(self.lines))

    def _on(self, grid: Mesh) -> RowMemory:
        check_room(grid, self._copies(self.rows.any_known))
        return replace(self, grid=grid)

    def _copies(self, known: bool) -> int:
        *batch, outputs, _ = self.rows.noise.shape
        return math.prod(batch) * (outputs if known else 1)

    def aligned(self, grid: Mesh, rounding: float) -> RowMemory:
        """Move to another grid's nodes if its own are them but for rounding."""
        own, first = (mesh.aligned(grid, rounding) for mesh in (self.grid, self.first))
        return replace(self, grid=own, first=first)

    def refined(self, grid: Mesh) -> RowMemory:
        """Return the rows on another grid, as if they had been observed there."""
        return replace(self._on(grid), first=grid)

    def observed(self, data: Observations) -> RowMemory | None:
        """Append a batch; None where the rows would be too many.

        Raises:
            ValueError: Known noise needs a grid for each output, which are too large for memory.
        """
        if len(self.rows) + len(data) > self.bound:
            return None
        if data.any_known and not self.rows.any_known:
            check_room(self.grid, self._copies(known=True))
        return replace(self, rows=Observations.joined((self.rows, data)))

    def without(self, data: Observations) -> RowMemory:
        """Take out some of the rows.

        Raises:
            InputDataError: One of the batch is not among the rows.
        """
        return replace(self, rows=self.rows.at(self.rows.all_but(self.positions(data))))

    def positions(self, data: Observations) -> Tensor:
        """Find each row of a batch among the rows; see :meth:`Observations.positions`."""
        return self.rows.positions(data, self.grid.bounds.diff(dim=0)[0])

    def emptied(self) -> RowMemory:
        """Return the memory without its rows."""
        return replace(self, rows=self.rows.rows(slice(0)))

    def on_grid(self) -> StreamMemory:
        """Return the rows interpolated onto the grid, as statistics. Cost O(7^d p + n 7^d).

        Raises:
            ValueError: The grid is too large for memory.
        """
        *batch, outputs, _ = self.rows.noise.shape
        device = self.rows.noise.device
        current = GridMemory.empty(self.grid, torch.Size(batch), outputs, device)
        if len(self.rows) > 0:
            current = current.observe(self.rows.told)
        return StreamMemory(current, (), self.first, self.rounding)

    def held_on_grid(self) -> StreamMemory:
        """Return a memory on the grid that holds the rows. Cost O(7^d p)."""
        empty = self.emptied().on_grid()
        return replace(empty, held=self.rows) if len(self.rows) > 0 else empty

    def whitened(self, basis: GridBasis) -> WhitenedMemory:
        """Compute statistics in the whitened weights of a basis. Cost O(n r²)."""
        features, rows, known = basis.features(self.rows.X), self.rows.told, None
        if rows.any_known:
            known = weighted_statistics(features, rows.targets, *rows.known_group())
        learned = weighted_statistics(features, rows.targets, *rows.learned_group())
        return WhitenedMemory(learned, known)

    def scale(self, factor: float) -> WiskiMemory:  # type: ignore[override]
        """Let every observation count ``factor`` times: on the grid, for rows count once."""
        return self if factor == 1.0 else self.on_grid().scale(factor)


WiskiMemory = RowMemory | StreamMemory
"""Rows while they are few, then statistics on the grid."""


# --- the prior of a grid model while its observations are few: an interpolated kernel ------------


@dataclass(frozen=True)
class GridPrior(ObservationSpacePrior):
    """A Gaussian process prior with an interpolated kernel at fixed hyperparameters.

    The coordinates of points are their interpolation weights w of all dimensions side by side,
    ``... x 1 x n x G``, their images ``K w``.

    Attributes:
        kernel: Before it is interpolated, detached.
        mesh: The nodes.
        mean: Constant prior mean, ``... x m x 1``.
        tolerance: Part of the kernel's trace that its features may leave out.
        max_rank: Cap on the number of features.
    """

    kernel: GridKernel
    mesh: Mesh
    mean: Tensor
    tolerance: float
    max_rank: int

    @cached_property
    def _interpolated(self) -> InterpolatedKernel:
        """The kernel k̃, ``batch x m``, also where all outputs share one."""
        kernel = InterpolatedKernel.of(self.kernel, self.mesh)
        return replace(kernel, scales=tuple(s.expand(self.mean.shape[:-1]) for s in kernel.scales))

    def coordinates(self, X: Tensor) -> Tensor:
        """Compute interpolation weights."""
        return interpolation_lines(self.mesh, X).unsqueeze(-3)

    def images(self, coordinates: Tensor) -> Tensor:
        """Multiply weights by the kernel between the nodes."""
        return self._interpolated.images(coordinates)

    def covariance(self, coordinates: Tensor, images: Tensor) -> Tensor:
        """Multiply the products of all dimensions."""
        return self._interpolated.covariance(coordinates, images)

    def variance(self, coordinates: Tensor, images: Tensor) -> Tensor:
        """Multiply the products of all dimensions, each point with itself."""
        return self._interpolated.variance(coordinates, images)

    def radial(self, images: Tensor) -> None:
        """Return nothing: on a grid kernels are products over inputs, interpolated."""

    def basis_for(self, X: Tensor, batch: torch.Size) -> GridBasis:
        """Build the kernel's features, whatever the observations."""
        return grid_basis(self.mesh, self.kernel, batch, self.tolerance, self.max_rank)
