"""Outcomes under another likelihood than a Gaussian one: the interface, and counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, UnsupportedError
from botorch.models.transforms.outcome import OutcomeTransform, Standardize
from gpytorch.likelihoods import (
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    StudentTLikelihood,
)
from torch import Tensor

from bo_stream.likelihoods.binomial import BinomialLikelihood, check_counts, logit_noise
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.sites import JointPrior, fit_sites, local_sites
from bo_stream.models.checks import check_type
from bo_stream.models.memory import Measured, Memory, Targets
from bo_stream.models.outcomes.base import Drawing, OutcomeChain, Outcomes
from bo_stream.models.outcomes.noise import NoiseFloor
from bo_stream.process import PosteriorProcess

if TYPE_CHECKING:
    from bo_stream.models.inference import Prior


REAL = (GaussianLikelihood, LaplaceLikelihood, StudentTLikelihood)
"""Likelihoods of real outcomes, which are the same family in any units."""


@dataclass(frozen=True)
class LikelihoodOutcomes(Outcomes):
    """Outcomes whose likelihood is of the standardised ones.

    What was learned from an outcome under a likelihood cannot be rescaled, so a standardisation is
    learned from the first outcomes and stays. There is no known noise.

    Attributes:
        shift: Zero, ``batch x m``.
        floor: Of no use.
        beta: Weight of the divergence in the bound that a posterior maximises, in (0, 1].
        fantasy_steps: Natural-gradient steps on hypothetical outcomes.
    """

    rescales: ClassVar[bool] = False

    shift: Tensor
    floor: NoiseFloor
    beta: float = 1.0
    fantasy_steps: int = 1

    @classmethod
    def of(cls, like: Tensor, beta: float = 1.0, fantasy_steps: int = 1) -> Self:
        """Build them for tensors of a shape ``batch x m``, dtype and device."""
        zero = torch.zeros_like(like)
        return cls(zero, NoiseFloor.of(zero), beta, fantasy_steps)

    def check(self, prior: Prior, targets: Tensor) -> None:
        """Check that the likelihood can have such outcomes, ``... x m x n``; InputDataError."""
        self.model(prior).check(targets)

    def model(self, prior: Prior) -> OutcomeModel:
        """Copy the likelihood as it is now."""
        return OutcomeModel.of(prior.likelihood, prior.num_outputs)

    def encode(self, prior: Prior, Y: Tensor, Yvar: Tensor | None, infers_noise: bool) -> Targets:
        """Check outcomes and standardise them; see :meth:`Outcomes.encode`."""
        if Yvar is not None:
            raise UnsupportedError(
                "Expected no Yvar: the noise is the likelihood's. For known variances use OSGPR."
            )
        outcomes = Y.detach().to(torch.float64)
        self.check(prior, outcomes.mT)
        targets = prior.chain.standardized(outcomes, self.shift).mT
        unknown = torch.zeros_like(targets[..., :1, :], dtype=torch.bool)
        return Targets(targets, torch.ones_like(targets[..., : prior.num_outputs, :]), unknown)

    def standardized(
        self, chain: OutcomeChain, level: Tensor | None, data: Measured
    ) -> tuple[Tensor, Tensor]:
        """Return targets as they are, with the noise of a Gaussian likelihood."""
        noise = data.noise if level is None else level.unsqueeze(-1)
        return data.targets, noise.expand_as(data.targets)

    def target_map(self, chain: OutcomeChain, mean: Tensor) -> Tensor:
        """Subtract the prior mean."""
        return torch.stack((torch.ones_like(mean), -mean), -1).unsqueeze(-1)

    def noise_level(self, prior: Prior, memory: Memory) -> Tensor:
        """Return the noise variance of a Gaussian likelihood; see :class:`Outcomes`."""
        inferred = prior.inferred_noise
        if inferred is not None:
            return inferred
        raise UnsupportedError(
            f"A {type(prior.likelihood).__name__} has no Gaussian noise to add "
            "(observation_noise=True): the posterior is of the latent process. For outcomes use "
            "predictive or log_predictive."
        )

    def noise_variance(self, prior: Prior, memory: Memory) -> Tensor:
        """Return the variance of a real outcome given the process; see :class:`Outcomes`."""
        if prior.is_gaussian or not isinstance(prior.likelihood, REAL):
            return self.noise_level(prior, memory)
        nowhere = torch.zeros_like(prior.mean).unsqueeze(-1)
        return self.model(prior).variance(nowhere).squeeze(-1)

    def moments(
        self, prior: Prior, mean: Tensor, variance: Tensor, noise: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the moments of the likelihood's marginal; see :class:`Outcomes`."""
        return self.model(prior).moments(mean, variance)

    def log_density(
        self,
        prior: Prior,
        targets: Tensor,
        mean: Tensor,
        variance: Tensor,
        noise: Callable[[], Tensor],
    ) -> Tensor:
        """Return the log density of the likelihood's marginal; see :class:`Outcomes`."""
        self.check(prior, targets)
        return self.model(prior).log_marginal(targets, mean, variance)

    def pseudo_observations(
        self,
        prior: Prior,
        memory: Memory,
        process: PosteriorProcess,
        inputs: Tensor,
        targets: Tensor,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sites of outcomes as observations: a dual update (Chang et al., 2023)."""
        if prior.is_gaussian:
            if noise is None:
                noise = self.noise_level(prior, memory).detach().unsqueeze(-1)
            return targets, self.beta * noise
        if noise is not None:
            raise UnsupportedError(
                f"Expected no noise with a {type(prior.likelihood).__name__}: it has its own."
            )
        self.check(prior, targets)
        expected, power = self.model(prior).expected_log_prob(targets), 1.0 / self.beta
        latent = targets[..., : prior.num_outputs, :]
        if self.fantasy_steps == 1:
            _, mean, variance = torch.broadcast_tensors(latent, *process.marginals(inputs))
            sites, _ = local_sites(expected, mean, variance, power)
        else:
            marginal = JointPrior.of(process.mean(inputs), process.covariance(inputs), latent.shape)
            sites = fit_sites(marginal, expected, power, self.fantasy_steps).sites
        return sites.pseudo_observations()

    def drawing(self, prior: Prior, observation_noise: Tensor | None) -> Drawing | None:
        """Return draws of the likelihood; see :class:`Outcomes`."""
        if prior.is_gaussian:
            return None
        if observation_noise is not None:
            raise UnsupportedError(
                f"Expected no observation_noise with a {type(prior.likelihood).__name__}: it has "
                "its own."
            )
        draw = self.model(prior).draw
        return lambda values, seed: (draw(values, seed), None)


def check_transform(transform: OutcomeTransform | None, likelihood: Likelihood | None) -> None:
    """Check that outcomes stay as they are, or are standardised where the likelihood allows it.

    Raises:
        UnsupportedError: Another transform, or a likelihood of labels or counts.
    """
    if transform is None:
        return
    if not isinstance(transform, Standardize):
        raise UnsupportedError(
            f"Expected outcome_transform to be Standardize or None, got {type(transform).__name__}:"
            " the likelihood is of outcomes as they are. Transform Y yourself."
        )
    if likelihood is not None and not isinstance(likelihood, REAL):
        raise UnsupportedError(
            f"Expected outcome_transform to be None with a {type(likelihood).__name__}, got "
            "Standardize: its outcomes are no real numbers of some unit."
        )


# --- counts as outcomes: rows of positives and examined under a binomial likelihood --------------


@dataclass(frozen=True)
class CountOutcomes(LikelihoodOutcomes):
    """Rows ``[positives, examined]`` of one latent output, the logit of prevalence.

    Attributes:
        examined: Sum of those examined in all rows that are in memory, ``batch x 1``.
        surveys: Number of these rows, ``batch x 1``.
    """

    columns: ClassVar[int] = 2

    examined: Tensor | float = 0.0
    surveys: Tensor | float = 0.0

    def check(self, prior: Prior, targets: Tensor) -> None:
        """Check that rows are counts, ``... x 2 x n``; see the function."""
        check_counts(targets.mT)

    def model(self, prior: Prior) -> OutcomeModel:
        """Return the likelihood of a hypothetical survey, of as many examined as observed ones."""
        model = super().model(prior)
        surveys = float(torch.as_tensor(self.surveys).sum())
        if prior.likelihood.trials is None and surveys > 0.0:
            mean = float(torch.as_tensor(self.examined).sum()) / surveys
            model.likelihood.trials = max(round(mean), 1)
        return model

    def survey_noise(
        self, prior: Prior, mean: Tensor, variance: Tensor, trials: Tensor | None = None
    ) -> Tensor:
        """Compute the noise of hypothetical surveys as observations of the logit.

        That of the fantasies of binomial counts, whatever their outcome; see :func:`logit_noise`.

        Args:
            prior: The hyperparameters.
            mean: Of the logit, ``... x n``.
            variance: Of the logit, ``... x n``.
            trials: Examined in each survey, ``... x n``; default: as :meth:`model` has it.

        Raises:
            UnsupportedError: No number of trials is known.
        """
        likelihood = self.model(prior).likelihood
        if trials is None and likelihood.trials is None:
            raise UnsupportedError(
                "Expected a number of trials for hypothetical surveys, got none and no observation "
                "to take it from. Pass trials, or build BinomialLikelihood(trials=100)."
            )
        examined = mean.new_tensor(likelihood.trials) if trials is None else trials
        return self.beta * logit_noise(examined, mean, variance, likelihood.concentration)

    def noise_level(self, prior: Prior, memory: Memory) -> Tensor:
        """Return the harmonic mean of the noise of sites that are stored as observations.

        Raises:
            UnsupportedError: They are not held so.
        """
        typical = getattr(memory, "typical_known_noise", None)
        noise: Tensor | None = None if typical is None else typical()
        return super().noise_level(prior, memory) if noise is None else noise

    def noise_variance(self, prior: Prior, memory: Memory) -> Tensor:
        """Refuse: a count has no one variance given the process; see :class:`Outcomes`."""
        return super().noise_level(prior, memory)

    def drawing(self, prior: Prior, observation_noise: Tensor | None) -> Drawing | None:
        """Return draws of positives alongside the number examined; see :class:`Outcomes`."""
        positives = super().drawing(prior, observation_noise)
        assert positives is not None  # noqa: S101 (only for a Gaussian likelihood)
        trials = self.model(prior).likelihood.trials

        def draw(values: Tensor, seed: int) -> tuple[Tensor, None]:
            drawn, _ = positives(values, seed)
            return torch.cat((drawn, torch.full_like(drawn, trials)), -2), None

        return draw

    def prepared_for(
        self, prior: Prior, memory: Memory, Y: Tensor, Yvar: Tensor | None, sign: float
    ) -> Self:
        """Count those examined; see :class:`Outcomes`."""
        examined = Y[..., 1].detach().to(torch.float64).sum(-1, keepdim=True)
        surveys = torch.full_like(examined, Y.shape[-2])
        return self._plus(sign * examined, sign * surveys)

    def with_observations(self, is_found: bool) -> Self:
        """Count from zero where nothing is in memory; see :class:`Outcomes`."""
        return self if is_found else replace(self, examined=0.0, surveys=0.0)

    def merged(self, other: Self) -> Self:
        """Add the other's counts; see :class:`Outcomes`."""
        return self._plus(other.examined, other.surveys)

    def _plus(self, examined: Tensor | float, surveys: Tensor | float) -> Self:
        return replace(self, examined=self.examined + examined, surveys=self.surveys + surveys)


def outcomes_of(
    likelihood: Likelihood | None, like: Tensor, beta: float = 1.0, fantasy_steps: int = 1
) -> LikelihoodOutcomes:
    """Build the outcomes of a likelihood for tensors of a shape ``batch x m``, dtype and device."""
    counts = isinstance(likelihood, BinomialLikelihood)
    return (CountOutcomes if counts else LikelihoodOutcomes).of(like, beta, fantasy_steps)


def latent_columns(train_Y: Tensor, likelihood: Likelihood | None) -> Tensor:
    """Return as many columns of first outcomes as there are latent outputs: of counts one.

    Raises:
        BotorchTensorDimensionError: Of counts there are not two columns.
        InputDataError: They are no floating-point tensor, or no counts.
    """
    if not isinstance(likelihood, BinomialLikelihood):
        return train_Y
    check_type("train_Y", train_Y)
    if train_Y.ndim < 2 or train_Y.shape[-1] != 2:
        raise BotorchTensorDimensionError(
            "Expected train_Y of two columns, [positives, examined], with a BinomialLikelihood, "
            f"got shape {tuple(train_Y.shape)}. From prevalences: "
            "torch.stack((prevalence * examined, examined), -1).round()."
        )
    check_counts(train_Y)
    return train_Y[..., :1]
