"""Matrices of kernels of the distance, and their gradients in closed form."""

from __future__ import annotations

import copy

import pytest
import torch
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream.bases.inducing import (
    InducingBasis,
    differentiable_matrix,
    kernel_matrix,
    kernel_variance,
)
from bo_stream.bases.kernels import ProductMatern, stacked_variance
from bo_stream.bases.radial import RadialKernel, RadialSums
from tests.oracles.kernels import dense_kernel

DOUBLE = torch.float64
NU = [None, 0.5, 1.5, 2.5]


def kernel_of(nu: float | None, batch: torch.Size, dims: int | None, scaled: bool) -> Kernel:
    kind = RBFKernel if nu is None else MaternKernel
    options = {} if nu is None else {"nu": nu}
    base = kind(ard_num_dims=dims, batch_shape=batch, **options).to(DOUBLE)
    base.lengthscale = 0.3 + torch.rand(*batch, 1, dims or 1, dtype=DOUBLE)
    if not scaled:
        return base
    kernel = ScaleKernel(base, batch_shape=batch).to(DOUBLE)
    kernel.outputscale = 0.5 + torch.rand(batch, dtype=DOUBLE)
    return kernel


def matrix_of(kernel: Kernel, X: Tensor, outputs: int) -> Tensor:
    known = RadialKernel.of(kernel, outputs)
    assert known is not None
    return known.matrix(X)


def expected_matrix(kernel: Kernel, X: Tensor, outputs: int) -> Tensor:
    """The oracle's, of differences between points, for ``... x m x n x d``."""
    if outputs == 1:
        return expected_matrix(kernel, X.squeeze(-3), 2).unsqueeze(-3)
    return dense_kernel(kernel, X, X)


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "bare"])
@pytest.mark.parametrize("dims", [3, None], ids=["ard", "one"])
@pytest.mark.parametrize(
    ("batch", "outputs"), [((), 1), ((2,), 1), ((3,), 3), ((2, 3), 3)], ids=str
)
@pytest.mark.parametrize("nu", NU, ids=str)
def test_values_and_gradients_are_those_of_the_formula(
    nu: float | None, batch: tuple[int, ...], outputs: int, dims: int | None, scaled: bool
) -> None:
    """In points and hyperparameters; two points are equal, and the gradient is not symmetric."""
    torch.manual_seed(0)
    kernel = kernel_of(nu, torch.Size(batch), dims, scaled)
    leading = batch[:-1] if outputs > 1 else batch
    distinct = 5.0 + torch.randn(*leading, outputs, 7, 3, dtype=DOUBLE)
    X = distinct[..., [0, 1, 2, 3, 4, 5, 6, 1], :].requires_grad_()
    found, expected = matrix_of(kernel, X, outputs), expected_matrix(kernel, X, outputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    weights, leaves = torch.randn_like(expected), [X, *kernel.parameters()]
    gradients = [torch.autograd.grad((m * weights).sum(), leaves) for m in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-10 * float(other.abs().max()))


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "bare"])
@pytest.mark.parametrize(
    ("batch", "outputs"), [((), 1), ((2,), 1), ((3,), 3), ((2, 3), 3)], ids=str
)
@pytest.mark.parametrize("nu", NU, ids=str)
def test_covariances_with_known_points_are_those_of_the_formula(
    nu: float | None, batch: tuple[int, ...], outputs: int, scaled: bool
) -> None:
    kernel = kernel_of(nu, torch.Size(batch), 3, scaled).requires_grad_(False)
    leading = batch[:-1] if outputs > 1 else batch
    Z, X = (5.0 + torch.randn(*leading, n, 3, dtype=DOUBLE) for n in (6, 4))
    both = expected_matrix(kernel, torch.cat((Z, X), -2).unsqueeze(-3), outputs)
    known = RadialKernel.of(kernel, outputs)
    sums = RadialSums.of(known, Z.unsqueeze(-3))
    assert (sums is None) == (nu == 0.5)
    found = [kernel_matrix(kernel, Z, X, outputs, known), kernel_matrix(kernel, Z, X, outputs)]
    for each in found if sums is None else [*found, sums.covariance(X)]:
        torch.testing.assert_close(each, both[..., :6, 6:], rtol=1e-12, atol=1e-13)
    itself = kernel_matrix(kernel, Z, Z, outputs, known)
    torch.testing.assert_close(itself, both[..., :6, :6], rtol=1e-12, atol=1e-7 if nu else 1e-13)


@pytest.mark.parametrize("nu", NU, ids=str)
def test_a_basis_that_was_first_used_without_gradients_has_them_later(nu: float | None) -> None:
    kernel = kernel_of(nu, torch.Size(), 3, True)
    Z, X = torch.randn(5, 3, dtype=DOUBLE), torch.randn(4, 3, dtype=DOUBLE)
    basis = InducingBasis.of(kernel, Z, 1)
    with torch.inference_mode():
        first = basis.features(X), basis.residual_covariance(X, X, *2 * (basis.features(X),))
    at = X.clone().requires_grad_()
    features = basis.features(at)
    residual = basis.residual_covariance(at, at, features, features)
    for one, other in zip(first, (features, residual), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    features.sum().backward()
    assert at.grad is not None
    assert bool((at.grad != 0.0).any())


def test_a_basis_of_a_learned_kernel_follows_it() -> None:
    kernel = kernel_of(1.5, torch.Size(), 3, True)
    Z, X = torch.randn(5, 3, dtype=DOUBLE), torch.randn(4, 3, dtype=DOUBLE)
    basis = InducingBasis.of(kernel, Z, 1, live=True)
    basis.features(X)
    with torch.no_grad():
        kernel.outputscale = 4.0 * kernel.outputscale
    root = torch.linalg.solve_triangular(basis.root, dense_kernel(kernel, Z, X), upper=False)
    torch.testing.assert_close(basis.features(X).squeeze(-3), root.mT.squeeze(-3))


@pytest.mark.parametrize(("batch", "outputs"), [((2,), 1), ((3,), 3), ((2, 3), 3)], ids=str)
def test_as_many_points_as_kernels_are_no_matrix(batch: tuple[int, ...], outputs: int) -> None:
    size = torch.Size(batch)
    kernel = kernel_of(None, size, 2, True) + kernel_of(1.5, size, 2, True)
    X = torch.rand(batch[-1], 2, dtype=DOUBLE)
    matrix = expected_matrix(kernel, X.unsqueeze(-3), outputs)
    expected = matrix.diagonal(dim1=-2, dim2=-1)
    for found in (
        kernel_variance(kernel, X, outputs),
        stacked_variance(kernel, X.expand(outputs, *X.shape), outputs),
    ):
        torch.testing.assert_close(found, expected.expand_as(found))


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "bare"])
@pytest.mark.parametrize(
    ("batch", "outputs"), [((), 1), ((2,), 1), ((3,), 3), ((2, 3), 3)], ids=str
)
@pytest.mark.parametrize("leading", [(), (4, 1)], ids=str)
def test_variances_are_the_diagonal(
    leading: tuple[int, ...], batch: tuple[int, ...], outputs: int, scaled: bool
) -> None:
    kernel = kernel_of(1.5, torch.Size(batch), 3, scaled)
    X = torch.randn(*leading, *(batch[:-1] if outputs > 1 else batch), 5, 3, dtype=DOUBLE)
    expected = expected_matrix(kernel, X.unsqueeze(-3), outputs).diagonal(dim1=-2, dim2=-1)
    for found in (
        kernel_variance(kernel, X, outputs),
        stacked_variance(kernel, X.unsqueeze(-3).expand(*X.shape[:-2], outputs, 5, 3), outputs),
    ):
        assert found.shape == (*X.shape[:-2], outputs, 5)
        torch.testing.assert_close(found, expected.expand_as(found))
        slopes = (
            torch.autograd.grad(found.sum(), list(kernel.parameters()), allow_unused=True)
            if scaled
            else ()
        )
        assert sum(slope is not None for slope in slopes) == scaled


@pytest.mark.parametrize("nu", NU, ids=str)
def test_equal_points_have_no_distance_anywhere(nu: float | None) -> None:
    """Also far from the others and in many inputs; of their r² is left rounding below 1e-8.

    For ν = 1/2, with its kink, the root of that would be seen, and one over it in the gradient.
    """
    kernel = kernel_of(nu, torch.Size(), 40, False)
    X = torch.randn(1, 30, 40, dtype=DOUBLE)
    X[0, 20:] = 5.0 * X[0, :10]
    rows = torch.cat((X, X[:, 15:25]), -2)
    found = matrix_of(kernel, rows, 1)
    twice = found[0, 15:25, 30:].diagonal()
    torch.testing.assert_close(twice, torch.ones_like(twice), rtol=0.0, atol=1e-8)
    (gradient,) = torch.autograd.grad(found.sum(), kernel.raw_lengthscale)
    (expected,) = torch.autograd.grad(
        expected_matrix(kernel, rows, 1).sum(), kernel.raw_lengthscale
    )
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-8)


def test_a_scale_may_have_more_batch_dimensions_than_lengthscales() -> None:
    base = kernel_of(2.5, torch.Size(), 3, False)
    kernel = ScaleKernel(base, batch_shape=torch.Size([2])).to(DOUBLE)
    kernel.outputscale = torch.tensor([0.5, 2.0])
    X = torch.randn(2, 1, 6, 3, dtype=DOUBLE)
    found, expected = matrix_of(kernel, X, 1), expected_matrix(kernel, X, 1)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(m.sum(), list(kernel.parameters())) for m in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("nu", NU, ids=str)
def test_float32_hyperparameters_are_constrained_in_float64(nu: float | None) -> None:
    """As those of a copy in float64 are, to all digits."""
    kernel = kernel_of(nu, torch.Size(), 3, True).to(torch.float32)
    X = torch.randn(6, 3, dtype=DOUBLE)
    found = differentiable_matrix(kernel, X, X, 1)
    expected = expected_matrix(copy.deepcopy(kernel).double(), X.unsqueeze(-3), 1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    for one in torch.autograd.grad(found.sum(), list(kernel.parameters())):
        assert one.dtype == torch.float32


class _Other(RBFKernel):
    """A kernel that a user derived."""


@pytest.mark.parametrize(
    "kernel",
    [
        RBFKernel(active_dims=(0, 2)),
        ScaleKernel(MaternKernel(active_dims=(1,))),
        ScaleKernel(ScaleKernel(RBFKernel())),
        AdditiveKernel(RBFKernel(), MaternKernel()),
        ProductMatern(),
        _Other(ard_num_dims=3),
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_another_kernel_is_gpytorchs_own(kernel: Kernel) -> None:
    kernel, X = kernel.double(), torch.randn(6, 3, dtype=DOUBLE)
    assert RadialKernel.of(kernel, 1) is None
    assert torch.equal(differentiable_matrix(kernel, X, X, 1), kernel_matrix(kernel, X, X, 1))


def test_points_of_which_there_are_none_or_one() -> None:
    kernel = kernel_of(0.5, torch.Size(), None, True)
    assert matrix_of(kernel, torch.empty(1, 0, 3, dtype=DOUBLE), 1).shape == (1, 0, 0)
    one = matrix_of(kernel, torch.randn(1, 1, 3, dtype=DOUBLE), 1)
    torch.testing.assert_close(one.flatten(), kernel.outputscale.reshape(1))
    kernel.base_kernel.raw_lengthscale.data.fill_(torch.nan)
    assert bool(matrix_of(kernel, torch.randn(1, 1, 3, dtype=DOUBLE), 1).isnan())


@pytest.mark.parametrize("nu", NU, ids=str)
def test_a_second_derivative_is_refused(nu: float | None) -> None:
    kernel = kernel_of(nu, torch.Size(), 3, True)
    total = matrix_of(kernel, torch.randn(1, 6, 3, dtype=DOUBLE), 1).square().sum()
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(total, list(kernel.parameters()), create_graph=True)
