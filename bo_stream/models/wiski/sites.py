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
from bo_stream.likelihoods.sites import Prior as Marginal
from bo_stream.likelihoods.sites import fit_sites
from bo_stream.models.held_sites import held_bound, with_sites
from bo_stream.models.inference import Solved, SolvedWeights
from bo_stream.models.memory import Measured, Observations
from bo_stream.models.prior import Prior
from bo_stream.models.wiski.cache import GridCache, GridSolution
from bo_stream.models.wiski.inference import GridInference
from bo_stream.models.wiski.rows import Memory, RowMemory
from bo_stream.process.observation_space import ObservationSpaceProcess
from bo_stream.process.process import PosteriorProcess, WeightSpaceProcess

MOST_JOINT = 300
"""Up to so many rows the joint covariance of their logits is formed, of more a root in features."""

MOST_ROWS = 4096
"""Rows whose sites are found together; of more, later ones given those before."""


@dataclass(frozen=True)
class SiteGridInference(GridInference):
    """The posterior of a latent process whose outcomes are taken for Gaussian ones, their sites.

    While the memory holds rows, their sites are at the optimum of the bound
    ``Σ E log p(y | f) − KL(q ‖ prior)`` at the present hyperparameters, whatever the order in which
    they came. On the grid the sites of a batch maximise that bound given those before, and stay.
    """

    def observe(
        self,
        memory: Memory,
        cache: GridCache | None,
        data: Observations,
        prior: Prior,
        held: bool = False,
    ) -> tuple[Memory, GridCache | None]:
        """Find the sites of all rows that are held, or add those of a batch to the grid.

        Cost O(n³) a step for rows, O(n r² + r³) on the grid, beside a solve. Rows that become too
        many move to the grid together with the batch, as if they were one.

        Raises:
            UnsupportedError: Sites that are on the grid, and depend on others, are to be taken out.
        """
        if isinstance(memory, RowMemory):
            now = (
                memory.without(data) if data.sign < 0.0 else memory.covering(data.X).observed(data)
            )
            if now is not None:
                return self._sited(now, prior), _checked_as(cache, now)
            data = Observations.joined((memory.rows, data))
            memory = memory.covering(data.X).emptied().on_grid()
        if data.sign < 0.0:
            raise UnsupportedError(
                f"retract needs a Gaussian likelihood, got {type(prior.likelihood).__name__}: what "
                "an outcome left in memory depends on all that was there when it came. Build the "
                "model anew, or forget."
            )
        memory.covering(data.X)  # raises before anything is changed
        for rows in torch.arange(len(data)).split(MOST_ROWS):
            sites, cache = self._sites(memory, cache, data.rows(rows), prior)
            memory, cache = super().observe(memory, cache, sites, prior)
        return memory, cache

    def _sited(self, memory: RowMemory, prior: Prior) -> RowMemory:
        """Find the sites of all rows anew, from those that they have. Cost O(n³) a step."""
        with torch.no_grad():
            covariance = memory.covariance(self.kernel(prior))
        return replace(memory, rows=with_sites(memory.rows, covariance, prior))

    def _sites(
        self, memory: Memory, cache: GridCache | None, data: Observations, prior: Prior
    ) -> tuple[Observations, GridCache]:
        joint = len(data) <= MOST_JOINT
        process, cache = self.process(memory, cache, prior, data.X, in_features=not joint)
        likelihood = OutcomeModel.of(prior.likelihood, prior.num_outputs)
        expected = likelihood.expected_log_prob(data.targets)
        begin = likelihood.ordinary_log_prob(data.targets)
        fit = fit_sites(_marginal(process, data.X), expected, begin=begin)
        targets, noise = fit.sites.pseudo_observations()
        known = torch.ones_like(data.known)
        return Observations(data.X, targets, noise, known, data.sign), cache

    def _solve(
        self, solution: GridSolution, memory: Memory, prior: Prior, in_rows: bool
    ) -> tuple[GridSolution, Solved[ObservationSpaceProcess] | SolvedWeights]:
        """Solve for rows with their sites at the hyperparameters as they are now."""
        memory = self._sited(memory, prior) if isinstance(memory, RowMemory) else memory
        return super()._solve(solution, memory, prior, in_rows)

    def merged(
        self, memory: Memory, cache: GridCache | None, other: Memory, prior: Prior
    ) -> tuple[Memory, GridCache | None]:
        """Join rows, and find their sites together, or join statistics."""
        both, cache = super().merged(memory, cache, other, prior)
        return (self._sited(both, prior) if isinstance(both, RowMemory) else both), cache

    def refitted(
        self, memory: Memory, cache: GridCache | None, prior: Prior
    ) -> tuple[Memory, GridCache]:
        """Find the sites of rows anew, and check the grid against the new kernel."""
        solved = None if cache is None else cache.own.rows
        if isinstance(memory, RowMemory) and (solved is None or not prior.is_in(solved.state)):
            memory = self._sited(memory, prior)
        return super().refitted(memory, cache, prior)

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


def _checked_as(cache: GridCache | None, memory: Memory) -> GridCache | None:
    """Begin a cache anew, but for what was said of the grid's resolution, if that is the same."""
    if cache is None or cache.own.grid is not memory.grid:
        return None
    return replace(GridCache.of(memory), checked=cache.checked)


def _marginal(process: PosteriorProcess, X: Tensor) -> Marginal:
    """Return the joint distribution of the process at inputs."""
    mean = process.mean(X)
    if X.shape[-2] > MOST_JOINT and isinstance(process, WeightSpaceProcess):
        root = process.basis.features(X) @ process.weights.root
        return Marginal(mean, root.expand(*mean.shape, -1), torch.zeros_like(mean))
    return Marginal.of(mean, process.covariance(X), mean.shape)
