"""Expectations of binomial counts against adaptive integration, and their gradients."""

import math

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import betabinom, binom, norm
from torch import Tensor

from bo_stream.likelihoods.binomial import expected_log_prob, log_marginal, log_prob

CASES = [(0, 1), (1, 1), (3, 10), (0, 100), (100, 100), (12, 100), (40, 2000)]
MOMENTS = [(-2.0, 0.3), (0.5, 1.5), (-4.0, 2.0)]


def _tensors(*values: float) -> list[Tensor]:
    return [torch.tensor([value], dtype=torch.float64) for value in values]


@pytest.mark.parametrize(("positives", "trials"), CASES)
@pytest.mark.parametrize(("mean", "deviation"), MOMENTS)
def test_expectations(positives: int, trials: int, mean: float, deviation: float) -> None:
    y, n, m, v = _tensors(positives, trials, mean, deviation**2)
    ways = math.log(math.comb(trials, positives))

    def density(f: float) -> float:
        return math.exp(-0.5 * ((f - mean) / deviation) ** 2) / math.sqrt(math.tau) / deviation

    def log_likelihood(f: float) -> float:
        log_one_plus = max(f, 0.0) + math.log1p(math.exp(-abs(f)))
        return ways + positives * f - trials * log_one_plus

    def likelihood(f: float) -> float:
        return math.exp(log_likelihood(f))

    exact = binom.logpmf(positives, trials, 1.0 / (1.0 + math.exp(-mean)))
    assert log_likelihood(mean) == pytest.approx(float(exact), rel=1e-9, abs=1e-9)
    assert float(log_prob(y, n, m)) == pytest.approx(float(exact), rel=1e-9, abs=1e-9)
    mode = math.log((positives + 0.5) / (trials - positives + 0.5))
    low, high = mean - 20 * deviation, mean + 20 * deviation
    points = sorted(min(max(point, low), high) for point in (mode - 1, mode, mode + 1, mean))
    options = {"points": points, "limit": 400, "epsabs": 0.0, "epsrel": 1e-10}
    average, _ = quad(lambda f: density(f) * log_likelihood(f), low, high, **options)
    marginal, _ = quad(lambda f: density(f) * likelihood(f), low, high, **options)
    assert float(expected_log_prob(y, n, m, v)) == pytest.approx(average, rel=1e-4)
    assert float(log_marginal(y, n, m, v)) == pytest.approx(math.log(marginal), abs=1e-8)


@pytest.mark.parametrize("extreme", [0.0, 50.0])
def test_finite_where_the_logit_is_far(extreme: float) -> None:
    y, n = _tensors(extreme, 50.0)
    for logit in (-800.0, 800.0):
        assert bool(log_prob(y, n, torch.tensor(logit, dtype=torch.float64)).isfinite())


@pytest.mark.parametrize(("positives", "trials"), [(0, 5), (3, 10), (100, 100)])
def test_gradients(positives: int, trials: int) -> None:
    y, n, m, v = _tensors(positives, trials, -1.0, 0.8)
    m.requires_grad_(), v.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: expected_log_prob(y, n, a, b), (m, v))
    assert torch.autograd.gradcheck(lambda a, b: log_marginal(y, n, a, b), (m, v))


@pytest.mark.parametrize("trials", [1, 20, 100])
def test_probabilities_of_all_counts_sum_to_one(trials: int) -> None:
    counts = torch.arange(trials + 1, dtype=torch.float64)
    total = log_marginal(counts, *_tensors(trials, -2.0, 1.0)).exp().sum()
    assert float(total) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("positives", "trials"), CASES[:-1])
@pytest.mark.parametrize(("mean", "deviation"), MOMENTS)
@pytest.mark.parametrize("concentration", [3.0, 80.0])
def test_expectations_of_the_beta_binomial(
    positives: int, trials: int, mean: float, deviation: float, concentration: float
) -> None:
    y, n, m, v = _tensors(positives, trials, mean, deviation**2)
    (s,) = _tensors(concentration)
    reach = 14.0 * deviation
    grid = torch.linspace(mean - reach, mean + reach, 40_001, dtype=torch.float64)
    weights = torch.as_tensor(norm.pdf(grid.numpy(), mean, deviation)) * (grid[1] - grid[0])
    values = log_prob(y, n, grid, s)
    chance = grid.sigmoid().numpy()[20_000:20_001]
    exact = betabinom.logpmf(
        positives, trials, concentration * chance, concentration * (1 - chance)
    )
    assert float(values[20_000]) == pytest.approx(float(exact[0]), rel=1e-8, abs=1e-8)
    average, marginal = (weights * values).sum(), (weights.log() + values).logsumexp(-1)
    assert float(expected_log_prob(y, n, m, v, s)) == pytest.approx(float(average), rel=1e-3)
    assert float(log_marginal(y, n, m, v, s)) == pytest.approx(float(marginal), abs=1e-6)


def test_gradients_of_the_beta_binomial() -> None:
    y, n, m, v = _tensors(3, 10, -1.0, 0.8)
    (s,) = (t.requires_grad_() for t in _tensors(20.0))
    m.requires_grad_(), v.requires_grad_()
    assert torch.autograd.gradcheck(lambda *at: expected_log_prob(y, n, *at), (m, v, s))
    assert torch.autograd.gradcheck(lambda *at: log_marginal(y, n, *at), (m, v, s))


def test_a_large_concentration_is_binomial_and_far_logits_are_finite() -> None:
    y, n, f = _tensors(3, 10, -1.0)
    for concentration, error in ((1e6, 1e-4), (1e11, 1e-6), (1e30, 1e-6)):
        (s,) = _tensors(concentration)
        value = log_prob(y, n, f, s.requires_grad_())
        assert value.item() == pytest.approx(log_prob(y, n, f).item(), abs=error)
        assert abs(torch.autograd.grad(value.sum(), s)[0].item()) < 1e-9
        s = s.detach()
    for logit in (-800.0, 800.0):
        (far,) = _tensors(logit)
        assert bool(log_prob(y, n, far, s).isfinite())
