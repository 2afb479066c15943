"""The predictive distribution of counts against sums over a fine grid of logits, and its checks."""

import math

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.models import SingleTaskGP
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from scipy.special import betainc
from scipy.stats import betabinom, binom, norm
from torch import Tensor

from bo_stream import OSVGP, BinomialLikelihood, counts, prevalence
from bo_stream.likelihoods import binomial
from bo_stream.likelihoods import counts as counts_module
from bo_stream.likelihoods.binomial import FAR, MOST_EXAMINED, NARROW, NODES_OF_LATENT, check_counts
from bo_stream.likelihoods.counts import CountPosterior, PrevalencePosterior
from bo_stream.likelihoods.outcome_model import Outliers

MEAN = torch.tensor([-3.0, 0.2, 1.5], dtype=torch.float64)
VARIANCE = torch.tensor([0.4, 1.0, 2.0], dtype=torch.float64)
TRIALS = torch.tensor([[60.0], [1.0], [9.0]], dtype=torch.float64)
CONCENTRATIONS = [None, 4.0]


def _posterior(concentration: float | None, moments: tuple[Tensor, Tensor]) -> CountPosterior:
    mean, variance = moments
    latent = GPyTorchPosterior(MultivariateNormal(mean, DiagLinearOperator(variance)))
    s = None if concentration is None else torch.full((1, 1), concentration, dtype=torch.float64)
    return CountPosterior(PrevalencePosterior(latent), TRIALS, s)


def _probabilities(concentration: float | None, i: int) -> np.ndarray:
    """Probability of each count at a point, by a fine sum that shares no code."""
    m, sd, n = float(MEAN[i]), float(VARIANCE[i]) ** 0.5, int(TRIALS[i, 0])
    logits = np.linspace(m - 14.0 * sd, m + 14.0 * sd, 4001)
    weight, chance = norm.pdf(logits, m, sd), 1.0 / (1.0 + np.exp(-logits))
    law = binom(n, chance)
    if concentration is not None:
        law = betabinom(n, concentration * chance, concentration * (1.0 - chance))
    return np.array([(law.pmf(k) * weight).sum() / weight.sum() for k in range(n + 1)])


@pytest.mark.parametrize("concentration", CONCENTRATIONS)
def test_it_is_the_mixture_of_counts_over_logits(concentration: float | None) -> None:
    posterior = _posterior(concentration, (MEAN, VARIANCE))
    levels = torch.tensor([0.025, 0.5, 0.975], dtype=torch.float64)
    found = posterior.quantile(levels)
    assert found.shape == (3, 3, 1)
    low, high = posterior.interval(0.95)
    for i in range(3):
        exact = _probabilities(concentration, i)
        n, total = len(exact) - 1, np.cumsum(exact)
        every = np.arange(n + 1)
        mean = (every * exact).sum()
        assert float(posterior.mean[i, 0]) == pytest.approx(mean, rel=1e-6)
        variance = (every**2 * exact).sum() - mean**2
        assert float(posterior.variance[i, 0]) == pytest.approx(variance, rel=1e-4)
        expected = [np.flatnonzero(total >= level)[0] for level in levels.tolist()]
        assert found[:, i, 0].tolist() == expected
        assert [float(low[i, 0]), float(high[i, 0])] == [expected[0], expected[-1]]
        for k in {0, n // 3, n}:
            y = torch.zeros(3, 1).double()
            y[i] = k
            assert float(posterior.log_prob(y)[i, 0]) == pytest.approx(math.log(exact[k]), abs=1e-7)
            assert float(posterior.cdf(y)[i, 0]) == pytest.approx(total[k], abs=1e-9)


@pytest.mark.parametrize("concentration", CONCENTRATIONS)
def test_points_in_parts_are_those_together(
    concentration: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    posterior = _posterior(concentration, (MEAN, VARIANCE))
    level = torch.tensor(0.9).double()
    together = posterior.quantile(level), posterior.cdf(TRIALS.minimum(torch.tensor(3.0)))
    monkeypatch.setattr("bo_stream.likelihoods.counts.AT_ONCE", 1)
    apart = posterior.quantile(level), posterior.cdf(TRIALS.minimum(torch.tensor(3.0)))
    assert all(
        torch.allclose(a, b, rtol=0.0, atol=1e-12) for a, b in zip(together, apart, strict=True)
    )


@pytest.mark.parametrize("concentration", CONCENTRATIONS)
def test_draws_are_counts_with_its_moments(concentration: float | None) -> None:
    posterior = _posterior(concentration, (MEAN, VARIANCE))
    torch.manual_seed(0)
    drawn = posterior.rsample(torch.Size([20_000]))
    assert drawn.shape == (20_000, 3, 1)
    assert bool(((drawn == drawn.round()) & (drawn >= 0) & (drawn <= TRIALS)).all())
    error = 5.0 * (posterior.variance / len(drawn)).sqrt()
    assert bool(((drawn.mean(0) - posterior.mean).abs() < error).all())
    assert torch.allclose(drawn.var(0), posterior.variance, rtol=0.1)


@pytest.mark.parametrize("concentration", CONCENTRATIONS)
def test_gradients(concentration: float | None) -> None:
    y = torch.tensor([[5.0], [1.0], [0.0]], dtype=torch.float64)

    def summary(*moments: Tensor) -> Tensor:
        p = _posterior(concentration, moments)
        return torch.cat((p.mean, p.variance, p.log_prob(y)))

    moments = (MEAN.clone().requires_grad_(), VARIANCE.clone().requires_grad_())
    assert torch.autograd.gradcheck(summary, moments)


def _surveys() -> tuple[Tensor, Tensor]:
    X = torch.linspace(0.0, 1.0, 6).double().unsqueeze(-1)
    Y = torch.tensor([[0.0, 9], [2, 9], [3, 4], [30, 40], [8, 9], [9, 9]]).double()
    return X, Y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_counts_of_a_model_at_their_own_trials(dtype: torch.dtype) -> None:
    X, Y = (t.to(dtype) for t in _surveys())
    model = OSVGP(X, Y, BinomialLikelihood(overdispersion=True))
    found = counts(model, X, Y[:, 1:])
    assert found.mean.dtype == dtype
    assert torch.allclose(found.log_prob(Y[:, :1]), model.log_predictive(X, Y), rtol=1e-4)
    low, high = found.interval(0.9)
    assert bool(((low <= Y[:, :1]) & (Y[:, :1] <= high)).all())
    alike = counts(model, X.expand(2, *X.shape), 20)
    assert alike.quantile(torch.tensor(0.5)).shape == (2, 6, 1)
    assert bool((alike.quantile(torch.tensor(0.999)) <= 20).all())


def test_counts_of_a_model_of_empirical_logits_are_binomial() -> None:
    X, Y = _surveys()
    model = SingleTaskGP(X, Y[:, :1] - 3.0)
    found = counts(model, X, 50)
    assert torch.allclose(found.mean, 50.0 * prevalence(model, X).mean)
    assert found.concentration is None


def test_what_cannot_be() -> None:
    posterior = _posterior(None, (MEAN, VARIANCE))
    with pytest.raises(InputDataError, match=r"as examined.*row 1, column 0"):
        posterior.log_prob(torch.tensor([[5.0], [2.0], [0.0]]).double())
    with pytest.raises(InputDataError, match="whole number of positives"):
        posterior.cdf(torch.tensor(0.5).double())
    for level in (0.0, 1.0, 95.0):
        with pytest.raises(ValueError, match="Expected level"):
            posterior.interval(level)
        with pytest.raises(ValueError, match="Expected probabilities"):
            posterior.quantile(torch.tensor([level]))
    model = SingleTaskGP(*(t[:, :1] for t in _surveys()))
    X = _surveys()[0]
    with pytest.raises(BotorchTensorDimensionError, match=r"trials.*Y\[:, 1:\]"):
        counts(model, X, torch.ones(5, 1))
    with pytest.raises(InputDataError, match=r"1 or more examined.*row 0"):
        counts(model, X, 0)


def _rate(mean: Tensor, variance: Tensor) -> PrevalencePosterior:
    normal = MultivariateNormal(mean.squeeze(-1), DiagLinearOperator(variance.squeeze(-1)))
    return PrevalencePosterior(GPyTorchPosterior(normal))


@pytest.mark.parametrize(("concentration", "digits"), [(None, 1e-10), (20.0, 1e-6)])
@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_many_trials_are_as_few(
    monkeypatch: pytest.MonkeyPatch, concentration: float | None, digits: float, outliers: float
) -> None:
    mean = torch.tensor([-6.0, -2.0, 0.5, 4.0], dtype=torch.float64).unsqueeze(-1)
    variance = torch.tensor([1.0, 0.01, 4.0, 0.5], dtype=torch.float64).unsqueeze(-1)
    s = None if concentration is None else torch.tensor([[concentration]], dtype=torch.float64)
    trials = torch.tensor([[40.0], [150.0], [300.0], [60.0]], dtype=torch.float64)
    rate = _rate(mean, variance)
    found = CountPosterior(rate, trials, s, Outliers(outliers, 0.5, 4.0))
    y = torch.tensor([[0.0], [17.0], [210.0], [60.0]], dtype=torch.float64)
    listed = found.cdf(y), found.interval(0.95)
    monkeypatch.setattr(counts_module, "LISTED", 0)
    torch.testing.assert_close(found.cdf(y), listed[0], rtol=0.0, atol=digits)
    for many, few in zip(found.interval(0.95), listed[1], strict=True):
        assert torch.equal(many, few)


def test_counts_of_millions_cost_as_those_of_thousands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts_module, "log_prob", lambda *_: pytest.fail("lists all counts"))
    mean = torch.tensor([[-3.0], [0.0]], dtype=torch.float64)
    rate = _rate(mean, torch.full_like(mean, 0.25))
    trials = torch.full_like(mean, MOST_EXAMINED)
    found = CountPosterior(rate, trials)
    levels = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = found.interval(0.95)
    shares = rate.quantile(levels) * trials
    torch.testing.assert_close(torch.stack((low, high)), shares, rtol=1e-4, atol=1.0)
    torch.testing.assert_close(found.cdf(low), torch.full_like(low, 0.025), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("mean", "sd", "s", "y"), [(-1.0, 0.5, 4.0, 400), (0.5, 1.5, 1.5, 500), (2.0, 0.1, 9.0, 3600)]
)
def test_many_overdispersed_trials_cost_two_nodes(
    monkeypatch: pytest.MonkeyPatch, mean: float, sd: float, s: float, y: int
) -> None:
    """At the fewest trials and positives that two nodes are enough for; not 96 of them."""
    trials = math.ceil(NARROW * (s + 1.0))
    assert FAR <= y <= trials - FAR
    logits = np.linspace(mean - 9.0 * sd, mean + 9.0 * sd, 201)
    weight, chance = norm.pdf(logits, mean, sd), 1.0 / (1.0 + np.exp(-logits))
    each = betabinom.pmf(np.arange(y + 1)[:, None], trials, s * chance, s * (1.0 - chance)).sum(0)
    evaluated = []

    def recorded(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
        values: np.ndarray = betainc(a, b, x)
        evaluated.append(values.size)
        return values

    monkeypatch.setattr(binomial, "betainc", recorded)
    row = [np.array([value]) for value in (float(y), float(trials), mean, sd**2, s)]
    found = binomial.chance_up_to(*row)
    assert float(found[0]) == pytest.approx(float(each @ weight / weight.sum()), abs=1e-6)
    assert sum(evaluated) == 2 * NODES_OF_LATENT


@pytest.mark.parametrize("examined", [MOST_EXAMINED + 1.0, 2.0**60, 1e30, 1e300])
def test_no_survey_examines_so_many(examined: float) -> None:
    with pytest.raises(InputDataError, match="at most 10,000,000 examined, more than any survey"):
        check_counts(torch.tensor([[3.0, examined]], dtype=torch.float64))
    check_counts(torch.tensor([[3.0, MOST_EXAMINED]], dtype=torch.float64))
