"""The one home of factorisations and of jitter."""

from __future__ import annotations

import math
from typing import Any

import torch
from linear_operator import to_linear_operator
from linear_operator.operators import (
    LinearOperator,
    RootLinearOperator,
    TriangularLinearOperator,
)
from linear_operator.utils.errors import NotPSDError
from scipy.linalg.lapack import dpstrf
from torch import Tensor

JITTERS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6)
"""Relative jitters tried in turn by :func:`safe_cholesky`."""


INDEPENDENT = 1e-8
"""Part of its diagonal entry that a row keeps given the others, to be :func:`independent_rows`."""

_SMALL = 192


def safe_cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor L of a symmetric matrix, ``L Lᵀ = matrix``, jittered where needed.

    Args and errors as :func:`cholesky_with_jitter`, which also tells the jitter.
    """
    return cholesky_with_jitter(matrix)[0]


def cholesky_with_nugget(matrix: Tensor, share: float) -> Tensor:
    """Factor of a covariance whose diagonal is larger by a share of itself. Cost O(n³)."""
    nugget = torch.diag_embed(share * matrix.diagonal(dim1=-2, dim2=-1))
    return safe_cholesky(matrix + nugget)


def cholesky_with_jitter(matrix: Tensor) -> tuple[Tensor, float]:
    """Lower Cholesky factor L of a symmetric matrix, and the jitter that it took.

    A factorisation that fails is tried again with a jitter relative to the mean of the diagonal,
    from the list ``JITTERS``; the same for all matrices of a batch. Cost O(n³).

    Args:
        matrix: A ``... x n x n`` symmetric positive (semi-)definite tensor.

    Returns:
        L with ``L Lᵀ = matrix + jitter · mean(diagonal) · I``, and the jitter; 0 is none.

    Raises:
        NotPSDError: The matrix is not positive definite even with the largest jitter.
    """
    for jitter in JITTERS:
        factor, info = torch.linalg.cholesky_ex(_add_jitter(matrix, jitter))
        if not bool(info.any()):
            return factor, jitter
    raise NotPSDError(
        f"Expected a positive definite matrix, got one of shape {tuple(matrix.shape)} that cannot "
        f"be factorised with a relative jitter of {JITTERS[-1]}. Check the noise variance and the "
        "hyperparameters for NaN and for extreme values."
    )


def independent_rows(matrix: Tensor) -> Tensor:
    """Rows of symmetric matrices that are positive definite together, in the order of pivots.

    Pivoted Cholesky of the correlations as they stand, indefinite or not, until no pivot is more
    than ``INDEPENDENT``; of a batch one matrix after the other, each among the rows that are left.
    Cost O(n³).

    Args:
        matrix: ``... x n x n``, finite.

    Returns:
        Indices, ``k``.
    """
    rows = torch.arange(matrix.shape[-1], device=matrix.device)
    for one in matrix.detach().reshape(-1, *matrix.shape[-2:]):
        part = one[rows][:, rows]
        scale = part.diagonal().clamp_min(0.0).sqrt()
        scale = torch.where(scale > 0.0, scale, torch.inf)
        rows = rows[pivot_rows(part / scale / scale.unsqueeze(-1), INDEPENDENT)]
    return rows


def pivot_rows(matrix: Tensor, tolerance: float) -> Tensor:
    """Pivots of the Cholesky factorisation of a symmetric matrix, in order. Cost O(n³).

    Args:
        matrix: ``n x n``, finite.
        tolerance: Ends when no pivot is larger.

    Returns:
        Indices, ``k``.
    """
    _, pivots, rank, _ = dpstrf(matrix.double().cpu().numpy(), tol=tolerance, lower=1)
    return torch.from_numpy(pivots[:rank] - 1).long().to(matrix.device)


def _add_jitter(matrix: Tensor, jitter: float) -> Tensor:
    if jitter == 0.0:
        return matrix
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    scale = diagonal.mean(-1, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
    return matrix + torch.diag_embed(jitter * scale.expand_as(diagonal))


def inverse_root(matrix: Tensor) -> Tensor:
    """A root S of the inverse, ``S Sᵀ = matrix⁻¹``: the transposed inverse Cholesky factor.

    Cost O(n³). Args and errors as :func:`safe_cholesky`.
    """
    return inverse_lower(safe_cholesky(matrix)).mT


def inverse_lower(factor: Tensor) -> Tensor:
    """Inverse of a lower triangular matrix by halves, which spares the products with zeros."""
    n = factor.shape[-1]
    if n <= _SMALL:
        identity = torch.eye(n, dtype=factor.dtype, device=factor.device)
        return torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    half = n // 2
    first = inverse_lower(factor[..., :half, :half])
    second = inverse_lower(factor[..., half:, half:])
    result = torch.zeros_like(factor)
    result[..., :half, :half] = first
    result[..., half:, half:] = second
    result[..., half:, :half] = -second @ (factor[..., half:, :half] @ first)
    return result


def solve_one_plus_product(A: Tensor, P: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """``(I + A P)⁻¹ right`` and ``log |I + A P|`` for positive semi-definite A and P. Cost O(n³).

    A P has no negative eigenvalue, so that I + A P can be inverted whatever their ranks.

    Raises:
        NotPSDError: An entry is NaN or infinite.
    """
    matrix = A @ P
    matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
    factor, pivots, _ = torch.linalg.lu_factor_ex(matrix)
    log_determinant = factor.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
    if not bool(log_determinant.isfinite().all()):
        raise NotPSDError(
            f"Expected finite positive semi-definite matrices, got some of shape {tuple(A.shape)} "
            "with NaN or infinite entries. Check the hyperparameters for extreme values."
        )
    return torch.linalg.lu_solve(factor, pivots, right), log_determinant


def product_of_triangular_root(root: Tensor) -> Tensor:
    """``S Sᵀ`` of an upper triangular S, ``... x n x n``, by halves, at half the cost."""
    n = root.shape[-1]
    if n <= _SMALL:
        return root @ root.mT
    half = n // 2
    above, corner = root[..., :half, half:], root[..., half:, half:]
    result = torch.empty_like(root)
    result[..., :half, :half] = product_of_triangular_root(root[..., :half, :half])
    result[..., :half, :half] += above @ above.mT
    cross = above @ corner.mT
    result[..., :half, half:] = cross
    result[..., half:, :half] = cross.mT
    result[..., half:, half:] = product_of_triangular_root(corner)
    return result


def row_product(rows: Tensor, matrix: Tensor) -> Tensor:
    """``rows @ matrix``, ``... x q x r`` by ``... x r x k``, where many batches share one matrix.

    One product for all of them: ``matmul`` would make one for each batch, at twice the time.
    """
    return torch.einsum("...qr,...rk->...qk", rows, matrix)


def solve_lower(factor: Tensor, right: Tensor) -> Tensor:
    """``factor⁻¹ right`` for a lower triangular factor, leading dimensions broadcast."""
    batch = torch.broadcast_shapes(factor.shape[:-2], right.shape[:-2])
    return torch.linalg.solve_triangular(
        factor.expand(*batch, *factor.shape[-2:]),
        right.expand(*batch, *right.shape[-2:]),
        upper=False,
    )


def stack_rows(first: Tensor, second: Tensor) -> Tensor:
    """Rows of both, leading dimensions broadcast."""
    return stack_columns(first.mT, second.mT).mT


def stack_columns(first: Tensor, second: Tensor) -> Tensor:
    """Columns of both, leading dimensions and rows broadcast."""
    batch = torch.broadcast_shapes(first.shape[:-1], second.shape[:-1])
    return torch.cat(
        (first.expand(*batch, first.shape[-1]), second.expand(*batch, second.shape[-1])), dim=-1
    )


class DowndatedRootOperator(LinearOperator):
    """The covariance ``Z Zᵀ − B Bᵀ`` of n points, never formed: O(n (r + q)) memory.

    The leading dimensions of ``root`` and ``downdate`` broadcast but are not expanded, so that many
    fantasies of the same points share one root.
    """

    def __init__(self, root: Tensor, downdate: Tensor, batch: torch.Size | None = None) -> None:
        """Set the two factors.

        Args:
            root: Z, ``... x n x r``.
            downdate: B, ``... x n x q``; q may be 0.
            batch: Leading shape of the operator; what the factors broadcast to if omitted.
        """
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
        """The ``... x n x n`` matrix itself."""
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
        """Rows and columns: again in factors where they are the same, else dense."""
        if not (isinstance(row_index, slice) and isinstance(col_index, slice)):
            return to_linear_operator(self.to_dense()[(*batch_indices, row_index, col_index)])
        wide = [f.expand(*self.batch, *f.shape[-2:]) for f in (self.root, self.downdate)]
        root, downdate = (f[(*batch_indices, row_index, slice(None))] for f in wide)
        if row_index == col_index:
            return DowndatedRootOperator(root, downdate)
        root2, downdate2 = (f[(*batch_indices, col_index, slice(None))] for f in wide)
        return to_linear_operator(root @ root2.mT - downdate @ downdate2.mT)

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """A root with n columns while n is small, else the low-rank root of the difference."""
        n, rank = self.root.shape[-2:]
        if n <= rank + self.downdate.shape[-1]:
            return RootLinearOperator(TriangularLinearOperator(safe_cholesky(self.to_dense())))
        return RootLinearOperator(self._low_rank_root())

    def _low_rank_root(self) -> Tensor:
        """``Q V √Λ`` with ``V Λ Vᵀ = R Rᵀ − Qᵀ B Bᵀ Q`` and ``Z = Q R``. Cost O(n r² + r³).

        Exact because B lies in the range of Z, which Q spans whatever the rank of Z.
        """
        if self.downdate.shape[-1] == 0:
            return self.root
        range_, own = torch.linalg.qr(self.root)
        less = range_.mT @ self.downdate
        eigenvalues, vectors = torch.linalg.eigh(own @ own.mT - less @ less.mT)
        return range_ @ (vectors * eigenvalues.clamp_min(0.0).sqrt().unsqueeze(-2))


SMALLER_GRID = "Take a smaller grid_size (or narrower bounds)."


def check_memory(
    name: str,
    numbers: int,
    limit_gib: float,
    remedy: str = SMALLER_GRID,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Refuse an allocation beyond a limit, before it is made.

    Args:
        name: What would be allocated.
        numbers: How many.
        limit_gib: In GiB.
        remedy: A sentence on what to do instead.
        dtype: Of the numbers.

    Raises:
        ValueError: More than ``limit_gib`` GiB would be needed.
    """
    gib = numbers * dtype.itemsize / 2**30
    if not math.isfinite(gib) or gib > limit_gib:
        raise ValueError(
            f"{name} would need {gib:,.1f} GiB of memory, more than the limit of {limit_gib:g} "
            f"GiB. {remedy}"
        )
