"""The interpolation basis against the dense kernel ``W K Wᵀ`` and its eigenvectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bo_stream.bases.grid.contraction import MeshPullBack
from bo_stream.bases.grid.interpolation import (
    GridBasis,
    first_correlations,
    grid_basis,
    integrated_gram,
    relative_products,
    select_largest,
)
from bo_stream.bases.grid.kernel import kernel_factors
from bo_stream.bases.grid.mesh import Grid
from bo_stream.bases.grid.statistics import accumulate, zero_statistics
from bo_stream.testing.streams import assert_close
from tests.oracles.interpolation import (
    interpolated_kernel,
    interpolation_weights,
    kronecker_eigenpairs,
)
from tests.support.problems import KERNELS, kernel
from tests.support.problems.grids import mesh_of

BOUNDS = torch.tensor([[0.0, -1.0], [1.0, 0.5]], dtype=torch.float64)
GRID = Grid.over(BOUNDS, (7, 9))
MESH = mesh_of(GRID)
PART = Grid((0.25, -1.0), GRID.spacing, (3, 4))
GRID_NAMES = ["own grid", "part of it", "another"]


def basis_of(
    name: str, batch: tuple[int, ...] = (1,), tolerance: float = 0.0, max_rank: int = 1000
) -> GridBasis:
    factors = kernel_factors(kernel(name, 2, batch), 2)
    return grid_basis(MESH, factors, torch.Size(batch), tolerance, max_rank)


def points(*shape: int) -> Tensor:
    return BOUNDS[0] + (BOUNDS[1] - BOUNDS[0]) * torch.rand(*shape, 2, dtype=torch.float64)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("max_rank", [1000, 20])
def test_features_span_the_interpolated_kernel(name: str, max_rank: int) -> None:
    module = kernel(name, 2)
    factors = kernel_factors(module, 2).for_single_output()
    basis = grid_basis(MESH, factors, torch.Size((1,)), 0.0, max_rank)
    X = points(6)
    z = basis.features(X)
    expected = interpolated_kernel(module, BOUNDS, GRID.size, basis.rank)(X, X)
    assert_close((z @ z.mT).squeeze(0), expected)
    assert not basis.has_residual
    assert basis.residual_variance(X) is None


@pytest.mark.parametrize("batch_shape", [(), (2,)])
@pytest.mark.parametrize("name", KERNELS)
def test_correlations_of_the_first_node(name: str, batch_shape: tuple[int, ...]) -> None:
    (factors,) = kernel_factors(kernel(name, 2, batch_shape), 2).parts
    for i in range(2):
        nodes = GRID.nodes(i)
        first = factors.correlation(i, nodes[:1], nodes).squeeze(-2)
        assert_close(first_correlations(factors, GRID, i), first)


def test_features_of_a_batch_of_kernels() -> None:
    module = kernel("product", 2, (3, 2))
    factors = kernel_factors(module, 2)
    basis = grid_basis(MESH, factors, torch.Size((3, 2)), 0.0, 1000)
    X = points(3, 5)
    z = basis.features(X)
    expected = interpolated_kernel(module, BOUNDS, GRID.size)(X.unsqueeze(1), X.unsqueeze(1))
    assert_close(z @ z.mT, expected)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-4, 1e-9])
def test_rank_is_the_smallest_that_keeps_the_trace(tolerance: float) -> None:
    module = kernel("scaled", 2)
    factors = kernel_factors(module, 2).for_single_output()
    basis = grid_basis(MESH, factors, torch.Size((1,)), tolerance, 1000)
    values, _ = kronecker_eigenpairs(module, BOUNDS, GRID.size)
    left = 1.0 - values.cumsum(0) / values.sum()
    assert basis.rank == int((left > tolerance).sum()) + 1
    assert basis.dropped == pytest.approx(float(left[basis.rank - 1]), abs=1e-12)
    assert basis.dropped <= tolerance


def test_the_largest_products_are_kept_for_every_batch_element() -> None:
    first = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.5, 0.3]])
    second = torch.tensor([[0.6, 0.4], [1.0, 0.0]])
    products = relative_products((first, second))
    chosen, dropped = select_largest(products, tolerance=0.0, max_rank=3)
    assert chosen.tolist() == [0, 2, 1]
    assert dropped == pytest.approx(0.3)


def test_nothing_is_kept_of_a_zero_eigenvalue() -> None:
    chosen, dropped = select_largest(torch.tensor([0.7, 0.3, 0.0]), 0.0, 1000)
    assert chosen.tolist() == [0, 1]
    assert dropped == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("tolerance", [0.0, 1e-2])
@pytest.mark.parametrize("grid", [GRID, PART, Grid.over(BOUNDS, (5, 6))], ids=GRID_NAMES)
def test_pulls_statistics_back_to_whitened_weights(tolerance: float, grid: Grid) -> None:
    batch, n, mesh = (2, 2), 8, mesh_of(grid)
    basis = basis_of("product", batch, tolerance)
    statistics = zero_statistics(mesh, torch.Size(batch[:1]), 1, 2, torch.device("cpu"))
    inside = grid.bounds[0] + (grid.bounds[1] - grid.bounds[0]) * torch.rand(2, n, 2).double()
    X, Y = inside, torch.randn(2, 2, n).double()
    noise = 0.5 + torch.rand(2, 1, n).double()
    statistics = accumulate(statistics, mesh, X, Y, noise, torch.ones_like(noise))
    T = MeshPullBack(basis, mesh)

    features = features_through(basis, grid, X)
    columns = torch.stack((Y, torch.ones_like(Y)), -1)
    weighted = features / noise.unsqueeze(-1)
    assert_close(T.congruence(statistics.gram), features.mT @ weighted, factor=10)
    assert_close(T.transpose(statistics.moment), weighted.mT @ columns, factor=10)


def features_through(basis: GridBasis, grid: Grid, X: Tensor) -> Tensor:
    """Features interpolated from their values at another grid's nodes."""
    if grid.offset_in(GRID) is not None:
        return basis.features(X)
    nodes = torch.cartesian_prod(*(grid.nodes(i) for i in range(2)))
    return interpolation_weights(X, BOUNDS, grid.size).unsqueeze(-3) @ basis.features(nodes)


@pytest.mark.parametrize(
    "box", [BOUNDS, torch.tensor([[0.13, -0.9], [0.58, -0.2]]).double()], ids=["whole", "part"]
)
def test_integrated_gram_is_the_integral(box: Tensor) -> None:
    basis = basis_of("scaled", (2,))
    lines = [quadrature(GRID.nodes(i).numpy(), *box[:, i].tolist()) for i in range(2)]
    X = torch.cartesian_prod(*(line[0] for line in lines))
    weights = torch.outer(*(line[1] for line in lines)).flatten()
    z = basis.features(X)
    assert_close(integrated_gram(basis, box), z.mT @ (weights.unsqueeze(-1) * z))


def quadrature(nodes: np.ndarray, low: float, high: float) -> tuple[Tensor, Tensor]:
    """A mean over an interval, exact for polynomials of degree 19 between the nodes."""
    edges = np.unique(np.clip(nodes, low, high))
    unit, weights = np.polynomial.legendre.leggauss(10)
    width = np.diff(edges)[:, None]
    x = edges[:-1, None] + width * (unit + 1.0) / 2.0
    share = width * weights / 2.0 / (high - low)
    return torch.from_numpy(x.ravel()), torch.from_numpy(share.ravel())
