"""The best posterior of a decoupled model's functions, against dense regression."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream import DecoupledGP
from bo_stream.models.decoupled import inference as decoupled_inference
from bo_stream.models.decoupled.collapse import between
from bo_stream.models.decoupled.posterior import DirectCovariance, Expanded, SpectralCovariance
from bo_stream.testing.streams import (
    assert_same_posterior,
    assert_untouched,
    fingerprint,
    joint_covariance,
)
from tests.oracles.inducing import SGPR, two_basis_bound
from tests.oracles.kernels import dense_kernel
from tests.support.problems.likelihoods import LIKELIHOODS, outcomes

D, N = 2, 120


def kernel() -> ScaleKernel:
    chosen = ScaleKernel(RBFKernel(ard_num_dims=D)).double()
    chosen.outputscale, chosen.base_kernel.lengthscale = 1.5, 0.15
    return chosen.requires_grad_(False)


def data(name: str = "gaussian", n: int = N) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, D, dtype=torch.float64)
    return X, outcomes(name, X)


def model_of(X: Tensor, Y: Tensor, name: str = "gaussian", **options: Any) -> DecoupledGP:
    """With hyperparameters that stay, after a few steps."""
    defaults = {
        "likelihood": LIKELIHOODS[name]().requires_grad_(False),
        "covar_module": kernel(),
        "num_mean": 40,
        "num_covar": 8,
        "num_span": 20,
        "learning_rate": 0.0,
    }
    model = DecoupledGP(X, Y, **{**defaults, **options})
    model.fit(5, progress=False)
    return model


def constant(model: DecoupledGP) -> float:
    return float(model.mean_module.constant.detach())


def regression(X: Tensor, Y: Tensor, model: DecoupledGP, Z: Tensor, weight: float = 1.0) -> SGPR:
    """On values at Z, by dense formulas; a datum counts ``weight`` times."""
    noise = torch.full((len(X),), float(model.likelihood.noise.detach()) / weight).double()
    y = Y[:, 0] - constant(model)
    K = model.covar_module
    return SGPR(dense_kernel(K, X, X), dense_kernel(K, X, Z), dense_kernel(K, Z, Z), y, noise)


def mean_points(model: DecoupledGP) -> Tensor:
    posterior = model._memory.posterior
    if type(posterior.covariance).__name__ == "HybridCovariance":
        return torch.cat((posterior.alpha.points[0], posterior.beta.points[0]))
    return posterior.alpha.points[0]


def assert_best_mean(model: DecoupledGP, X: Tensor, Y: Tensor, weight: float = 1.0) -> None:
    T, Z, K = torch.rand(7, D).double(), mean_points(model), model.covar_module
    dense = regression(X, Y, model, Z, weight)
    mean, _ = dense.predict(dense_kernel(K, T, Z), dense_kernel(K, T, T))
    found = model.posterior(T).mean[:, 0]
    expected = mean + constant(model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"preconditioner": "jacobi"}, {"preconditioner": None}])
@pytest.mark.parametrize("parametrization", ["spectral", "hybrid", "direct"])
def test_the_mean_is_that_of_regression_on_all_functions(
    parametrization: str, options: dict[str, Any]
) -> None:
    X, Y = data()
    model = model_of(X, Y, parametrization=parametrization, **options).optimize_posterior()
    assert_best_mean(model, X, Y)


@pytest.mark.parametrize("parametrization", ["spectral", "hybrid"])
def test_the_covariance_is_the_best_of_its_functions(parametrization: str) -> None:
    X, Y = data()
    model = model_of(X, Y, parametrization=parametrization).optimize_posterior()
    posterior, T = model._memory.posterior, torch.rand(7, D).double()
    covariance, Z = posterior.covariance, posterior.beta.points[0]
    L = (
        covariance.combination[0]
        if isinstance(covariance, SpectralCovariance)
        else torch.eye(len(Z)).double()
    )
    whole, K = regression(X, Y, model, Z), model.covar_module
    dense = replace(whole, cross=whole.cross @ L, inner=L.mT @ whole.inner @ L)
    _, covariance = dense.predict(dense_kernel(K, T, Z) @ L, dense_kernel(K, T, T))
    found = joint_covariance(model.posterior(T))[0]
    torch.testing.assert_close(found, covariance, rtol=1e-6, atol=1e-6)


def test_with_one_basis_for_both_the_bound_is_titsias_s() -> None:
    X, Y = data()
    model = model_of(X, Y, num_mean=30, num_covar=30, num_span=30, num_added=30)
    model.optimize_posterior()
    expected = regression(X, Y, model, model._memory.posterior.alpha.points[0]).bound()
    torch.testing.assert_close(model.elbo(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rank", [3, 8, 40])
def test_the_covariance_s_functions_are_the_best_in_the_span_of_all(rank: int) -> None:
    X, Y = data()
    model = model_of(X, Y, num_covar=rank, num_span=None).optimize_posterior()
    Z = model._memory.posterior.alpha.points[0]
    assert len(model._memory.posterior.beta) == len(Z) == 40
    whole = regression(X, Y, model, Z)
    noise = model.likelihood.noise.item()
    expected = two_basis_bound(whole.K, whole.cross, whole.inner, whole.y, noise, rank)
    torch.testing.assert_close(model.elbo(), expected, rtol=0, atol=1e-3)


def test_of_other_likelihoods_they_are_sought_once() -> None:
    X, Y = data("poisson", 300)
    model = model_of(X, Y, "poisson", num_mean=80)
    assert len(model._memory.posterior.beta) == 20
    wide = model.optimize_posterior()._memory.posterior
    assert len(wide.beta) == 80
    again = model.optimize_posterior()._memory.posterior
    assert isinstance(wide.covariance, SpectralCovariance)
    assert isinstance(again.covariance, SpectralCovariance)
    assert torch.equal(again.covariance.combination, wide.covariance.combination)


def test_a_direct_covariance_stays() -> None:
    X, Y = data()
    model = model_of(X, Y, parametrization="direct")
    before = model._memory.posterior.covariance
    after = model.optimize_posterior()._memory.posterior.covariance
    assert isinstance(before, DirectCovariance)
    assert isinstance(after, DirectCovariance)
    assert torch.equal(before.root, after.root)


def test_a_sample_stands_for_all_that_came() -> None:
    X, Y = data()
    model = model_of(X, Y, max_rows=60).optimize_posterior()
    held = model._memory.replay.at(torch.arange(60))
    assert_best_mean(model, held.X, held.Y, weight=N / 60)


def test_outputs_are_each_alone() -> None:
    X, Y = data()
    Y = torch.cat((Y, X[:, :1].sin()), 1)
    options = {"likelihood": None, "covar_module": None, "initial_points": 0}
    both, alone = (model_of(X, y, **options).optimize_posterior() for y in (Y, Y[:, 1:]))
    assert_same_posterior(both.subset_output([1]), alone, X[:5])


def test_a_second_round_changes_nothing() -> None:
    X, Y = data()
    model = model_of(X, Y).optimize_posterior()
    before = model.posterior(X[:5]).mean
    torch.testing.assert_close(model.optimize_posterior().posterior(X[:5]).mean, before)


@pytest.mark.parametrize("parametrization", ["spectral", "hybrid"])
@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_rounds_reach_the_best_bound_of_other_likelihoods(name: str, parametrization: str) -> None:
    X, Y = data(name)
    model = model_of(X, Y, name, parametrization=parametrization)
    first = float(model.elbo())
    bounds = [first, *(float(model.optimize_posterior().elbo()) for _ in range(8))]
    assert all(b >= a - 1e-9 for a, b in pairwise(bounds))
    assert bounds[1] > bounds[0]
    memory, best = model._memory, bounds[-1]
    for _ in range(5):
        direction = 1e-2 * torch.randn_like(memory.posterior.coefficients)
        moved = replace(memory.posterior, coefficients=memory.posterior.coefficients + direction)
        model._set_memory(replace(memory, posterior=moved))
        assert float(model.elbo()) < best + 1e-6


def test_a_step_that_is_too_long_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a far target the bound takes a part, or nothing where no part is better."""
    X, Y = data("bernoulli")
    model = model_of(X, Y, "bernoulli")
    before = float(model.elbo())
    whole = decoupled_inference.optimum

    def too_far(now: Expanded, *given: Any) -> Any:
        return between(now.posterior, whole(now, *given), 4.0)

    monkeypatch.setattr(decoupled_inference, "optimum", too_far)
    assert float(model.optimize_posterior().elbo()) > before

    def away(now: Expanded, *_: Any) -> Any:
        return replace(now.posterior, coefficients=now.posterior.coefficients + 1e3)

    monkeypatch.setattr(decoupled_inference, "optimum", away)
    better = float(model.elbo())
    assert float(model.optimize_posterior().elbo()) >= better


def test_between_is_linear_in_the_mean() -> None:
    X, Y = data()
    model = model_of(X, Y, parametrization="hybrid")
    before, first = model._memory, model.posterior(X[:5]).mean
    last = model.optimize_posterior().posterior(X[:5]).mean
    middle = between(before.posterior, model._memory.posterior, 0.25)
    model._set_memory(replace(before, posterior=middle))
    torch.testing.assert_close(model.posterior(X[:5]).mean, 0.75 * first + 0.25 * last)


@pytest.mark.parametrize("parametrization", ["spectral", "hybrid", "direct"])
@pytest.mark.parametrize("sizes", [(0, 0), (30, 0)])
def test_bases_may_be_empty(parametrization: str, sizes: tuple[int, int]) -> None:
    X, Y = data()
    options: dict[str, Any] = {"num_mean": sizes[0], "num_covar": sizes[1], "num_span": None}
    options |= {"learning_rate": 0.1, "initial_points": 0}
    model = model_of(X, Y, parametrization=parametrization, **options)
    before = float(model.elbo())
    assert float(model.optimize_posterior().elbo()) >= before - 1e-6


def test_bad_input_changes_nothing() -> None:
    X, Y = data()
    model, empty = model_of(X, Y), DecoupledGP(X[:0], Y[:0])
    for refused, rounds, error, match in (
        (model, 0, ValueError, "rounds"),
        (empty, 1, InputDataError, "empty stream"),
        (model.condition_on_observations(X[:2], Y[:2]), 1, UnsupportedError, "optimize_posterior"),
    ):
        before = fingerprint(refused)
        with pytest.raises(error, match=match):
            refused.optimize_posterior(rounds)
        assert_untouched(refused, before)
