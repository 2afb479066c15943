"""Criteria: uncertainties of target points that a round of observations is to reduce."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from bo_stream.acquisition.lookahead import (
    LinearLookahead,
    Lookahead,
    Loss,
    exceedance_loss,
    misclassification,
    prevalence_variance,
)

Scale = Literal["latent", "prevalence"]
"""The process f itself, or the prevalence ``1 / (1 + exp(−f))`` whose logit it is."""

SMALLEST_VARIANCE = 1e-18
"""Targets of a smaller variance count as known to this one."""


@dataclass(frozen=True)
class Threshold:
    """A threshold of the process f, or of the prevalence ``1 / (1 + exp(−f))``.

    Attributes:
        value: In the units that ``scale`` names.
        scale: "latent": of f; "prevalence": a prevalence in (0, 1).
    """

    value: float
    scale: Scale

    def __post_init__(self) -> None:
        """Check the value.

        Raises:
            ValueError: It is not finite, or a prevalence outside (0, 1); the scale is another one.
        """
        _check_scale(self.scale)
        if self.scale == "latent":
            if not math.isfinite(self.value):
                raise ValueError(f"Expected a finite threshold, got {self.value}.")
        elif not 0.0 < self.value < 1.0:
            raise ValueError(
                f"Expected threshold to be a prevalence in (0, 1), got {self.value}. From per "
                'cent: divide by 100. For a threshold of f itself pass scale="latent".'
            )

    @property
    def latent(self) -> float:
        """The threshold in units of f."""
        if self.scale == "latent":
            return float(self.value)
        return math.log(self.value) - math.log1p(-self.value)

    def distance(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute by how many standard deviations normal values of f are above it, ``M``."""
        return (mean - self.latent) / variance.clamp_min(SMALLEST_VARIANCE).sqrt()


class HasThreshold:
    """Criteria about a threshold, which is checked when it is asked for.

    Attributes:
        threshold: In the units that ``scale`` names.
        scale: "latent" or "prevalence"; see :class:`Threshold`.
    """

    threshold: float
    scale: Scale

    @property
    def limit(self) -> Threshold:
        """The threshold with its scale; ValueError if it cannot be one."""
        return Threshold(self.threshold, self.scale)


@dataclass(frozen=True)
class Criterion(ABC):
    """An uncertainty U of each target point, of which a choice reduces the weighted sum.

    A target has ``f ~ N(m, s²)`` now, in the units of the outcomes; of counts it is the logit of
    prevalence. Observations that remove r of its variance move its mean by ``N(0, r)``.
    """

    @abstractmethod
    def lookahead(self, mean: Tensor, variance: Tensor) -> Lookahead:
        """Return E U of M targets as a function of the removed variance.

        Args:
            mean: m before the round, ``M``.
            variance: s² before the round, ``M``.
        """

    def expected(self, mean: Tensor, variance: Tensor, removed: Tensor) -> Tensor:
        """Compute E U after observations.

        Args:
            mean: m before them, ``M``.
            variance: s² before them, ``M``.
            removed: Variance r that they remove, at most s², ``... x M``.

        Returns:
            ``... x M``.
        """
        return self.lookahead(mean, variance)(removed)

    def current(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute U as it is, ``M``; arguments as :meth:`expected`."""
        return self.expected(mean, variance, torch.zeros_like(variance))


@dataclass(frozen=True)
class IntegratedVariance(Criterion):
    """Variance of f, or of prevalence (integrated mean squared error, IMSE).

    ``s² − r``, the same whatever is observed; on the scale of prevalence p ``E p² − E (E p)²``,
    which the counts to come change.

    Attributes:
        scale: "latent": of f; "prevalence": of ``1 / (1 + exp(−f))``.
    """

    scale: Scale = "latent"

    def __post_init__(self) -> None:
        """Check the scale; ValueError."""
        _check_scale(self.scale)

    def lookahead(self, mean: Tensor, variance: Tensor) -> Lookahead:
        """Return the expected variance; see :class:`Criterion`."""
        return _variance(self.scale, mean, variance, torch.ones_like(variance))


@dataclass(frozen=True)
class TargetedVariance(HasThreshold, Criterion):
    """Variance of points near a threshold t (targeted integrated mean squared error, tIMSE).

    The variance as of :class:`IntegratedVariance` times the density of ``N(m, s² + width²)`` at t,
    with m and s² before the round. Source: Picheny et al. (2010), Journal of Mechanical Design
    132(7), eq. 16, with the weight that uses the whole uncertainty of the prediction.

    Attributes:
        threshold: The threshold t, in the units that ``scale`` names.
        scale: "latent": t and the variance are of f; "prevalence": of ``1 / (1 + exp(−f))``.
        width: Standard deviation of a band about t that is of interest, in units of f.
    """

    threshold: float
    scale: Scale
    width: float = 0.0

    def __post_init__(self) -> None:
        """Check threshold, scale and width; ValueError."""
        _ = self.limit
        if not 0.0 <= self.width < math.inf:
            raise ValueError(f"Expected width to be zero or more and finite, got {self.width}.")

    def lookahead(self, mean: Tensor, variance: Tensor) -> Lookahead:
        """Return the expected weighted variance; see :class:`Criterion`."""
        spread = (variance + self.width**2).clamp_min(SMALLEST_VARIANCE).sqrt()
        gap = (mean - self.limit.latent) / spread
        density = (-0.5 * gap.square()).exp() / (spread * math.sqrt(2.0 * math.pi))
        return _variance(self.limit.scale, mean, variance, density)


@dataclass(frozen=True)
class ExceedanceEntropy(HasThreshold, Criterion):
    """Entropy of whether a point exceeds a threshold t, in nats.

    With P the probability of f > t: ``−P log P − (1 − P) log(1 − P)``; expected to an absolute
    error below 1e-6.

    Attributes:
        threshold: The threshold t, in the units that ``scale`` names.
        scale: "latent": t is a value of f; "prevalence": of ``1 / (1 + exp(−f))``.
    """

    threshold: float
    scale: Scale

    def __post_init__(self) -> None:
        """Check threshold and scale; ValueError."""
        _ = self.limit

    def lookahead(self, mean: Tensor, variance: Tensor) -> Lookahead:
        """Return the expected entropy; see :class:`Criterion`."""
        return exceedance_loss(binary_entropy, self.limit.distance(mean, variance), variance)


@dataclass(frozen=True)
class Misclassification(HasThreshold, Criterion):
    """Probability that a point is called on the wrong side of a threshold t.

    ``Φ(−|m − t| / s)`` now; expected after the round ``2 T((m − t) / s, √(s² / r − 1))`` with
    Owen's function T. The sum over targets is the expected number of wrong calls: stepwise
    uncertainty reduction, SUR. Source: Bect et al. (2012), Statistics and Computing 22, eq. 17,
    integrated in closed form as of Chevalier et al. (2014), Technometrics 56(4). Interpolated, with
    an absolute error below 1e-5.

    With a ``miss_cost`` w other than 1 the expected cost of the cheaper call, ``min(w P, 1 − P)``
    with P the probability of f > t, by the table of :class:`ExpectedLoss`: a point is called above
    from ``P = 1 / (1 + w)`` on.

    Attributes:
        threshold: The threshold t, in the units that ``scale`` names.
        scale: "latent": t is a value of f; "prevalence": of ``1 / (1 + exp(−f))``.
        miss_cost: Cost of calling a point below that is above, in costs of the opposite mistake.
    """

    threshold: float
    scale: Scale
    miss_cost: float = 1.0

    def __post_init__(self) -> None:
        """Check threshold, scale and cost; ValueError."""
        _ = self.limit
        if not 0.0 < self.miss_cost < math.inf:
            raise ValueError(f"Expected miss_cost above 0 and finite, got {self.miss_cost}.")

    def lookahead(self, mean: Tensor, variance: Tensor) -> Lookahead:
        """Return the expected cost of a wrong call; see :class:`Criterion`."""
        distance = self.limit.distance(mean, variance)
        if self.miss_cost == 1.0:
            return misclassification(distance, variance)
        return exceedance_loss(CheaperCall(self.miss_cost), distance, variance)


@dataclass(frozen=True)
class CheaperCall:
    """Expected cost ``min(w P, 1 − P)`` of calling a point above or below, whichever is cheaper.

    Attributes:
        miss_cost: Cost w of calling a point below that is above; the opposite mistake costs 1.
    """

    miss_cost: float

    def __call__(self, chance: Tensor) -> Tensor:
        """Compute it for probabilities P of being above, elementwise."""
        return torch.minimum(self.miss_cost * chance, 1.0 - chance)


@dataclass(frozen=True)
class ExpectedLoss(HasThreshold, Criterion):
    """Loss of a programme's best action, as it knows the probability of exceeding a threshold.

    Such as ``lambda P: torch.minimum(10.0 * P, 1.0 - P)``: leaving out a place above the threshold
    costs 10, treating one below costs 1. Losses of best actions are concave in P; observations can
    only lower their expectation.

    The expectation is interpolated, with an error below 1e-6 of the loss's range where the loss is
    smooth, and below 1e-4 of it where it has kinks.

    Attributes:
        loss: Maps probabilities to losses, elementwise, by torch.
        threshold: The threshold t, in the units that ``scale`` names.
        scale: "latent": t is a value of f; "prevalence": of ``1 / (1 + exp(−f))``.
    """

    loss: Loss
    threshold: float
    scale: Scale

    def __post_init__(self) -> None:
        """Check threshold and scale; ValueError."""
        _ = self.limit

    def lookahead(self, mean: Tensor, variance: Tensor) -> Lookahead:
        """Return the expected loss; see :class:`Criterion`."""
        return exceedance_loss(self.loss, self.limit.distance(mean, variance), variance)


def binary_entropy(chance: Tensor) -> Tensor:
    """Compute ``−P log P − (1 − P) log(1 − P)``, in nats."""
    return torch.special.entr(chance) + torch.special.entr(1.0 - chance)


def _check_scale(scale: str) -> None:
    if scale not in get_args(Scale):
        raise ValueError(f'Expected scale "latent" or "prevalence", got {scale!r}.')


def _variance(scale: Scale, mean: Tensor, variance: Tensor, slope: Tensor) -> Lookahead:
    if scale == "latent":
        return LinearLookahead(variance, slope)
    return prevalence_variance(mean, variance, slope)
