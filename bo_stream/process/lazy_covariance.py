"""Covariance matrices of many points that are never formed, for BoTorch's distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import RootLinearOperator, TriangularLinearOperator
from torch import Tensor

from bo_stream.linalg import safe_cholesky


class LazyCovariance(LinearOperator):
    """Symmetric matrix whose diagonal is evaluated without the other entries.

    Means, variances and marginals of thousands of points take no n x n numbers; samples and
    products do.

    Args:
        like: A tensor with the operator's batch shape, size, dtype and device, ``... x n``.
        dense: Evaluates the matrix, ``... x n x n``; leading dimensions broadcast.
        variance: Evaluates the diagonal, ``... x n``; leading dimensions broadcast.
    """

    def __init__(
        self, like: Tensor, dense: Callable[[], Tensor], variance: Callable[[], Tensor]
    ) -> None:
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
        """Evaluate the ``... x n x n`` matrix."""
        return self.dense().to(self.like).expand(self._size())

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """Compute the Cholesky factor, jittered where needed, in float64."""
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


class DowndatedRootOperator(LinearOperator):
    """Covariance ``Z Zᵀ − B Bᵀ`` of n points, never formed: O(n (r + q)) memory.

    The leading dimensions of ``root`` and ``downdate`` broadcast but are not expanded, so that many
    fantasies of the same points share one root.

    Args:
        root: Z, ``... x n x r``.
        downdate: B, ``... x n x q``; q may be 0.
        batch: Leading shape of the operator. Default: the shape to which the factors broadcast.
    """

    def __init__(self, root: Tensor, downdate: Tensor, batch: torch.Size | None = None) -> None:
        super().__init__(root, downdate, batch=batch)
        self.root = root
        self.downdate = downdate
        own = torch.broadcast_shapes(root.shape[:-2], downdate.shape[:-2])
        self.batch = own if batch is None else torch.Size(batch)

    def _size(self) -> torch.Size:
        n = self.root.shape[-2]
        return torch.Size((*self.batch, n, n))

    def _transpose_nonbatch(self) -> DowndatedRootOperator:
        return self

    def _matmul(self, rhs: Tensor) -> Tensor:
        columns = rhs.unsqueeze(-1) if rhs.ndim == 1 else rhs
        product = self.root @ (self.root.mT @ columns)
        product = product - self.downdate @ (self.downdate.mT @ columns)
        return product.squeeze(-1) if rhs.ndim == 1 else product

    def _diagonal(self) -> Tensor:
        variance = self.root.square().sum(-1) - self.downdate.square().sum(-1)
        return variance.expand(*self.batch, -1)

    def to_dense(self) -> Tensor:
        """Evaluate the ``... x n x n`` matrix."""
        dense = self.root @ self.root.mT - self.downdate @ self.downdate.mT
        return dense.expand(self._size())

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> DowndatedRootOperator:
        return DowndatedRootOperator(self.root, self.downdate, torch.Size(batch_shape))

    def _unsqueeze_batch(self, dim: int) -> DowndatedRootOperator:
        factors = [f[(None,) * (len(self.batch) + 2 - f.ndim)] for f in (self.root, self.downdate)]
        root, downdate = (factor.unsqueeze(dim) for factor in factors)
        return DowndatedRootOperator(
            root, downdate, torch.Size((*self.batch[:dim], 1, *self.batch[dim:]))
        )

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        """Select rows and columns: in factors where they are the same slice, else dense."""
        if not (isinstance(row_index, slice) and isinstance(col_index, slice)):
            return to_linear_operator(self.to_dense()[(*batch_indices, row_index, col_index)])
        wide = [f.expand(*self.batch, *f.shape[-2:]) for f in (self.root, self.downdate)]
        root, downdate = (f[(*batch_indices, row_index, slice(None))] for f in wide)
        if row_index == col_index:
            return DowndatedRootOperator(root, downdate)
        root2, downdate2 = (f[(*batch_indices, col_index, slice(None))] for f in wide)
        return to_linear_operator(root @ root2.mT - downdate @ downdate2.mT)

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """Compute a root, of low rank where n is more than the number of columns of Z and B."""
        n, rank = self.root.shape[-2:]
        if n <= rank + self.downdate.shape[-1]:
            return RootLinearOperator(TriangularLinearOperator(safe_cholesky(self.to_dense())))
        return RootLinearOperator(self._low_rank_root())

    def _low_rank_root(self) -> Tensor:
        """Compute ``Q V √Λ`` with ``V Λ Vᵀ = R Rᵀ − Qᵀ B Bᵀ Q`` and ``Z = Q R``. Cost O(n r² + r³).

        Exact because B lies in the range of Z, which Q spans for any rank of Z.
        """
        if self.downdate.shape[-1] == 0:
            return self.root
        range_, own = torch.linalg.qr(self.root)
        less = range_.mT @ self.downdate
        eigenvalues, vectors = torch.linalg.eigh(own @ own.mT - less @ less.mT)
        return range_ @ (vectors * eigenvalues.clamp_min(0.0).sqrt().unsqueeze(-2))
