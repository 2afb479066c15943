"""Supposed outcomes of any likelihood, against dense quadrature and the best normal q."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from botorch.acquisition import qNegIntegratedPosteriorVariance
from botorch.exceptions.errors import UnsupportedError
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from torch import Tensor

from bo_stream import OSVGP
from bo_stream.models.inducing.inference import basis_of_independent
from bo_stream.testing.streams import (
    assert_close,
    assert_gradient,
    assert_untouched,
    fingerprint,
    moments,
)
from tests.oracles.likelihoods import Normal, log_probs, moments_given_outcomes, variational_optimum
from tests.support.problems.likelihoods import LIKELIHOODS, OTHERS, outcomes


def fitted(name: str, **options: Any) -> OSVGP:
    """A model of some outcomes over the unit square, at points of its own."""
    X = torch.rand(25, 2, dtype=torch.float64)
    Z = torch.quasirandom.SobolEngine(2).draw(15, dtype=torch.float64)
    return OSVGP(X, outcomes(name, X), LIKELIHOODS[name](), inducing_points=Z, **options).eval()


def near_pair() -> Tensor:
    """Two points whose values are correlated."""
    return torch.tensor([[0.4, 0.5], [0.55, 0.6]], dtype=torch.float64)


def at(model: OSVGP, X: Tensor) -> Normal:
    distribution = model.posterior(X).distribution
    return Normal(distribution.mean.detach(), distribution.covariance_matrix.detach())


def hypothetical_pairs(name: str) -> list[Tensor]:
    if name == "bernoulli":
        values = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    else:
        values = [[1.0, 2.0], [3.0, 0.0]]
    return [torch.tensor(v, dtype=torch.float64).unsqueeze(-1) for v in values]


def errors(name: str, model: OSVGP) -> list[float]:
    """Largest error of a mean, in sds of the exact one, and of a log sd, for each pair."""
    X, found = near_pair(), []
    before = at(model, X)
    for Y in hypothetical_pairs(name):
        exact = moments_given_outcomes(
            before.mean, before.covariance, log_probs(name, Y.squeeze(-1))
        )
        conditioned = at(model.condition_on_observations(X, Y), X)
        scale, own = (n.covariance.diagonal().sqrt() for n in (exact, conditioned))
        shift = ((conditioned.mean - exact.mean) / scale).abs()
        found.append(float(torch.maximum(shift, (own / scale).log().abs()).max()))
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_one_step_where_something_is_known_is_the_exact_posterior_nearly(name: str) -> None:
    """Without conditioning the means are off by up to 1.1 standard deviations here."""
    assert max(errors(name, fitted(name))) < 0.04


@pytest.mark.parametrize("name", OTHERS)
def test_one_step_where_nothing_is_known_is_rough_and_three_are_not(name: str) -> None:
    """Two values of standard deviation 2.4, their correlation 0.82; without: off by up to 2.6."""
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 6.0, 0.3
    one, three = (
        fitted(name, covar_module=kernel, fantasy_steps=steps).clear() for steps in (1, 3)
    )
    assert 0.05 < max(errors(name, one)) < 0.6
    assert max(errors(name, three)) < 0.15


@pytest.mark.parametrize("name", ["bernoulli", "poisson", "laplace"])
def test_more_steps_end_at_the_best_normal(name: str) -> None:
    X = near_pair()
    for Y in hypothetical_pairs(name):
        torch.manual_seed(1)
        one, many = (fitted(name, fantasy_steps=steps) for steps in (1, 60))
        before = at(many, X)
        mean, covariance, _ = variational_optimum(
            before.mean, before.covariance, log_probs(name, Y.squeeze(-1))
        )
        found = at(many.condition_on_observations(X, Y), X)
        error = 5e-3 if name == "laplace" else 1e-4  # the oracle's slopes
        torch.testing.assert_close(found.mean, mean, rtol=0.0, atol=error)
        torch.testing.assert_close(found.covariance, covariance, rtol=0.0, atol=error)
        first = at(one.condition_on_observations(X, Y), X)
        assert float((first.mean - mean).abs().max()) > 1e-6


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_conditioning_is_nearly_updating(name: str) -> None:
    """With converged sites and points at the conditioned inputs, exactly."""
    X = near_pair()
    Y = hypothetical_pairs(name)[1]
    torch.manual_seed(0)
    model = fitted(name, fantasy_steps=60, natural_steps=60)
    Z = torch.cat((model.inducing_points, X))
    model._set_memory(model._memory.in_basis(basis_of_independent(model.covar_module, Z, 1)))
    conditioned = model.condition_on_observations(X, Y)
    updated = copy.deepcopy(model).update(X, Y)
    T = torch.rand(5, 2, dtype=torch.float64)
    for a, b in zip(moments(conditioned, T), moments(updated, T), strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(("name", "steps"), [*((name, 4) for name in OTHERS), (OTHERS[0], 1)])
def test_gradients_are_those_of_differences(name: str, steps: int) -> None:
    model, Y = fitted(name, fantasy_steps=steps), hypothetical_pairs(name)[1]
    T = torch.rand(3, 2, dtype=torch.float64)

    def value(X: Tensor) -> Tensor:
        conditioned = model.condition_on_observations(X, Y)
        posterior = conditioned.condition_on_observations(X + 0.1, Y).posterior(T)
        return posterior.mean.sin().sum() + posterior.variance.sin().sum()

    assert_gradient(value, near_pair())


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_through_draws(name: str) -> None:
    """Labels and counts stay while X moves a little; continuous outcomes move along."""
    model, T = fitted(name), torch.rand(3, 2, dtype=torch.float64)
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=3)

    def value(X: Tensor) -> Tensor:
        posterior = model.fantasize(X, sampler).posterior(T)
        return posterior.mean.sin().sum() + posterior.variance.sum()

    assert_gradient(value, near_pair())


@pytest.mark.parametrize("name", OTHERS)
def test_fantasies_in_batches_are_each_alone(name: str) -> None:
    model = fitted(name)
    X = torch.rand(5, 3, 2, dtype=torch.float64)
    Y = torch.stack([outcomes(name, X) for _ in range(4)])
    model.posterior(X)
    before = fingerprint(model)
    together = model.condition_on_observations(X, Y)
    assert_untouched(model, before)
    T = torch.rand(2, 2, dtype=torch.float64)
    mean, covariance = moments(together, T)
    assert mean.shape == (4, 5, 2, 1)
    for i, j in ((0, 0), (3, 4)):
        alone_mean, alone_covariance = moments(model.condition_on_observations(X[j], Y[i, j]), T)
        assert_close(mean[i, j], alone_mean)
        assert_close(covariance[i, j], alone_covariance)


@pytest.mark.parametrize("name", OTHERS)
def test_draws_are_the_sampler_s_and_the_same_for_every_batch(name: str) -> None:
    model = fitted(name)
    X = torch.rand(3, 2, dtype=torch.float64)
    sampler = SobolQMCNormalSampler(torch.Size([6]), seed=5)
    state = torch.get_rng_state()
    alone = moments(model.fantasize(X, sampler), X)
    assert torch.equal(torch.get_rng_state(), state)
    both = moments(model.fantasize(X.expand(2, 3, 2), sampler), X)
    for a, b in zip(alone, both, strict=True):
        assert_close(b[:, 0], a)
        assert_close(b[:, 1], a)
    again = moments(model.fantasize(X, SobolQMCNormalSampler(torch.Size([6]), seed=6)), X)
    assert float((again[0] - alone[0]).abs().max()) > 1e-3


def test_draws_have_the_predictive_distribution() -> None:
    model = fitted("poisson")
    X = torch.rand(3, 2, dtype=torch.float64)
    drawing = model._outcomes.drawing(model.prior, None)
    assert drawing is not None
    inputs, sampler = (
        model.hypothetical_inputs(X),
        SobolQMCNormalSampler(torch.Size([4096]), seed=0),
    )
    outcomes, _ = model._drawn(X, inputs, model.process(inputs), sampler, drawing)
    found = model.predictive(X)
    torch.testing.assert_close(outcomes.mean(0), found.mean, rtol=0.05, atol=0.0)
    torch.testing.assert_close(outcomes.var(0), found.variance, rtol=0.1, atol=0.0)


def test_fantasies_of_fantasies_and_of_nothing() -> None:
    model = fitted("bernoulli")
    X = torch.rand(2, 3, 2, dtype=torch.float64)
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
    twice = model.fantasize(X, sampler).fantasize(X + 0.1, sampler)
    assert twice.posterior(X).mean.shape == (4, 4, 2, 3, 1)
    none = model.fantasize(X[:, :0], sampler).posterior(X[0])
    assert_close(none.mean[0, 0], model.posterior(X[0]).mean)
    with pytest.raises(UnsupportedError, match="Expected no observation_noise"):
        model.fantasize(X, sampler, observation_noise=torch.ones(1, 1).double())
    with pytest.raises(UnsupportedError, match="hypothetical"):
        twice.update(X[0], torch.ones(3, 1).double())


def test_botorch_s_integrated_variance_takes_labels() -> None:
    """A label is worth most where the variance is large and the label not sure."""
    X = torch.rand(40, 2, dtype=torch.float64) * torch.tensor([0.5, 1.0])
    model = OSVGP(X, outcomes("bernoulli", X), BernoulliLikelihood())
    criterion = qNegIntegratedPosteriorVariance(model, torch.rand(64, 2, dtype=torch.float64))
    known, unknown = (
        criterion(torch.tensor([[x, 0.5]], dtype=torch.float64)) for x in (0.25, 0.85)
    )
    assert float(unknown) > float(known)
