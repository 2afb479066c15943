"""A stream's first observations as rows, while these are fewer than a grid's features."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from bo_stream.bases.grid.interpolated_kernel import (
    InterpolatedKernel,
    Pairs,
    covariance_of_pairs,
    interpolation_lines,
    pairs_of,
)
from bo_stream.bases.grid.interpolation import GridBasis
from bo_stream.bases.grid.kernel import GridKernel
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.bases.grid.statistics import check_room
from bo_stream.models.memory import Observations, WhitenedMemory
from bo_stream.models.wiski.memory import EPS, GridMemory, OnGrid, StreamMemory
from bo_stream.sufficient_statistics import target_columns, weighted_statistics
from bo_stream.tensors import outside_inference_mode

MOST_ROWS = 300
"""Up to this many observations are held as rows, if a model may have as many features."""

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
        most: Up to how many are held.
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
        """Up to how many rows are held: no more than there are nodes, hence features."""
        return min(self.most, sum(grid.num_nodes for grid in self.grid.parts))

    @property
    def earlier(self) -> tuple[()]:
        """No other grids: rows are interpolated from the present one."""
        return ()

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        columns = target_columns(self.rows.told.targets)
        return columns.mT @ columns

    @property
    def counts(self) -> Tensor:
        """Number of observations, ``... x m``."""
        return self.rows.noise.new_full(self.rows.noise.shape[:-1], float(len(self.rows)))

    def _known_sums(self) -> tuple[Tensor, Tensor, Tensor] | None:
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

    def scale(self, factor: float) -> Memory:
        """Let every observation count ``factor`` times: on the grid, for rows count once."""
        return self if factor == 1.0 else self.on_grid().scale(factor)

    def select(self, outputs: list[int]) -> RowMemory:
        """Copy the memory of some of the outputs."""
        return replace(self, rows=self.rows.select(outputs))

    def to(self, device: torch.device) -> RowMemory:
        """Move the memory to another device."""
        return replace(self, rows=self.rows.to(device))

    def map_targets(self, matrix: Tensor) -> RowMemory:
        """Map the target columns to ``[Y, 1] @ matrix``, of which the last stays."""
        targets = (target_columns(self.rows.targets) @ matrix)[..., 0]
        return replace(self, rows=replace(self.rows, targets=targets))


Memory = RowMemory | StreamMemory
"""Rows while they are few, then statistics on the grid."""
