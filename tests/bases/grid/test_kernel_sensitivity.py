"""The gradient of the expected log prior against the dense expression, differentiated."""

from __future__ import annotations

import pytest
import torch

from bo_stream.bases.grid.contraction import (
    Rewhitening,
    expected_log_prior,
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


@pytest.mark.parametrize("sizes", [(8,), (6, 5), (4, 5, 4)])
@pytest.mark.parametrize("name", ["Matérn-1/2", "product of scaled", "product"])
def test_whitening_under_another_kernel(name: str, sizes: tuple[int, ...]) -> None:
    """``L Lᵀ`` is the prior covariance of the other kernel, of which L⁻¹ w is white."""
    dim = len(sizes)
    mesh = mesh_over(torch.tensor([[0.0] * dim, [1.0] * dim], dtype=torch.float64), sizes)
    module, other = kernel(name, dim), kernel(name, dim)
    one = kernel_factors(module, dim).for_single_output()
    basis = grid_basis(mesh, one, torch.Size((1,)), 0.0, 12)
    moved = kernel_factors(other, dim).for_single_output()
    whitening, P = Rewhitening.of(basis, moved), prior_covariance(basis, moved)
    L = whitening.transpose(torch.eye(basis.rank, dtype=torch.float64).unsqueeze(0)).mT
    assert_close(L @ L.mT, P)
    assert_close(whitening.variance(), P.diagonal(dim1=-2, dim2=-1))
    root = torch.randn(1, basis.rank, basis.rank, dtype=torch.float64)
    gram, z = root @ root.mT, torch.randn(1, 7, basis.rank, dtype=torch.float64)
    assert_close(whitening.congruence(gram), L.mT @ gram @ L, factor=10)
    assert_close(whitening.features(z), z @ L)

    parameters = list(other.parameters())
    value = expected_log_prior(basis, moved, gram, whitening).sum()
    actual = torch.autograd.grad(value, parameters, retain_graph=True)
    moment = (L @ gram @ L.mT).detach()
    dense = 0.5 * (torch.logdet(P) + (torch.linalg.inv(P) * moment).sum((-2, -1))).sum()
    for a, e in zip(actual, torch.autograd.grad(dense, parameters), strict=True):
        assert_close(a, e, factor=100)


@pytest.mark.parametrize("rank", [1, 7, 30, 60])
def test_a_product_of_functions_comes_with_all_of_lower_ones(rank: int) -> None:
    sizes = (4, 5, 4)
    mesh = mesh_over(torch.tensor([[0.0] * 3, [1.0] * 3], dtype=torch.float64), sizes)
    factors = kernel_factors(kernel("product", 3), 3).for_single_output()
    (part,) = grid_basis(mesh, factors, torch.Size((1,)), 0.0, rank).parts
    features = {tuple(own) for own in part.index.tolist()}
    for own in features:
        for i in range(3):
            assert own[i] == 0 or (*own[:i], own[i] - 1, *own[i + 1 :]) in features
    for i, lines in enumerate(part.lines):
        for rows in lines.split(lines.order.unsqueeze(-1)):
            along = part.index[rows.squeeze(-1)]
            assert torch.equal(along[..., i], torch.arange(along.shape[1]).expand(along.shape[:2]))
            others = [j for j in range(3) if j != i]
            assert torch.equal(
                along[..., others], along[:, :1, others].expand_as(along[..., others])
            )
        assert torch.equal(lines.order[lines.inverse], torch.arange(part.rank))
