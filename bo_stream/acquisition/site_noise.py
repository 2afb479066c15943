"""Noise of the observations that a round would make, in the units of the process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from bo_stream.models.base import StreamingGP

ROWS = 16_384
"""Candidates whose noise is computed together."""


@dataclass(frozen=True)
class SiteNoise:
    """Noise variances of observations at N candidates, given the posterior before the round.

    Of counts those of observations of the logit with the same expected information; else the
    model's own.

    Attributes:
        model: The model.
        X: Candidates in transformed inputs, ``N x d``.
        trials: Examined at each, ``N``; None: as the model has it, or no counts.
    """

    model: StreamingGP
    X: Tensor
    trials: Tensor | None

    @classmethod
    def of(cls, model: StreamingGP, X: Tensor, trials: int | Tensor | None) -> Self:
        """Check the number of trials, one or one each.

        Raises:
            BotorchTensorDimensionError: Another number of them than of candidates.
            InputDataError: One is less than 1.
        """
        if trials is None:
            return cls(model, X, None)
        examined = torch.as_tensor(trials).to(X)
        if examined.shape not in (torch.Size(), torch.Size((len(X),))):
            raise BotorchTensorDimensionError(
                f"Expected trials as a number or of shape `{len(X)}`, one for each candidate of "
                f"pool, got {tuple(examined.shape)}."
            )
        if not bool((examined >= 1.0).all() & examined.isfinite().all()):
            raise InputDataError(f"Expected trials of 1 or more, got {float(examined.min()):g}.")
        return cls(model, X, examined.expand(len(X)))

    def at(self, index: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Compute the noise variances of some candidates, ``1 x n``.

        Args:
            index: Of them, ``n``.
            mean: Of the process there, ``n``.
            variance: Of the process there, ``n``; what rounding made negative counts as 0.

        Raises:
            UnsupportedError: There are trials, and the model is not of counts.
        """
        columns = zip(*(t.split(ROWS) for t in (index, mean, variance.clamp_min(0.0))), strict=True)
        return torch.cat([self._some(*column).expand(1, len(column[0])) for column in columns], -1)

    def _some(self, index: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        trials = None if self.trials is None else self.trials[index]
        return self.model.noise_given(self.X[index], mean, variance, trials)
