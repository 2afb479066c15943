"""The interpolated kernel between points, by matrices of the nodes and by pairs of points."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import AdditiveKernel, Kernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream.bases.grid.interpolation import (
    InterpolatedKernel,
    covariance_of_pairs,
    interpolation_lines,
    pairs_of,
)
from bo_stream.bases.grid.kernel import GridKernel, kernel_factors
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.bases.kernels import ProductMatern
from bo_stream.testing.streams import assert_close
from tests.oracles.interpolation import interpolated_kernel
from tests.support.problems import KERNELS, kernel

BOUNDS = torch.tensor([[0.0, -1.0], [1.0, 0.5]], dtype=torch.float64)


def points(*shape: int) -> Tensor:
    """Inside the box, two of them in its corners."""
    inside = BOUNDS[0] + (BOUNDS[1] - BOUNDS[0]) * torch.rand(*shape, 2, dtype=torch.float64)
    inside[..., :2, :] = BOUNDS
    return inside


def both_ways(factors: GridKernel, mesh: Mesh, X: Tensor) -> tuple[Tensor, Tensor]:
    own = InterpolatedKernel.of(factors, mesh)
    lines = interpolation_lines(mesh, X).unsqueeze(-3)
    by_nodes = own.covariance(lines, own.images(lines))
    return covariance_of_pairs(factors, mesh, pairs_of(mesh, X)), by_nodes


def additive(batch: torch.Size) -> Kernel:
    """A sum over overlapping groups of inputs."""
    parts = (
        ScaleKernel(RBFKernel(active_dims=(1,), batch_shape=batch), batch_shape=batch),
        ScaleKernel(
            ProductMatern(2.5, active_dims=(0, 1), ard_num_dims=2, batch_shape=batch),
            batch_shape=batch,
        ),
    )
    return AdditiveKernel(*parts).double()


@pytest.mark.parametrize("name", KERNELS)
def test_pairs_of_points_are_the_interpolated_kernel(name: str) -> None:
    module, X = kernel(name, 2), points(6)
    factors = kernel_factors(module, 2).for_single_output()
    by_pairs, by_nodes = both_ways(factors, Mesh.over(BOUNDS, factors.groups(2), ((7, 9),)), X)
    expected = interpolated_kernel(module, BOUNDS, (7, 9))(X, X)
    assert_close(by_pairs.squeeze(0), expected)
    assert_close(by_nodes.squeeze(0), expected)


@pytest.mark.parametrize("batch_shape", [(2,), (3, 2)])
def test_pairs_of_a_sum_have_the_gradients_of_the_nodes_matrix(
    batch_shape: tuple[int, ...],
) -> None:
    module = additive(torch.Size(batch_shape))
    factors = kernel_factors(module, 2)
    mesh, X = Mesh.over(BOUNDS, factors.groups(2), ((8,), (7, 9))), points(*batch_shape[:-1], 5)
    by_pairs, by_nodes = both_ways(factors, mesh, X)
    assert_close(by_pairs, by_nodes)
    weights, parameters = torch.randn_like(by_pairs), list(module.parameters())
    found = torch.autograd.grad((weights * by_pairs).sum(), parameters, retain_graph=True)
    expected = torch.autograd.grad((weights * by_nodes).sum(), parameters)
    for own, other in zip(found, expected, strict=True):
        assert_close(own, other)
