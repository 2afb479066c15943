"""A model with inducing points whose memory is of sites, for outcomes under any likelihood."""

from __future__ import annotations

from typing import Self

import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

from bo_stream.models.inducing_gp import InducingGP
from bo_stream.models.inducing_memory import InducingMemory
from bo_stream.models.latent_outcomes import LatentOutcomes


class LatentGP(LatentOutcomes, InducingGP[InducingMemory]):
    """A model of outcomes under a likelihood whose memory is of sites."""

    def _check_retractable(self, X: Tensor) -> None:
        super()._check_retractable(X)
        if X.shape[-2] > 0 and not self._is_gaussian:
            raise UnsupportedError(
                f"retract needs a Gaussian likelihood, got {type(self.likelihood).__name__}: what "
                "an outcome left in memory depends on all that was there when it came. Build the "
                "model anew, or forget."
            )

    def _targets_of(self, other: Self) -> Tensor:
        matrix = super()._targets_of(other)
        mine, theirs = (m._outcomes.offset_and_scale(m._counts()) for m in (self, other))
        if not all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)):
            raise UnsupportedError(
                "Expected a model whose outcomes are standardised alike, got another mean or "
                "standard deviation: sites cannot change their units. Standardise Y yourself, the "
                "same for both, and leave out outcome_transform."
            )
        return matrix
