"""The joint normal distribution of several independent outputs."""

from __future__ import annotations

from typing import Self

from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator.operators import BlockDiagLinearOperator
from torch import Tensor


class IndependentOutputs(MultitaskMultivariateNormal):
    """One block of the covariance an output, as BoTorch's own models have it.

    BoTorch's cached roots (qLogNEI, qLogNEHVI) rely on that layout. gpytorch's ``log_prob`` takes
    the values in another order than the covariance there; this one does not.
    """

    @classmethod
    def of(cls, outputs: MultivariateNormal) -> Self:
        """Of a batch ``... x m`` of normal distributions over n points, one an output."""
        blocks = BlockDiagLinearOperator(outputs.lazy_covariance_matrix)
        return cls(outputs.mean.mT, blocks, interleaved=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of ``... x n x m`` values."""
        ordered = value if self._interleaved else value.mT
        flat = ordered.reshape(*value.shape[:-2], -1)
        density: Tensor = MultivariateNormal.log_prob(self, flat)
        return density
