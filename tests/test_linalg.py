"""Factorisations against the matrices they factorise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.bases.radial import RadialKernel
from bo_stream.linalg import (
    DowndatedRootOperator,
    Tridiagonal,
    check_memory,
    cholesky_with_jitter,
    inverse_lower,
    inverse_root,
    inverse_root_product,
    product_of_triangular_root,
    row_product,
    safe_cholesky,
    solve_lower,
    solve_one_plus_product,
    solve_rows,
    transposed,
)
from bo_stream.testing.streams import assert_close


def positive_definite(*shape: int, rank: int | None = None) -> Tensor:
    root = torch.randn(*shape, rank or 2 * shape[-1], dtype=torch.float64)
    return root @ root.mT


def test_cholesky_of_a_definite_matrix_gets_no_jitter() -> None:
    matrix = positive_definite(3, 5)
    factor = safe_cholesky(matrix)
    assert_close(factor @ factor.mT, matrix)
    assert torch.equal(factor, torch.linalg.cholesky(matrix))


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_cholesky_of_a_singular_matrix_gets_a_relative_jitter(scale: float) -> None:
    matrix = scale * positive_definite(6, rank=2)
    factor = safe_cholesky(matrix)
    assert_close((factor @ factor.mT) / scale, matrix / scale, factor=1e3)


@pytest.mark.parametrize(
    "matrix",
    [-torch.eye(3, dtype=torch.float64), torch.full((3, 3), torch.nan)],
    ids=["negative", "NaN"],
)
def test_cholesky_refuses_what_no_jitter_repairs(matrix: Tensor) -> None:
    with pytest.raises(NotPSDError, match=r"shape \(3, 3\)"):
        safe_cholesky(matrix)


@pytest.mark.parametrize("batch", [(), (1,), (2, 3)])
def test_cholesky_at_sizes_where_columns_share_lines_of_a_cache(
    batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix to which rows of the identity are added: the same factor, laid out as torch's."""
    root = torch.randn(*batch, 8, 8, dtype=torch.float64)
    matrix = root @ root.mT + torch.eye(8, dtype=torch.float64)
    expected = torch.linalg.cholesky(matrix)
    monkeypatch.setattr("bo_stream.linalg._ALIASED", 4)
    factor, jitter = cholesky_with_jitter(matrix)
    assert jitter == 0.0
    assert_close(factor, expected)
    assert factor.stride()[-2:] == expected.stride()[-2:]
    singular = torch.ones(*batch, 8, 8, dtype=torch.float64)
    assert cholesky_with_jitter(singular)[1] > 0.0
    with pytest.raises(NotPSDError):
        cholesky_with_jitter(-matrix)


@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 5), (2, 4, 3, 5)])
def test_transposed_is_a_contiguous_copy(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(*shape)
    copy = transposed(matrix)
    assert torch.equal(copy, matrix.mT)
    assert copy.is_contiguous()
    assert copy.data_ptr() != matrix.data_ptr()


def test_inverse_root_product_has_the_covariance_of_the_inverse() -> None:
    """Of unit columns of a batch of two matrices, with a nugget of a quarter."""
    A = torch.rand(2, 4, 6, dtype=torch.float64)
    matrix = A @ A.mT
    columns = torch.eye(4, dtype=torch.float64)[:, None, :, None].expand(4, 2, 4, 1)
    found = inverse_root_product(matrix, columns, 0.25).squeeze(-1).movedim(0, -1)
    wide = matrix + 0.25 * torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    assert_close(found @ found.mT @ wide, torch.eye(4).double().expand(2, 4, 4))


@pytest.mark.parametrize("seed", range(5))
def test_inverse_root_product_of_rounded_distances(seed: int) -> None:
    """Between points that are a million lengthscales from their mean, off by some 1e-4."""
    generator = torch.Generator().manual_seed(seed)
    points = 3.0 * torch.rand(1, 80, 2, generator=generator, dtype=torch.float64)
    points[:, 40:] += 2e6
    kernel = RadialKernel(2.5, None, torch.ones(1, 1, 1).double())
    found = inverse_root_product(kernel.values(points, points), torch.ones(1, 80, 1).double(), 0.0)
    assert bool(found.isfinite().all())


def test_inverse_root_product_leaves_out_rows_that_are_rounding() -> None:
    """One of no variance, and one that is equal to another up to a variance below zero."""
    matrix = torch.tensor([[4.0, 0.0, 4.0], [0.0, -1e-3, 0.0], [4.0, 0.0, 4.0 - 1e-2]]).double()
    found = inverse_root_product(matrix, torch.full((1, 3, 1), 6.0).double(), 0.0)
    assert_close(found, torch.tensor([[[3.0], [0.0], [0.0]]]).double())


def test_inverse_root_is_a_root_of_the_inverse() -> None:
    matrix = positive_definite(2, 4)
    root = inverse_root(matrix)
    assert_close(root @ root.mT, torch.linalg.inv(matrix))


@pytest.mark.parametrize("n", [1, 50, 431])
def test_triangular_matrices_by_halves(n: int) -> None:
    factor = torch.linalg.cholesky(positive_definite(2, n) / n)
    inverse = inverse_lower(factor)
    assert_close(inverse @ factor, torch.eye(n).expand(2, n, n))
    assert_close(product_of_triangular_root(factor.mT), factor.mT @ factor)


@pytest.mark.parametrize(
    ("rows", "factor"),
    [((7,), ()), ((2, 7), (2,)), ((5, 3, 2, 7), (2,)), ((5, 3, 2, 7), (3, 2)), ((0, 2, 7), (2,))],
)
def test_solve_rows_is_a_product_with_the_inverse(
    rows: tuple[int, ...], factor: tuple[int, ...]
) -> None:
    L = torch.randn(*factor, 4, 4, dtype=torch.float64).tril() + 5.0 * torch.eye(4)
    R = torch.randn(*rows, 4, dtype=torch.float64).requires_grad_()
    found = solve_rows(L, R)
    assert_close(found, R @ torch.linalg.inv(L).mT)
    (slope,) = torch.autograd.grad(found.square().sum(), R)
    assert_close(slope, 2.0 * found @ torch.linalg.inv(L))


@pytest.mark.parametrize(
    ("ahead", "batch"),
    [
        ((5, 3), (3,)),  # a matrix each, the same for all batches
        ((3,), (3,)),
        ((2, 3), (2, 3)),
        ((), ()),
        ((5, 2), (1,)),  # one matrix
        ((), (1, 1)),
        ((1,), (3,)),
        ((0,), (1,)),
    ],
)
def test_row_product_broadcasts(ahead: tuple[int, ...], batch: tuple[int, ...]) -> None:
    """Also of no rows, and of no columns to sum over."""
    for q, r in ((2, 4), (0, 4), (2, 0)):
        rows, matrix = torch.randn(*ahead, q, r).double(), torch.randn(*batch, r, 6).double()
        product = row_product(rows, matrix)
        assert_close(product, rows @ matrix)
        assert product.shape == (rows @ matrix).shape


def test_solve_lower_broadcasts_both_sides() -> None:
    factor = torch.linalg.cholesky(positive_definite(3, 1, 4))
    right = torch.randn(2, 4, 5, dtype=torch.float64)
    assert_close(factor @ solve_lower(factor, right), right.expand(3, 2, 4, 5))


def error_of_root_of_huddled_points(device: torch.device) -> float:
    """Of 600 points beside one another, whose features have hardly a rank."""
    Z, X, conditioned = (torch.rand(n, 2).double() for n in (60, 600, 20))

    def kernel(A: Tensor, B: Tensor) -> Tensor:
        return (-(torch.cdist(A, B) ** 2) / 0.2).exp()

    root = safe_cholesky(kernel(Z, Z) + 1e-10 * torch.eye(60).double())
    features = [solve_lower(root, kernel(Z, T)).mT for T in (0.5 + 1e-4 * X, conditioned)]
    factor = safe_cholesky(features[1] @ features[1].mT + 1e-2 * torch.eye(20).double())
    downdate = features[0] @ solve_lower(factor, features[1]).mT
    operator = DowndatedRootOperator(features[0].to(device), downdate.to(device))
    found = operator.low_rank_root()
    assert found.shape == (600, 60)
    return float((found @ found.mT - operator.to_dense()).abs().max())


class TestDowndatedRootOperator:
    """``Z Zᵀ − B Bᵀ`` with B in the range of Z, as conditioning makes it."""

    @staticmethod
    def factors(n: int, r: int, q: int) -> tuple[Tensor, Tensor]:
        root = torch.randn(3, n, r, dtype=torch.float64)
        columns = 0.9 * torch.linalg.qr(torch.randn(3, r, r, dtype=torch.float64))[0][..., :q]
        return root, root @ columns

    @pytest.mark.parametrize(
        ("n", "r", "q"), [(6, 4, 2), (40, 4, 2), (40, 4, 0)], ids=["small", "tall", "no downdate"]
    )
    def test_is_its_dense_matrix(self, n: int, r: int, q: int) -> None:
        root, downdate = self.factors(n, r, q)
        operator = DowndatedRootOperator(root, downdate)
        dense = root @ root.mT - downdate @ downdate.mT
        vector = torch.randn(n, dtype=torch.float64)
        assert_close(operator.to_dense(), dense)
        assert_close(operator.diagonal(dim1=-2, dim2=-1), dense.diagonal(dim1=-2, dim2=-1))
        assert_close(operator @ vector, dense @ vector)
        assert_close((operator.mT @ vector), dense @ vector)
        for index in ((1,), (slice(1, 3),), (..., slice(1, 4), slice(1, 4)), (..., slice(2), 3)):
            part = operator[index]
            part = part if isinstance(part, Tensor) else part.to_dense()
            assert_close(part, dense[index])
        assert_close(operator.unsqueeze(0).squeeze(0).to_dense(), dense)
        for order in ((0, 1, 2), (2, 0, 1)):  # of batch dimensions, one of which is broadcast
            wide = operator.expand(2, 3, n, n).unsqueeze(2).permute(*order, -2, -1)
            assert_close(
                wide.to_dense(), dense.expand(2, 3, n, n).unsqueeze(2).permute(*order, 3, 4)
            )
        low = operator.low_rank_root()
        assert_close(low @ low.mT, dense, factor=1e3)
        factor = operator.root_decomposition().root.to_dense()  # as many columns as points
        assert torch.equal(factor, factor.tril())
        scale = dense.diagonal(dim1=-2, dim2=-1).max()
        assert float((factor @ factor.mT - dense).abs().max() / scale) < 1e-6

    def test_root_of_huddled_points_is_exact(self, device: torch.device) -> None:
        assert error_of_root_of_huddled_points(device) < 1e-12

    def test_shares_one_root_between_batches(self) -> None:
        root, downdate = self.factors(6, 4, 2)
        operator = DowndatedRootOperator(root[:1], downdate)
        assert operator.expand(5, 3, 6, 6).root is operator.root
        dense = root[:1] @ root[:1].mT - downdate @ downdate.mT
        wide = operator.expand(5, 3, 6, 6)
        assert_close(wide.to_dense(), dense.expand(5, 3, 6, 6))
        for dim in (0, 1, 2):
            assert_close(wide.unsqueeze(dim).to_dense(), dense.expand(5, 3, 6, 6).unsqueeze(dim))
        one = DowndatedRootOperator(root[0], downdate[0]).expand(6, 6)
        assert_close(one.unsqueeze(0).to_dense(), one.to_dense().unsqueeze(0))

    def test_passes_gradients_to_both_factors(self) -> None:
        factors = [factor.requires_grad_() for factor in self.factors(6, 4, 2)]
        weights = torch.randn(6, 6, dtype=torch.float64)
        operator = DowndatedRootOperator(*factors)
        lazy = torch.autograd.grad((operator @ weights).square().sum(), factors)
        dense = factors[0] @ factors[0].mT - factors[1] @ factors[1].mT
        expected = torch.autograd.grad((dense @ weights).square().sum(), factors)
        for actual, want in zip(lazy, expected, strict=True):
            assert_close(actual, want)


@pytest.mark.parametrize("rank", [2, 12])
def test_one_plus_a_product_is_solved_whatever_the_ranks(rank: int) -> None:
    A, P = (positive_definite(3, 6, rank=rank) for _ in range(2))
    right = torch.randn(3, 6, 2, dtype=torch.float64)
    solution, log_determinant = solve_one_plus_product(A, P, right)
    matrix = torch.eye(6, dtype=torch.float64) + A @ P
    assert_close(matrix @ solution, right)
    assert_close(log_determinant, torch.logdet(matrix))


def test_one_plus_a_product_of_a_batch_of_empty_matrices() -> None:
    empty = torch.zeros(2, 3, 0, 0, dtype=torch.float64)
    solution, log_determinant = solve_one_plus_product(empty, empty, empty)
    assert torch.equal(solution, empty)
    assert torch.equal(log_determinant, torch.zeros(2, 3, dtype=torch.float64))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_batch_is_solved_by_several_threads_as_each_matrix_alone() -> None:
    n, batch = 300, (2, 2)
    roots = torch.randn(2, *batch, n, n, dtype=torch.float64) / n**0.5
    A, P = roots @ roots.mT
    right = torch.randn(*batch, n, 1, dtype=torch.float64)
    alone = {}
    for index in product(*map(range, batch)):
        matrix = torch.eye(n, dtype=torch.float64) + A[index] @ P[index]
        alone[index] = torch.linalg.solve(matrix, right[index]), torch.logdet(matrix)
    for _ in range(3):
        solution, log_determinant = solve_one_plus_product(A, P, right)
        for index, (expected, determinant) in alone.items():
            assert_close(solution[index], expected)
            assert_close(log_determinant[index], determinant)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_plus_a_product_refuses_what_is_not_finite(bad: float) -> None:
    A = positive_definite(4, 4)
    with pytest.raises(NotPSDError, match="NaN or infinite"):
        solve_one_plus_product(A, bad * A, A)


def test_memory_is_refused_before_it_is_allocated() -> None:
    check_memory("A grid", 2**27, limit_gib=1.0)
    with pytest.raises(ValueError, match=r"A grid would need 2\.0 GiB .* limit of 1 GiB"):
        check_memory("A grid", 2**28, limit_gib=1.0)
    check_memory("A matrix", 2**28, 1.0, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"A matrix .* Do without\."):
        check_memory("A matrix", 2**29, 1.0, "Do without.", torch.float32)


def test_the_jitter_is_in_parts_of_the_mean_of_the_diagonal() -> None:
    matrix = torch.ones(50, 50, dtype=torch.float64) * 3.0
    factor, jitter = cholesky_with_jitter(matrix)
    assert jitter > 0.0
    added = (factor @ factor.mT - matrix).diagonal().mean()
    assert float(added) == pytest.approx(3.0 * jitter, rel=1e-2)


@pytest.mark.parametrize("size", [2, 3, 40])
def test_a_tridiagonal_form_is_the_matrix(size: int) -> None:
    root = torch.rand(size, size + 2, dtype=torch.float64)
    A = (root @ root.mT).numpy()
    form, eye = Tridiagonal(np.tril(A)), np.eye(size)  # only the lower triangle is read
    Q = np.stack([form.from_basis(e) for e in eye], -1)
    np.testing.assert_allclose(Q.T @ Q, eye, atol=1e-12)
    np.testing.assert_allclose(np.stack([form.to_basis(e) for e in eye], -1), Q.T, atol=1e-12)
    factor = form.shifted(0.3)
    shifted = Q.T @ A @ Q + 0.3 * eye
    np.testing.assert_allclose(np.stack([factor.solve(row) for row in shifted], -1), eye, atol=1e-9)
    L = np.stack([factor.root_times(e) for e in eye], -1)
    np.testing.assert_allclose(L @ L.T, shifted, atol=1e-12)
    assert factor.log_determinant() == pytest.approx(float(np.linalg.slogdet(shifted)[1]))
