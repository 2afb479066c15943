"""The marginal likelihood of a stream whose hyperparameters are what is differentiated."""

from __future__ import annotations

import pytest
import torch

from bo_stream.bases.grid.contraction import prior_covariance
from bo_stream.bases.grid.interpolation import grid_basis
from bo_stream.bases.grid.kernel import kernel_factors
from bo_stream.marginal_likelihood import (
    NoiseGroup,
    combine,
    subspace_log_marginal_likelihood,
)
from bo_stream.models.wiski.cache import differentiable_log_marginal_likelihood
from bo_stream.testing.streams import assert_close
from bo_stream.weights import solve, weighted_statistics
from tests.oracles.gaussian_process import DenseGP
from tests.oracles.interpolation import interpolated_kernel
from tests.support.problems import kernel
from tests.support.problems.grids import mesh_over

SIZES = (6, 7)
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()


@pytest.mark.parametrize("moved", [False, True], ids=["where it was built", "elsewhere"])
def test_two_noise_groups_and_the_mean_are_learned_together(moved: bool) -> None:
    """Values, the posterior, and gradients in kernel, both levels, mean and outcome scale."""
    module, centre = (kernel("product", 2) for _ in range(2))
    factors, at_centre = (kernel_factors(m, 2).for_single_output() for m in (module, centre))
    mesh = mesh_over(BOUNDS, SIZES)
    basis = grid_basis(mesh, at_centre if moved else factors, torch.Size([1]), 0.0, 1000)
    X, y, relative = torch.rand(12, 2).double(), torch.randn(12).double(), torch.rand(12).double()
    levels = [torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (0.3, 1.7)]
    slope, constant = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.6, 0.2))
    parts = (slice(0, 5), slice(5, 12))

    Phi, one = basis.features(X), torch.ones(1, 12, dtype=torch.float64)
    groups = [
        NoiseGroup(
            weighted_statistics(Phi[:, s], y[None, s], 0.1 + relative[None, s], one[:, s]), level
        )
        for s, level in zip(parts, levels, strict=True)
    ]
    residual = torch.stack((slope, constant)).view(1, 2, 1)
    if moved:
        prior = prior_covariance(basis, factors)
        own = subspace_log_marginal_likelihood(groups, residual, prior)
    else:
        own = differentiable_log_marginal_likelihood(groups, residual, basis, factors)

    level = torch.cat([lv.expand(len(y[s])) for s, lv in zip(parts, levels, strict=True)])
    covariance = interpolated_kernel(module, BOUNDS, SIZES)
    noise = level * (0.1 + relative)
    dense = DenseGP(covariance, torch.zeros(1), X, slope * y + constant, noise)
    expected = dense.log_marginal_likelihood()
    assert_close(own, expected.unsqueeze(0))

    parameters = [*module.parameters(), *levels, slope, constant]
    actual = torch.autograd.grad(own.sum(), parameters)
    wanted = torch.autograd.grad(expected, parameters)
    for a, w in zip(actual, wanted, strict=True):
        assert_close(a, w)

    if moved:
        return
    T = torch.rand(4, 2).double()
    posterior = solve(combine(groups, residual))
    z = basis.features(T)
    mean, cov = dense.posterior(T)
    assert_close((z @ posterior.mean).flatten(), mean)
    assert_close((z @ posterior.covariance() @ z.mT)[0], cov)
