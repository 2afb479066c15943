"""What a grid model keeps between calls: recomputed when stale, carried along by small updates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.basis import Basis
from bo_stream.bases.grid.interpolation import GridBasis
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.models.memory import Observations, WhitenedMemory
from bo_stream.models.wiski.observation_space import SolvedRows
from bo_stream.process.process import WeightSpaceProcess
from bo_stream.tensors import State

WHITENED_ROWS = 512
"""Larger updates drop the whitened memory, which is then pulled back from the grid anew."""

SOLVED_ROWS = 64
"""Larger updates drop the solved posterior."""

SOLVED_OBSERVED = 192
"""Observations after which it is solved anew, so that neither costs nor rounding errors add up."""

WIDER_GRIDS = 4
"""Wider grids than the memory's whose posteriors are kept for queries outside the bounds."""


@dataclass(frozen=True)
class Whitening:
    """The memory in the whitened weights of the kernel at one state of its hyperparameters.

    Attributes:
        state: Of the kernel.
        basis: Its features.
        memory: Statistics in those features.
        pending: Small batches still to be added to them, with their features.
    """

    state: State
    basis: GridBasis
    memory: WhitenedMemory
    pending: tuple[tuple[Observations, Tensor], ...] = ()

    def after(self, data: Observations, features: Tensor) -> Whitening:
        """The memory after a batch. Cost O(n r), and O(n r²) once the statistics are needed."""
        data = replace(data, X=data.X.new_empty(*data.X.shape[:-1], 0))  # the features are enough
        waiting = sum(batch.X.shape[-2] for batch, _ in self.pending)
        if waiting + data.X.shape[-2] > WHITENED_ROWS:
            return replace(self.settled(), pending=((data, features),))
        return replace(self, pending=(*self.pending, (data, features)))

    def settled(self) -> Whitening:
        """The same with nothing pending: many small batches are added as one."""
        memory = self.memory
        for sign in (1.0, -1.0):
            batches = [pair for pair in self.pending if pair[0].sign == sign]
            if batches:
                data = Observations.joined([batch for batch, _ in batches])
                memory = memory.observed(torch.cat([f for _, f in batches], -2), data)
        return replace(self, memory=memory, pending=())


@dataclass(frozen=True)
class Solved:
    """The posterior process at one state of all hyperparameters.

    Attributes:
        state: Of the model.
        process: The posterior.
    """

    state: State
    process: WeightSpaceProcess

    def can_take(self, data: Observations, basis: Basis) -> bool:
        """Whether a batch is small, adds, and meets the basis that was solved in."""
        n = data.X.shape[-2]
        small = n <= SOLVED_ROWS
        young = self.process.weights.observed + n <= min(SOLVED_OBSERVED, basis.rank)
        return small and young and data.sign > 0 and self.process.basis is basis

    def after(self, features: Tensor, outcomes: Tensor, noise: Tensor) -> Solved:
        """The posterior after a batch of standardised outcomes. Cost O(n r²)."""
        residual = outcomes - self.process.prior_mean
        weights = self.process.weights.observe(features, residual, noise)
        return Solved(self.state, replace(self.process, weights=weights))


@dataclass(frozen=True)
class Wider:
    """What is kept for queries outside the bounds: a posterior on a wider grid than the memory's.

    Attributes:
        grid: The wider grid.
        whitening: The memory in its features, if known.
        solved: The posterior in its features, if known.
        rows_solved: The posterior in observation space, if known.
        asked: Whether it has served a query since the last update.
    """

    grid: Mesh
    whitening: Whitening | None = None
    solved: Solved | None = None
    rows_solved: SolvedRows | None = None
    asked: bool = True
