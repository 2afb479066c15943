"""Likelihood of binomial counts, positives out of trials, and expectations under a normal logit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor
from torch.distributions import Beta, Binomial, Distribution
from torch.nn.functional import logsigmoid

NODES = 32
"""Nodes of Gauss-Hermite quadrature."""

FIRST_CONCENTRATION = 50.0
"""Concentration of the beta-binomial before any data: trials of a row correlate by 0.02."""

LEAST_INFORMATION = 1e-10
"""A survey tells at least so much about a logit."""

_BISECTIONS, _NEWTON_STEPS = 30, 3


class BinomialLikelihood(_OneDimensionalLikelihood):
    """Likelihood of counts with a logit link: positives of a number of trials of each row.

    A row of outcomes is ``[positives, trials]``, of one latent output, the logit f of prevalence.
    With overdispersion the counts are beta-binomial: the prevalence of a row is drawn from a Beta
    distribution of mean ``p = 1 / (1 + exp(−f))`` and concentration s, so that two trials of a row
    have the correlation ``1 / (1 + s)``. Source: Williams (1975). Without it, log-concave in f.

    Args:
        trials: Examined by a hypothetical survey. Default: the rounded mean of those observed.
        overdispersion: Whether counts are beta-binomial, with a concentration that models learn.
        batch_shape: Of the concentration.

    Raises:
        ValueError: ``trials`` is no whole number from 1.
    """

    raw_concentration: Tensor
    raw_concentration_constraint: Positive

    def __init__(
        self,
        trials: int | None = None,
        overdispersion: bool = False,
        batch_shape: torch.Size | None = None,
    ) -> None:
        super().__init__()
        if trials is not None and (trials < 1 or trials != int(trials)):
            raise ValueError(f"Expected trials to be a whole number from 1, or None, got {trials}.")
        self.trials = trials
        self.overdispersion = overdispersion
        if overdispersion:
            start = torch.full((*(batch_shape or ()), 1), FIRST_CONCENTRATION)
            constraint = Positive(torch.exp, torch.log)  # a step of a learner is relative
            raw = torch.nn.Parameter(constraint.inverse_transform(start))
            self.register_parameter("raw_concentration", raw)
            self.register_constraint("raw_concentration", constraint)

    @property
    def concentration(self) -> Tensor | None:
        """Concentration s of the beta-binomial, ``batch_shape x 1``; None of the binomial."""
        if not self.overdispersion:
            return None
        return self.raw_concentration_constraint.transform(self.raw_concentration)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return the distribution of positives in ``trials`` given the logit.

        Raises:
            UnsupportedError: ``trials`` is None.
        """
        if self.trials is None:
            raise UnsupportedError(
                "Expected a number of trials to predict counts for, got none and no observation "
                "to take it from. Build BinomialLikelihood(trials=100)."
            )
        chance, concentration = function_samples.sigmoid(), self.concentration
        trials = torch.full_like(chance, self.trials)
        if concentration is None:
            return Binomial(trials, logits=function_samples, validate_args=False)
        return BetaBinomial(trials, chance, concentration)

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute ``E log p(y | f)`` of rows ``... x n x 2``, ``... x n``; see the function."""
        positives, trials = observations.unbind(-1)
        mean, variance = function_dist.mean, function_dist.variance
        return expected_log_prob(positives, trials, mean, variance, self.concentration)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute ``log E p(y | f)`` of rows ``... x n x 2``, ``... x n``; see the function."""
        positives, trials = observations.unbind(-1)
        mean, variance = function_dist.mean, function_dist.variance
        return log_marginal(positives, trials, mean, variance, self.concentration)


class BetaBinomial(Distribution):
    """Counts whose probability is drawn from a Beta distribution.

    Args:
        trials: Of each count.
        chance: Mean of the probability, of the same shape.
        concentration: Sum of the parameters of the Beta distribution; broadcasts.
    """

    def __init__(self, trials: Tensor, chance: Tensor, concentration: Tensor) -> None:
        self.trials, self.chance = trials, chance
        self.concentration = concentration.expand_as(chance)
        super().__init__(chance.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean of the counts."""
        return self.trials * self.chance

    @property
    def variance(self) -> Tensor:
        """Variance of the counts: the binomial one times ``1 + (trials − 1) / (1 + s)``."""
        inflation = 1.0 + (self.trials - 1.0) / (1.0 + self.concentration)
        return self.mean * (1.0 - self.chance) * inflation

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw probabilities, then counts."""
        inside = self.chance.clamp(1e-12, 1.0 - 1e-12)
        first, second = self.concentration * inside, self.concentration * (1.0 - inside)
        drawn = Beta(first, second).sample(torch.Size(sample_shape))
        return Binomial(self.trials.expand_as(drawn), drawn, validate_args=False).sample()


def empirical_logits(positives: Tensor, examined: Tensor) -> tuple[Tensor, Tensor]:
    """Compute empirical logits ``log((y + 1/2) / (n - y + 1/2))`` and their variances.

    The variances are ``1 / (y + 1/2) + 1 / (n - y + 1/2)``.

    At low prevalence the variances depend on the outcomes so much that a model which is told them
    is biased upwards: leave them out there, or use a model with a binomial likelihood.

    Args:
        positives: y, any shape.
        examined: n, of the same shape.
    """
    found, others = positives + 0.5, examined - positives + 0.5
    return torch.log(found / others), 1.0 / found + 1.0 / others


def log_prob(
    positives: Tensor, trials: Tensor, logit: Tensor, concentration: Tensor | None = None
) -> Tensor:
    """Compute the log probability of counts, finite for none and for all positive.

    Args:
        positives: Whole numbers from 0 to the trials, ``...``.
        trials: Whole numbers from 1, ``...``.
        logit: Of the probability of one positive, ``...``.
        concentration: Of the beta-binomial; None: binomial.
    """
    log_chance, log_rest = logsigmoid(logit), logsigmoid(-logit)
    negatives, choices = trials - positives, log_choices(positives, trials)
    if concentration is None:
        return choices + positives * log_chance + negatives * log_rest
    log_s = concentration.log()
    rises = _log_rise(positives, log_s + log_chance) + _log_rise(negatives, log_s + log_rest)
    return choices + rises - _log_rise(trials, log_s)


def _log_rise(count: Tensor, log_start: Tensor) -> Tensor:
    """Compute ``log Γ(a + count) / Γ(a)`` for ``log a``, linear in it where a is tiny."""
    start = log_start.exp()
    rise = (start + count.clamp_min(1.0)).lgamma() - (start + 1.0).lgamma() + log_start
    return torch.where(count > 0.0, rise, 0.0)


def log_choices(positives: Tensor, trials: Tensor) -> Tensor:
    """Compute the log of the binomial coefficient of trials over positives."""
    return (trials + 1).lgamma() - (positives + 1).lgamma() - (trials - positives + 1).lgamma()


def expected_log_prob(
    positives: Tensor,
    trials: Tensor,
    mean: Tensor,
    variance: Tensor,
    concentration: Tensor | None = None,
) -> Tensor:
    """Compute ``E log p(positives | f)`` for a logit ``f ~ N(mean, variance)``.

    By quadrature; of the binomial only ``E log(1 + exp(f))``, for the rest is linear in f.
    Differentiable in both moments and in the concentration; all tensors broadcast.
    """
    nodes, weights = normal_nodes(mean)
    logits = mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * nodes
    if concentration is None:
        softplus = -(logsigmoid(-logits) * weights).sum(-1)
        return log_choices(positives, trials) + positives * mean - trials * softplus
    counts = positives.unsqueeze(-1), trials.unsqueeze(-1)
    return (log_prob(*counts, logits, concentration.unsqueeze(-1)) * weights).sum(-1)


def log_marginal(
    positives: Tensor,
    trials: Tensor,
    mean: Tensor,
    variance: Tensor,
    concentration: Tensor | None = None,
) -> Tensor:
    """Compute ``log E p(positives | f)`` for a logit ``f ~ N(mean, variance)``.

    The nodes lie about the mode of the integrand, in its own width: about the mean they would miss
    the narrow likelihood of many trials. The integral does not depend on where they lie, so they
    are held fixed under differentiation. All tensors broadcast.
    """
    positives, trials, mean, variance = torch.broadcast_tensors(positives, trials, mean, variance)
    share = torch.ones_like(mean) if concentration is None else _share(trials, concentration)
    weighed = positives * share, trials * share
    centre, width = _mode(*weighed, mean.detach(), variance.detach())
    nodes, weights = normal_nodes(mean)
    logits = centre.unsqueeze(-1) + width.unsqueeze(-1) * nodes
    gap = logits - mean.unsqueeze(-1)
    log_normal = -0.5 * (gap.square() / variance.unsqueeze(-1) - nodes.square())
    log_normal = log_normal + (width / variance.sqrt()).log().unsqueeze(-1)
    counts, s = (positives.unsqueeze(-1), trials.unsqueeze(-1)), concentration
    likelihood = log_prob(*counts, logits, None if s is None else s.unsqueeze(-1))
    return (likelihood + log_normal + weights.log()).logsumexp(-1)


def logit_noise(
    trials: Tensor, mean: Tensor, variance: Tensor, concentration: Tensor | None = None
) -> Tensor:
    """Compute the noise variance of an observation of a logit that is worth as much as a count.

    The inverse of the expected information ``E n p (1 − p)`` in n trials about a logit
    ``f ~ N(mean, variance)``, of a beta-binomial count divided by its overdispersion
    ``1 + (n − 1) / (1 + s)``. By quadrature; all tensors broadcast. Finite, at most
    ``1 / LEAST_INFORMATION``, where a prevalence is 0 or 1 in floating point.

    Args:
        trials: n, from 1.
        mean: Of the logit.
        variance: Of the logit.
        concentration: s, of the beta-binomial; None: binomial.
    """
    nodes, weights = normal_nodes(mean)
    chance = (mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * nodes).sigmoid()
    share = 1.0 if concentration is None else _share(trials, concentration)
    information = trials * share * (chance * (1.0 - chance) * weights).sum(-1)
    return information.clamp_min(LEAST_INFORMATION).reciprocal()


def _share(trials: Tensor, concentration: Tensor) -> Tensor:
    """Return the part of its trials that a beta-binomial count is worth as a binomial one."""
    s = concentration.detach()
    return (1.0 + s) / (trials + s)


@torch.no_grad()
def _mode(
    positives: Tensor, trials: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mode and width of likelihood times normal: log-concave, by bisection, then Newton."""
    low = mean - variance * (trials - positives)
    high = mean + variance * positives
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        rises = positives - trials * middle.sigmoid() > (middle - mean) / variance
        low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
    mode = 0.5 * (low + high)
    for _ in range(_NEWTON_STEPS):
        slope = positives - trials * mode.sigmoid() - (mode - mean) / variance
        mode = mode + slope * _width(trials, mode, variance).square()
    return mode, _width(trials, mode, variance)


def _width(trials: Tensor, logit: Tensor, variance: Tensor) -> Tensor:
    """Return the deviation of the normal that has the curvature of likelihood times normal."""
    chance = logit.sigmoid()
    return (trials * chance * (1.0 - chance) + variance.reciprocal()).rsqrt()


def normal_nodes(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of a standard normal expectation."""
    nodes, weights = hermegauss(NODES)
    return like.new_tensor(nodes), like.new_tensor(weights / math.sqrt(2.0 * math.pi))
