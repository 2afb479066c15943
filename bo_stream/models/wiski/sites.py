"""Inference on a grid for counts: each enters the statistics as a Gaussian observation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

from bo_stream.bases.grid.mesh import Mesh
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.sites import Prior as Marginal
from bo_stream.likelihoods.sites import fit_sites
from bo_stream.models.memory import Measured, Observations
from bo_stream.models.prior import Prior
from bo_stream.models.wiski.cache import GridCache
from bo_stream.models.wiski.inference import GridInference
from bo_stream.models.wiski.rows import Memory
from bo_stream.process.process import PosteriorProcess, WeightSpaceProcess

MOST_JOINT = 300
"""Up to so many rows the joint covariance of their logits is formed, of more a root in features."""

MOST_ROWS = 4096
"""Rows whose sites are found together; of more, later ones given those before."""


@dataclass(frozen=True)
class SiteGridInference(GridInference):
    """The posterior of a latent process whose outcomes are taken for Gaussian ones, their sites.

    The site of a row maximises, together with those of its batch, the bound
    ``Σ E log p(y | f) − KL(q ‖ current posterior)``, by natural gradients; it stays as found.
    """

    def observe(
        self,
        memory: Memory,
        cache: GridCache | None,
        data: Observations,
        prior: Prior,
        held: bool = False,
    ) -> tuple[Memory, GridCache | None]:
        """Find the sites of a batch, and add them as observations of known noise.

        Cost O(n³) a step for few rows, O(n r² + r³) for more, beside a solve.

        Raises:
            UnsupportedError: Sites, which depend on others, are to be taken out.
        """
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


def _marginal(process: PosteriorProcess, X: Tensor) -> Marginal:
    """Return the joint distribution of the process at inputs."""
    mean = process.mean(X)
    if X.shape[-2] > MOST_JOINT and isinstance(process, WeightSpaceProcess):
        root = process.basis.features(X) @ process.weights.root
        return Marginal(mean, root.expand(*mean.shape, -1), torch.zeros_like(mean))
    return Marginal.of(mean, process.covariance(X), mean.shape)
