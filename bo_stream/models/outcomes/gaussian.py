"""Outcomes with Gaussian noise: the targets and noise variances that a memory holds of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor
from torch.distributions import Normal

from bo_stream.models.memory import Measured, Memory, Targets
from bo_stream.models.outcomes.base import Drawing, OutcomeChain, Outcomes
from bo_stream.models.outcomes.noise import (
    LEAST_NOISE,
    NOISE_FLOOR,
    NoiseFloor,
    known_noise,
    outcome_variance,
    typical_variance,
    warn_of_raised,
)
from bo_stream.process import PosteriorProcess
from bo_stream.weights import target_columns

if TYPE_CHECKING:
    from bo_stream.models.inference import Prior


@dataclass(frozen=True)
class GaussianOutcomes(Outcomes):
    """Outcomes less a shift, with noise variances above a floor: what a memory holds.

    Targets are in the units of the outcomes, which may be standardised again at any time, exactly.

    Attributes:
        shift: Subtracted from outcomes after the fixed part of their transform, ``batch x m``: sums
            of squares of what is far from zero would lose digits.
        floor: How small known noise variances may be.
        is_found: Whether the shift was taken from observations.
        zeros_apart: Whether observations without noise are a group of their own.
    """

    rescales: ClassVar[bool] = True

    shift: Tensor
    floor: NoiseFloor
    is_found: bool
    zeros_apart: bool = False

    @classmethod
    def of(cls, targets: Tensor) -> Self:
        """Take the shift from the first targets, ``batch x n x m``; the floor is set later."""
        shift = targets.detach().to(torch.float64).mean(-2)  # so that sums keep digits
        if targets.shape[-2] == 0:
            shift = torch.zeros_like(shift)
        return cls(shift, NoiseFloor.of(torch.ones_like(shift)), targets.shape[-2] > 0)

    def noise_level(self, prior: Prior, memory: Memory) -> Tensor:
        """Return the inferred noise variance, or the mean of the positive known ones.

        Where all that are known are zero: what they are raised to.
        """
        inferred = prior.inferred_noise
        if inferred is not None:
            return inferred
        scale, mean = prior.scale, memory.mean_known_noise()
        if mean is not None:
            return (mean / scale.square()).clamp_min(LEAST_NOISE)
        return prior.zero_noise if self.floor.any_zero else torch.full_like(scale, NOISE_FLOOR)

    def noise_variance(self, prior: Prior, memory: Memory) -> Tensor:
        """Return the noise level."""
        return self.noise_level(prior, memory)

    def moments(
        self, prior: Prior, mean: Tensor, variance: Tensor, noise: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Add the noise variance; see :class:`Outcomes`.

        Raises:
            UnsupportedError: The transformed outcomes are no multiples of those observed.
        """
        if prior.chain.fixed:
            names = ", ".join(type(step).__name__ for step in prior.chain.fixed)
            raise UnsupportedError(
                f"Expected outcome_transform to be Standardize or None, got {names}: outcomes have "
                "another distribution than the transformed ones. Use posterior."
            )
        return mean, variance + noise()

    def log_density(
        self,
        prior: Prior,
        targets: Tensor,
        mean: Tensor,
        variance: Tensor,
        noise: Callable[[], Tensor],
    ) -> Tensor:
        """Return the normal log density; see :class:`Outcomes`."""
        mean, variance = self.moments(prior, mean, variance, noise)
        density: Tensor = Normal(mean, variance.sqrt(), validate_args=False).log_prob(targets)
        return density

    def pseudo_observations(
        self,
        prior: Prior,
        memory: Memory,
        process: PosteriorProcess,
        inputs: Tensor,
        targets: Tensor,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return targets and variances as they are; see :class:`Outcomes`."""
        if noise is None:
            noise = self.noise_level(prior, memory).detach().unsqueeze(-1)
        return targets, noise

    def drawing(self, prior: Prior, observation_noise: Tensor | None) -> Drawing | None:
        """Return None: outcomes are drawn by adding Gaussian noise; see :class:`Outcomes`."""
        return None

    def with_observations(self, is_found: bool) -> Self:
        """Say whether there are observations in memory; see :class:`Outcomes`."""
        return replace(self, is_found=is_found)

    def initialized(self, targets: Tensor, scale: Tensor, zeros_apart: bool, share: float) -> Self:
        """Set the floor by the variance of the first outcomes; see :class:`Outcomes`."""
        totals = first_totals(targets, self.shift)
        scale, variance = scale.square(), outcome_variance(totals)
        variance = torch.where(variance > 0.0, variance.minimum(scale), scale)
        floor = NoiseFloor.of(variance, share, typical_variance(targets.detach().double().mT))
        return replace(self, floor=floor, zeros_apart=zeros_apart)

    def prepared_for(
        self, prior: Prior, memory: Memory, Y: Tensor, Yvar: Tensor | None, sign: float
    ) -> Self:
        """Let shift and floor follow the stream; see :class:`Outcomes`."""
        units = self
        if not self.is_found and Y.shape[-2] > 0:  # the first that enter an empty model
            first = prior.chain.to_targets(Y.detach(), None)[0].to(torch.float64)
            shift = self.shift + (first.mT - self.shift.unsqueeze(-1)).mean(-1)
            units = replace(self, shift=shift, is_found=True)
            units = units.initialized(first, prior.scale, self.zeros_apart, self.floor.share)
        if Yvar is None:
            return units
        targets, variances = prior.chain.to_targets(Y.detach(), Yvar)
        assert variances is not None  # noqa: S101 (a transform returns those that it was given)
        noise = variances.detach().double().mT
        zeros = (noise == 0.0).all(-2, keepdim=True) & self.zeros_apart
        noise = torch.where(zeros, torch.inf, noise)  # those that are kept apart are not raised
        if sign < 0.0:
            units.floor.check_retractable(noise)
            return units
        floor = units.floor
        if bool(zeros.any()):
            floor = floor.with_zeros(memory.totals + first_totals(targets, units.shift))
            warn_of_raised(
                f"{int(zeros.sum()):,} variances that are zero or less than what float64 resolves",
                floor.zero,
                ", which follows the outcomes' variance at each refit",
            )
        if bool(floor.below(noise).any()):
            floor = floor.for_update(noise, memory.totals + first_totals(targets, units.shift))
        return replace(units, floor=floor)

    def encode(self, prior: Prior, Y: Tensor, Yvar: Tensor | None, infers_noise: bool) -> Targets:
        """Subtract the shift and raise small variances; see :class:`Outcomes`."""
        targets, variances = prior.chain.to_targets(Y.detach(), Yvar)
        shifted = targets.to(torch.float64).mT - self.shift.unsqueeze(-1)
        if variances is None and infers_noise:
            unknown = torch.zeros_like(shifted[..., :1, :], dtype=torch.bool)
            return Targets(shifted, torch.ones_like(shifted), unknown)
        apart = self.zeros_apart and not infers_noise
        return Targets(shifted, *known_noise(shifted, variances, self.floor, infers_noise, apart))

    def standardized(
        self, chain: OutcomeChain, level: Tensor | None, data: Measured
    ) -> tuple[Tensor, Tensor]:
        """Standardise targets and their variances; see :class:`Outcomes`."""
        offset, scale = (t.unsqueeze(-1) for t in chain.offset_and_scale(self.shift))
        outcomes = (data.targets + self.shift.unsqueeze(-1) - offset) / scale
        variances = data.noise / scale.square()
        if level is None:
            return outcomes, variances
        return outcomes, torch.where(data.known, variances, level.unsqueeze(-1))

    def target_map(self, chain: OutcomeChain, mean: Tensor) -> Tensor:
        """Standardise and subtract the prior mean; see :class:`Outcomes`."""
        offset, scale = chain.offset_and_scale(self.shift)
        constant = (self.shift - offset) / scale - mean
        return torch.stack((scale.reciprocal().expand_as(constant), constant), -1).unsqueeze(-1)

    def settled(self, totals: Tensor) -> Self:
        """Let the noise of zeros follow the outcomes; see :class:`Outcomes`."""
        settled = self.floor.settled(totals) if self.floor.any_zero else self.floor
        same = torch.equal(settled.zero, self.floor.zero)
        return self if same else replace(self, floor=settled)

    def merged(self, other: Self) -> Self:
        """Return the units after a merge: the other's shift if this model has none yet."""
        first = self if self.is_found else other
        floor = first.floor.joined(other.floor)
        return replace(self, shift=first.shift, floor=floor, is_found=first.is_found)


def first_totals(targets: Tensor, shift: Tensor) -> Tensor:
    """``[Y, 1]ᵀ [Y, 1]`` of the first outcomes less their shift, ``batch x m x 2 x 2``."""
    columns = target_columns(targets.detach().to(torch.float64).mT - shift.unsqueeze(-1))
    return columns.mT @ columns


def shifted_targets(shift: Tensor) -> Tensor:
    """Return the map of target columns [Y, 1] to [Y + shift, 1], ``... x m x 2 x 2``."""
    matrix = torch.eye(2, dtype=shift.dtype, device=shift.device).repeat(*shift.shape, 1, 1)
    matrix[..., 1, 0] = shift
    return matrix
