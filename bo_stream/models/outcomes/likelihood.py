"""Outcomes of any likelihood: targets are in units of the process, and stay so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from bo_stream.models.checks import check_finite
from bo_stream.models.memory import Measured, Targets
from bo_stream.models.outcomes.base import Outcomes
from bo_stream.models.outcomes.noise import NoiseFloor
from bo_stream.models.outcomes.transform import OutcomeChain


@dataclass(frozen=True)
class LikelihoodOutcomes(Outcomes):
    """Outcomes whose likelihood is of the standardised ones.

    What was learned from an outcome under a likelihood cannot be rescaled, so a standardisation is
    learned from the first outcomes and stays. There is no known noise.

    Attributes:
        shift: Zero, ``batch x m``.
        floor: Of no use.
    """

    shift: Tensor
    floor: NoiseFloor

    @classmethod
    def of(cls, like: Tensor) -> Self:
        """Build them for tensors of a shape ``batch x m``, dtype and device."""
        zero = torch.zeros_like(like)
        return cls(zero, NoiseFloor.of(zero))

    def encode(
        self, chain: OutcomeChain, Y: Tensor, Yvar: Tensor | None, infers_noise: bool
    ) -> Targets:
        """Standardise outcomes; see :meth:`Outcomes.encode`."""
        targets = chain.standardized(Y.detach().to(torch.float64), self.shift).mT
        check_finite("Y after its outcome transform", targets)
        unknown = torch.zeros_like(targets[..., :1, :], dtype=torch.bool)
        return Targets(targets, torch.ones_like(targets), unknown)

    def standardized(
        self, chain: OutcomeChain, level: Tensor | None, data: Measured
    ) -> tuple[Tensor, Tensor]:
        """Return targets as they are, with the noise of a Gaussian likelihood."""
        noise = data.noise if level is None else level.unsqueeze(-1)
        return data.targets, noise.expand_as(data.targets)

    def target_map(self, chain: OutcomeChain, mean: Tensor) -> Tensor:
        """Subtract the prior mean."""
        return torch.stack((torch.ones_like(mean), -mean), -1).unsqueeze(-1)

    @property
    def awaits(self) -> bool:
        """Never: there is no shift."""
        return False

    def found(self, is_found: bool) -> Self:
        """Change nothing."""
        return self

    def begun(self, totals: Tensor, scale: Tensor, zeros_apart: bool) -> Self:
        """Change nothing."""
        return self

    def forgotten(self) -> Self:
        """Change nothing."""
        return self

    def referring_to(self, targets: Tensor, scale: Tensor) -> Self:
        """Change nothing."""
        return self

    def before_update(self, chain: OutcomeChain, Y: Tensor, Yvar: Tensor, totals: Tensor) -> Self:
        """Change nothing."""
        return self

    def check_retractable(self, chain: OutcomeChain, Y: Tensor, Yvar: Tensor) -> None:
        """Check nothing: no noise is known."""

    def settled(self, totals: Tensor) -> Self:
        """Change nothing."""
        return self

    def merged(self, other: Outcomes) -> Self:
        """Change nothing."""
        return self

    def map(self, rule: Callable[[Tensor], Tensor]) -> Self:
        """Apply a rule to all tensors."""
        return type(self)(rule(self.shift), self.floor.map(rule))
