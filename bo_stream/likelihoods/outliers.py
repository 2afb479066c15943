"""Counts that have nothing to do with the logit of prevalence of others like them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.distributions import Beta, Binomial, Distribution

LEAST_SUM, LARGEST_SUM = 0.3, 400.0
"""Of the parameters of a Beta distribution that is learned from counts."""


@dataclass(frozen=True)
class Outliers:
    """A share of rows whose prevalence is drawn from a Beta distribution, independent of the map.

    A count of theirs is beta-binomial: with ``a = b = 1``, a uniform prevalence, each of the
    numbers from 0 to the trials is as likely.

    Attributes:
        share: Of these rows, in [0, 1).
        a: First parameter of the Beta distribution, positive.
        b: Second parameter, positive; the mean prevalence is ``a / (a + b)``.
    """

    share: float = 0.0
    a: float = 1.0
    b: float = 1.0

    def __post_init__(self) -> None:
        """Check the parameters; ValueError."""
        if not 0.0 <= self.share < 1.0:
            raise ValueError(f"Expected outliers as a share in [0, 1), got {self.share}.")
        if not (0.0 < self.a < math.inf and 0.0 < self.b < math.inf):
            raise ValueError(
                "Expected outlier_beta to be two positive parameters of a Beta distribution, got "
                f"({self.a}, {self.b}). The mean prevalence is a / (a + b)."
            )

    @classmethod
    def like(cls, positives: Tensor, trials: Tensor, share: float) -> Outliers:
        """Make outliers whose prevalences are distributed as those of all counts.

        The mean is the pooled prevalence; the sum ``a + b`` maximises the likelihood of the counts,
        within ``LEAST_SUM`` and ``LARGEST_SUM``. Uniform without any count.

        Args:
            positives: Whole numbers from 0 to the trials, ``n``.
            trials: Whole numbers from 1, ``n``.
            share: Of the outliers.
        """
        if len(positives) == 0:
            return cls(share)
        mean = float((positives.sum() + 0.5) / (trials.sum() + 1.0))

        def of(log_sum: float) -> Outliers:
            return cls(share, math.exp(log_sum) * mean, math.exp(log_sum) * (1.0 - mean))

        found = minimize_scalar(
            lambda log_sum: -float(of(log_sum).log_prob(positives, trials).sum()),
            bounds=(math.log(LEAST_SUM), math.log(LARGEST_SUM)),
            method="bounded",
        )
        return of(float(found.x))

    def log_prob(self, positives: Tensor, trials: Tensor) -> Tensor:
        """Compute the log probability of counts of outliers, elementwise."""
        negatives = trials - positives
        choices = -log_beta(positives + 1.0, negatives + 1.0) - (trials + 1.0).log()
        a, b = torch.as_tensor(self.a).to(trials), torch.as_tensor(self.b).to(trials)
        return choices + log_beta(positives + a, negatives + b) - log_beta(a, b)

    def mixed(self, log_ordinary: Tensor, positives: Tensor, trials: Tensor) -> Tensor:
        """Return ``log((1 − share) p + share p_outlier)`` of the log probability p of counts."""
        if self.share == 0.0:
            return log_ordinary
        alike = math.log(self.share) + self.log_prob(positives, trials)
        return torch.logaddexp(math.log1p(-self.share) + log_ordinary, alike)

    def mixed_functions(self, ordinary: Tensor, trials: Tensor) -> Tensor:
        """Return distribution functions of counts, of which the others have ordinary ones.

        Args:
            ordinary: At counts from 0 to the largest number of trials K, ``n x (1 + K)``.
            trials: ``n x 1``.
        """
        if self.share == 0.0:
            return ordinary
        counts = torch.arange(ordinary.shape[-1]).to(trials)
        chance = self.log_prob(counts.minimum(trials), trials).exp()
        own = torch.where(counts <= trials, chance, 0.0).cumsum(-1)
        return torch.lerp(ordinary, own, self.share)

    def mean(self, ordinary: Tensor, trials: Tensor) -> Tensor:
        """Return the mean of counts, of which the others have an ordinary one."""
        return torch.lerp(ordinary, trials * (self.a / (self.a + self.b)), self.share)

    def variance(self, mean: Tensor, variance: Tensor, trials: Tensor) -> Tensor:
        """Return the variance of counts, from the mean and the variance of the others.

        That of outliers is ``n q (1 − q) (a + b + n) / (a + b + 1)`` with ``q = a / (a + b)``.
        """
        total = self.a + self.b
        q = self.a / total
        own = trials * (q * (1.0 - q) / (total + 1.0)) * (total + trials)
        between = self.share * (1.0 - self.share) * (mean - trials * q).square()
        return torch.lerp(variance, own, self.share) + between

    def draw(self, trials: Tensor) -> Tensor:
        """Draw counts of outliers."""
        prevalence = Beta(trials.new_tensor(self.a), trials.new_tensor(self.b))
        chance = prevalence.sample(trials.shape)
        return Binomial(trials, chance, validate_args=False).sample()


class WithOutliers(Distribution):
    """Counts of which some are of outliers.

    Args:
        ordinary: Distribution of the others.
        trials: Of each count.
        outliers: Their share and their distribution.
    """

    def __init__(self, ordinary: Distribution, trials: Tensor, outliers: Outliers) -> None:
        self.ordinary, self.trials, self.outliers = ordinary, trials, outliers
        super().__init__(ordinary.batch_shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean of the counts."""
        return self.outliers.mean(self.ordinary.mean, self.trials)

    @property
    def variance(self) -> Tensor:
        """Variance of the counts."""
        return self.outliers.variance(self.ordinary.mean, self.ordinary.variance, self.trials)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw which are outliers, then counts."""
        counts = self.ordinary.sample(torch.Size(sample_shape))
        others = self.outliers.draw(self.trials.expand_as(counts))
        return torch.where(torch.rand_like(counts) < self.outliers.share, others, counts)


def log_beta(a: Tensor, b: Tensor) -> Tensor:
    """Compute the logarithm of the Beta function."""
    return a.lgamma() + b.lgamma() - (a + b).lgamma()
