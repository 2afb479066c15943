"""A covariance of many points that is evaluated when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import LinearOperator
from linear_operator.operators import (
    BlockDiagLinearOperator,
    RootLinearOperator,
    TriangularLinearOperator,
)
from torch import Tensor

from bo_stream.linalg import safe_cholesky


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


class LazyCovariance(LinearOperator):
    """A symmetric matrix of which the diagonal is had without the rest.

    Means, variances and marginals of thousands of points then take no n x n numbers; samples and
    products do.
    """

    def __init__(
        self, like: Tensor, dense: Callable[[], Tensor], variance: Callable[[], Tensor]
    ) -> None:
        """Set what evaluates it.

        Args:
            like: Of the batch shape, size, dtype and device, ``... x n``.
            dense: Gives ``... x n x n``; leading dimensions broadcast.
            variance: Gives the diagonal, ``... x n``; the same.
        """
        super().__init__(like, dense=dense, variance=variance)
        self.like = like
        self.dense = dense
        self.variance = variance

    def _size(self) -> torch.Size:
        return torch.Size((*self.like.shape, self.like.shape[-1]))

    def _transpose_nonbatch(self) -> LazyCovariance:
        return self

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.to_dense() @ rhs

    def _diagonal(self) -> Tensor:
        return self.variance().to(self.like).expand(self.like.shape)

    def to_dense(self) -> Tensor:
        """The ``... x n x n`` matrix itself."""
        return self.dense().to(self.like).expand(self._size())

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """The Cholesky factor of the whole matrix, jittered where needed, in float64."""
        factor = safe_cholesky(self.dense().to(torch.float64)).to(self.like)
        return RootLinearOperator(TriangularLinearOperator(factor.expand(self._size())))

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> LazyCovariance:
        like = self.like.expand(*batch_shape, self.like.shape[-1])
        return LazyCovariance(like, self.dense, self.variance)

    def _unsqueeze_batch(self, dim: int) -> LazyCovariance:
        return LazyCovariance(
            self.like.unsqueeze(dim),
            lambda: self.to_dense().unsqueeze(dim),
            lambda: self._diagonal().unsqueeze(dim),
        )
