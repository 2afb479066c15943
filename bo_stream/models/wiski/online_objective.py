"""What a model says of hyperparameters that move a little with every observation, cheaply."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bo_stream.bases.grid.sensitivity import prior_covariance
from bo_stream.linalg import safe_cholesky, solve_lower
from bo_stream.models.objective import (
    NoiseGroup,
    subspace_log_marginal_likelihood,
    subspace_posterior,
)
from bo_stream.models.wiski.grid_gp import GridGP
from bo_stream.models.wiski.learning import Subspace

LEFT_OUT = 1e-3
"""Prior variance that may lie outside the features, in parts of the noise variance."""

_UNTIL = 2.0
"""Features are chosen anew when this many times as much lies outside."""


class Follower:
    """A model at its present hyperparameters, in features that were chosen at earlier ones.

    A kernel that has moved a little is, in those features, another prior of their weights. So
    neither its eigenvectors nor the memory in them are computed anew until too much of its variance
    lies outside. Valid until a hyperparameter changes; observations may come in between.

    Cost: O(r³), with as few features r as leave out ``left_out`` of the noise variance.
    """

    def __init__(self, model: GridGP, left_out: float = LEFT_OUT) -> None:
        """Take the model's features of before, or choose new ones.

        Args:
            model: One that supposes no data.
            left_out: Prior variance to leave out, in parts of the noise variance.
        """
        self._model = model
        self._left_out = left_out
        self._prior = self._prior_in_features()

    def _prior_in_features(self) -> Tensor:
        model, factors, left_out = self._model, self._model._factors(), self._left_out
        if model._subspace is not None:
            prior = prior_covariance(model._subspace.basis, factors)
            most = _UNTIL * (left_out * model.noise_level()).maximum(model._subspace.missed)
            if bool((model._subspace.outside(prior, factors.scale()) <= most).all()):
                return prior
        share = model._share_of_noise(left_out)
        model._subspace = Subspace.around(factors, model._memory, share, model.max_rank)
        return prior_covariance(model._subspace.basis, factors)

    def log_density(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Tensor:
        """``log p(Y | memory)`` of a batch in units of the outcomes, differentiable in the stem.

        Summed over points, outputs and batch elements. Cost O(r³ + q r² + q³).

        Args:
            X: ``... x q x d``.
            Y: ``... x q x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
        """
        model = self._model
        outcomes, noise = model.standardized(X, Y, Yvar)
        prior = self._prior.detach()
        features = self._subspace.basis.features(model.hypothetical_inputs(X))
        projected = features @ prior
        with torch.no_grad():
            posterior = subspace_posterior(model._prior.evidence_of(self._groups), prior)
        surprise = outcomes - model._prior.mean.unsqueeze(-1).detach()
        surprise = surprise - (projected @ posterior.u).squeeze(-1)
        covariance = projected @ features.mT - projected @ posterior.K @ projected.mT
        normal = _log_normal(surprise, covariance + torch.diag_embed(noise.detach()))
        return normal - outcomes.shape[-1] * model.outcome_scale().log().sum()

    def log_marginal_likelihood(self) -> Tensor:
        """Of all observations, differentiable in the hyperparameters, ``batch_shape x m``."""
        model = self._model
        value = subspace_log_marginal_likelihood(
            self._groups, model._prior.target_map(), self._prior
        )
        return model._from_per_output(value)

    @property
    def _subspace(self) -> Subspace:
        subspace = self._model._subspace
        if subspace is None:  # the memory was changed other than by a small batch
            self._prior = self._prior_in_features()
            return self._subspace
        return subspace

    @property
    def _groups(self) -> list[NoiseGroup]:
        return self._model._prior.noise_groups(self._subspace.memory)


def _log_normal(surprise: Tensor, covariance: Tensor) -> Tensor:
    """``log N(surprise; 0, covariance)``, summed."""
    factor = safe_cholesky(covariance)
    white = solve_lower(factor, surprise.unsqueeze(-1))
    logs = factor.diagonal(dim1=-2, dim2=-1).log().sum()
    return -0.5 * white.square().sum() - logs - 0.5 * surprise.numel() * math.log(2.0 * math.pi)
