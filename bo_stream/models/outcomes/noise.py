"""Which observations have a known noise variance, and how small one may be."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.exceptions.warnings import InputDataWarning
from torch import Tensor

from bo_stream.warnings import users_stack_level

NOISE_FLOOR = 1e-6
"""What a known noise variance of zero is raised to, in parts of the outcomes' variance."""

MOVED = 4.0
"""Factor by which noise that was raised may be off: of zeros, between two refits."""

_ROUNDING = 1e-12

LEAST_NOISE = 1e-10
"""Smallest positive known noise variance, in parts of the outcomes' variance, that float64 solves
for. Of a model on a grid, whose kernel is known to less than that, it is ``NOISE_FLOOR``.
"""

_OF_NORMAL = 1.4826
"""Standard deviation of a normal distribution, in parts of its median absolute deviation."""


@dataclass(frozen=True)
class NoiseFloor:
    """How small known noise variances may be, in parts of a variance of the outcomes.

    That variance falls with the stream's and never rises: what was stored as it came is stored so
    ever after, and can be taken out again. Of a model on a grid, positive ones count as given from
    ``share`` of it on, or of the variance that the first outcomes have without outliers.
    Observations said to have no noise are a group of their own where the model learns no noise
    level: their noise variance is ``NOISE_FLOOR`` of the least variance of the outcomes so far, and
    at least ``share`` of that at the last refit.

    An outlier that stays among the outcomes raises their variance, so that from about 1e5 standard
    deviations of the others on it raises their noise too, with a warning: the prior variance is as
    large, and statistics in float64 solve systems whose condition number is it over the noise. Of
    45 outcomes in two dimensions with noise of standard deviation 0.1 and one of 1e4, predicted
    means were exact to 2e-4 standard deviations; with one of 1e6 they were off by hundreds, where
    a dense exact process was not. Drop or clip such an outlier.

    Attributes:
        variance: Of the outcomes, ``batch x m``.
        former: The largest such variance by which any noise variance was raised, 0 for none.
        zero: Noise variance of observations that are said to have none, where these are kept apart:
            unlike others' it may be changed after they entered, ``batch x m``.
        any_zero: Whether there are such observations.
        share: Smallest positive variance, in parts of the outcomes', of those that a model on a
            grid is given; ``LEAST_NOISE`` in all others.
        typical: Variance of the first outcomes but for outliers, of which ``share`` counts where it
            is less than ``variance``, ``batch x m``; None: not known.
    """

    variance: Tensor
    former: Tensor
    zero: Tensor
    any_zero: bool = False
    share: float = LEAST_NOISE
    typical: Tensor | None = None

    @classmethod
    def of(
        cls, variance: Tensor, share: float = LEAST_NOISE, typical: Tensor | None = None
    ) -> NoiseFloor:
        """Set the floor by a variance of the outcomes; nothing was raised yet."""
        former, zero = torch.zeros_like(variance), NOISE_FLOOR * variance
        return cls(variance, former, zero, share=share, typical=typical)

    def joined(self, other: NoiseFloor) -> NoiseFloor:
        """Join the floors of two memories: no variance stored in either is below the result."""
        return replace(
            self,
            variance=self.variance.minimum(other.variance),
            former=self.former.maximum(other.former),
            zero=self.zero if self.any_zero or not other.any_zero else other.zero,
            any_zero=self.any_zero or other.any_zero,
        )

    def with_zeros(self, totals: Tensor) -> NoiseFloor:
        """Set the floor for a batch with observations that are kept apart.

        What all of them have for noise moves where it is ``MOVED`` times too small or too large.

        Args:
            totals: As in :meth:`for_update`.
        """
        settled = replace(self, any_zero=True).settled(totals)
        ratio = settled.zero / self.zero
        moved = bool(((ratio > MOVED) | (ratio < 1.0 / MOVED)).any())
        return settled if moved else replace(settled, zero=self.zero)

    def settled(self, totals: Tensor) -> NoiseFloor:
        """Set the noise that zeros have by the outcomes' variance now.

        Args:
            totals: As in :meth:`for_update`.
        """
        variance = outcome_variance(totals)
        lower = self.variance.minimum(torch.where(variance > 0.0, variance, torch.inf))
        zero = (NOISE_FLOOR * lower).maximum(self.share * variance)
        return replace(self, variance=lower, zero=zero)

    @property
    def least(self) -> Tensor:
        """Smallest positive known noise variance, ``batch x m``."""
        typical = self.variance if self.typical is None else self.variance.minimum(self.typical)
        return (LEAST_NOISE * self.variance).maximum(self.share * typical)

    def below(self, noise: Tensor) -> Tensor:
        """Find variances, ``batch x m x n``, that are too small. False where they are NaN."""
        return noise < self.least.unsqueeze(-1)

    def raised(self, noise: Tensor) -> Tensor:
        """Variances, ``batch x m x n``, with those that are too small raised; NaN stays."""
        zero, least = NOISE_FLOOR * self.variance.unsqueeze(-1), self.least.unsqueeze(-1)
        raised = noise.maximum(torch.where(noise == 0.0, zero, least))
        return torch.where(noise.isnan(), noise, raised)

    def for_update(self, noise: Tensor, totals: Tensor) -> NoiseFloor:
        """Set the floor for a batch; warn of what it raises.

        Once anything was raised it falls only by ``MOVED`` and more, so that observations of a
        steady stream can be taken out.

        Args:
            noise: Variances as given, ``batch x m x n``.
            totals: ``[Y, 1]ᵀ [Y, 1]`` of all outcomes, the batch's among them, ``batch x m x 2 x
                2``.
        """
        variance = outcome_variance(totals)
        variance = torch.where(variance > 0.0, variance, torch.inf)
        variance = self.variance.minimum(variance)
        stays = (self.former > 0.0) & (MOVED * variance > self.variance)
        fallen = replace(self, variance=torch.where(stays, self.variance, variance))
        low = fallen.below(noise)
        if not bool(low.any()):
            return fallen
        given = noise[low]
        warn_of_raised(
            f"{len(given):,} variances from {float(given.min()):g} to {float(given.max()):g} that "
            f"are zero or less than {self.share:g} of the outcomes' variance",
            fallen.raised(noise)[low],
        )
        raised = torch.where(low.any(-1), fallen.variance, 0.0)
        return replace(fallen, former=self.former.maximum(raised))

    def check_retractable(self, noise: Tensor) -> None:
        """Check that it is known to what variances were raised when their observations entered.

        Args:
            noise: Variances as given, ``batch x m x n``.

        Raises:
            UnsupportedError: The floor has fallen since some were raised that were as small.
        """
        moved = self.former > self.variance
        if bool((replace(self, variance=self.former).below(noise) & moved.unsqueeze(-1)).any()):
            raise UnsupportedError(
                "Cannot take out observations whose Yvar is as small as some that were raised: "
                "the outcomes' variance, in parts of which that is done, has fallen since, so "
                "what these were raised to is not known. Call clear() and update the model with "
                "the observations to keep."
            )


def outcome_variance(totals: Tensor) -> Tensor:
    """Variance of outcomes, ``... x m``; 0 where there are no two that differ.

    Args:
        totals: ``[Y, 1]ᵀ [Y, 1]``, ``... x m x 2 x 2``.
    """
    count = totals[..., 1, 1].clamp_min(1.0)
    squares = totals[..., 0, 0] - totals[..., 0, 1].square() / count
    differ = squares > _ROUNDING * totals[..., 0, 0]
    return torch.where(differ, squares / (count - 1.0).clamp_min(1.0), 0.0)


def typical_variance(targets: Tensor) -> Tensor:
    """Variance of outcomes, ``... x m x n -> ... x m``, of which up to half may be outliers.

    By their median absolute deviation; infinite where that is zero.
    """
    if targets.shape[-1] == 0:
        return torch.full_like(targets.sum(-1), torch.inf)
    centred = (targets - targets.median(-1, keepdim=True).values).abs()
    variance = (_OF_NORMAL * centred.median(-1).values).square()
    return torch.where(variance > 0.0, variance, torch.inf)


def warn_of_raised(which: str, level: Tensor, rest: str = "") -> None:
    """Warn of ``which`` known noise variances, too small ones, and of what they are raised to."""
    low, high = float(level.min()), float(level.max())
    to = f"{low:g} to {high:g}" if high > low else f"{low:g}"
    warnings.warn(
        f"Yvar holds {which}; they are raised to {to}{rest}.",
        InputDataWarning,
        stacklevel=users_stack_level(),
    )


def known_noise(
    targets: Tensor, Yvar: Tensor | None, floor: NoiseFloor, learns: bool, apart: bool
) -> tuple[Tensor, Tensor]:
    """Noise variances with 1 where unknown, ``batch x m x n``, and where known, ``batch x 1 x n``.

    Args:
        targets: ``batch x m x n``.
        Yvar: Variances, ``batch x n x m``; NaN in a row: unknown.
        floor: How small they may be; smaller ones are raised.
        learns: Whether the model has a noise level for the unknown ones.
        apart: Whether rows of zeros are kept apart: they are not known then, and have ``zero`` of
            the floor for a noise level.

    Raises:
        InputDataError: One is unknown and the model learns none.
    """
    given = torch.full_like(targets, torch.nan) if Yvar is None else Yvar.detach().double().mT
    known = ~given.isnan().any(-2, keepdim=True)
    noise = torch.where(known, floor.raised(given), 1.0)
    if not learns and not bool(known.all()):
        raise InputDataError(
            "Expected Yvar for every observation: this model has no one noise level for others, "
            "for all its first observations had known noise, or its noise depends on the inputs. "
            "Pass Yvar, or build WISKI with NaN in train_Yvar."
        )
    if apart:
        zeros = (given == 0.0).all(-2, keepdim=True)
        return torch.where(zeros, 1.0, noise), known & ~zeros
    return noise, known
