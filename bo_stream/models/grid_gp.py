"""A grid model's memory as a stream changes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from bo_stream.models.caches import WHITENED_ROWS, Solved, Whitening
from bo_stream.models.compatibility import check_mergeable
from bo_stream.models.construction import (
    checked_projection,
)
from bo_stream.models.grid_choice import GridSize, choose_grid_size
from bo_stream.models.grid_posterior import GridPosterior
from bo_stream.models.memory import Observations
from bo_stream.models.stream_memory import StreamMemory
from bo_stream.module_state import is_same, state_of


class GridGP(GridPosterior):
    """A streaming Gaussian process on a grid: the body of every model on one."""

    def update(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Self:
        """Put n observations into memory, in place. Cost O(n (7^d + r²)), whatever came before.

        Inputs outside the bounds grow the grid by whole cells, hyperparameters kept, to at most
        ``MAX_GROWTH`` times its first width per dimension. Bad input raises and changes nothing.

        Args:
            X: ``batch_shape x n x d``; n = 0 changes nothing.
            Y: ``batch_shape x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit the model.
            InputDataError: Dtype, device, NaN, infinity, negative variance, inputs too far outside.
            UnsupportedError: The model supposes data.
            ValueError: The grown grid is too large for memory.
        """
        return self._changed("update", X, Y, Yvar, 1.0)

    def retract(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Self:
        """Take observations out of memory: undoes :meth:`update` with the same arguments.

        Args and errors as there; also InputDataError if more are taken out than are in.
        """
        return self._changed("retract", X, Y, Yvar, -1.0)

    def _changed(self, verb: str, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float) -> Self:
        self._check_not_supposed(verb)
        self._check_observations(X, Y, Yvar)
        if sign < 0:
            self._check_retractable(X)
        if X.shape[-2] > 0:
            self._observe(X, Y, Yvar, sign)
        return self

    def _check_retractable(self, X: Tensor) -> None:
        if X.shape[-2] > self.num_observations + 0.5:
            raise InputDataError(
                f"Expected X to hold at most the {self.num_observations:g} observations in "
                f"memory, got {X.shape[-2]}. Retract only what was given to update."
            )

    def _observe(self, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float) -> None:
        self._take(self._observations(X, Y, Yvar, sign))

    def _take(self, data: Observations) -> None:
        self._make_room(data.X)
        memory = self._memory.with_room_for(data)
        whitening, solved = self._caches_after(data)
        subspace = None if self._subspace is None else self._subspace.after(data)
        memory.observe(data)
        self._memory, self._whitening, self._solved = memory, whitening, solved
        self._learning, self._subspace = None, subspace
        self._refresh_fixed_noise()

    @torch.no_grad()
    def _caches_after(self, data: Observations) -> tuple[Whitening | None, Solved | None]:
        whitening, solved = self._whitening, self._solved
        if whitening is None or data.X.shape[-2] > WHITENED_ROWS:
            return None, None
        solvable = solved is not None and solved.can_take(data, whitening.basis)
        if solved is None or not solvable or not is_same(state_of(self), solved.state):
            return self._whitening_after(whitening, data), None
        features = whitening.basis.features(data.X)
        outcomes, noise = self._as_outcomes(data.targets, data.noise, data.known)
        return whitening.after(data, features), solved.after(features, outcomes, noise)

    def _whitening_after(self, whitening: Whitening, data: Observations) -> Whitening | None:
        if not is_same(state_of(self.covar_module), whitening.state):
            return None
        return whitening.after(data, whitening.basis.features(data.X))

    def _make_room(self, X: Tensor) -> None:
        """Grow the grid, exactly, so that its box holds transformed inputs."""
        memory = self._memory.covering(X)
        if memory is not self._memory:
            self._set_memory(memory)

    def merge(self, other: Self) -> Self:
        """Add another model's memory to this one's, in place; hyperparameters stay as they are.

        Exact: equal to one stream of both models' data. Grids that share their nodes are joined; a
        different grid is kept beside this one, its observations interpolated from its own nodes.

        Raises:
            UnsupportedError: Another class, shape, transform, or a model that supposes data.
        """
        check_mergeable(self, other)
        self._check_not_supposed("merge")
        other._check_not_supposed("merge")
        matrix = _shifted_targets(other._shift - self._shift)
        self._set_memory(
            self._memory.absorb(other._memory.map(lambda s: s.map_targets(matrix).scale(1.0)))
        )
        self._refresh_fixed_noise()
        return self

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
        self._take(replace(new, X=checked_projection(former.to(new.X)), sign=-1.0))
        self._take(new)
        return self

    def forget(self, factor: float) -> Self:
        """Let every past observation count ``factor`` times: exponential forgetting.

        Args:
            factor: In (0, 1].

        Raises:
            ValueError: The factor is out of range.
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("forget")
        if not 0.0 < factor <= 1.0:
            raise ValueError(f"Expected factor in (0, 1], got {factor}.")
        self._set_memory(self._memory.map(lambda s: s.scale(factor)))
        return self

    def clear(self) -> Self:
        """Drop all observations; hyperparameters, stem and standardisation stay.

        Raises:
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("clear")
        memory = self._memory
        self._set_memory(
            StreamMemory.empty(
                memory.grid, self._batch_shape, self._num_outputs, memory.counts.device
            )
        )
        return self

    def refine(self, grid_size: GridSize) -> Self:
        """Move to a finer (or coarser) grid over the same box, hyperparameters kept.

        What is observed from now on has the new grid's interpolation error. The posterior is
        exactly that of the new grid's kernel with the past observations interpolated twice (from
        the new grid to the old nodes, from those to the data), whose statistics stay on the old
        grid. So the past keeps the old grid's error, and memory and the cost of a refit grow by
        one grid per call.

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
        return self

    def _prepare_refit(self) -> None:
        self._standardize_by(self._memory.totals)
        self._refresh_fixed_noise()

    def _select_memory(self, outputs: list[int]) -> None:
        self._set_memory(self._memory.select(outputs))
        self._shift = self._shift[..., outputs]
        self._noise_floor = self._noise_floor[..., outputs]


def _shifted_targets(shift: Tensor) -> Tensor:
    """The map of target columns [Y, 1] to [Y + shift, 1], ``... x m x 2 x 2``."""
    matrix = torch.eye(2, dtype=shift.dtype, device=shift.device).repeat(*shift.shape, 1, 1)
    matrix[..., 1, 0] = shift
    return matrix
