"""Kernel matrices with far points, in float32 and float64, against formulas of differences."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from torch import Tensor

from bo_stream.bases.inducing import (
    InducingBasis,
    differentiable_matrix,
    kernel_matrix,
    largest_norm,
)
from bo_stream.bases.kernels import matrix_between
from bo_stream.bases.radial import RadialKernel, RadialSums
from tests.oracles.kernels import dense_kernel

DOUBLE = torch.float64


def spoiled(A: Tensor, B: Tensor) -> Tensor:
    """As gpytorch does it: squares of distances from the mean."""
    A, B = A - A.mean(-2, keepdim=True), B - A.mean(-2, keepdim=True)
    square = A.square().sum(-1, keepdim=True) + B.square().sum(-1).unsqueeze(-2) - 2.0 * A @ B.mT
    return torch.exp(-0.5 * square.clamp_min(0.0))


def dense(A: Tensor, B: Tensor) -> Tensor:
    difference = A.double().unsqueeze(-2) - B.double().unsqueeze(-3)
    return torch.exp(-0.5 * difference.square().sum(-1))


def points(*far: float) -> Tensor:
    rows = [torch.rand(40, 3), *(torch.full((1, 3), one) + torch.rand(2, 3) for one in far)]
    return torch.cat(rows)[torch.randperm(40 + 2 * len(far))]


def near(X: Tensor) -> Tensor:
    return X.abs().amax(-1) < 2.0


@pytest.mark.parametrize("far", [(), (1e4,), (3e4, -1e7), (1e3, 1e5, 1e9)])
def test_far_points_leave_the_others_their_digits(far: tuple[float, ...]) -> None:
    Z, X = points(*far), torch.cat((points(*far), points(*far)[:3] + 0.1))
    batch = torch.rand(5, 4, 3)
    for A, B in ((Z, Z), (X, Z), (Z, X), (batch, Z), (Z, batch), (batch, batch + 0.1)):
        found = matrix_between(spoiled, A, B).double()
        told = near(A).unsqueeze(-1) | near(B).unsqueeze(-2)
        torch.testing.assert_close(found[told], dense(A, B)[told], rtol=0.0, atol=1e-5)
    whole = matrix_between(spoiled, Z, Z)
    torch.testing.assert_close(whole, whole.mT)
    if far:
        both = near(Z).unsqueeze(-1) & near(Z)
        assert float((spoiled(Z, Z).double() - dense(Z, Z))[both].abs().max()) > 1e-3


@pytest.mark.parametrize("kind", [RBFKernel, RQKernel, MaternKernel])
@pytest.mark.parametrize(("outputs", "batch"), [(1, ()), (1, (4,)), (2, (2,)), (2, (4, 2))])
@pytest.mark.parametrize(("n", "others"), [(0, 3), (3, 0), (0, 0)])
def test_matrices_of_no_points_have_their_shape_and_no_gradient(
    kind: type[Kernel], outputs: int, batch: tuple[int, ...], n: int, others: int
) -> None:
    size = torch.Size(batch)
    kernel = ScaleKernel(kind(batch_shape=size), batch_shape=size).double()
    A = torch.rand(5, 1, n, 2, dtype=DOUBLE, requires_grad=True)
    B = torch.rand(others, 2, dtype=DOUBLE, requires_grad=True)
    matrix = kernel_matrix(kernel, A, B, outputs)
    lead = (5, 4) if 4 in batch else (5, 1)
    assert matrix.shape == (*lead, outputs, n, others)
    for gradient in torch.autograd.grad(matrix.sum(), (A, B)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_no_points_and_equal_points() -> None:
    none, equal = torch.zeros(0, 3), torch.full((5, 3), 0.5)
    assert matrix_between(spoiled, none, none).shape == (0, 0)
    assert matrix_between(spoiled, equal, none).shape == (5, 0)
    assert torch.equal(matrix_between(spoiled, equal, equal), torch.ones(5, 5))


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_points_that_are_not_finite_end_in_some_block(odd: float) -> None:
    Z = points(1e5)
    Z[3] = odd
    values, between = matrix_between(dense, Z, Z), matrix_between(dense, points(), Z)
    finite = torch.arange(len(Z)) != 3
    assert values.shape == (len(Z), len(Z))
    assert bool(values[finite][:, finite].isfinite().all())
    assert bool(between[:, finite].isfinite().all())


# --- places far apart in float64, of which each keeps its digits ---------------------------------


def towns(far: float = 1e5) -> Tensor:
    """Points about three corners, as many about each: the mean is far from all of them."""
    corners = far * torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, -1.0]], dtype=DOUBLE)
    return torch.cat([corner + torch.rand(8, 2, dtype=DOUBLE) for corner in corners])[
        torch.randperm(24)
    ]


def part(nu: float | None, *dims: int) -> Kernel:
    options = {"active_dims": dims or None}
    kernel = RBFKernel(**options) if nu is None else MaternKernel(nu, **options)
    kernel.lengthscale = 0.4
    return kernel.double()


RADIAL = [None, 0.5, 1.5, 2.5]

OTHERS = [
    part(None, 0, 1),
    part(None, 0) * part(2.5, 1),
    ScaleKernel(part(None, 1) + part(1.5, 0, 1) * part(None, 0)).double(),
]


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(
    "kernel", [*map(part, RADIAL), *OTHERS], ids=lambda each: type(each).__name__
)
def test_values_are_those_of_differences(kernel: Kernel, outputs: int) -> None:
    """With and without gradients, which agree, and with a batch of other points."""
    X = towns()
    T = X[:10] + 0.1
    batch = torch.stack((T[:5], T[5:]))
    for A, B in ((X, X), (X, T), (T, X), (X, batch), (batch, X)):
        expected = dense_kernel(kernel, A, B).unsqueeze(-3)
        expected = expected.expand(*expected.shape[:-3], outputs, *expected.shape[-2:])
        with torch.no_grad():
            found = kernel_matrix(kernel, A, B, outputs)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-9)
    at, other = T.clone().requires_grad_(), T.clone().requires_grad_()
    found, expected = kernel_matrix(kernel, X, at, outputs), dense_kernel(kernel, X, other)
    torch.testing.assert_close(found, expected.expand_as(found), rtol=0.0, atol=1e-9)
    slopes = [torch.autograd.grad(one.sum(), x) for one, x in ((found, at), (expected, other))]
    torch.testing.assert_close(slopes[0][0], outputs * slopes[1][0], rtol=0.0, atol=1e-7)


@pytest.mark.parametrize("nu", RADIAL, ids=str)
def test_gradients_in_hyperparameters_are_those_of_differences(nu: float | None) -> None:
    kernel, X = ScaleKernel(part(nu)).double(), towns()
    found, expected = differentiable_matrix(kernel, X, X, 1), dense_kernel(kernel, X, X)
    torch.testing.assert_close(found.squeeze(-3), expected, rtol=0.0, atol=1e-9)
    weights, leaves = torch.rand(24, 24, dtype=DOUBLE), list(kernel.parameters())
    slopes = [torch.autograd.grad((each * weights).sum(), leaves) for each in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("nu", [None, 1.5, 2.5], ids=str)
def test_known_points_are_those_of_differences(nu: float | None) -> None:
    kernel, Z = part(nu).requires_grad_(False), towns()
    X, weights = Z[:10] + 0.1, torch.rand(24, 1, dtype=DOUBLE)
    sums = RadialSums.of(RadialKernel.of(kernel, 1), Z.unsqueeze(-3))
    assert sums is not None
    covariance = sums.covariance(X).squeeze(-3)
    torch.testing.assert_close(covariance, dense_kernel(kernel, Z, X), rtol=0.0, atol=1e-9)
    at, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    found = sums.regression(torch.zeros(1, 1, dtype=DOUBLE), weights, at).flatten()
    expected = (dense_kernel(kernel, other, Z) @ weights).flatten()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-8)
    slopes = [torch.autograd.grad(one.sum(), x)[0] for one, x in ((found, at), (expected, other))]
    torch.testing.assert_close(*slopes, rtol=0.0, atol=1e-7)


@pytest.mark.parametrize("kernel", [part(None), OTHERS[1]], ids=["radial", "product"])
def test_a_basis_of_far_places_needs_no_jitter(kernel: Kernel) -> None:
    Z = towns()
    basis = InducingBasis.of(kernel, Z, 1)
    assert basis.jitter == 0.0
    root = torch.linalg.cholesky(dense_kernel(kernel, Z, Z).detach())
    torch.testing.assert_close(basis.root.squeeze(-3), root, rtol=0.0, atol=1e-4)


def nested() -> list[Kernel]:
    """Kernels that select inputs of inputs that were selected."""
    sums = RBFKernel(active_dims=(0,)) + ScaleKernel(RBFKernel(active_dims=(1,)))
    deep = ScaleKernel(sums * RBFKernel(ard_num_dims=3), active_dims=(3, 1, 2))
    return [
        RBFKernel(),
        ScaleKernel(RBFKernel(ard_num_dims=2), active_dims=(0, 2)),
        ScaleKernel(ScaleKernel(RBFKernel(ard_num_dims=2, active_dims=(3, 1)))),
        ScaleKernel(sums, active_dims=(0, 2)),
        ScaleKernel(AdditiveKernel(RBFKernel(active_dims=(1,)), sums), active_dims=(2, 3)),
        deep + RBFKernel(active_dims=(0,)),
        RBFKernel(batch_shape=torch.Size([2])) * RBFKernel(active_dims=(2,)),
    ]


@pytest.mark.parametrize("index", range(7))
def test_the_largest_norm_is_of_the_inputs_that_each_part_is_given(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against what the parts are called with when the kernel is evaluated."""
    kernel = nested()[index].double()
    X = torch.rand(9, 4, dtype=DOUBLE) * torch.tensor([1.0, 7.0, 30.0, 100.0])
    for one in kernel.modules():
        if isinstance(one, RBFKernel):
            one.lengthscale = 0.5 + 10.0 * torch.rand_like(one.lengthscale)
    norms, forward = [], RBFKernel.forward

    def recorded(self: RBFKernel, x1: Tensor, x2: Tensor, **options: object) -> Tensor:
        norms.append(((x1 - x1.mean(-2, keepdim=True)) / self.lengthscale).norm(dim=-1).max())
        return forward(self, x1, x2, **options)

    monkeypatch.setattr(RBFKernel, "forward", recorded)
    with torch.no_grad():
        kernel(X).to_dense()
    assert largest_norm(kernel, X) == pytest.approx(float(torch.stack(norms).max()))
