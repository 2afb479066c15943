"""Sites by natural gradients against the best normal q that L-BFGS finds."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from bo_stream.likelihoods.outcome_model import expected_log_prob
from bo_stream.likelihoods.sites import (
    ExpectedLogProb,
    JointPrior,
    RootPrior,
    Sites,
    fit_at,
    fit_sites,
    local_sites,
)
from bo_stream.testing.streams import assert_close
from tests.oracles.likelihoods import log_probs, variational_optimum
from tests.support.problems.likelihoods import CONCAVE, LIKELIHOODS, outcomes


def expected(name: str, y: Tensor) -> ExpectedLogProb:
    likelihood = LIKELIHOODS[name]()
    return lambda mean, variance: expected_log_prob(likelihood, y, mean, variance)


def joint(n: int) -> tuple[Tensor, Tensor]:
    """A mean and a covariance of n values."""
    root = torch.randn(n, n, dtype=torch.float64)
    return torch.randn(n, dtype=torch.float64), root @ root.mT / n + 0.1 * torch.eye(n)


@pytest.mark.parametrize("power", [1.0, 4.0])
@pytest.mark.parametrize("name", CONCAVE)
def test_the_optimum_is_the_best_normal_there_is(name: str, power: float) -> None:
    mean, covariance = joint(8)
    y = outcomes(name, torch.rand(8, 2, dtype=torch.float64)).squeeze(-1)
    prior = JointPrior.of(mean, covariance, mean.shape)
    fit = fit_sites(prior, expected(name, y), power, steps=200)
    best_mean, best_covariance, best = variational_optimum(
        mean, covariance, log_probs(name, y), power
    )
    torch.testing.assert_close(fit.bound, best, rtol=1e-5, atol=1e-5)
    error = 5e-3 if name == "laplace" else 1e-4  # the oracle's slopes
    torch.testing.assert_close(fit.mean, best_mean, rtol=0.0, atol=error)
    torch.testing.assert_close(fit.variance, best_covariance.diagonal(), rtol=10 * error, atol=0.0)


def test_heavy_tails_never_lose_and_have_no_negative_precision() -> None:
    mean, covariance = joint(10)
    y = 6.0 * torch.randn(10, dtype=torch.float64)
    prior = JointPrior.of(mean, covariance, mean.shape)
    bounds = [fit_sites(prior, expected("student", y), steps=s).bound for s in (*range(1, 15), 29)]
    assert all(b >= a - 1e-6 for a, b in pairwise(bounds))
    assert bool((fit_sites(prior, expected("student", y)).sites.precision > 0).all())
    _, _, best = variational_optimum(mean, covariance, log_probs("student", y))
    assert float(best) - 0.2 <= float(bounds[-1]) <= float(best) + 1e-3


def test_a_gaussian_likelihood_takes_one_step() -> None:
    mean, covariance = joint(6)
    y = torch.randn(6, dtype=torch.float64)
    prior = JointPrior.of(mean, covariance, mean.shape)
    fit = fit_sites(prior, expected("gaussian", y), steps=1)
    K = covariance + 0.5 * torch.eye(6)
    exact = torch.distributions.MultivariateNormal(mean, K)
    assert_close(fit.mean, mean + covariance @ torch.linalg.solve(K, y - mean))
    assert_close(fit.bound, exact.log_prob(y))
    outcomes_, noise = fit.sites.pseudo_observations()
    assert_close(outcomes_, y)
    assert_close(noise, torch.full_like(y, 0.5))


def test_values_are_conditioned_alike_by_weights_and_by_their_covariance() -> None:
    mean, rest = torch.randn(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    root = torch.randn(2, 5, 30, dtype=torch.float64)
    sites = Sites(torch.rand(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64))
    few, many = JointPrior(mean, root @ root.mT, rest), RootPrior(mean, root, rest)
    for a, b in zip(many.given(sites), few.given(sites), strict=True):
        assert_close(a, b)


def test_values_observed_well_and_hardly_are_conditioned_to_many_digits() -> None:
    """At a precision of 1e10 the prior variance less what is explained has no digits left.

    Independent values have a variance in closed form.
    """
    precision = torch.tensor([1e10, 1.0, 0.0, 1e-6]).double()
    variance = torch.full((4,), 4.0).double()
    prior = JointPrior.of(torch.zeros(4).double(), torch.diag(variance), torch.Size([4]))
    found = prior.given(Sites(precision, 3.0 * precision))
    expected = 1.0 / (1.0 / variance + precision)
    torch.testing.assert_close(found[1], expected, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(found[0], 3.0 * precision * expected, rtol=1e-14, atol=0.0)


def test_sites_at_their_scale_are_a_bound() -> None:
    """``Σ log_scale + log E Π site`` is the bound at the optimum and elsewhere."""
    mean, covariance = joint(5)
    y = (torch.rand(5) > 0.5).double()
    prior = JointPrior.of(mean, covariance, mean.shape)
    sites = Sites(torch.rand(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64))
    fit = fit_at(prior, expected("bernoulli", y), sites, power=2.0)
    pseudo, noise = sites.pseudo_observations()
    normal = torch.distributions.MultivariateNormal(mean, covariance + torch.diag(noise))
    at_pseudo = torch.distributions.Normal(pseudo, noise.sqrt()).log_prob(pseudo)
    own = 0.5 * sites.shift.square() / sites.precision - at_pseudo
    assert_close(fit.log_scale.sum() + own.sum() + normal.log_prob(pseudo), fit.bound)


def test_one_step_is_differentiable() -> None:
    y = torch.tensor([1.0, 0.0], dtype=torch.float64)

    def noise(mean: Tensor, variance: Tensor) -> Tensor:
        sites, _ = local_sites(expected("bernoulli", y), mean, variance)
        return torch.stack(sites.pseudo_observations())

    at = [torch.tensor(v, dtype=torch.float64).requires_grad_() for v in ([0.3, 2.5], [0.4, 0.2])]
    assert torch.autograd.gradcheck(noise, at, eps=1e-6, atol=1e-5)
