"""Factorisations, triangular solves and jitter, and covariance matrices that are never formed."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from linear_operator import LinearOperator, to_linear_operator
from linear_operator.operators import RootLinearOperator, TriangularLinearOperator
from linear_operator.utils.errors import NotPSDError
from numpy.typing import NDArray
from scipy.linalg import lapack
from torch import Tensor

from bo_stream.tensors import broadcast_shapes, none_set

Array = NDArray[np.float64]

JITTERS = (0.0, 1e-12, 1e-10, 1e-8, 1e-6)
"""Relative jitters tried in turn by :func:`safe_cholesky`."""

INDEPENDENT = (1e-8, 1e-6, 1e-4, 1e-2)
"""Least pivots of independent rows, relative to the diagonal, one tried after the other."""

_SMALLER_GRID = "Take a smaller grid_size (or narrower bounds)."

_SMALL = 192

_ALIASED = 512
"""Of matrices whose number of rows it divides, and of which a host's columns fall on the same lines
of its caches, a factorisation takes two to three times as long."""


def safe_cholesky(matrix: Tensor, is_new: bool = False) -> Tensor:
    """Factorise a symmetric matrix as :func:`cholesky_with_jitter` and return the factor alone."""
    return cholesky_with_jitter(matrix, is_new)[0]


def cholesky_with_nugget(matrix: Tensor, share: float, is_new: bool = False) -> Tensor:
    """Factorise a covariance whose diagonal is larger by a share of itself. Cost O(n³)."""
    nugget = torch.diag_embed(share * matrix.diagonal(dim1=-2, dim2=-1))
    return safe_cholesky(matrix + nugget, is_new)


def cholesky_with_jitter(matrix: Tensor, is_new: bool = False) -> tuple[Tensor, float]:
    """Compute the lower Cholesky factor L of a symmetric matrix, and the jitter needed.

    ``L Lᵀ = matrix + jitter · mean(diagonal) · I``, ``... x n x n``. A factorisation that fails is
    tried again with the next of ``JITTERS``, the same for all matrices of a batch. Cost O(n³).

    Args:
        matrix: ``... x n x n``.
        is_new: Whether only what a verb returns depends on the factor, and nothing that is cached:
            success is then expected, as by :func:`~bo_stream.tensors.none_set`.

    Raises:
        NotPSDError: The matrix is not positive definite even with the largest jitter.
    """
    for jitter in JITTERS:
        shifted = matrix
        if jitter > 0.0:
            diagonal = matrix.diagonal(dim1=-2, dim2=-1)
            scale = diagonal.mean(-1, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
            shifted = matrix + torch.diag_embed(jitter * scale.expand_as(diagonal))
        factor, info = _factorised(shifted)
        may_wait = info.is_cpu or not is_new
        if not bool(info.any()) if may_wait else none_set(info):
            return factor, jitter
    raise NotPSDError(
        f"Expected a positive definite matrix, got one of shape {tuple(matrix.shape)} that cannot "
        f"be factorised with a relative jitter of {JITTERS[-1]}. Check the noise variance and the "
        "hyperparameters for NaN and for extreme values."
    )


def _factorised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a lower Cholesky factor, ``... x n x n``, and where there is none, as torch does.

    With a few rows of the identity more where n is such that this is faster.
    """
    n = matrix.shape[-1]
    if n == 0 or n % _ALIASED or not matrix.is_cpu or matrix.requires_grad:
        factor, info = torch.linalg.cholesky_ex(matrix)
        return factor, info
    wide = torch.nn.functional.pad(matrix, (0, 8, 0, 8))
    wide.diagonal(dim1=-2, dim2=-1)[..., n:] = 1.0
    factor, info = torch.linalg.cholesky_ex(wide)
    return factor[..., :n, :n].mT.contiguous().mT, info  # columns side by side, as torch's are


def transposed(matrix: Tensor) -> Tensor:
    """Copy a transposed matrix, ``... x n x k -> ... x k x n``.

    ``mT.contiguous()`` has a fast way for two dimensions only: of one matrix in a stack it takes
    six times as long at 1,024 rows, as long at 640.
    """
    *batch, n, k = matrix.shape
    copies = [one.t().contiguous() for one in matrix.reshape(-1, n, k)]
    whole = copies[0] if len(copies) == 1 else torch.stack(copies)
    return whole.view(*batch, k, n)


def independent_rows(matrix: Tensor, tolerance: float = INDEPENDENT[0]) -> Tensor:
    """Select rows of symmetric matrices that are positive definite together, in pivot order.

    Pivoted Cholesky of the correlations, indefinite or not, until no pivot is more than the
    tolerance; in a batch one matrix after the other, each among the rows that remain. Cost O(n³).
    The matrices are ``... x n x n`` and finite, the indices ``k``.
    """
    rows = torch.arange(matrix.shape[-1], device=matrix.device)
    for one in matrix.detach().reshape(-1, *matrix.shape[-2:]):
        part = one[rows][:, rows]
        scale = part.diagonal().clamp_min(0.0).sqrt()
        scale = torch.where(scale > 0.0, scale, torch.inf)
        rows = rows[pivot_rows(part / scale / scale.unsqueeze(-1), tolerance)]
    return rows


def pivot_rows(matrix: Tensor, tolerance: float) -> Tensor:
    """Return the pivots, not less than ``tolerance``, of a Cholesky factorisation, in order.

    The matrix is ``n x n``, symmetric and finite, the indices ``k``. Cost O(n³).
    """
    _, pivots, rank, _ = lapack.dpstrf(matrix.double().cpu().numpy(), tol=tolerance, lower=1)
    return torch.from_numpy(pivots[:rank] - 1).long().to(matrix.device)


def inverse_root(matrix: Tensor, is_new: bool = False) -> Tensor:
    """Compute a root S of the inverse, ``S Sᵀ = matrix⁻¹``: the transposed inverse Cholesky factor.

    Jitter, ``is_new`` and errors as :func:`cholesky_with_jitter`. Cost O(n³).
    """
    return inverse_lower(safe_cholesky(matrix, is_new)).mT


def identity(like: Tensor) -> Tensor:
    """Return the identity of the size, dtype and device of a matrix."""
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def inverse_lower(factor: Tensor) -> Tensor:
    """Invert a lower triangular matrix by halves, which spares the products with zeros."""
    n = factor.shape[-1]
    if n <= _SMALL:
        return solve_lower(factor, identity(factor).expand_as(factor))
    half = n // 2
    first = inverse_lower(factor[..., :half, :half])
    second = inverse_lower(factor[..., half:, half:])
    result = torch.zeros_like(factor)
    result[..., :half, :half] = first
    result[..., half:, half:] = second
    result[..., half:, :half] = -second @ (factor[..., half:, :half] @ first)
    return result


def solve_one_plus_product(A: Tensor, P: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``(I + A P)⁻¹ right`` and ``log |I + A P|`` for positive semi-definite A and P.

    A P has no negative eigenvalue, so that I + A P is invertible for any ranks. Cost O(n³).

    Raises:
        NotPSDError: An entry is NaN or infinite.
    """
    matrix = A @ P
    matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
    if matrix.is_cpu and matrix.shape[:-2].numel() > 1:
        # One after the other: torch gives each thread some matrices of a batch, and MKL's
        # factorisation of one, from some 150 rows on, is wrong while another thread is in it
        # (PyTorch's issue 142815).
        single = [torch.linalg.lu_factor_ex(each)[:2] for each in matrix.flatten(0, -3)]
        factors, orders = (torch.stack(parts) for parts in zip(*single, strict=True))
        factor, pivots = factors.reshape(matrix.shape), orders.reshape(matrix.shape[:-1])
    else:
        factor, pivots, _ = torch.linalg.lu_factor_ex(matrix)
    log_determinant = factor.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
    if not none_set(~log_determinant.isfinite()):
        raise NotPSDError(
            f"Expected finite positive semi-definite matrices, got some of shape {tuple(A.shape)} "
            "with NaN or infinite entries. Check the hyperparameters for extreme values."
        )
    return torch.linalg.lu_solve(factor, pivots, right), log_determinant


def product_of_triangular_root(root: Tensor) -> Tensor:
    """Compute ``S Sᵀ`` of an upper triangular S, ``... x n x n``, by halves, at half the cost."""
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
    """Compute ``rows @ matrix``, ``... x q x r`` by ``... x r x k``, for batches with one matrix.

    One product for all of them: ``matmul`` would make one for each batch, at twice the time. That
    of one matrix for each batch, or for all, goes without the bookkeeping of batches, which takes
    longer than a small product: two to four microseconds.
    """
    if rows.dim() == matrix.dim() == 3 and len(rows) == len(matrix):  # nearly all
        return torch.bmm(rows, matrix)
    ahead, batch = rows.shape[:-2], matrix.shape[:-2]
    if ahead == batch:
        if not batch:
            return rows @ matrix
        return torch.bmm(rows.flatten(0, -3), matrix.flatten(0, -3)).unflatten(0, batch)
    if batch.numel() == 1:
        q, (r, k) = rows.shape[-2], matrix.shape[-2:]
        product = rows.reshape(ahead.numel() * q, r) @ matrix.reshape(r, k)
        return product.view(*batch[: max(0, len(batch) - len(ahead))], *ahead, q, k)
    return torch.einsum("...qr,...rk->...qk", rows, matrix)


def solve_lower(factor: Tensor, right: Tensor) -> Tensor:
    """Compute ``factor⁻¹ right`` for a lower triangular factor, leading dimensions broadcast."""
    return torch.linalg.solve_triangular(factor, right, upper=False)


def solve_rows(factor: Tensor, rows: Tensor) -> Tensor:
    """Compute ``rows @ factor⁻ᵀ`` for a lower triangular factor, ``b x n x n``.

    Rows are ``... x b x q x n``. The rows of all batches before b are solved for together, since
    ``solve_triangular`` would copy the factor for each batch. Cost O(n²) a row, half as much as a
    product with the inverse.
    """
    batch, q = factor.shape[:-2], rows.shape[-2]
    leading = rows.shape[: max(rows.dim() - factor.dim(), 0)]
    if len(leading) == 0 or rows.shape[len(leading) : -2] != batch:
        return solve_lower(factor, rows.mT).mT
    together = rows.flatten(0, len(leading) - 1).movedim(0, -3).flatten(-3, -2)
    solved = solve_lower(factor, together.mT).mT.unflatten(-2, (leading.numel(), q))
    return solved.movedim(-3, 0).unflatten(0, leading)


def solve_columns(factor: Tensor, columns: Tensor) -> Tensor:
    """Compute ``factor⁻¹ columns`` for a lower triangular factor; see :func:`by_columns`."""
    return by_columns(partial(solve_lower, factor), columns, factor.ndim - 2)


def solve_columns_transposed(factor: Tensor, columns: Tensor) -> Tensor:
    """Compute ``factor⁻ᵀ columns`` for a lower triangular factor; see :func:`by_columns`."""
    solve = partial(torch.linalg.solve_triangular, factor.mT, upper=True)
    return by_columns(solve, columns, factor.ndim - 2)


def by_columns(rule: Callable[[Tensor], Tensor], columns: Tensor, batch: int) -> Tensor:
    """Apply a linear rule to columns, draws side by side: its matrix is not copied for each.

    The rule takes ``batch x n x k``, the columns are ``draws x batch x n x 1``.
    """
    ahead = columns.shape[: columns.ndim - 2 - batch]
    together = columns.squeeze(-1).reshape(ahead.numel(), *columns.shape[len(ahead) : -1])
    return rule(together.movedim(0, -1)).movedim(-1, 0).reshape(columns.shape)


def inverse_root_product(covariance: Tensor, columns: Tensor, share: float) -> Tensor:
    """Compute ``L⁻ᵀ columns``, with L the factor of a covariance with a nugget.

    Of independent columns of variance 1 the product has the inverse's covariance. Where rounding
    leaves no factor, only rows that the others do not determine are among the product's that are
    not zero: up to a tolerance that grows until there is a factor, for distances between points
    that are many lengthscales from their mean are rounded to much less. Cost O(N³ + N² k) for k
    columns.

    Args:
        covariance: ``batch x N x N``.
        columns: ``draws x batch x N x 1``.
        share: Of its diagonal that is added, see :func:`cholesky_with_nugget`.
    """
    with suppress(NotPSDError):
        return solve_columns_transposed(cholesky_with_nugget(covariance, share), columns)
    for tolerance in INDEPENDENT:
        rows = independent_rows(covariance, tolerance)
        with suppress(NotPSDError):
            factor = cholesky_with_nugget(covariance[..., rows[:, None], rows], share)
            some = solve_columns_transposed(factor, columns[..., rows, :])
            return torch.zeros_like(columns).index_copy(-2, rows, some)
    raise NotPSDError(
        f"Expected a covariance, got a matrix of shape {tuple(covariance.shape)} with negative "
        "eigenvalues beyond rounding. Check the hyperparameters for extreme values."
    )


def scaled_prior(K: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``S K S``, ``... x s x s``, and the diagonal of S, the root of the noise precision.

    The precision is ``... x s``, 0 where nothing was observed.
    """
    there = precision > 0.0
    root = torch.where(there, torch.where(there, precision, 1.0).sqrt(), 0.0)
    return root.unsqueeze(-1) * K * root.unsqueeze(-2), root


def stack_rows(first: Tensor, second: Tensor) -> Tensor:
    """Stack the rows of two matrices, leading dimensions and columns broadcast."""
    return stack_columns(first.mT, second.mT).mT


def stack_columns(first: Tensor, second: Tensor) -> Tensor:
    """Stack the columns of two matrices, leading dimensions and rows broadcast."""
    if first.shape[:-1] != second.shape[:-1]:  # torch's broadcasting takes as long as the copy
        batch = broadcast_shapes(first.shape[:-1], second.shape[:-1])
        first, second = (matrix.expand(*batch, matrix.shape[-1]) for matrix in (first, second))
    return torch.cat((first, second), dim=-1)


class Tridiagonal:
    """``A = Q T Qᵀ`` of a symmetric positive semi-definite matrix, ``D x D``, T tridiagonal."""

    def __init__(self, A: Array) -> None:
        """Compute Q, as Householder reflections, and T in O(D³).

        Args:
            A: Of which the lower triangle is read.
        """
        length = int(lapack.dsytrd_lwork(len(A), lower=1)[0])
        reflections, self.diagonal, self.beside, self._scales, _ = lapack.dsytrd(
            A, lower=1, lwork=length
        )
        self._reflections = np.asfortranarray(reflections[1:, :-1])

    def to_basis(self, vector: Array) -> Array:
        """Compute ``Qᵀ v`` in O(D²)."""
        return self._reflected(b"T", vector)

    def from_basis(self, vector: Array) -> Array:
        """Compute ``Q v`` in O(D²)."""
        return self._reflected(b"N", vector)

    def shifted(self, shift: float) -> TridiagonalFactor:
        """Factorize ``T + t I``, t the shift, in O(D)."""
        pivots, below, _ = lapack.dpttrf(self.diagonal + shift, self.beside)
        return TridiagonalFactor(pivots, below)

    def _reflected(self, transposed: bytes, vector: Array) -> Array:
        rest, _, _ = lapack.dormqr(
            b"L", transposed, self._reflections, self._scales, vector[1:, None], len(vector)
        )
        return np.concatenate((vector[:1], rest[:, 0]))


@dataclass(frozen=True)
class TridiagonalFactor:
    """``L diag(pivots) Lᵀ``, L of unit diagonal, with one more diagonal below it.

    Attributes:
        pivots: ``D``.
        below: ``D - 1``.
    """

    pivots: Array
    below: Array

    def log_determinant(self) -> float:
        """Compute ``Σ log pivots``."""
        return float(np.log(self.pivots).sum())

    def solve(self, vector: Array) -> Array:
        """Compute ``(L diag(pivots) Lᵀ)⁻¹ v``, ``D``."""
        solution: Array = lapack.dpttrs(self.pivots, self.below, vector)[0]
        return solution

    def root_times(self, vector: Array) -> Array:
        """Compute ``L diag(√pivots) v``, ``D``."""
        scaled: Array = np.sqrt(self.pivots) * vector
        scaled[1:] += self.below * scaled[:-1].copy()
        return scaled


def check_memory(
    name: str,
    numbers: int,
    limit_gib: float,
    remedy: str = _SMALLER_GRID,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Refuse to allocate too many numbers of a dtype, before the allocation.

    Raises:
        ValueError: More than ``limit_gib`` GiB would be needed; ``name`` is the subject of the
            message and ``remedy`` ends it.
    """
    gib = numbers * dtype.itemsize / 2**30
    if not math.isfinite(gib) or gib > limit_gib:
        raise ValueError(
            f"{name} would need {gib:,.1f} GiB of memory, more than the limit of {limit_gib:g} "
            f"GiB. {remedy}"
        )


# --- covariance matrices of many points that are never formed ------------------------------------


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

    def _permute_batch(self, *dims: int) -> LazyCovariance:
        return LazyCovariance(
            self.like.permute(*dims, -1),
            lambda: self.to_dense().permute(*dims, -2, -1),
            lambda: self._diagonal().permute(*dims, -1),
        )

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        """Select batch elements without evaluating them, else entries of the dense matrix."""
        every = slice(None, None, None)
        if row_index != every or col_index != every:
            return to_linear_operator(self.to_dense()[(*batch_indices, row_index, col_index)])
        return LazyCovariance(
            self.like[(*batch_indices, every)],
            lambda: self.to_dense()[(*batch_indices, every, every)],
            lambda: self._diagonal()[(*batch_indices, every)],
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
        own = broadcast_shapes(root.shape[:-2], downdate.shape[:-2])
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

    def _permute_batch(self, *dims: int) -> DowndatedRootOperator:
        wide = (f.expand(*self.batch, *f.shape[-2:]) for f in (self.root, self.downdate))
        root, downdate = (factor.permute(*dims, -2, -1) for factor in wide)
        return DowndatedRootOperator(root, downdate)

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """Compute the Cholesky factor, jittered where needed, in float64.

        Callers with base samples of their own have n of them, whatever the rank.
        """
        factor = safe_cholesky(self.to_dense().to(torch.float64)).to(self.root)
        return RootLinearOperator(TriangularLinearOperator(factor))

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        """Draw samples, ``num_samples x ... x n``, from a root of low rank where there is one."""
        root = self.low_rank_root()
        noise = torch.randn(
            num_samples, *self.batch, root.shape[-1], 1, dtype=root.dtype, device=root.device
        )
        return (root @ noise).squeeze(-1)

    def low_rank_root(self) -> Tensor:
        """Compute a root, of no more columns than Z where n is more than Z and B have."""
        n, rank = self.root.shape[-2:]
        if n <= rank + self.downdate.shape[-1]:
            return safe_cholesky(self.to_dense())
        if self.downdate.shape[-1] == 0:
            return self.root
        # Q V √Λ with V Λ Vᵀ = R Rᵀ − Qᵀ B Bᵀ Q and Z = Q R, in O(n r² + r³): exact because B lies
        # in the range of Z, which Q spans for any rank of Z
        range_, own = torch.linalg.qr(self.root)
        less = range_.mT @ self.downdate
        eigenvalues, vectors = torch.linalg.eigh(own @ own.mT - less @ less.mT)
        roots = eigenvalues.clamp_min(0.0).sqrt()
        return range_ @ (vectors * roots.unsqueeze(-2))
