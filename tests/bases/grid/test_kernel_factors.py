"""Kernels taken apart against their closed formulas and against gpytorch's own values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import (
    AdditiveKernel,
    AdditiveStructureKernel,
    CosineKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    RBFKernelGrad,
    ScaleKernel,
    SpectralMixtureKernel,
)
from torch import Tensor

from bo_stream import ProductMatern
from bo_stream.bases.grid.kernel import (
    DEFAULT_SIZES,
    Factor,
    GridKernel,
    default_grid_size,
    kernel_factors,
)
from bo_stream.testing.streams import assert_close
from tests.oracles.kernels import dense_kernel
from tests.support.problems import KERNELS, kernel

OSCILLATING = [name for name in KERNELS if any(w in name for w in ("period", "spectral", "sum"))]


def product_of(kernel: GridKernel, X: Tensor, X2: Tensor) -> Tensor:
    (factors,) = kernel.parts
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
        ScaleKernel(ProductMatern(nu=1.5, ard_num_dims=2, active_dims=(1, 0))),
        ScaleKernel(ProductKernel(RBFKernel(active_dims=(1,)), RBFKernel(active_dims=(1, 0)))),
        ProductKernel(ScaleKernel(RBFKernel(active_dims=(1,))), MaternKernel(active_dims=(0,))),
        ScaleKernel(AdditiveKernel(PeriodicKernel(), MaternKernel(nu=0.5)), active_dims=(1,)),
        ScaleKernel(PeriodicKernel(active_dims=(1, 0), ard_num_dims=2)),
        SpectralMixtureKernel(2, ard_num_dims=2, active_dims=(1, 0)),
        AdditiveKernel(ScaleKernel(RBFKernel(active_dims=(0, 1)))),
        RBFKernel(active_dims=(1,)) + RBFKernel(active_dims=(1,)) + MaternKernel(active_dims=(1,)),
    ],
    ids=str,
)
def test_the_product_of_the_factors_is_gpytorchs_kernel(module: Kernel) -> None:
    module = module.double()
    X = torch.rand(6, 2).double()
    randomize(module)
    assert_close(product_of(kernel_factors(module, 2), X, X), module(X, X).to_dense(), factor=0.01)


def randomize(module: Kernel) -> None:
    for parameter in module.parameters():
        parameter.data.normal_()


@pytest.mark.parametrize("batch_shape", [(), (2,), (3, 2)])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("name", OSCILLATING)
def test_values_and_gradients_are_gpytorchs(
    name: str, dim: int, batch_shape: tuple[int, ...]
) -> None:
    module = kernel(name, dim, batch_shape)
    X, X2 = torch.rand(6, dim).double(), torch.rand(5, dim).double()
    own = product_of(kernel_factors(module, dim), X, X2)
    theirs = module(X, X2).to_dense()
    assert_close(own, theirs.expand_as(own), factor=0.01)
    parameters, weights = list(module.parameters()), torch.randn_like(own)
    actual = torch.autograd.grad((weights * own).sum(), parameters)
    expected = torch.autograd.grad((weights * theirs).sum(), parameters)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, factor=0.01)


@pytest.mark.parametrize("name", KERNELS)
def test_factors_are_correlations(name: str) -> None:
    """One at distance zero; what is left is the prior variance."""
    module = kernel(name, 2, (3,))
    (factors,), X = kernel_factors(module, 2).parts, torch.rand(4, 2).double()
    for factor in factors.factors:
        assert_close(factor(torch.zeros(1, 1).double()), torch.ones(3, 1, 1).double())
    assert_close(factors.scale().expand(3), dense_kernel(module, X, X)[..., 0, 0])


def test_a_spectral_mixtures_variance_is_the_sum_of_weights_in_each_dimension() -> None:
    module = SpectralMixtureKernel(3, ard_num_dims=2).double()
    module.mixture_weights = torch.tensor([0.5, 1.0, 1.5]).double()
    assert_close(kernel_factors(module, 2).scale(), torch.tensor(9.0).double())


def test_the_span_of_the_spread_kernel_holds_the_derivative_in_a_frequency() -> None:
    """That of a periodic kernel itself does not."""
    found = kernel_factors(kernel("periodic", 1), 1)
    (factors,), (spread,) = found.parts, found.spread([1.0]).parts
    x = torch.linspace(0.0, 1.0, 60).double()
    derivative = derivative_in_frequency(factors.factors[0], x)
    assert_close(spread.scale(), factors.scale())
    outside = norm_outside(derivative, spread.correlation(0, x, x))
    assert outside < 1e-3 * derivative.norm()
    assert norm_outside(derivative, factors.correlation(0, x, x)) > 0.1 * derivative.norm()


def derivative_in_frequency(factor: Factor, x: Tensor) -> Tensor:
    frequency, *others = factor.parameters
    distance = (x.unsqueeze(-1) - x).abs()
    moved = replace(factor, parameters=(frequency + 1e-4, *others))
    return (moved(distance) - factor(distance)) / 1e-4


def norm_outside(matrix: Tensor, kernel_matrix: Tensor) -> Tensor:
    """Of what is outside the eigenvectors that carry the kernel but for a part of 1e-9."""
    values, vectors = torch.linalg.eigh(kernel_matrix.detach())
    kept = vectors[:, values.cumsum(0) > 1e-9 * values.sum()]
    return (matrix.detach() - kept @ (kept.mT @ matrix.detach())).norm()


def test_only_oscillating_kernels_are_spread() -> None:
    found = kernel_factors(kernel("product", 2), 2)
    assert found.spread([1.0, 1.0]).parts[0].factors == found.parts[0].factors


def test_the_roughest_factor_counts() -> None:
    rough = MaternKernel(nu=0.5, active_dims=(0,)) * RBFKernel(active_dims=(1,))
    for part, kind in ((rough, "rough"), (RBFKernel(), "smooth")):
        size = DEFAULT_SIZES[kind][2]
        assert default_grid_size(kernel_factors(part, 2), 2) == ((size, size),)


def test_a_single_output_gets_its_dimension() -> None:
    found = kernel_factors(kernel("product", 2, (3,)), 2)
    x = torch.rand(4).double()
    (factors,), (single,) = found.parts, found.for_single_output().parts
    assert_close(single.scale(), factors.scale().unsqueeze(-1))
    assert_close(single.correlation(0, x, x), factors.correlation(0, x, x).unsqueeze(-3))


def _scaled(nu: float, *dims: int) -> Kernel:
    base = ProductMatern(nu=nu, ard_num_dims=len(dims), active_dims=dims)
    return ScaleKernel(base)


def _structured() -> Kernel:
    with pytest.warns(DeprecationWarning, match="AdditiveStructureKernel"):
        return AdditiveStructureKernel(RBFKernel(), num_dims=2)


SUMS: dict[str, tuple[Callable[[], Kernel], tuple[tuple[int, ...], ...]]] = {
    "one each": (lambda: _scaled(0.5, 2) + _scaled(1.5, 0) + _scaled(2.5, 1), ((2,), (0,), (1,))),
    "overlapping": (lambda: _scaled(0.5, 2, 1) + _scaled(1.5, 0, 1), ((1, 2), (0, 1))),
    "the same inputs": (lambda: _scaled(0.5, 0, 1) + _scaled(2.5, 0, 1), ((0, 1), (0, 1))),
    "joined": (
        lambda: _scaled(0.5, 1) + _scaled(1.5, 0) + _scaled(2.5, 1) + _scaled(2.5, 1, 2),
        ((1,), (0,), (1, 2)),
    ),
    "scaled, nested": (
        lambda: ScaleKernel(ScaleKernel(_scaled(0.5, 0) + _scaled(1.5, 2)) + _scaled(2.5, 1)),
        ((0,), (2,), (1,)),
    ),
    "product of sums": (
        lambda: ProductKernel(_scaled(0.5, 0) + _scaled(1.5, 1), _scaled(2.5, 2) + _scaled(0.5, 0)),
        ((0, 2), (0,), (1, 2), (0, 1)),
    ),
    "inside active dims": (
        lambda: AdditiveKernel(
            ProductKernel(_scaled(0.5, 0), _scaled(1.5, 1)),
            ScaleKernel(RBFKernel(active_dims=(2,))),
        ),
        ((0, 1), (2,)),
    ),
}


def randomized(build: Callable[[], Kernel]) -> Kernel:
    module = build().double()
    randomize(module)
    return module


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_that_of_its_parts_with_their_gradients(name: str) -> None:
    build, groups = SUMS[name]
    module, X, X2 = randomized(build), torch.rand(5, 3).double(), torch.rand(4, 3).double()
    found = kernel_factors(module, 3)
    assert found.groups(3) == groups
    own = sum(
        product_of(GridKernel((part,)), X[:, list(group)], X2[:, list(group)])
        for part, group in zip(found.parts, groups, strict=True)
    )
    dense = dense_kernel(module, X, X2)
    assert isinstance(own, Tensor)
    assert_close(own, dense.expand_as(own))
    assert_close(found.scale(), dense_kernel(module, X, X).diagonal()[0])
    weights = torch.randn_like(own)
    for single in (kernel_factors(module, 3).for_single_output(), found.spread([1.0] * 3)):
        assert single.groups(3) == groups
        assert_close(single.scale().reshape(()), found.scale())
    parameters = list(module.parameters())
    actual = torch.autograd.grad((weights * own).sum(), parameters)
    expected = torch.autograd.grad((weights * dense).sum(), parameters)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (LinearKernel(), "LinearKernel"),
        (ScaleKernel(CosineKernel()), "CosineKernel .* PeriodicKernel, SpectralMixtureKernel"),
        (RBFKernel(active_dims=(2,)), r"active_dims \(2,\)"),
        (RBFKernel(active_dims=(0,)) + LinearKernel(active_dims=(0,)), "LinearKernel"),
        (AdditiveKernel(), "AdditiveKernel .* to have parts, got none"),
        (
            _structured(),
            "AdditiveStructureKernel is not a sum .* ScaleKernel, ProductKernel and Additive",
        ),
        (
            SpectralMixtureKernel(2),
            r"SpectralMixtureKernel with ard_num_dims=1 that acts on 2 dimension\(s\) \(0, 1\). "
            r"Expected ard_num_dims=2, or active_dims that choose 1",
        ),
        (PeriodicKernel(ard_num_dims=3), "PeriodicKernel with ard_num_dims=3 that acts on 2"),
    ],
)
def test_other_kernels_are_refused_by_name(module: Kernel, name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        kernel_factors(module, 2)


class Bent(RBFKernel):
    """Computes something else than its base class."""

    def forward(self, x1: Tensor, x2: Tensor, **params: object) -> Tensor:
        return super().forward(x1, x2, **params) ** 2


class Renamed(RBFKernel):
    """Computes what its base class does."""


@pytest.mark.parametrize("module", [RBFKernelGrad(), Bent(), ScaleKernel(Bent())])
def test_a_derived_kernel_that_computes_another_is_refused(module: Kernel) -> None:
    with pytest.raises(UnsupportedError, match=r"type (RBFKernelGrad|Bent) is not a sum"):
        kernel_factors(module, 2)


def test_a_derived_kernel_that_computes_the_same_is_taken() -> None:
    X = torch.rand(3, 2).double()
    assert_close(
        product_of(kernel_factors(Renamed(), 2), X, X),
        product_of(kernel_factors(RBFKernel(), 2), X, X),
    )


@pytest.mark.parametrize("module", ["rbf", RBFKernel])
def test_what_is_no_kernel_is_refused(module: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"covar_module of type .*Expected one of: RBF"):
        kernel_factors(module, 2)
