"""The joint distribution of points under a process, and that of their outcomes for BoTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import (
    BlockDiagLinearOperator,
    DiagLinearOperator,
    RootLinearOperator,
    TriangularLinearOperator,
)
from torch import Tensor

from bo_stream.linalg import safe_cholesky

DENSE_LIMIT = 512
"""Up to this many points a joint posterior has a dense covariance, beyond it a lazy one."""


@dataclass(frozen=True)
class Joint:
    """Joint distribution of n points: mean and covariance ``Z Zᵀ − B Bᵀ + residual``.

    Attributes:
        mean: ``... x m x n``.
        root: Z, ``... x m x n x r``.
        downdate: B, ``... x m x n x q``.
        residual: Residual covariance of the basis, or None where it is zero.
    """

    mean: Tensor
    root: Tensor
    downdate: Tensor
    residual: Residual | None

    def select(self, outputs: Sequence[int]) -> Joint:
        """Select some of the outputs."""
        if list(outputs) == list(range(self.mean.shape[-2])):
            return self
        chosen = torch.tensor(list(outputs), device=self.mean.device)
        return self._map(lambda tensor, after: tensor.index_select(-1 - after, chosen))

    def distribution(
        self, offset: Tensor, scale: Tensor, noise: Tensor | None, dtype: torch.dtype
    ) -> MultivariateNormal:
        """Return the normal ``offset + scale · joint``, with noise on the joint's diagonal.

        Args:
            offset: ``... x m x 1``.
            scale: Shaped as offset.
            noise: Variances, broadcastable to ``... x m x n``, or None.
            dtype: Of the normal.
        """
        joint, several = self, self.mean.shape[-2] > 1
        if not several:
            joint = self._map(lambda tensor, after: tensor.squeeze(-1 - after))
            offset, scale = offset.squeeze(-2), scale.squeeze(-2)
            noise = None if noise is None else noise.squeeze(-2)
        mean = (offset + scale * joint.mean).to(dtype)
        normal = MultivariateNormal(mean, _covariance(joint, scale, noise, mean.shape, dtype))
        return IndependentOutputs.of(normal) if several else normal

    def _map(self, rule: Callable[[Tensor, int], Tensor]) -> Joint:
        """Apply a rule for a tensor and its number of dimensions after m."""
        mean, root, downdate = rule(self.mean, 1), rule(self.root, 2), rule(self.downdate, 2)
        if (rest := self.residual) is None:
            return Joint(mean, root, downdate, None)
        residual = Residual(lambda: rule(rest.covariance(), 2), lambda: rule(rest.variance(), 1))
        return Joint(mean, root, downdate, residual)

    def covariance(self) -> Tensor:
        """Compute the dense covariance, ``... x m x n x n``."""
        covariance = self.root @ self.root.mT
        if self.downdate.shape[-1] > 0:
            covariance = covariance - self.downdate @ self.downdate.mT
        return covariance if self.residual is None else covariance + self.residual.covariance()

    def without_root(self) -> Residual | None:
        """Return covariance and variance to evaluate, or None if the root is not empty."""
        residual = self.residual
        if residual is None or self.root.shape[-1] > 0:
            return None
        explained = self.downdate.square().sum(-1)
        return Residual(self.covariance, lambda: residual.variance() - explained)


@dataclass(frozen=True)
class Residual:
    """Covariance outside the factors of a :class:`Joint`, evaluated when it is asked for.

    Attributes:
        covariance: Evaluates ``... x m x n x n``.
        variance: Evaluates its diagonal, ``... x m x n``, at less cost.
    """

    covariance: Callable[[], Tensor]
    variance: Callable[[], Tensor]


def _covariance(
    joint: Joint, scale: Tensor, noise: Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> LinearOperator:
    if shape[-1] > DENSE_LIMIT:
        return _lazy_covariance(joint, scale, noise, shape, dtype)
    dense = joint.covariance()
    if noise is not None:
        dense = dense + torch.diag_embed(noise.expand(torch.broadcast_shapes(noise.shape, shape)))
    scaled = (dense * scale.square().unsqueeze(-1)).to(dtype)
    return to_linear_operator(scaled.expand(*shape, shape[-1]))


def _lazy_covariance(
    joint: Joint, scale: Tensor, noise: Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> LinearOperator:
    factor, square = scale.unsqueeze(-1), scale.square()
    rootless = joint.without_root()
    residual = joint.residual if rootless is None else rootless
    lazy: LinearOperator | None = None
    if residual is not None:
        like = torch.zeros(shape, dtype=dtype, device=joint.mean.device)
        lazy = LazyCovariance(
            like,
            lambda: residual.covariance() * square.unsqueeze(-1),
            lambda: residual.variance() * square,
        )
    if lazy is None or rootless is None:
        root: LinearOperator = DowndatedRootOperator(
            (joint.root * factor).to(dtype), (joint.downdate * factor).to(dtype)
        ).expand(*shape, shape[-1])
        lazy = root if lazy is None else root + lazy
    if noise is None:
        return lazy
    return lazy + DiagLinearOperator((noise * square).expand(shape).to(dtype))


class IndependentOutputs(MultitaskMultivariateNormal):
    """Joint distribution of independent outputs, with one block of the covariance an output.

    BoTorch's own models have this layout, and its cached roots (qLogNEI, qLogNEHVI) rely on it.
    gpytorch's ``log_prob`` takes the values in another order than the covariance, ours does not.
    """

    @classmethod
    def of(cls, outputs: MultivariateNormal) -> Self:
        """Join a batch ``... x m`` of normal distributions over n points, one an output."""
        blocks = BlockDiagLinearOperator(outputs.lazy_covariance_matrix)
        return cls(outputs.mean.mT, blocks, interleaved=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Compute the log density of ``... x n x m`` values."""
        ordered = value if self._interleaved else value.mT
        return MultivariateNormal.log_prob(self, ordered.reshape(*value.shape[:-2], -1))


class LazyCovariance(LinearOperator):
    """Symmetric matrix whose diagonal is had without the rest.

    Means, variances and marginals of thousands of points take no n x n numbers; samples and
    products do.

    Args:
        like: Of the operator's batch shape, size, dtype and device, ``... x n``.
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
        batch: Leading shape of the operator; what the factors broadcast to if omitted.
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
        """Compute a root: of n columns while n is small, else of low rank."""
        n, rank = self.root.shape[-2:]
        if n <= rank + self.downdate.shape[-1]:
            return RootLinearOperator(TriangularLinearOperator(safe_cholesky(self.to_dense())))
        return RootLinearOperator(self._low_rank_root())

    def _low_rank_root(self) -> Tensor:
        """Compute ``Q V √Λ`` with ``V Λ Vᵀ = R Rᵀ − Qᵀ B Bᵀ Q`` and ``Z = Q R``. Cost O(n r² + r³).

        Exact because B lies in the range of Z, which Q spans whatever the rank of Z.
        """
        if self.downdate.shape[-1] == 0:
            return self.root
        range_, own = torch.linalg.qr(self.root)
        less = range_.mT @ self.downdate
        eigenvalues, vectors = torch.linalg.eigh(own @ own.mT - less @ less.mT)
        return range_ @ (vectors * eigenvalues.clamp_min(0.0).sqrt().unsqueeze(-2))
