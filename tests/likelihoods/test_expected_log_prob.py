"""Expected log probabilities against the trapezoidal rule, and their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from gpytorch.likelihoods import BetaLikelihood, Likelihood, PoissonLikelihood
from torch import Tensor

from bo_stream.likelihoods.outcome_model import OutcomeModel, expected_log_prob, log_marginal
from tests.oracles.likelihoods import expectation, log_probs
from tests.support.problems.likelihoods import LIKELIHOODS, outcomes


def problem(name: str) -> tuple[Tensor, Tensor, Tensor]:
    y = outcomes(name, torch.rand(12, 2, dtype=torch.float64)).squeeze(-1)
    mean = 1.5 * torch.randn(12, dtype=torch.float64)
    return y, mean, 0.2 + 0.8 * torch.rand(12, dtype=torch.float64)


ERRORS = {
    "laplace": (1e-5, 5e-3),  # the oracle's: twice what a kink costs the trapezoidal rule
    "student": (1e-5, 5e-5),  # of 20 nodes: the logarithm has poles 1.6 from the outcome
}
"""Of values and of slopes, over all means from -8 to 8 and variances up to 1. The others' are below
1e-8, but for gpytorch's nodes, which are made in single precision."""


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_expectations_and_slopes_are_those_of_the_trapezoidal_rule(name: str) -> None:
    y, mean, variance = problem(name)
    found = []
    for function in (
        lambda m, v: expected_log_prob(LIKELIHOODS[name](), y, m, v),
        lambda m, v: expectation(log_probs(name, y), m, v),
    ):
        at = [t.clone().requires_grad_() for t in (mean, variance)]
        value = function(*at)
        found.append((value.detach(), *torch.autograd.grad(value.sum(), at)))
    error, slope_error = ERRORS.get(name, (1e-6, 1e-6))
    for actual, expected, most in zip(*found, (error, slope_error, slope_error), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=most)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_quadratics_stay_below_what_a_log_probability_can_be(name: str) -> None:
    """Of heavy tails below the expectation itself, of counts and labels below zero."""
    y, mean, variance = (t.unsqueeze(-2) for t in problem(name))
    model = OutcomeModel.of(LIKELIHOODS[name](), 1)
    expected = model.expected_log_prob(y)
    at = mean.clone().requires_grad_()
    value = expected(at, variance)
    (slope,) = torch.autograd.grad(value.sum(), at)
    value = value.detach()
    precision = model.bounded_precision(y, mean, variance, slope, value)
    assert bool((precision >= 0.0).all())
    for other in torch.linspace(-12.0, 12.0, 49, dtype=torch.float64):
        step = other - mean
        quadratic = value + slope * step - 0.5 * precision * step.square()
        if name in ("laplace", "student"):
            limit = expected(other.expand_as(mean), variance)
            assert bool((quadratic <= limit + 1e-4).all())
        elif name != "gaussian":  # densities may be larger than 1
            assert bool((quadratic <= 1e-6)[value < 0.0].all())


def test_the_laplace_marginal_is_that_of_the_trapezoidal_rule() -> None:
    """Outcomes up to 40 standard deviations out; quadrature of 20 nodes is off by percents."""
    y = torch.linspace(-20.0, 20.0, 101, dtype=torch.float64)
    mean, variance = 0.3 + torch.zeros_like(y), 0.2 + 0.8 * torch.rand_like(y)
    actual = log_marginal(LIKELIHOODS["laplace"](), y, mean, variance)
    density = log_probs("laplace", y)
    shift = density(mean)  # the average of what is near 1, however far out
    expected = shift + expectation(lambda f: (density(f) - shift).exp(), mean, variance).log()
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-4)


def test_the_marginal_of_a_count_is_finite_where_its_probability_underflows() -> None:
    """Up to 2,400 nats away, against a sum over 80 standard deviations and its differences."""
    y = torch.tensor([0.0, 33.0, 200.0, 500.0, 1000.0], dtype=torch.float64)
    mean, variance = torch.full_like(y, 33.0), torch.full_like(y, 0.03)
    t = torch.linspace(-40.0, 40.0, 20_001, dtype=torch.float64).unsqueeze(-1)
    log_normal = -0.5 * t.square() + (t[1] - t[0]).log() - 0.5 * math.log(2.0 * math.pi)

    def dense(m: Tensor, v: Tensor) -> Tensor:
        return (log_probs("poisson", y)(m + v.sqrt() * t) + log_normal).logsumexp(0)

    at = mean.clone().requires_grad_(), variance.clone().requires_grad_()
    actual = log_marginal(PoissonLikelihood().double(), y, *at)
    torch.testing.assert_close(actual.detach(), dense(mean, variance), rtol=1e-7, atol=1e-6)
    slopes, step = torch.autograd.grad(actual.sum(), at), 1e-5
    for slope, h in zip(slopes, ((step, 0.0), (0.0, step)), strict=True):
        up, down = (dense(mean + s * h[0], variance + s * h[1]) for s in (1.0, -1.0))
        torch.testing.assert_close(slope, (up - down) / (2.0 * step), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_second_derivatives_are_those_of_differences(name: str) -> None:
    """gpytorch's log normal cdf has none below −1; fantasies need them."""
    y, mean, variance = problem(name)
    mean = mean - 2.0
    likelihood, step = LIKELIHOODS[name](), 1e-5

    def slopes(m: Tensor, v: Tensor) -> list[Tensor]:
        at = [t.requires_grad_() for t in (m.clone(), v.clone())]
        return list(torch.autograd.grad(expected_log_prob(likelihood, y, *at).sum(), at))

    at = [t.clone().requires_grad_() for t in (mean, variance)]
    first = torch.autograd.grad(expected_log_prob(likelihood, y, *at).sum(), at, create_graph=True)
    for i in (0, 1):
        second = torch.autograd.grad(first[i].sum(), at, retain_graph=True, allow_unused=True)
        for j, shift in ((0, (step, 0.0)), (1, (0.0, step))):
            up, down = (
                slopes(mean + s * shift[0], variance + s * shift[1])[i] for s in (1.0, -1.0)
            )
            actual = torch.zeros_like(mean) if second[j] is None else second[j]
            torch.testing.assert_close(actual, (up - down) / (2 * step), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("likelihood", [BetaLikelihood, *LIKELIHOODS.values()])
def test_no_points_have_no_moments_and_no_densities(
    likelihood: Callable[[], Likelihood], outputs: int
) -> None:
    model = OutcomeModel.of(likelihood(), outputs)
    none = torch.empty(3, outputs, 0, dtype=torch.float64)
    assert [value.shape for value in model.moments(none, none)] == [none.shape] * 2
    assert model.log_marginal(none, none, none).shape == none.shape
