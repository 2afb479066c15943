"""Inference on a grid for counts: each enters the statistics as a Gaussian observation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

from bo_stream.bases.grid.kernel import GridKernel
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.sites import fit_sites
from bo_stream.models.held_sites import held_bound, marginal, with_held, with_sites
from bo_stream.models.inference import Solved, SolvedWeights
from bo_stream.models.memory import Measured, Observations
from bo_stream.models.prior import Prior
from bo_stream.models.wiski.cache import GridCache, GridSolution, Whitening, WithHeld
from bo_stream.models.wiski.inference import GridInference
from bo_stream.models.wiski.memory import StreamMemory
from bo_stream.models.wiski.rows import Memory, RowMemory
from bo_stream.process.observation_space import ObservationSpaceProcess
from bo_stream.process.process import PosteriorProcess, WeightSpaceProcess

MOST_ROWS = 4096
"""Rows whose sites are found together; of more, later ones given those before."""


@dataclass(frozen=True)
class SiteGridInference(GridInference):
    """The posterior of a latent process whose outcomes are taken for Gaussian ones, their sites.

    While the memory holds rows, their sites are at the optimum of the bound
    ``Σ E log p(y | f) − KL(q ‖ prior)`` at the present hyperparameters, whatever the order in which
    they came. On the grid the sites of a batch and of the latest outcomes, ``window`` of them,
    maximise that bound given those before; one that leaves the window enters the statistics with
    the site that it has then, for good.
    """

    def observe(
        self,
        memory: Memory,
        cache: GridCache | None,
        data: Observations,
        prior: Prior,
        held: bool = False,
    ) -> tuple[Memory, GridCache | None]:
        """Find the sites of all rows that are held, or of a batch and the window on the grid.

        Cost O(n³) a step for rows, O(n r² + r³) on the grid, beside a solve; n counts the outcomes
        in the window, too. Rows that become too many move to the grid together with the batch, as
        if they were one.

        Raises:
            UnsupportedError: Sites that depend on others are to be taken out, not of the window.
        """
        if isinstance(memory, RowMemory):
            now = (
                memory.without(data) if data.sign < 0.0 else memory.covering(data.X).observed(data)
            )
            if now is not None:
                return self._sited(now, prior), _checked_as(cache, now)
            data = Observations.joined((replace(memory.rows, sites=None), data))
            memory = memory.covering(data.X).emptied().on_grid()
        if data.sign < 0.0:
            return self._with_window(memory, cache, with_held(memory.held, data, prior), prior)
        memory.covering(data.X)  # raises before anything is changed
        for which in torch.arange(len(data)).split(MOST_ROWS):
            rows = with_held(memory.held, data.rows(which), prior)
            memory, cache = self._with_window(memory, cache, rows, prior)
        return memory, cache

    def _sited(self, memory: RowMemory, prior: Prior) -> RowMemory:
        """Find the sites of all rows anew, from those that they have. Cost O(n³) a step."""
        with torch.no_grad():
            covariance = memory.covariance(self.kernel(prior))
        return replace(memory, rows=with_sites(memory.rows, covariance, prior))

    def _with_window(
        self, memory: StreamMemory, cache: GridCache | None, rows: Observations, prior: Prior
    ) -> tuple[StreamMemory, GridCache | None]:
        """Find the sites of outcomes given the statistics, and hold the latest of them.

        The others enter the statistics; what the memory held before is dropped.
        """
        before = replace(memory, held=None)
        if len(rows) == 0:
            return before, None if cache is None else cache.of_statistics()
        rows, cache = self._sites(before, cache, rows, prior)
        left = max(0, len(rows) - self.window)
        after: Memory = before.covering(rows.X)
        cache = cache.of_statistics() if after is before else None
        if left > 0:
            after, cache = super().observe(after, cache, rows.rows(slice(left)).told, prior)
        assert isinstance(after, StreamMemory)  # noqa: S101 (as before)
        held = rows.rows(slice(left, None)) if left < len(rows) else None
        return replace(after, held=held), cache

    def _sites(
        self, memory: StreamMemory, cache: GridCache | None, data: Observations, prior: Prior
    ) -> tuple[Observations, GridCache]:
        """Return outcomes with their sites given statistics, from those that they have."""
        process, cache = self.process(memory, cache, prior, data.X)
        assert isinstance(process, WeightSpaceProcess)  # noqa: S101 (statistics have no other)
        likelihood = OutcomeModel.of(prior.likelihood, prior.num_outputs)
        expected = likelihood.expected_log_prob(data.targets)
        begin = likelihood.ordinary_log_prob(data.targets)
        start = data.sites if begin is None else None
        features = process.basis.features(data.X).expand(*data.noise.shape, -1)
        rest = torch.zeros_like(data.noise)
        before = marginal(process.weights, process.prior_mean, features, rest)
        fit = fit_sites(before, expected, start=start, begin=begin)
        return replace(data, sites=fit.sites), cache

    # --- the posterior: of the statistics, then of what is held besides ------------------------

    def process(
        self,
        memory: Memory,
        cache: GridCache | None,
        prior: Prior,
        X: Tensor | None = None,
        in_features: bool = False,
    ) -> tuple[PosteriorProcess, GridCache]:
        """Solve as any grid model, and condition on the sites of the window in O(n r² + r³)."""
        if isinstance(memory, RowMemory) or memory.held is None:
            return super().process(memory, cache, prior, X, in_features)
        held = memory.held
        before, cache = super().process(replace(memory, held=None), cache, prior, X)
        assert isinstance(before, WeightSpaceProcess)  # noqa: S101 (statistics have no other)
        whole = cache.whole(before, held)
        if whole is None:
            whole = WithHeld(before, held, _given(before, held, prior))
            cache = cache.with_whole(whole)
        return whole.process, cache

    def whitened(
        self, memory: Memory, cache: GridCache | None, prior: Prior
    ) -> tuple[Whitening, GridCache]:
        """Return the memory in features, with what it holds, and the cache that has the rest."""
        if isinstance(memory, RowMemory) or memory.held is None:
            return super().whitened(memory, cache, prior)
        before, cache = super().whitened(replace(memory, held=None), cache, prior)
        return replace(before, memory=memory.with_held(before.memory, before.basis)), cache

    def _solve(
        self, solution: GridSolution, memory: Memory, prior: Prior, in_rows: bool
    ) -> tuple[GridSolution, Solved[ObservationSpaceProcess] | SolvedWeights]:
        """Solve for rows with their sites at the hyperparameters as they are now."""
        memory = self._sited(memory, prior) if isinstance(memory, RowMemory) else memory
        return super()._solve(solution, memory, prior, in_rows)

    def merged(
        self, memory: Memory, cache: GridCache | None, other: Memory, prior: Prior
    ) -> tuple[Memory, GridCache | None]:
        """Join rows, or statistics and windows, and find the sites of all rows anew."""
        if self.window > 0 and not _join_as_rows(memory, other):
            memory, other = (
                part.held_on_grid() if isinstance(part, RowMemory) else part
                for part in (memory, other)
            )
        both, cache = super().merged(memory, cache, other, prior)
        return self._renewed(both, cache, prior)

    def refitted(
        self, memory: Memory, cache: GridCache | None, prior: Prior
    ) -> tuple[Memory, GridCache]:
        """Find the sites of rows and of the window anew, and check the grid for the kernel."""
        solved = None
        if cache is not None:
            solved = cache.own.rows if isinstance(memory, RowMemory) else cache.own.weights
        if solved is None or not prior.is_in(solved.state):
            memory, cache = self._renewed(memory, cache, prior)
        return super().refitted(memory, cache, prior)

    def _renewed(
        self, memory: Memory, cache: GridCache | None, prior: Prior
    ) -> tuple[Memory, GridCache | None]:
        """Find the sites of all rows that are held anew. Cost as of an update."""
        if isinstance(memory, RowMemory):
            return self._sited(memory, prior), cache
        if memory.held is None:
            return memory, cache
        return self._with_window(memory, cache, memory.held, prior)

    # --- learning: of what is on the grid as of any statistics, sites held ---------------------

    def log_marginal_likelihood_of_rows(
        self, memory: RowMemory, kernel: GridKernel, prior: Prior
    ) -> Tensor:
        """Return the bound at its optimum; see :func:`held_bound`."""
        return held_bound(memory.rows, memory.covariance(kernel), prior)

    def batch_log_marginal_likelihood(
        self, grid: Mesh, inputs: Tensor, data: Measured, prior: Prior
    ) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "batch_log_marginal_likelihood needs a Gaussian likelihood, got "
            f"{type(prior.likelihood).__name__}: use log_marginal_likelihood or log_predictive."
        )


def _given(before: WeightSpaceProcess, held: Observations, prior: Prior) -> WeightSpaceProcess:
    """Condition a process on the sites of outcomes."""
    features, weights = before.basis.features(held.X), before.weights
    outcomes, noise = prior.standardized(held.told)
    told = features, outcomes - before.prior_mean, noise
    few = len(held) < features.shape[-1]
    return replace(before, weights=weights.observe(*told) if few else weights.observe_many(*told))


def _join_as_rows(memory: Memory, other: Memory) -> bool:
    """Say whether two memories are of rows, few enough to be held together."""
    if not isinstance(memory, RowMemory) or not isinstance(other, RowMemory):
        return False
    return len(memory.rows) + len(other.rows) <= memory.bound


def _checked_as(cache: GridCache | None, memory: Memory) -> GridCache | None:
    """Begin a cache anew, but for what was said of the grid's resolution, if that is the same."""
    if cache is None or cache.own.grid is not memory.grid:
        return None
    return replace(GridCache.of(memory), checked=cache.checked)
