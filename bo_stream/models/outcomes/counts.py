"""Counts as outcomes: rows of positives and examined under a binomial likelihood."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, UnsupportedError
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from bo_stream.likelihoods.binomial import BinomialLikelihood, check_counts, logit_noise
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.models.checks import check_type
from bo_stream.models.memory import Memory
from bo_stream.models.outcomes.base import Drawing
from bo_stream.models.outcomes.likelihood import LikelihoodOutcomes

if TYPE_CHECKING:
    from bo_stream.models.prior import Prior


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
        """Return the harmonic mean of the noise of sites that are held as observations.

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
        """Return draws of positives beside the number examined; see :class:`Outcomes`."""
        positives = super().drawing(prior, observation_noise)
        assert positives is not None  # noqa: S101 (only for a Gaussian likelihood)
        trials = self.model(prior).likelihood.trials

        def draw(values: Tensor, seed: int) -> tuple[Tensor, None]:
            drawn, _ = positives(values, seed)
            return torch.cat((drawn, torch.full_like(drawn, trials)), -2), None

        return draw

    def before(
        self, prior: Prior, memory: Memory, Y: Tensor, Yvar: Tensor | None, sign: float
    ) -> Self:
        """Count those examined; see :class:`Outcomes`."""
        examined = Y[..., 1].detach().to(torch.float64).sum(-1, keepdim=True)
        surveys = torch.full_like(examined, Y.shape[-2])
        return self._plus(sign * examined, sign * surveys)

    def found(self, is_found: bool) -> Self:
        """Count from zero where nothing is in memory; see :class:`Outcomes`."""
        return self if is_found else replace(self, examined=0.0, surveys=0.0)

    def merged(self, other: Self) -> Self:
        """Add the other's counts; see :class:`Outcomes`."""
        return self._plus(other.examined, other.surveys)

    def _plus(self, examined: Tensor | float, surveys: Tensor | float) -> Self:
        return replace(self, examined=self.examined + examined, surveys=self.surveys + surveys)

    def map(self, rule: Callable[[Tensor], Tensor]) -> Self:
        """Apply a rule to all tensors."""
        examined, surveys = (
            rule(value) if isinstance(value, Tensor) else value
            for value in (self.examined, self.surveys)
        )
        return replace(super().map(rule), examined=examined, surveys=surveys)


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
