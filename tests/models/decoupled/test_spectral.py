"""Covariance functions that combine the mean's: what they leave, and what a renewal keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream import DecoupledGP
from bo_stream.models.decoupled.collapse import _RIDGE, with_eigenfunctions
from bo_stream.models.decoupled.posterior import DecoupledPosterior, Expanded, SpectralCovariance
from bo_stream.testing.streams import assert_gradient, joint_covariance
from tests.oracles.kernels import dense_kernel
from tests.support.problems.likelihoods import LIKELIHOODS

D, SPAN, RANK = 2, 30, 8


def kernel_of(smooth: bool, lengthscale: float = 0.3) -> ScaleKernel:
    base = RBFKernel(ard_num_dims=D) if smooth else MaternKernel(nu=2.5, ard_num_dims=D)
    kernel = ScaleKernel(base).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 2.0, lengthscale
    return kernel.requires_grad_(False)


def data(n: int = 200) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, D, dtype=torch.float64)
    return X, (7.0 * X[:, :1]).sin() + X[:, 1:] ** 2 + 0.1 * torch.randn(n, 1).double()


def fitted(steps: int = 12, smooth: bool = True, rank: int = RANK, **options: Any) -> DecoupledGP:
    """With a kernel and a likelihood that stay."""
    X, Y = data()
    defaults = {"num_mean": 40, "num_span": SPAN, "batch_size": 60, "num_columns": 20}
    defaults["initial_points"] = 0
    model = DecoupledGP(
        X,
        Y,
        covar_module=kernel_of(smooth),
        likelihood=LIKELIHOODS["gaussian"]().requires_grad_(False),
        num_covar=rank,
        **{**defaults, **options},
    )
    model.fit(steps, progress=False)
    return model


def expanded(model: DecoupledGP) -> Expanded:
    posterior = model._memory.posterior
    constant = model.mean_module.constant.detach().reshape(1)
    return Expanded(posterior, model.covar_module, constant, 1)


def renewed(model: DecoupledGP, X: Tensor, rank: int = RANK) -> DecoupledPosterior:
    return with_eigenfunctions(expanded(model), X, SPAN, rank)


def left_over(model: DecoupledGP, posterior: DecoupledPosterior, X: Tensor) -> float:
    """Variance of the prior that the covariance's functions do not explain, on average."""
    basis = replace(expanded(model), posterior=posterior).basis
    return float(basis.residual_variance(X).mean())


def test_is_the_default() -> None:
    X, Y = data(20)
    model = DecoupledGP(X, Y, num_mean=16, num_covar=3)
    posterior = model._memory.posterior
    assert isinstance(posterior.covariance, SpectralCovariance)
    assert posterior.covariance.combination.shape == (1, 12, 3)
    assert torch.equal(posterior.beta.points, posterior.alpha.points[:, :12])


@pytest.mark.parametrize("smooth", [True, False])
def test_leaves_the_least_variance_that_so_many_functions_can(smooth: bool) -> None:
    """The tail of the eigenvalues of the span's covariance, by a dense eigendecomposition.

    With the ridge under which eigenfunctions are sought it is a bound from above: a combination c
    is divided by at least its standard deviation, and so explains no less.
    """
    model = fitted(smooth=smooth)
    X = torch.rand(300, D, dtype=torch.float64)
    after = renewed(model, X)
    Z, kernel = after.alpha.points[0, :SPAN], model.covar_module
    inner, cross = kernel(Z).to_dense(), kernel(Z, X).to_dense()
    found, scale = left_over(model, after, X), float(kernel.outputscale)

    def least(ridge: float) -> float:
        half = torch.linalg.cholesky(inner + ridge * scale * torch.eye(SPAN).double())
        features = torch.linalg.solve_triangular(half, cross, upper=False)
        values = torch.linalg.eigvalsh(features @ features.T / len(X))
        return scale - float(values[-RANK:].sum())

    assert least(1e-11) - 1e-5 <= found <= least(_RIDGE) + 1e-5
    points = replace(after.covariance, combination=torch.eye(SPAN).double()[None, :, :RANK])
    assert found < 0.8 * left_over(model, replace(after, covariance=points), X)


def test_a_renewal_keeps_the_mean() -> None:
    model = fitted()
    T = torch.rand(20, D, dtype=torch.float64)
    now = expanded(model)
    after = replace(now, posterior=renewed(model, T))
    assert not torch.allclose(after.posterior.coefficients, now.posterior.coefficients)
    torch.testing.assert_close(after.at(T).mean, now.at(T).mean, rtol=0, atol=1e-8)


def test_a_renewal_keeps_the_covariance_where_nothing_is_left_out() -> None:
    model = fitted(rank=SPAN, smooth=False)
    T = torch.rand(20, D, dtype=torch.float64)
    before = joint_covariance(model.posterior(T))
    model._set_memory(replace(model._memory, posterior=renewed(model, T, SPAN)))
    torch.testing.assert_close(joint_covariance(model.posterior(T)), before, rtol=0, atol=1e-5)


def test_a_renewal_keeps_what_data_say_of_functions_in_the_span_before() -> None:
    """From precisions of the whole span: those that features of the new functions would have."""
    model = fitted(0, rank=SPAN, natural_rate=1.0, batch_size=200)
    X = model._memory.replay.at(torch.arange(200)).X
    after = replace(expanded(model), posterior=renewed(model, X))
    z, noise = after.basis.features(X)[0], float(model.likelihood.noise)
    found = after.posterior.covariance
    assert isinstance(found, SpectralCovariance)
    torch.testing.assert_close(found.gram[0], z.T @ z / noise, rtol=1e-4, atol=1e-4)


def test_renewals_follow_the_kernel() -> None:
    model = fitted(steps=0)
    X = torch.rand(300, D, dtype=torch.float64)
    with torch.no_grad():
        model.covar_module.base_kernel.lengthscale = torch.tensor([[5.0, 0.1]])
    stale = left_over(model, model._memory.posterior, X)
    model.fit(10, progress=False)
    assert left_over(model, model._memory.posterior, X) < 0.9 * stale


def test_a_step_combines_few_again_and_keeps_the_mean() -> None:
    """After the best posterior, whose functions combine all of the mean's."""
    model = fitted(learning_rate=0.0).optimize_posterior()
    assert len(model._memory.posterior.beta) == 40
    T = torch.rand(20, D, dtype=torch.float64)
    now = expanded(model)
    after = replace(now, posterior=renewed(model, T))
    assert len(after.posterior.beta) == SPAN
    torch.testing.assert_close(after.at(T).mean, now.at(T).mean, rtol=0, atol=1e-6)
    model.fit(1, progress=False)
    assert len(model._memory.posterior.beta) == SPAN


@pytest.mark.parametrize("smooth", [True, False])
def test_gradients_of_features_pass_through_combinations(smooth: bool) -> None:
    model = fitted(smooth=smooth)
    X = torch.rand(5, D, dtype=torch.float64)

    def mean_and_variance(X: Tensor) -> Tensor:
        posterior = model.posterior(X)
        return posterior.mean.sum() + posterior.variance.sum()

    assert_gradient(mean_and_variance, X)


def test_learned_points_stay_those_of_both_bases() -> None:
    X, Y = data()
    model = DecoupledGP(
        X, Y, num_mean=20, num_covar=3, learn_mean_points=True, batch_size=60, initial_points=0
    )
    before = model._memory.posterior.alpha.points
    model.fit(7, progress=False)
    posterior = model._memory.posterior
    assert torch.equal(posterior.beta.points, posterior.alpha.points[:, :12])
    assert not torch.equal(posterior.alpha.points, before)


def test_the_mean_is_found_from_minibatches() -> None:
    """Given hyperparameters: what the best coefficients of α leave is nearly reached."""
    X, Y = data()
    kernel, likelihood = kernel_of(smooth=True), LIKELIHOODS["gaussian"]().requires_grad_(False)
    likelihood.noise = 0.01
    model = DecoupledGP(
        X, Y, likelihood, kernel, num_mean=40, num_covar=RANK, batch_size=80, num_columns=30
    )
    model.mean_module.requires_grad_(False)
    model.fit(120, progress=False)
    Z = model._memory.posterior.alpha.points[0]
    cross, inner = (dense_kernel(kernel, A, Z) for A in (X, Z))
    constant = float(model.mean_module.constant)
    weights = torch.linalg.solve(inner + cross.T @ cross / 0.01, cross.T @ (Y - constant) / 0.01)
    best = float((Y - constant - cross @ weights).square().mean())
    found = float((Y - model.posterior(X).mean).square().mean())

    assert found < 1.25 * best
