"""The interpolation error that is reported against the one that is measured."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import Kernel, PeriodicKernel, RBFKernel, SpectralMixtureKernel
from torch import Tensor

from bo_stream.bases.grid.kernel import (
    default_grid_size,
    interpolation_error,
    kernel_factors,
    sufficient_grid_size,
)
from bo_stream.bases.kernels import ProductMatern
from tests.oracles.interpolation import interpolated_kernel
from tests.oracles.kernels import dense_kernel
from tests.support.problems.grids import mesh_over

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
LINE = BOUNDS[:, :1]


def with_lengthscales(module: Kernel, *lengthscales: float) -> Kernel:
    module.lengthscale = torch.tensor([lengthscales])
    return module.double()


def measured_error(module: Kernel, sizes: tuple[int, ...], bounds: Tensor = BOUNDS) -> float:
    """Largest ``|k − k̃|`` over random pairs and random points, as parts of the prior variance."""
    X = bounds[1] * torch.rand(600, bounds.shape[-1], dtype=torch.float64)
    X2 = (X + 0.05 * torch.randn_like(X)).clamp(bounds[0], bounds[1])
    difference = 0.0
    for a, b in ((X, X), (X, X2)):
        exact = dense_kernel(module, a, b)
        approximate = interpolated_kernel(module, bounds, sizes)(a, b)
        difference = max(difference, float((exact - approximate).detach().abs().max()))
    return difference


@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (with_lengthscales(RBFKernel(ard_num_dims=2), 0.2, 0.4), (12, 14)),
        (with_lengthscales(RBFKernel(ard_num_dims=2), 0.3, 0.2), (30, 12)),
        (with_lengthscales(ProductMatern(nu=2.5, ard_num_dims=2), 0.2, 0.4), (12, 14)),
        (with_lengthscales(ProductMatern(nu=1.5, ard_num_dims=2), 0.2, 0.4), (12, 14)),
        (with_lengthscales(ProductMatern(nu=0.5, ard_num_dims=2), 0.2, 0.4), (12, 14)),
    ],
)
def test_error_is_a_bound_and_not_a_loose_one(module: Kernel, sizes: tuple[int, ...]) -> None:
    bound = interpolation_error(kernel_factors(module, 2), mesh_over(BOUNDS, sizes))
    measured = measured_error(module, sizes)
    assert measured <= 1.05 * bound
    assert bound <= 3.0 * measured


def test_the_sufficient_grid_is_sufficient_and_hardly_more() -> None:
    module = with_lengthscales(RBFKernel(ard_num_dims=2), 0.1, 0.2)
    factors, grid = kernel_factors(module, 2), mesh_over(BOUNDS, (8, 8))
    found = sufficient_grid_size(factors, grid, 0.01)
    assert found is not None
    (sizes,) = found
    assert interpolation_error(factors, mesh_over(BOUNDS, sizes)) <= 0.01
    coarser = tuple(int(size / 1.3) for size in sizes)
    assert interpolation_error(factors, mesh_over(BOUNDS, coarser)) > 0.01


def test_a_grid_that_is_fine_enough_stays() -> None:
    module = with_lengthscales(RBFKernel(ard_num_dims=2), 0.5, 1.0)
    grid = mesh_over(BOUNDS, (20, 25))
    assert sufficient_grid_size(kernel_factors(module, 2), grid, 0.01) == ((20, 25),)


def test_no_grid_carries_a_kernel_that_is_too_rough() -> None:
    module = with_lengthscales(ProductMatern(nu=0.5, ard_num_dims=2), 1e-3, 1.0)
    grid = mesh_over(BOUNDS, (20, 20))
    assert sufficient_grid_size(kernel_factors(module, 2), grid, 1e-3) is None


def oscillating(period: float) -> list[Kernel]:
    """Two kernels of about this period in one dimension."""
    periodic = with_lengthscales(PeriodicKernel(), 2.0)
    periodic.period_length = period
    mixture = SpectralMixtureKernel(1).double()
    mixture.mixture_means, mixture.mixture_scales = 1.0 / period, 0.2
    mixture.mixture_weights = 1.0
    return [periodic, mixture]


@pytest.mark.parametrize("module", oscillating(0.1), ids=["periodic", "mixture"])
def test_the_sufficient_grid_resolves_a_period(module: Kernel) -> None:
    factors, coarse = kernel_factors(module, 1), mesh_over(LINE, (12,))
    assert interpolation_error(factors, coarse) > 0.5
    found = sufficient_grid_size(factors, coarse, 0.05)
    assert found is not None
    (sizes,) = found
    assert measured_error(module, sizes, LINE) <= 0.05
    assert 5 < 0.1 * sizes[0] < 12


@pytest.mark.parametrize("module", oscillating(0.025), ids=["periodic", "mixture"])
def test_a_period_that_divides_the_cells_is_not_overlooked(module: Kernel) -> None:
    """All nodes, and all quarters of cells, see a constant."""
    assert interpolation_error(kernel_factors(module, 1), mesh_over(LINE, (13,))) > 0.5


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_rough_kernels_get_finer_grids(dim: int) -> None:
    (smooth,) = default_grid_size(kernel_factors(RBFKernel(), dim), dim)
    (rough,) = default_grid_size(kernel_factors(ProductMatern(nu=2.5), dim), dim)
    assert len(smooth) == len(rough) == dim
    assert all(a <= b for a, b in zip(smooth, rough, strict=True))
