"""Expected log probabilities against the trapezoidal rule, and their derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bo_stream.models.expected_log_prob import expected_log_prob
from tests.models.likelihoods import LIKELIHOODS, outcomes
from tests.oracles import expectation, log_probs


def problem(name: str) -> tuple[Tensor, Tensor, Tensor]:
    y = outcomes(name, torch.rand(12, 2, dtype=torch.float64)).squeeze(-1)
    mean = 1.5 * torch.randn(12, dtype=torch.float64)
    return y, mean, 0.05 + torch.rand(12, dtype=torch.float64)


# The oracle's error, which bounds what can be compared, depends on the draws.
pytestmark = pytest.mark.fixed_seed


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
    slope_error = 5e-3 if name == "laplace" else 2e-5  # the oracle's
    for actual, expected, error in zip(*found, (2e-5, slope_error, slope_error), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=error)


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
