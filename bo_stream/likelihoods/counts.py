"""Distribution functions of counts under a posterior, and of a prevalence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import cast

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, UnsupportedError
from botorch.models.model import Model
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from botorch.posteriors.transformed import TransformedPosterior
from torch import Tensor
from torch.distributions import Binomial, Distribution

from bo_stream.likelihoods.binomial import (
    LARGE_COUNTS_NODES,
    BetaBinomial,
    BinomialLikelihood,
    chance_up_to,
    check_counts,
    log_marginal,
    log_prob,
    normal_nodes,
    outliers_up_to,
)
from bo_stream.likelihoods.outcome_model import Outliers, WithOutliers


class PrevalencePosterior(TransformedPosterior):
    """Distribution of prevalence ``1 / (1 + exp(−f))`` for a posterior of its logit f.

    Its moments (by quadrature), quantiles and exceedance probabilities are of each point alone and
    differentiable; samples are joint.

    Args:
        latent: Posterior of the logit, normal: ``... x q x 1``.
    """

    def __init__(self, latent: GPyTorchPosterior) -> None:
        super().__init__(latent, torch.sigmoid, partial(_moment, 1), _variance)
        self.latent = latent

    def quantile(self, value: Tensor) -> Tensor:
        """Compute quantiles of the prevalence, in closed form.

        Args:
            value: Probabilities in (0, 1), of shape ``k`` or a scalar.

        Returns:
            ``k x ... x q x 1``, without k for a scalar.

        Raises:
            ValueError: One is outside (0, 1).
        """
        _check_probabilities(value)
        score = torch.special.ndtri(value.to(self.latent.mean))
        score = score.reshape(*value.shape, *[1] * self.latent.mean.ndim)
        return (self.latent.mean + self.latent.variance.sqrt() * score).sigmoid()

    def exceedance(self, threshold: float) -> Tensor:
        """Compute the probability of a prevalence above a threshold, ``... x q x 1``.

        Raises:
            ValueError: The threshold is outside (0, 1).
        """
        if not 0.0 < threshold < 1.0:
            raise ValueError(
                f"Expected threshold to be a prevalence in (0, 1), got {threshold}. From per cent: "
                "divide by 100."
            )
        logit = torch.logit(self.latent.mean.new_tensor(threshold))
        return torch.special.ndtr((self.latent.mean - logit) / self.latent.variance.sqrt())


def _check_probabilities(value: Tensor) -> None:
    """Check that quantiles are asked for at probabilities in (0, 1)."""
    if not bool(((value > 0.0) & (value < 1.0)).all()):
        raise ValueError(f"Expected probabilities in (0, 1), got {value.tolist()}.")


def _moment(power: int, mean: Tensor, variance: Tensor) -> Tensor:
    """Compute ``E p^power`` of the prevalence p by quadrature, ``... x q x 1``."""
    logits, weights = normal_nodes(mean, variance)
    return (logits.sigmoid().pow(power) * weights).sum(-1)


def _variance(mean: Tensor, variance: Tensor) -> Tensor:
    return _moment(2, mean, variance) - _moment(1, mean, variance).square()


def prevalence(model: Model, X: Tensor) -> PrevalencePosterior:
    """Return the posterior of prevalence of a model of its logit.

    Such as a model with a :class:`~bo_stream.BinomialLikelihood`, or of empirical logits.

    Args:
        model: A model of one output.
        X: ``... x q x d``.

    Raises:
        UnsupportedError: The model has more outputs.
    """
    if model.num_outputs != 1:
        raise UnsupportedError(
            f"Expected a model of one output, the logit of prevalence, got {model.num_outputs}. "
            "Take model.subset_output([i]) of one of them."
        )
    return PrevalencePosterior(cast(GPyTorchPosterior, model.posterior(X)))


# --- posterior of the positives in a survey of a given number of trials --------------------------


REACH = 8.5
"""Standard deviations of the logit on both sides of its mean that are integrated over."""

_SPACING = 0.9
"""Distance of the nodes in units of the least deviation of a likelihood times the normal."""

LISTED = 1000
"""Number of trials up to which the probabilities of all counts are listed; the distribution
functions of more trials are integrals of their own, at the same cost for any number."""

AT_ONCE = 4_000_000
"""Probabilities, of counts at nodes, that are in memory at a time."""


class CountPosterior(Posterior):
    """Distribution of positives out of trials for a posterior of the logit of prevalence.

    Probabilities and quantiles are of each point alone, by quadrature: to 1e-5 up to a variance of
    the logit of 10. Moments and ``log_prob`` are
    differentiable; the cost of the others is O(trials^1.5) a point up to a thousand trials, and
    does not grow with them beyond. Samples are joint; they are whole numbers, which no gradient
    passes.

    Args:
        rate: Posterior of prevalence, ``... x q x 1``.
        trials: Number examined at each point, ``... x q x 1``: whole numbers from 1; broadcasts.
        concentration: Concentration of a beta-binomial, ``... x 1 x 1``; None: binomial.
        outliers: Share and distribution of counts that do not depend on the posterior, as in
            :class:`~bo_stream.BinomialLikelihood`; None: there are none.

    Raises:
        BotorchTensorDimensionError: The trials do not broadcast to the points.
        InputDataError: One is no whole number from 1.
    """

    def __init__(
        self,
        rate: PrevalencePosterior,
        trials: Tensor,
        concentration: Tensor | None = None,
        outliers: Outliers | None = None,
    ) -> None:
        self.rate = rate
        latent = rate.latent.mean
        try:
            wide = torch.broadcast_to(trials, latent.shape)
        except RuntimeError as error:
            raise BotorchTensorDimensionError(
                f"Expected trials of a number, or of shape {tuple(latent.shape)}, one for each "
                f"point, got {tuple(trials.shape)}. Of counts Y they are Y[:, 1:]."
            ) from error
        check_counts(torch.cat((torch.zeros_like(wide), wide), -1))
        self.trials = wide.to(latent.device, torch.float64)
        self.concentration = None if concentration is None else concentration.to(self.trials)
        self.outliers = outliers or Outliers()

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.rate.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the tensors."""
        return self.rate.dtype

    def _extended_shape(self, sample_shape: torch.Size = torch.Size()) -> torch.Size:  # noqa: B008
        return self.rate._extended_shape(sample_shape)

    @property
    def mean(self) -> Tensor:
        """Mean number of positives, ``... x q x 1``."""
        return self.outliers.mean(self.trials * self.rate.mean, self.trials).to(self.dtype)

    @property
    def variance(self) -> Tensor:
        """Variance of the number of positives, ``... x q x 1``.

        ``n E[p (1 − p)] (1 + (n − 1) / (1 + s)) + n² Var p`` for n trials; without the fraction of
        a binomial. With outliers it is the variance of the mixture.
        """
        n, mean, spread = self.trials, self.rate.mean, self.rate.variance
        within = n * (mean * (1.0 - mean) - spread)
        if self.concentration is not None:
            within = within * (1.0 + (n - 1.0) / (1.0 + self.concentration))
        ordinary = within + n.square() * spread
        return self.outliers.variance(n * mean, ordinary, n).to(self.dtype)

    def log_prob(self, positives: Tensor) -> Tensor:
        """Compute the log probability of each count alone, ``... x q x 1``.

        Args:
            positives: ``... x q x 1``; broadcasts.

        Raises:
            InputDataError: One is no whole number from 0 to the trials.
        """
        y, *points = self._points(self._checked(positives))
        return self.outliers.mixed(log_marginal(y, *points), y, points[0]).to(self.dtype)

    @torch.no_grad()
    def cdf(self, positives: Tensor) -> Tensor:
        """Compute the probability of at most a number of positives, ``... x q x 1``.

        A randomised probability integral transform of a count is uniform between the probability
        for one positive fewer, 0 where there is none, and the probability for the count.

        Args:
            positives: ``... x q x 1``; broadcasts.

        Raises:
            InputDataError: One is no whole number from 0 to the trials.
        """
        wide = self._points(self._checked(positives))
        y, *points = (point.reshape(-1) for point in wide)
        result, few = torch.empty_like(y), points[0] <= LISTED
        rows = y[few].unsqueeze(-1).long()
        listed = [table.gather(-1, rows[part]) for part, table in self._tables(points, few)]
        result[few] = torch.cat([rows.new_zeros(0, 1).to(y), *listed]).squeeze(-1)
        result[~few] = self._cdf_of_many(y[~few], [point[~few] for point in points])
        return result.reshape(wide[0].shape).to(self.dtype)

    @torch.no_grad()
    def quantile(self, value: Tensor) -> Tensor:
        """Find the least number of positives whose ``cdf`` is at least some probability.

        Args:
            value: Probabilities in (0, 1), of shape ``k`` or a scalar.

        Returns:
            ``k x ... x q x 1``, without k for a scalar.

        Raises:
            ValueError: One is outside (0, 1).
        """
        _check_probabilities(value)
        wide = self._points(self.rate.latent.mean)
        mean, *points = (point.reshape(-1) for point in wide)
        levels = value.to(mean).reshape(-1)
        result, few = mean.new_empty(len(mean), len(levels)), points[0] <= LISTED
        listed = [
            torch.searchsorted(table, levels.expand(len(table), -1).contiguous())
            for _, table in self._tables(points, few)
        ]
        result[few] = torch.cat([result.new_zeros(0, len(levels)).long(), *listed]).to(result)
        many = [point[~few] for point in points]
        for column, level in enumerate(levels):  # by bisection
            low, high = torch.full_like(many[0], -1.0), many[0].clone()
            while bool((high - low > 1.0).any()):
                middle = ((low + high) / 2.0).floor()
                is_enough = self._cdf_of_many(middle.clamp_min(0.0), many) >= level
                is_open = high - low > 1.0
                high = torch.where(is_open & is_enough, middle, high)
                low = torch.where(is_open & ~is_enough, middle, low)
            result[~few, column] = high
        result = result.minimum(points[0].unsqueeze(-1))
        return result.mT.reshape(*value.shape, *wide[0].shape).to(self.dtype)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Find the central interval that contains a count with at least some probability.

        Args:
            level: The probability, in (0, 1).

        Returns:
            The least and the largest count of the interval, ``... x q x 1`` each.

        Raises:
            ValueError: The level is outside (0, 1).
        """
        if not 0.0 < level < 1.0:
            raise ValueError(f"Expected level in (0, 1), got {level}. From per cent: level / 100.")
        tail = 0.5 * (1.0 - level)
        low, high = self.quantile(self.trials.new_tensor([tail, 1.0 - tail]))
        return low, high

    @torch.no_grad()
    def rsample(self, sample_shape: torch.Size | None = None) -> Tensor:
        """Draw counts, ``sample_shape x ... x q x 1``, joint over q; without gradients."""
        chance = self.rate.rsample(sample_shape).to(self.trials)
        trials = self.trials.expand_as(chance)
        counts: Distribution = Binomial(trials, chance, validate_args=False)
        if self.concentration is not None:
            counts = BetaBinomial(trials, chance, self.concentration.expand_as(chance))
        return WithOutliers(counts, trials, self.outliers).sample().to(self.dtype)

    def _tables(self, points: list[Tensor], few: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield distribution functions of points of few trials, ``points x (1 + largest trials)``.

        Some points at a time, by the trapezoidal rule over the logit, with its normal truncated at
        ``REACH``.
        """
        trials, mean, variance, *rest = (point[few] for point in points)
        if not len(trials):
            return
        columns = [t.reshape(-1, 1, 1) for t in (trials, mean, variance.sqrt(), *rest)]
        most, widest = float(trials.max()), float(variance.max())
        number = math.ceil(2.0 * REACH / _SPACING * math.sqrt(1.0 + 0.25 * most * widest))
        nodes = torch.linspace(-REACH, REACH, max(number, 32), dtype=mean.dtype, device=mean.device)
        nodes = nodes.unsqueeze(-1)
        weights = torch.softmax(-0.5 * nodes.square().squeeze(-1), -1)
        counts = torch.arange(most + 1.0, dtype=mean.dtype, device=mean.device)
        step = max(1, AT_ONCE // (len(nodes) * len(counts)))
        for first in range(0, trials.numel(), step):
            part = slice(first, first + step)
            n, middle, deviation, *concentration = (column[part] for column in columns)
            log = log_prob(counts.minimum(n), n, middle + deviation * nodes, *concentration)
            chance = torch.where(counts <= n.squeeze(-1), weights @ log.exp(), 0.0)
            table, examined = chance.cumsum(-1), n.squeeze(-1)
            if self.outliers.share != 0.0:
                others = self.outliers.log_prob(counts.minimum(examined), examined).exp()
                others = torch.where(counts <= examined, others, 0.0).cumsum(-1)
                table = torch.lerp(table, others, self.outliers.share)
            yield part, table

    def _cdf_of_many(self, positives: Tensor, points: list[Tensor]) -> Tensor:
        """Compute ``cdf`` at n points of any number of trials, ``n``."""
        y, *given = (tensor.cpu().numpy() for tensor in (positives, *points))
        step, share = max(1, AT_ONCE // LARGE_COUNTS_NODES), self.outliers.share
        parts = [positives.new_empty(0)]
        for first in range(0, len(y), step):
            part = slice(first, first + step)
            trials, mean, variance, *rest = (value[part] for value in given)
            chance = chance_up_to(y[part], trials, mean, variance, rest[0] if rest else None)
            if share:
                others = outliers_up_to(y[part], trials, self.outliers.a, self.outliers.b)
                chance = (1.0 - share) * chance + share * others
            parts.append(torch.from_numpy(chance).to(positives))
        return torch.cat(parts)

    def _points(self, values: Tensor) -> list[Tensor]:
        """Broadcast values, trials, moments of the logit and concentration, if any, in float64."""
        latent = self.rate.latent
        parts = [values, self.trials, latent.mean, latent.variance]
        if self.concentration is not None:
            parts.append(self.concentration)
        return [part.double() for part in torch.broadcast_tensors(*parts)]

    def _checked(self, positives: Tensor) -> Tensor:
        """Return counts broadcast with the trials, after :func:`check_counts`."""
        both = torch.broadcast_tensors(positives.to(self.trials), self.trials)
        check_counts(torch.cat(both, -1))
        return both[0]


def counts(model: Model, X: Tensor, trials: int | Tensor) -> CountPosterior:
    """Return the distribution of positives in surveys with a given number of trials.

    By the likelihood of a model with a :class:`~bo_stream.BinomialLikelihood`; binomial given the
    logit for any other model, such as a model of empirical logits.

    Args:
        model: A model of one output, the logit of prevalence.
        X: ``... x q x d``.
        trials: Number examined at each point: one number, or ``... x q x 1``.

    Raises:
        BotorchTensorDimensionError: The trials do not broadcast to the points.
        InputDataError: One is no whole number from 1.
        UnsupportedError: The model has more outputs.
    """
    likelihood = getattr(model, "likelihood", None)
    rate, examined = prevalence(model, X), torch.as_tensor(trials).to(X)
    if not isinstance(likelihood, BinomialLikelihood):
        return CountPosterior(rate, examined)
    concentration = likelihood.concentration
    if concentration is not None:
        concentration = concentration.detach().unsqueeze(-1)
    return CountPosterior(rate, examined, concentration, likelihood.others)
