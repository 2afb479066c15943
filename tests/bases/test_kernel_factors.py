"""Kernels taken apart against their closed formulas and against gpytorch's own values."""

from __future__ import annotations

import math

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from torch import Tensor

from bo_stream.bases.kernel_factors import KernelFactors, kernel_factors
from tests.oracles import dense_kernel
from tests.problems import KERNELS, kernel
from tests.tolerances import assert_close


def product_of(factors: KernelFactors, X: Tensor, X2: Tensor) -> Tensor:
    result = factors.scale()[..., None, None]
    for i in range(X.shape[-1]):
        result = result * factors.correlation(i, X[:, i], X2[:, i])
    return result


@pytest.mark.parametrize("batch_shape", [(), (2,)])
@pytest.mark.parametrize("name", KERNELS)
def test_the_product_of_the_factors_is_the_kernel(name: str, batch_shape: tuple[int, ...]) -> None:
    module = kernel(name, 3, batch_shape)
    X, X2 = torch.rand(5, 3).double(), torch.rand(4, 3).double()
    actual = product_of(kernel_factors(module, 3), X, X2)
    assert_close(actual, dense_kernel(module, X, X2).expand_as(actual))


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_reach_every_hyperparameter(name: str) -> None:
    module = kernel(name, 2)
    X, parameters = torch.rand(5, 2).double(), list(module.parameters())
    weights = torch.randn(5, 5).double()
    actual = torch.autograd.grad(
        (weights * product_of(kernel_factors(module, 2), X, X)).sum(), parameters
    )
    expected = torch.autograd.grad((weights * dense_kernel(module, X, X)).sum(), parameters)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


@pytest.mark.parametrize(
    "module",
    [
        RBFKernel(ard_num_dims=2),
        RBFKernel(),
        ScaleKernel(RBFKernel(ard_num_dims=2)),
        RBFKernel(active_dims=(1,)),
        ScaleKernel(RBFKernel(active_dims=(1,))),
        ScaleKernel(MaternKernel(nu=0.5, active_dims=(1,))),
        ScaleKernel(ScaleKernel(MaternKernel(nu=2.5, active_dims=(1,)))),
        MaternKernel(nu=1.5, active_dims=(0,)) * MaternKernel(nu=2.5, active_dims=(1,)),
        ScaleKernel(ProductKernel(RBFKernel(active_dims=(1,)), RBFKernel(active_dims=(1, 0)))),
        ProductKernel(ScaleKernel(RBFKernel(active_dims=(1,))), MaternKernel(active_dims=(0,))),
    ],
    ids=str,
)
def test_the_product_of_the_factors_is_gpytorchs_kernel(module: Kernel) -> None:
    module = module.double()
    X = torch.rand(6, 2).double()
    assert_close(product_of(kernel_factors(module, 2), X, X), module(X, X).to_dense())


def test_the_roughest_factor_counts() -> None:
    rough = MaternKernel(nu=0.5, active_dims=(0,)) * RBFKernel(active_dims=(1,))
    assert kernel_factors(rough, 2).smoothness == 0.5
    assert kernel_factors(RBFKernel(), 2).smoothness == math.inf


def test_a_single_output_gets_its_dimension() -> None:
    factors = kernel_factors(kernel("product", 2, (3,)), 2)
    x = torch.rand(4).double()
    single = factors.for_single_output()
    assert_close(single.scale(), factors.scale().unsqueeze(-1))
    assert_close(single.correlation(0, x, x), factors.correlation(0, x, x).unsqueeze(-3))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (LinearKernel(), "LinearKernel"),
        (ScaleKernel(PeriodicKernel()), "PeriodicKernel"),
        (AdditiveKernel(RBFKernel(), MaternKernel()), "AdditiveKernel"),
        (RBFKernel(active_dims=(2,)), r"active_dims \(2,\)"),
    ],
)
def test_other_kernels_are_refused_by_name(module: Kernel, name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        kernel_factors(module, 2)
