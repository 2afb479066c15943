"""What a model of outcomes under any likelihood predicts, and how outcomes are supposed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.utils import fantasize as fantasize_flag
from botorch.sampling.base import MCSampler
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.sites import Prior, fit_sites, local_sites
from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_supposed
from bo_stream.models.latent_choice import REAL
from bo_stream.process.process import PosteriorProcess


@dataclass(frozen=True)
class Predictive:
    """Mean and variance of outcomes at single points, ``... x q x m`` each.

    Attributes:
        mean: Of a label, its probability.
        variance: Of the outcome, noise included.
    """

    mean: Tensor
    variance: Tensor


class LatentOutcomes(StreamingGP):
    """A model whose outcomes are a likelihood's, given the process.

    What it remembers is in units of the process: a standardisation is learned from the first
    outcomes and stays.
    """

    beta: float
    fantasy_steps: int

    @property
    def _is_gaussian(self) -> bool:
        return isinstance(self.likelihood, GaussianLikelihood)

    def _check_observations(self, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> None:
        super()._check_observations(X, Y, Yvar)
        if Yvar is not None:
            raise UnsupportedError(
                "Expected no Yvar: the noise is the likelihood's. For known variances use OSGPR."
            )
        self._outcome_model().check(Y.detach().double().mT)

    def _prepare_refit(self) -> None:
        """Nothing: what is remembered cannot be standardised anew."""

    def noise_level(self) -> Tensor:
        """The noise variance of a Gaussian likelihood, ``batch_shape x m``.

        Raises:
            UnsupportedError: The likelihood is another.
        """
        inferred = self._prior.inferred_noise
        if inferred is not None:
            return inferred
        raise UnsupportedError(
            f"A {type(self.likelihood).__name__} has no Gaussian noise to add "
            "(observation_noise=True): the posterior is of the latent process. For outcomes use "
            "predictive or log_predictive."
        )

    def noise_at(self, inputs: Tensor) -> Tensor:
        """Of real outcomes under any likelihood their variance given the process.

        Raises:
            UnsupportedError: A likelihood of labels or counts.
        """
        if self._is_gaussian or not isinstance(self.likelihood, REAL):
            return super().noise_at(inputs)
        nowhere = torch.zeros_like(self._prior.mean).unsqueeze(-1)
        return self._outcome_model().variance(nowhere)

    # --- outcomes -----------------------------------------------------------------------------

    def _outcome_model(self) -> OutcomeModel:
        return OutcomeModel.of(self.likelihood, self.num_outputs)

    def _marginals(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Of the process at single points, ``... x m x q`` each."""
        self.eval()
        inputs = self.process_inputs(X)
        mean, variance = torch.broadcast_tensors(*self.process(inputs).marginals(inputs))
        return mean, variance

    def predictive(self, X: Tensor) -> Predictive:
        """Mean and variance of outcomes at single points; differentiable in X.

        Of the likelihood's marginal: in closed form where gpytorch has one (Bernoulli, Gaussian),
        else by quadrature. Cost O(q M²).

        Args:
            X: ``... x q x d``.

        Raises:
            BotorchTensorDimensionError: X has the wrong width or too few dimensions.
            InputDataError: X has a wrong dtype or device, or is not finite.
        """
        mean, variance = self._outcome_model().moments(*self._marginals(X))
        offset, scale = self._offset_and_scale()
        return Predictive((offset + scale * mean).mT.to(X), (scale.square() * variance).mT.to(X))

    def _offset_and_scale(self) -> tuple[Tensor, Tensor]:
        """Outcomes are ``offset + scale ·`` what the process has, ``batch_shape x m x 1``."""
        offset, scale = self._outcomes.offset_and_scale(self._counts())
        return offset.unsqueeze(-1), scale.unsqueeze(-1)

    def log_predictive(self, X: Tensor, Y: Tensor) -> Tensor:
        """Log density, or log probability, of each outcome at its point, ``... x q x m``.

        In closed form as :meth:`predictive`, and of a Laplace likelihood; else by quadrature, which
        is rough where the process is many times less certain than the likelihood is wide.

        Args:
            X: ``... x q x d``.
            Y: ``...' x q x m``, leading dimensions broadcast against those of X.

        Raises:
            BotorchTensorDimensionError: A wrong width, number of rows or batch shape.
            InputDataError: A wrong dtype or device, NaN or infinity; outcomes that the likelihood
                cannot have.
        """
        mean, variance = self._marginals(X)
        check_supposed(mean.mT.to(X), Y, None, self.num_outputs)
        outcomes, targets = self._outcome_model(), self._standardized(Y.to(torch.float64)).mT
        outcomes.check(targets)
        density = outcomes.log_marginal(targets, mean, variance) - self._offset_and_scale()[1].log()
        return density.mT.to(X)

    # --- supposing ----------------------------------------------------------------------------

    def _as_gaussian(
        self, process: PosteriorProcess, inputs: Tensor, targets: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """By a dual update (Chang et al., 2023): the sites of supposed outcomes as observations."""
        if self._is_gaussian:
            own = self.noise_at(inputs) if noise is None else noise
            return targets, self.beta * own
        if noise is not None:
            raise UnsupportedError(
                f"Expected no noise with a {type(self.likelihood).__name__}: it has its own."
            )
        outcomes = self._outcome_model()
        outcomes.check(targets)
        expected, power = outcomes.expected_log_prob(targets), 1.0 / self.beta
        if self.fantasy_steps == 1:
            _, mean, variance = torch.broadcast_tensors(targets, *process.marginals(inputs))
            sites, _ = local_sites(expected, mean, variance, power)
        else:
            prior = Prior.of(process.mean(inputs), process.covariance(inputs), targets.shape)
            sites = fit_sites(prior, expected, power, self.fantasy_steps).sites
        return sites.pseudo_observations()

    def fantasize(
        self,
        X: Tensor,
        sampler: MCSampler,
        observation_noise: Tensor | None = None,
        **kwargs: Any,
    ) -> Self:
        """A model that supposes outcomes drawn from their joint posterior at X.

        The process is drawn by the sampler, and outcomes from the likelihood of each draw with the
        sampler's seed, the same for every batch of inputs. Gradients flow through the points, and
        through the draws of a continuous likelihood; a draw of labels or counts is a step in X.

        Args:
            X: ``... x q x d``.
            sampler: Of normal samples; its shape comes first in the returned model's batches.
            observation_noise: For a Gaussian likelihood as in BoTorch; else None.
            kwargs: Ignored, for BoTorch's callers.

        Raises:
            UnsupportedError: ``observation_noise`` is given and the likelihood is not Gaussian.
        """
        if self._is_gaussian:
            return super().fantasize(X, sampler, observation_noise, **kwargs)
        if observation_noise is not None:
            raise UnsupportedError(
                f"Expected no observation_noise with a {type(self.likelihood).__name__}: it has "
                "its own."
            )
        return self.condition_on_observations(X, self._drawn(X, sampler))

    def _drawn(self, X: Tensor, sampler: MCSampler) -> Tensor:
        self._check_fantasy(X, sampler)
        if X.shape[-2] == 0:
            return X.new_empty(*sampler.sample_shape, *X.shape[:-1], self.num_outputs)
        with fantasize_flag():
            drawn = sampler(self.posterior(X))
        values = self._standardized(drawn.to(torch.float64)).mT
        kept = values.shape[values.ndim - len(self._batch_shape) - 2 :]
        samples = sampler.sample_shape.numel()
        outcomes = self._outcome_model().draw(values.reshape(samples, -1, *kept), sampler.seed)
        offset, scale = self._offset_and_scale()
        return (offset + scale * outcomes.view(values.shape)).mT.to(X)
