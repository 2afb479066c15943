"""The marginal likelihood of a stream whose hyperparameters are what is differentiated."""

from __future__ import annotations

import pytest
import torch
from linear_operator.utils.errors import NotPSDError
from torch import Tensor
from torch.distributions import MultivariateNormal

from bo_stream.bases.grid.contraction import prior_covariance
from bo_stream.bases.grid.interpolation import grid_basis
from bo_stream.bases.grid.kernel import kernel_factors
from bo_stream.linalg import cholesky_with_jitter
from bo_stream.marginal_likelihood import (
    NoiseGroup,
    combine,
    dense_log_marginal_likelihood,
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


# --- of rows with a dense covariance: the log density of a normal ---------------------------------


def problem(*batch: int, n: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """A covariance, values and noise variances, all of which are differentiated."""
    root = torch.randn(*batch, n, n, dtype=torch.float64)
    values, noise = (
        torch.randn(*batch, n, dtype=torch.float64),
        0.5 + torch.rand(*batch, n, dtype=torch.float64),
    )
    leaves = (root @ root.mT / n, values, noise)
    return tuple(leaf.requires_grad_() for leaf in leaves)  # type: ignore[return-value]


@pytest.mark.parametrize("batch", [(1,), (2, 2)], ids=str)
def test_value_and_gradients_are_those_of_torch(batch: tuple[int, ...]) -> None:
    """Of elements whose sum is weighted, as where priors or counts differ."""
    leaves = problem(*batch)
    covariance, values, noise = leaves
    found = dense_log_marginal_likelihood(covariance, values, noise)
    matrix = covariance + torch.diag_embed(noise)
    normal = MultivariateNormal(torch.zeros_like(values), 0.5 * (matrix + matrix.mT))
    expected = normal.log_prob(values)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.rand(batch, dtype=torch.float64)
    gradients = [torch.autograd.grad((v * weights).sum(), leaves) for v in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)


def test_values_alone_take_no_inverse(monkeypatch: pytest.MonkeyPatch) -> None:
    covariance, values, noise = problem(1)
    expected = torch.autograd.grad(
        dense_log_marginal_likelihood(covariance, values, noise).sum(), values
    )
    monkeypatch.setattr(torch, "cholesky_inverse", None)
    value = dense_log_marginal_likelihood(covariance.detach(), values, noise.detach())
    torch.testing.assert_close(torch.autograd.grad(value.sum(), values), expected)


def test_gradient_in_a_scale_of_a_matrix_that_needs_a_jitter() -> None:
    """It is that of the value: ``s (C + j I)`` scales as a whole, and y has no part outside of C.

    Then ``d / d log s log N(y; 0, s (C + j I)) = ½ (yᵀ (C + j I)⁻¹ y / s − n)``.
    """
    n, scale = 12, torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    root = torch.randn(n, 3, dtype=torch.float64)
    C = root @ root.mT - 1e-11 * torch.eye(
        n, dtype=torch.float64
    )  # of no smaller jitter than 1e-10
    values, none = (
        (root @ torch.randn(3, dtype=torch.float64))[None],
        torch.zeros(1, n, dtype=torch.float64),
    )
    factor, jitter = cholesky_with_jitter(scale.detach() * C)
    assert jitter > 0.0
    value = dense_log_marginal_likelihood((scale * C)[None], values, none)
    (gradient,) = torch.autograd.grad(value.sum(), scale)
    whitened = torch.linalg.solve_triangular(factor, values.mT, upper=False)
    expected = 0.5 * (whitened.square().sum() - n) / scale.detach()
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("entry", [torch.nan, -5.0], ids=["NaN", "indefinite"])
def test_a_matrix_that_has_no_factor_is_refused(entry: float) -> None:
    covariance, values, noise = problem(1)
    covariance.detach()[..., 2, 2] = entry
    with pytest.raises(NotPSDError, match="Check the noise variance"):
        dense_log_marginal_likelihood(covariance, values, noise)


def test_a_second_derivative_is_refused() -> None:
    leaves = problem(1)
    value = dense_log_marginal_likelihood(*leaves).sum()
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(value, leaves, create_graph=True)
