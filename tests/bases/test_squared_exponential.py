"""Squared-exponential matrices against gpytorch's kernels."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream.bases.kernels import SquaredExponential, stacked_kernel
from tests.bases.test_radial import kernel_of

DOUBLE = torch.float64


def matrix_of(kernel: Kernel, A: Tensor, B: Tensor, outputs: int) -> Tensor:
    known = SquaredExponential.of(kernel, outputs)
    assert known is not None
    return known.matrix(A, B)


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "bare"])
@pytest.mark.parametrize("dims", [3, None], ids=["ard", "one"])
@pytest.mark.parametrize(
    ("batch", "outputs"), [((), 1), ((2,), 1), ((3,), 3), ((2, 3), 3)], ids=str
)
def test_values_and_gradients_are_gpytorchs(
    batch: tuple[int, ...], outputs: int, dims: int | None, scaled: bool
) -> None:
    torch.manual_seed(0)
    kernel = kernel_of(None, torch.Size(batch), dims, scaled)
    leading = batch[:-1] if outputs > 1 else batch
    A = (5.0 + torch.randn(*leading, outputs, 6, 3, dtype=DOUBLE)).requires_grad_()
    B = (5.0 + torch.randn(*leading, outputs, 4, 3, dtype=DOUBLE)).requires_grad_()
    found, expected = matrix_of(kernel, A, B, outputs), stacked_kernel(kernel, A, B, outputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    weights, leaves = torch.randn_like(expected), [A, B, *kernel.parameters()]
    gradients = [torch.autograd.grad((m * weights).sum(), leaves) for m in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("batch", "outputs"), [((), 1), ((2,), 1), ((2, 3), 3)], ids=str)
def test_weighted_sums_and_their_gradients(batch: tuple[int, ...], outputs: int) -> None:
    """Inputs without the batch dimensions, as minibatches may be."""
    torch.manual_seed(0)
    kernel = kernel_of(None, torch.Size(batch), 3, True)
    leading = batch[:-1] if outputs > 1 else batch
    A = torch.randn(*leading, outputs, 6, 3, dtype=DOUBLE, requires_grad=True)
    B = torch.randn(1, 4, 3, dtype=DOUBLE, requires_grad=True)
    w = torch.randn(*leading, outputs, 6, dtype=DOUBLE, requires_grad=True)
    known = SquaredExponential.of(kernel, outputs)
    assert known is not None
    found, matrix = known.weighted(A, B, w)
    expected = (w.unsqueeze(-2) @ matrix_of(kernel, A, B, outputs)).squeeze(-2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(matrix, matrix_of(kernel, A, B, outputs).detach())
    assert not matrix.requires_grad
    slopes, leaves = torch.randn_like(expected), [A, B, w, *kernel.parameters()]
    gradients = [torch.autograd.grad((m * slopes).sum(), leaves) for m in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    kernel = kernel_of(None, torch.Size(), 2, True)
    A, B = (torch.randn(1, n, 2, dtype=DOUBLE, requires_grad=True) for n in (3, 2))
    assert torch.autograd.gradgradcheck(lambda A, B: matrix_of(kernel, A, B, 1), (A, B))


@pytest.mark.parametrize("far", [1e4, 1e8, 1e12])
def test_no_value_exceeds_the_variance_far_away(far: float) -> None:
    torch.manual_seed(0)
    kernel = kernel_of(None, torch.Size(), 3, True)
    near = torch.randn(1, 50, 3, dtype=DOUBLE)
    A = torch.cat((near, far * torch.randn(1, 50, 3, dtype=DOUBLE)), -2)
    matrix = matrix_of(kernel, A, A, 1)
    assert matrix.isfinite().all()
    assert matrix.max() <= kernel.outputscale.item() * (1.0 + 1e-15)
    torch.testing.assert_close(matrix[:, :50, 50:], torch.zeros(1, 50, 50, dtype=DOUBLE))
    variance = torch.full((1, 100), kernel.outputscale.item(), dtype=DOUBLE)
    torch.testing.assert_close(matrix.diagonal(dim1=-2, dim2=-1), variance, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_no_points(sizes: tuple[int, int]) -> None:
    A, B = (torch.rand(1, n, 3, dtype=DOUBLE) for n in sizes)
    assert matrix_of(kernel_of(None, torch.Size(), 3, True), A, B, 1).shape == (1, *sizes)


class Bent(RBFKernel):
    """Somebody's own."""


@pytest.mark.parametrize(
    "kernel",
    [
        MaternKernel(),
        RBFKernel(active_dims=(0,)),
        ScaleKernel(RBFKernel(), active_dims=(0,)),
        Bent(),
        ScaleKernel(ScaleKernel(RBFKernel())),
    ],
    ids=["Matern", "some inputs", "some inputs, scaled", "subclass", "nested"],
)
def test_other_kernels_are_left_to_gpytorch(kernel: Kernel) -> None:
    assert SquaredExponential.of(kernel, 1) is None
