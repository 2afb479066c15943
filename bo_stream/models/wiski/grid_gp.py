"""A grid model's memory as a stream changes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError
from torch import Tensor

from bo_stream.models.caches import WHITENED_ROWS, Solved, Whitening, Wider
from bo_stream.models.construction import (
    checked_projection,
)
from bo_stream.models.memory import Observations, WhitenedMemory
from bo_stream.models.remainder import check_remainder
from bo_stream.models.wiski.grid_choice import GridSize, choose_grid_size
from bo_stream.models.wiski.grid_posterior import GridPosterior
from bo_stream.models.wiski.memory import StreamMemory
from bo_stream.models.wiski.observation_space import SolvedRows
from bo_stream.models.wiski.rows import RowMemory, joined, on_grid
from bo_stream.tensors import is_in, keeps_tensors


class GridGP(GridPosterior):
    """A streaming Gaussian process on a grid: the body of every model on one."""

    def _take(self, data: Observations) -> None:
        memory = self._memory
        if data.sign < 0.0 and isinstance(memory, StreamMemory):
            self._check_holds(memory, data)
        self._accumulate(data)

    @torch.no_grad()
    def _check_holds(self, memory: StreamMemory, data: Observations) -> None:
        """Check that without observations the memory is one of observations. Cost O(n r² + r³).

        Raises:
            InputDataError: They are not in memory.
            UnsupportedError: There are observations on several grids.
        """
        memory.check_holds(data.X)
        whitening = self._current_whitening()
        check_remainder(self._whitened_without(memory, data, whitening), whitening.memory)

    @staticmethod
    def _whitened_without(
        memory: StreamMemory, data: Observations, whitening: Whitening
    ) -> WhitenedMemory:
        if memory.all_on_current and len(data) <= WHITENED_ROWS:
            return whitening.after(data, whitening.basis.features(data.X)).settled().memory
        return memory.without(data).whitened(whitening.basis)

    def _accumulate(self, data: Observations) -> None:
        """Add observations, or take out some that are in memory; see :meth:`_check_holds`.

        Raises:
            InputDataError: One to take out is not among the rows in memory.
        """
        memory = self._memory
        if data.sign < 0.0 and (isinstance(memory, RowMemory) or not memory.all_on_current):
            self._set_memory(memory.without(data))
        else:
            self._add(data)
        self._refresh_fixed_noise()

    def _add(self, data: Observations) -> None:
        self._make_room(data.X)
        memory = self._memory_for(data)
        whitening, solved = self._caches_after(self._whitening, self._solved, data)
        rows_solved = self._rows_solved_after(memory, self._rows_solved, data)
        wider = self._wider_after(memory, data)
        subspace = None if self._subspace is None else self._subspace.after(data)
        if isinstance(memory, StreamMemory):
            memory.observe(data)
        self._memory, self._whitening, self._solved = memory, whitening, solved
        self._learning, self._subspace = None, subspace
        self._rows_solved, self._wider = rows_solved, wider

    def _memory_for(self, data: Observations) -> RowMemory | StreamMemory:
        """Rows that hold a batch already, or statistics that have room for it."""
        rows = self._memory
        held = rows.observed(data) if isinstance(rows, RowMemory) else None
        return on_grid(rows).with_noise_group_for(data) if held is None else held

    @torch.no_grad()
    def _rows_solved_after(
        self, memory: RowMemory | StreamMemory, solved: SolvedRows | None, data: Observations
    ) -> SolvedRows | None:
        if isinstance(memory, StreamMemory) or solved is None or not is_in(self, solved.state):
            return None
        return solved.after(data.X, *self._prior.standardized(data))

    @torch.no_grad()
    def _caches_after(
        self, whitening: Whitening | None, solved: Solved | None, data: Observations
    ) -> tuple[Whitening | None, Solved | None]:
        if whitening is None or data.X.shape[-2] > WHITENED_ROWS:
            return None, None
        solvable = solved is not None and solved.can_take(data, whitening.basis)
        if solved is None or not solvable or not is_in(self, solved.state):
            return self._whitening_after(whitening, data), None
        features = whitening.basis.features(data.X)
        outcomes, noise = self._prior.standardized(data)
        return whitening.after(data, features), solved.after(features, outcomes, noise)

    def _wider_after(
        self, memory: RowMemory | StreamMemory, data: Observations
    ) -> tuple[Wider, ...]:
        """What is kept for queries outside the bounds, as far as it was asked for."""
        return tuple(
            Wider(
                wider.grid,
                *self._caches_after(wider.whitening, wider.solved, data),
                self._rows_solved_after(memory, wider.rows_solved, data),
                asked=False,
            )
            for wider in self._wider
            if wider.asked
        )

    def _whitening_after(self, whitening: Whitening, data: Observations) -> Whitening | None:
        if not is_in(self.covar_module, whitening.state):
            return None
        return whitening.after(data, whitening.basis.features(data.X))

    def _make_room(self, X: Tensor) -> None:
        """Grow the grid, exactly, so that its box holds transformed inputs."""
        memory = self._memory.covering(X)
        if memory is not self._memory:
            self._set_memory(memory)

    @keeps_tensors
    def merge(self, other: Self) -> Self:
        """Add another model's memory to this one's, in place; hyperparameters stay as they are.

        Exact: equal to one stream of both models' data. Rows of both stay rows while these are few.
        Else grids that share their nodes, up to the rounding of the inputs' dtype, are joined; a
        different grid is kept beside this one, its observations interpolated from its own nodes.

        Raises:
            UnsupportedError: Another class, shape, transform, or a model that supposes data.
        """
        self._set_merged(self._merged_memory(other), other)
        return self

    def _merged_memory(self, other: Self) -> RowMemory | StreamMemory:
        matrix = self._targets_of(other)
        rounding = max(torch.finfo(model._dtype).eps for model in (self, other))
        return joined(self._memory, other._memory.with_targets(matrix), rounding)

    def reproject(self, X: Tensor, Y: Tensor, former: Tensor, Yvar: Tensor | None = None) -> Self:
        """Replace observations by themselves as the stem projects them now.

        Exact: equal to a memory that they had entered by the present stem.

        Args:
            X: ``n x d``, observed before.
            Y: ``n x m``.
            former: Their coordinates when they entered, ``n x k``: what :meth:`coordinates` was.
            Yvar: Known noise variances shaped as Y; NaN: unknown.

        Raises:
            BotorchTensorDimensionError: ``former`` has another shape.
            InputDataError: As :meth:`update`, and more observations than are in memory.
            UnsupportedError: There are observations on several grids, after :meth:`refine`.
        """
        self._check_not_supposed("reproject")
        self._check_observations(X, Y, Yvar)
        self._check_retractable(X)
        if former.shape != (*X.shape[:-1], self._grid_dim):
            raise BotorchTensorDimensionError(
                f"Expected former of shape `{tuple(X.shape[:-1])} x {self._grid_dim}`, the "
                f"coordinates of X, got {tuple(former.shape)}."
            )
        new = self._observations(X, Y, Yvar, 1.0)
        old = replace(new, X=checked_projection(former.to(new.X)), sign=-1.0)
        if isinstance(self._memory, StreamMemory):
            self._memory.check_holds(old.X)
        self._accumulate(old)
        self._accumulate(new)
        return self

    @keeps_tensors
    def clear(self) -> Self:
        """Drop all observations; hyperparameters, stem and standardisation stay.

        Raises:
            UnsupportedError: The model supposes data.
        """
        self._begin_to_clear()
        self._set_memory(self._empty_memory(self._memory.grid, self._memory.counts.device))
        return self

    @keeps_tensors
    def refine(self, grid_size: GridSize) -> Self:
        """Move to a finer (or coarser) grid over the same box, hyperparameters kept.

        Observations that are still held as rows move to the new grid, exactly. Of others, what is
        observed from now on has the new grid's interpolation error, and the posterior is
        exactly that of the new grid's kernel with the past observations interpolated twice (from
        the new grid to the old nodes, from those to the data), whose statistics stay on the old
        grid. So the past keeps the old grid's error, and memory and the cost of a refit grow by
        one grid per call. Once there are observations on both grids, ``retract`` is refused, for
        it is not kept which is where.

        Args:
            grid_size: Nodes per dimension, one number or d, at least 4; for a sum of kernels also
                such a tuple for each grid.

        Raises:
            ValueError: The size is out of range or too large for memory.
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("refine")
        sizes = choose_grid_size(grid_size, self._factors(), self._grid_dim)
        self._set_memory(self._memory.refined(self._memory.grid.resized(sizes)))
        self._vouches_for_grid = False
        return self
