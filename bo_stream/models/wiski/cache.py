"""What a grid inference keeps between calls: recomputed when stale, carried along small updates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.grid.interpolation import GridBasis
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.models.inference import Solved, SolvedWeights
from bo_stream.models.memory import Observations, WhitenedMemory
from bo_stream.models.prior import Prior
from bo_stream.models.wiski.learning import WHITENED_ROWS, FitSubspace, Subspace
from bo_stream.models.wiski.rows import Memory
from bo_stream.process.observation_space import ObservationSpaceProcess
from bo_stream.process.process import WeightSpaceProcess
from bo_stream.tensors import State, is_in

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
        """Add a batch. Cost O(n r), and O(n r²) once the statistics are needed."""
        data = replace(data, X=data.X.new_empty(*data.X.shape[:-1], 0))  # the features are enough
        waiting = sum(batch.X.shape[-2] for batch, _ in self.pending)
        if waiting + data.X.shape[-2] > WHITENED_ROWS:
            return replace(self.settled(), pending=((data, features),))
        return replace(self, pending=(*self.pending, (data, features)))

    def settled(self) -> Whitening:
        """Add all that is pending: many small batches as one."""
        if not self.pending:
            return self
        memory = self.memory
        for sign in (1.0, -1.0):
            batches = [pair for pair in self.pending if pair[0].sign == sign]
            if batches:
                data = Observations.joined([batch for batch, _ in batches])
                memory = memory.observed(torch.cat([f for _, f in batches], -2), data)
        return replace(self, memory=memory, pending=())


@dataclass(frozen=True)
class WithHeld:
    """The posterior given statistics and, besides, outcomes that a memory holds.

    Attributes:
        before: The posterior given the statistics alone.
        held: The outcomes with their sites.
        process: The posterior given both.
    """

    before: WeightSpaceProcess
    held: Observations
    process: WeightSpaceProcess


@dataclass(frozen=True)
class GridSolution:
    """The posterior from one grid, as far as it is known: the memory's own, or a wider one.

    Of a memory that holds outcomes beside its statistics, whitening and weights are of the
    statistics alone.

    Attributes:
        grid: Its nodes.
        whitening: The memory in the features of the kernel there.
        weights: The posterior in the weights of those features.
        rows: The posterior in observation space.
        asked: Whether it has served a query since the last update.
        whole: The posterior with the outcomes that are held.
    """

    grid: Mesh
    whitening: Whitening | None = None
    weights: SolvedWeights | None = None
    rows: Solved[ObservationSpaceProcess] | None = None
    asked: bool = True
    whole: WithHeld | None = None

    def current(self, data: Observations, prior: Prior, holds_rows: bool) -> GridSolution:
        """Keep what a batch changes at a small cost, under the hyperparameters as they are now."""
        whitening, weights, rows = self.whitening, self.weights, self.rows
        if rows is not None and not (holds_rows and is_in(prior.model, rows.state)):
            rows = None
        if whitening is None or data.X.shape[-2] > WHITENED_ROWS:
            return GridSolution(self.grid, rows=rows, asked=False)
        if weights is not None:
            process = weights.process
            small = data.sign > 0.0 and process.weights.has_room_for(data.X.shape[-2])
            same = small and process.basis is whitening.basis
            weights = weights if same and is_in(prior.model, weights.state) else None
        if weights is None and not is_in(prior.kernel, whitening.state):
            whitening = None
        return GridSolution(self.grid, whitening, weights, rows, asked=False)

    def after(self, data: Observations, told: tuple[Tensor, Tensor] | None) -> GridSolution:
        """Add a batch to all that is kept.

        Args:
            data: The batch.
            told: Its outcomes and noise variances as the process has them; None drops posteriors.
        """
        whitening, weights, rows = self.whitening, None, None
        if self.rows is not None and told is not None:
            rows = replace(self.rows, process=self.rows.process.observe(data.X, *told))
        if whitening is not None:
            features = whitening.basis.features(data.X)
            if self.weights is not None and told is not None:
                process, (outcomes, noise) = self.weights.process, told
                posterior = process.weights.observe(features, outcomes - process.prior_mean, noise)
                weights = SolvedWeights(self.weights.state, replace(process, weights=posterior))
            whitening = whitening.after(data, features)
        return replace(self, whitening=whitening, weights=weights, rows=rows)


@dataclass(frozen=True)
class GridCache:
    """All that a grid inference derived from a memory.

    Attributes:
        own: The posterior from the memory's grid.
        wider: Those from wider grids, for queries outside the bounds, the latest one last.
        learning: The space in which a fit evaluates its objective.
        subspace: The features in which hyperparameters follow a stream.
        checked: State of the kernel when the grid was last found fine enough, or was warned of.
    """

    own: GridSolution
    wider: tuple[GridSolution, ...] = ()
    learning: FitSubspace | None = None
    subspace: Subspace | None = None
    checked: State | None = None

    @classmethod
    def of(cls, memory: Memory) -> GridCache:
        """Begin with nothing derived."""
        return cls(GridSolution(memory.grid))

    def whole(self, before: WeightSpaceProcess, held: Observations) -> WithHeld | None:
        """Return the posterior with the outcomes that are held, if it is known."""
        for solution in (self.own, *self.wider):
            whole = solution.whole
            if whole is not None and whole.before is before and whole.held is held:
                return whole
        return None

    def with_whole(self, whole: WithHeld) -> GridCache:
        """Keep a posterior beside that given the statistics alone."""

        def kept(solution: GridSolution) -> GridSolution:
            weights = solution.weights
            same = weights is not None and weights.process is whole.before
            return replace(solution, whole=whole) if same else solution

        return replace(self, own=kept(self.own), wider=tuple(map(kept, self.wider)))

    def of_statistics(self) -> GridCache:
        """Keep what does not depend on the outcomes that are held."""
        own, *wider = (replace(each, whole=None) for each in (self.own, *self.wider))
        return GridCache(own, tuple(wider), checked=self.checked)

    @torch.no_grad()
    def after(self, data: Observations, prior: Prior, holds_rows: bool) -> GridCache:
        """Carry along what a batch changes at a small cost, and drop the rest.

        Of wider grids only those that were asked for since the last update; the posterior in
        observation space where the memory with the batch ``holds_rows``.
        """
        asked = (self.own, *(wider for wider in self.wider if wider.asked))
        kept = [solution.current(data, prior, holds_rows) for solution in asked]
        solved = any(one.weights is not None or one.rows is not None for one in kept)
        told = prior.standardized(data) if solved else None
        solutions = [solution.after(data, told) for solution in kept]
        return GridCache(
            solutions[0],
            tuple(solutions[1:]),
            subspace=None if self.subspace is None else self.subspace.after(data),
            checked=self.checked,
        )
