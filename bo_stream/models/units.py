"""The units in which a memory holds outcomes: less a shift, with noise variances above a floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from bo_stream.models.checks import check_finite
from bo_stream.models.construction import first_totals, reference_outcome
from bo_stream.models.noise import (
    NoiseFloor,
    known_noise,
    outcome_variance,
    warn_of_zeros,
    zero_rows,
)
from bo_stream.models.outcomes import OutcomeChain
from bo_stream.sufficient_statistics import target_columns


@dataclass(frozen=True)
class OutcomeUnits:
    """Units of the targets that a memory holds, taken from the first observations.

    Attributes:
        shift: Subtracted from outcomes after the fixed part of their transform, ``batch x m``: sums
            of squares of what is far from zero would lose digits.
        floor: How small known noise variances may be.
        is_found: Whether the shift was taken from observations.
        is_sought: Whether it is to be taken from the first observations of an empty model.
        zeros_apart: Whether observations without noise are a group of their own.
    """

    shift: Tensor
    floor: NoiseFloor
    is_found: bool
    is_sought: bool = True
    zeros_apart: bool = False

    @classmethod
    def of(cls, targets: Tensor) -> Self:
        """Take the shift from the first targets, ``batch x n x m``; the floor is set later."""
        shift = reference_outcome(targets)
        return cls(shift, NoiseFloor.of(torch.ones_like(shift)), targets.shape[-2] > 0)

    def unshifted(self) -> Self:
        """Keep outcomes as they are, with no shift to find."""
        return replace(self, shift=torch.zeros_like(self.shift), is_sought=False)

    def forgotten(self) -> Self:
        """Take the shift anew from the next observations."""
        return replace(self, is_found=False)

    def with_floor(self, totals: Tensor, scale: Tensor) -> Self:
        """Set the floor by the variance of the first outcomes.

        Args:
            totals: ``[Y, 1]ᵀ [Y, 1]`` of these, ``batch x m x 2 x 2``.
            scale: Standard deviation by which the outcome transform divides, ``batch x m``.
        """
        scale, variance = scale.square(), outcome_variance(totals)
        floor = NoiseFloor.of(torch.where(variance > 0.0, variance.minimum(scale), scale))
        return replace(self, floor=floor)

    @property
    def awaits(self) -> bool:
        """Whether the next observations set the shift."""
        return self.is_sought and not self.is_found

    def referring_to(self, targets: Tensor, scale: Tensor) -> Self:
        """Take the shift from the first observations that enter an empty model.

        Args:
            targets: Of these, less the present shift, ``batch x m x n``.
            scale: As in :meth:`with_floor`.
        """
        mean = targets.mean(-1)
        centred = target_columns(targets - targets.mean(-1, keepdim=True))
        moved = replace(self, shift=self.shift + mean, is_found=True)
        return moved.with_floor(centred.mT @ centred, scale)

    def encode(
        self, chain: OutcomeChain, Y: Tensor, Yvar: Tensor | None, infers_noise: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Transform outcomes and noise variances to the memory's units.

        Args:
            chain: The outcome transform.
            Y: ``batch x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
            infers_noise: Whether observations without a known variance have the inferred one.

        Returns:
            Targets and noise variances (1 where unknown), ``batch x m x n`` each, and where the
            noise is known, ``batch x 1 x n``.
        """
        targets, variances = chain.to_targets(Y.detach(), Yvar)
        check_finite("Y after its outcome transform", targets)
        shifted = targets.to(torch.float64).mT - self.shift.unsqueeze(-1)
        apart = self.zeros_apart and not infers_noise
        return shifted, *known_noise(shifted, variances, self.floor, infers_noise, apart)

    def before_update(
        self, chain: OutcomeChain, Y: Tensor, Yvar: Tensor | None, totals: Tensor
    ) -> Self:
        """Let the floor follow the stream before a batch enters; warn of what it raises.

        Args:
            chain: The outcome transform.
            Y: ``batch x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.
            totals: ``[Y, 1]ᵀ [Y, 1]`` of the targets in memory, ``batch x m x 2 x 2``.
        """
        targets, noise = self._given_noise(chain, Y, Yvar)
        if noise is None:
            return self
        floor = self.floor
        if self.zeros_apart:
            zeros = zero_rows(noise)
            noise = torch.where(zeros, torch.inf, noise)
            if bool(zeros.any()):
                floor = floor.with_zeros(totals + first_totals(targets, self.shift))
                warn_of_zeros(int(zeros.sum()), floor.zero)
        if bool(floor.below(noise).any()):
            floor = floor.for_update(noise, totals + first_totals(targets, self.shift))
        return replace(self, floor=floor)

    def check_retractable(self, chain: OutcomeChain, Y: Tensor, Yvar: Tensor | None) -> None:
        """Check that it is known to what the variances of observations in memory were raised.

        Raises:
            UnsupportedError: It is not; see :meth:`NoiseFloor.check_retractable`.
        """
        _, noise = self._given_noise(chain, Y, Yvar)
        if noise is not None:
            apart = self.zeros_apart
            self.floor.check_retractable(
                torch.where(zero_rows(noise), torch.inf, noise) if apart else noise
            )

    @staticmethod
    def _given_noise(
        chain: OutcomeChain, Y: Tensor, Yvar: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if Yvar is None:
            return Y, None
        targets, variances = chain.to_targets(Y.detach(), Yvar)
        return targets, None if variances is None else variances.detach().double().mT

    def settled(self, totals: Tensor) -> Self:
        """Let the noise of observations said to have none follow the outcomes' variance.

        Returns:
            These units where that changes nothing.
        """
        settled = self.floor.settled(totals) if self.floor.any_zero else self.floor
        same = torch.equal(settled.zero, self.floor.zero)
        return self if same else replace(self, floor=settled)

    def merged(self, other: OutcomeUnits) -> Self:
        """Return the units after a merge: the other's shift if this model has none yet."""
        first = other if self.awaits else self
        return replace(
            self,
            shift=first.shift,
            floor=first.floor.joined(other.floor),
            is_found=first.is_found,
        )

    def map(self, rule: Callable[[Tensor], Tensor]) -> Self:
        """Apply a rule to all tensors."""
        return replace(self, shift=rule(self.shift), floor=self.floor.map(rule))
