"""Outcomes under another likelihood than a Gaussian one, counts among them, and their sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

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

from bo_stream.collective import ALONE, Collective
from bo_stream.likelihoods.binomial import BinomialLikelihood, check_counts, logit_noise
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.sites import (
    ExpectedLogProb,
    Fit,
    JointPrior,
    RootPrior,
    fit_sites,
    local_sites,
)
from bo_stream.likelihoods.sites import SitePrior as Marginal
from bo_stream.marginal_likelihood import dense_log_marginal_likelihood
from bo_stream.models.checks import check_type
from bo_stream.models.inference import Prior
from bo_stream.models.memory import Measured, Memory, Observations, Targets, staying
from bo_stream.models.outcomes.base import Drawing, OutcomeChain, Outcomes
from bo_stream.models.outcomes.noise import NoiseFloor
from bo_stream.process import PosteriorProcess
from bo_stream.weights import WeightPosterior

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

    def check(self, prior: Prior, targets: Tensor) -> None:
        """Check that the likelihood can have such outcomes, ``... x m x n``; InputDataError."""
        OutcomeModel(prior.likelihood, prior.num_outputs).check(targets)

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
            UnsupportedError: They are not stored so.
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
        surveys = self.surveys + sign * torch.full_like(examined, Y.shape[-2])
        return replace(self, examined=self.examined + sign * examined, surveys=surveys)

    def with_observations(self, is_found: bool) -> Self:
        """Count from zero where nothing is in memory; see :class:`Outcomes`."""
        return self if is_found else replace(self, examined=0.0, surveys=0.0)

    def merged(self, other: Self) -> Self:
        """Add the other's counts; see :class:`Outcomes`."""
        examined, surveys = self.examined + other.examined, self.surveys + other.surveys
        return replace(self, examined=examined, surveys=surveys)


def outcomes_of(
    likelihood: Likelihood | None, like: Tensor, beta: float = 1.0, fantasy_steps: int = 1
) -> LikelihoodOutcomes:
    """Build the outcomes of a likelihood for tensors of a shape ``batch x m``, dtype and device."""
    kind = CountOutcomes if isinstance(likelihood, BinomialLikelihood) else LikelihoodOutcomes
    zero = torch.zeros_like(like)
    return kind(zero, NoiseFloor.of(zero), beta, fantasy_steps)


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


# --- sites of rows that a memory stores, which are found together ---------------------------------


WINDOW = 300
"""So many of the latest counts are stored by default, beside statistics of those before.

Measured, of 400 surveys of at most 5 examined in tens: 0.003 posterior standard deviations off
their batch, where a window of 100 leaves 0.08 and none 0.8. One row more costs one and a half to
three times as much as with 100.
"""

STEPS = 100
"""Most natural-gradient steps; from sites near the optimum a few are enough."""


def marginal(
    weights: WeightPosterior,
    prior_mean: Tensor,
    features: Tensor,
    rest: Tensor,
    collective: Collective = ALONE,
) -> Marginal:
    """Return the joint distribution of a process at n inputs, in the smaller of two forms.

    Cost O(n r²).

    Args:
        weights: Of r features.
        prior_mean: ``... x m x 1``.
        features: Whitened, ``... x m x n x r``.
        rest: Prior variance that the features leave out, ``... x m x n``; taken for independent.
        collective: Processes of which each has some of the inputs.
    """
    mean = prior_mean + (features @ weights.mean).squeeze(-1)
    n, rank = features.shape[-2:]
    if n > rank or not collective.is_alone:
        return RootPrior(mean, features @ weights.root, rest.expand_as(mean), collective)
    root = weights.base.row_product(features)
    covariance = root @ root.mT
    if weights.observed:
        downdate = root @ weights.downdate
        covariance = covariance - downdate @ downdate.mT
    return JointPrior(mean, covariance, rest.expand_as(mean))


@torch.no_grad()
def fit_held(
    rows: Observations, covariance: Tensor, prior: Prior, weight: Tensor | None = None
) -> Fit:
    """Maximise ``Σ w E log p(y | f) − KL(q ‖ p)`` over normal q for all rows at once.

    For a log-concave likelihood the optimum is unique: it depends on the rows, not on their order,
    nor on the sites that the steps start from. With outliers it need not be: the steps always start
    from the optimum without them. Cost O(n³) a step.

    Args:
        rows: n outcomes, with their sites so far, if there are any.
        covariance: Of the process at them before any outcome, ``... x m x n x n``.
        prior: Mean and likelihood.
        weight: How many times each row counts, w, ``... x n``; default once.
    """
    shape = rows.noise.shape
    process = JointPrior.of(prior.mean.unsqueeze(-1), covariance.detach(), shape)
    model = OutcomeModel.of(prior.likelihood, prior.num_outputs)
    expected = _weighted(model.expected_log_prob(rows.targets), weight)
    ordinary = model.ordinary_log_prob(rows.targets)
    if ordinary is None:
        return fit_sites(process, expected, steps=STEPS, start=rows.sites)
    return fit_sites(process, expected, steps=STEPS, begin=_weighted(ordinary, weight))


def held_bound(
    rows: Observations, covariance: Tensor, prior: Prior, weight: Tensor | None = None
) -> Tensor:
    """Compute the largest ``Σ w E log p(y | f) − KL(q ‖ p)`` of the rows, ``... x m``.

    Differentiable in the hyperparameters of kernel and mean and in the likelihood's. At the optimum
    the bound does not change with the sites to first order, so that its gradient is that of the log
    marginal likelihood of the Gaussian observations that the sites are, and of
    ``w E log p(y | f)``, at this q. Cost O(n³) a step. Arguments as for :func:`fit_held`.
    """
    if len(rows) == 0:
        return prior.mean * 0.0
    fit = fit_held(rows, covariance, prior, weight)
    targets, noise = fit.sites.pseudo_observations()
    gaussian = dense_log_marginal_likelihood(
        covariance.expand(*targets.shape, targets.shape[-1]),
        targets - prior.mean.unsqueeze(-1),
        noise,
    )
    value = fit.bound + gaussian - gaussian.detach()
    if any(parameter.requires_grad for parameter in prior.likelihood.parameters()):
        model = OutcomeModel(prior.likelihood, prior.num_outputs)
        expected = _weighted(model.expected_log_prob(rows.targets), weight)
        learned = expected(fit.mean, fit.variance).sum(-1)
        value = value + learned - learned.detach()
    return value


def with_held(held: Observations | None, data: Observations, prior: Prior) -> Observations:
    """Return all outcomes whose sites are to be found: those stored, with a batch or without it.

    Args:
        held: The latest outcomes, in a window alongside statistics of those before; None: none.
        data: Is added, or taken out if its sign is negative.
        prior: The hyperparameters.

    Raises:
        UnsupportedError: Some of a batch that is to be taken out are not stored.
    """
    if data.sign > 0.0:
        return data if held is None else Observations.joined((held, data))
    if held is not None:
        stay = staying(held, data)
        if int((~stay).sum()) == len(data):
            return held.rows(stay)
    raise UnsupportedError(
        f"retract needs a Gaussian likelihood, got {type(prior.likelihood).__name__}, or outcomes "
        "in the model's window: what an earlier one left in memory depends on all that was there "
        "when it came. Build the model again, or forget."
    )


def _weighted(expected: ExpectedLogProb, weight: Tensor | None) -> ExpectedLogProb:
    """Return ``w E log p(y | f)`` of the marginals."""
    if weight is None:
        return expected
    return lambda mean, variance: weight.unsqueeze(-2) * expected(mean, variance)
