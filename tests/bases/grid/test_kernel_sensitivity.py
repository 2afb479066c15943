"""The gradient of the expected log prior against the dense expression, differentiated."""

from __future__ import annotations

import pytest
import torch

from bo_stream.bases.grid.contraction import (
    expected_log_prior,
    pairs_within_groups,
    prior_covariance,
    prior_variance,
)
from bo_stream.bases.grid.interpolation import grid_basis
from bo_stream.bases.grid.kernel import kernel_factors
from bo_stream.testing.streams import assert_close
from tests.oracles.interpolation import interpolation_weights, largest_eigenvectors, node_inputs
from tests.oracles.kernels import dense_kernel
from tests.support.problems import kernel
from tests.support.problems.grids import mesh_over


@pytest.mark.parametrize("sizes", [(8,), (6, 5), (4, 5, 4)])
@pytest.mark.parametrize("name", ["Matérn-1/2", "product of scaled", "product"])
def test_gradient_is_that_of_the_dense_prior(name: str, sizes: tuple[int, ...]) -> None:
    """``½ (log|K(θ)| + E[uᵀ K(θ)⁻¹ u])`` for the node values u in the kept directions."""
    dim = len(sizes)
    bounds = torch.tensor([[0.0] * dim, [1.0] * dim], dtype=torch.float64)
    mesh = mesh_over(bounds, sizes)
    module = kernel(name, dim)
    factors = kernel_factors(module, dim).for_single_output()
    basis = grid_basis(mesh, factors, torch.Size((1,)), 0.0, 12)
    root = torch.randn(1, basis.rank, basis.rank, dtype=torch.float64)
    second_moment = root @ root.mT
    value = expected_log_prior(basis, factors, second_moment).sum()
    actual = torch.autograd.grad(value, list(module.parameters()))

    nodes = node_inputs(bounds, sizes)
    E = largest_eigenvectors(module, bounds, sizes, basis.rank)
    kept = E.mT @ dense_kernel(module, nodes, nodes) @ E
    scales = kept.detach().diagonal().sqrt()
    X = torch.rand(50, dim, dtype=torch.float64)
    # eigenvectors are unique up to their sign
    signs = (basis.features(X)[0] * (interpolation_weights(X, bounds, sizes) @ E)).sum(0).sign()
    moment = torch.outer(signs * scales, signs * scales) * second_moment[0]
    prior = 0.5 * (torch.logdet(kept) + (torch.linalg.inv(kept) * moment).sum())
    expected = torch.autograd.grad(prior, list(module.parameters()))
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, factor=10)


@pytest.mark.parametrize("sizes", [(8,), (6, 5), (4, 5, 4)])
def test_prior_covariance_is_another_kernel_as_far_as_the_basis_spans_it(
    sizes: tuple[int, ...],
) -> None:
    dim = len(sizes)
    bounds = torch.tensor([[0.0] * dim, [1.0] * dim], dtype=torch.float64)
    mesh = mesh_over(bounds, sizes)
    module, other = kernel("product", dim), kernel("product", dim)
    factors = kernel_factors(module, dim).for_single_output()
    basis = grid_basis(mesh, factors, torch.Size((1,)), 0.0, 12)
    other_factors = kernel_factors(other, dim).for_single_output()
    moved = prior_covariance(basis, other_factors)
    assert_close(prior_covariance(basis, factors)[0], torch.eye(basis.rank))
    assert_close(prior_variance(basis, other_factors), moved.diagonal(dim1=-2, dim2=-1))

    X = torch.rand(9, dim, dtype=torch.float64)
    z, W = basis.features(X)[0], interpolation_weights(X, bounds, sizes)
    E = largest_eigenvectors(module, bounds, sizes, basis.rank)
    nodes = node_inputs(bounds, sizes)
    K = E @ (E.mT @ dense_kernel(other, nodes, nodes) @ E) @ E.mT
    own, dense = z @ moved[0] @ z.mT, W @ K @ W.mT
    assert_close(own, dense)
    weights = torch.randn(9, 9, dtype=torch.float64)
    parameters = list(other.parameters())
    actual = torch.autograd.grad((weights * own).sum(), parameters)
    expected = torch.autograd.grad((weights * dense).sum(), parameters)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


def test_pairs_of_equal_keys() -> None:
    key = torch.tensor([3, 1, 3, 7, 1, 3])
    rows, columns = pairs_within_groups(key)
    found = sorted(zip(rows.tolist(), columns.tolist(), strict=True))
    assert found == [(i, j) for i in range(6) for j in range(6) if key[i] == key[j]]
