"""Counts with a share of outliers: against sums over a fine grid of logits, and in a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from linear_operator.operators import DiagLinearOperator
from scipy.stats import betabinom, binom, norm

from bo_stream import OSVGP, QSGP, WISKI, AutoGP, BinomialLikelihood, counts
from bo_stream.likelihoods.counts import CountPosterior, PrevalencePosterior
from bo_stream.likelihoods.outcome_model import Outliers

SHARE = 0.1
MEAN, VARIANCE, TRIALS = -2.0, 0.5, 12
BETAS = pytest.mark.parametrize("beta", [(1.0, 1.0), (0.7, 9.0)])
"""Of the prevalence of an outlier."""


def _ordinary(chance: np.ndarray, k: int, concentration: float | None) -> np.ndarray:
    """Log probability of a count of a row that is no outlier."""
    if concentration is None:
        return binom.logpmf(k, TRIALS, chance)
    return betabinom.logpmf(k, TRIALS, concentration * chance, concentration * (1.0 - chance))


def _mixed(ordinary: np.ndarray, beta: tuple[float, float]) -> np.ndarray:
    """Mixed with a uniform or another Beta prevalence; counts are the leading axis."""
    law = betabinom.pmf(np.arange(TRIALS + 1), TRIALS, *beta)
    return (1.0 - SHARE) * ordinary + SHARE * law.reshape(-1, *[1] * (ordinary.ndim - 1))


def _sums(concentration: float | None, beta: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Bound of the expected log probability, and probability, of each count."""
    sd = VARIANCE**0.5
    logits = np.linspace(MEAN - 12.0 * sd, MEAN + 12.0 * sd, 4001)
    weight = norm.pdf(logits, MEAN, sd)
    weight /= weight.sum()
    chance = 1.0 / (1.0 + np.exp(-logits))
    logs = np.array([_ordinary(chance, k, concentration) for k in range(TRIALS + 1)])
    bound, laws = np.log(_mixed(np.exp(logs @ weight), beta)), _mixed(np.exp(logs), beta)
    assert (bound < np.log(laws) @ weight).all()  # it is one
    return bound, laws @ weight


@BETAS
@pytest.mark.parametrize("concentration", [None, 50.0])
def test_expectations_are_sums_over_logits(
    concentration: float | None, beta: tuple[float, float]
) -> None:
    overdispersed = concentration is not None
    likelihood = BinomialLikelihood(None, overdispersed, outliers=SHARE, outlier_beta=beta)
    every = torch.arange(TRIALS + 1.0, dtype=torch.float64)
    Y = torch.stack((every, torch.full_like(every, TRIALS)), -1)
    mean, variance = torch.full_like(every, MEAN), torch.full_like(every, VARIANCE)
    latent = MultivariateNormal(mean, DiagLinearOperator(variance))
    log, chance = _sums(concentration, beta)
    found = likelihood.double().expected_log_prob(Y, latent).detach().numpy()
    assert found == pytest.approx(log, abs=1e-6)
    found = likelihood.log_marginal(Y, latent).detach().exp().numpy()
    assert found == pytest.approx(chance, rel=1e-6)


@BETAS
@pytest.mark.parametrize("concentration", [None, 50.0])
def test_the_predictive_distribution_is_the_mixture(
    concentration: float | None, beta: tuple[float, float]
) -> None:
    moments = torch.tensor([MEAN]).double(), torch.tensor([VARIANCE]).double()
    latent = GPyTorchPosterior(MultivariateNormal(moments[0], DiagLinearOperator(moments[1])))
    s = None if concentration is None else torch.full((1, 1), concentration).double()
    trials = torch.full((1, 1), float(TRIALS)).double()
    posterior = CountPosterior(PrevalencePosterior(latent), trials, s, Outliers(SHARE, *beta))
    _, chance = _sums(concentration, beta)
    every = np.arange(TRIALS + 1)
    mean = (every * chance).sum()
    assert float(posterior.mean) == pytest.approx(mean, rel=1e-6)
    assert float(posterior.variance) == pytest.approx((every**2 * chance).sum() - mean**2, rel=1e-5)
    for k in (0, 5, TRIALS):
        y = torch.full((1, 1), float(k)).double()
        assert float(posterior.log_prob(y).exp()) == pytest.approx(chance[k], rel=1e-6)
        assert float(posterior.cdf(y)) == pytest.approx(chance[: k + 1].sum(), rel=1e-6)
    level = torch.tensor(0.95).double()
    assert float(posterior.quantile(level)) == np.flatnonzero(chance.cumsum() >= 0.95)[0]
    torch.manual_seed(0)
    drawn = posterior.rsample(torch.Size([4000])).flatten().numpy()
    assert drawn.mean() == pytest.approx(mean, abs=5.0 * drawn.std() / 4000**0.5)


@BETAS
def test_hypothetical_counts_have_the_moments_of_the_mixture(beta: tuple[float, float]) -> None:
    likelihood = BinomialLikelihood(trials=TRIALS, outliers=SHARE, outlier_beta=beta)
    law = likelihood(torch.tensor([MEAN]).double())
    every = np.arange(TRIALS + 1)
    chance = _mixed(binom.pmf(every, TRIALS, 1.0 / (1.0 + np.exp(-MEAN))), beta)
    mean = (every * chance).sum()
    variance = (every**2 * chance).sum() - mean**2
    assert float(law.mean) == pytest.approx(mean, rel=1e-9)
    assert float(law.variance) == pytest.approx(variance, rel=1e-9)
    torch.manual_seed(0)
    drawn = law.sample(torch.Size([4000]))
    assert float(drawn.mean()) == pytest.approx(mean, abs=5.0 * (variance / 4000) ** 0.5)


def _model(
    outliers: float, other: float = 60.0, beta: tuple[float, float] = (1.0, 30.0)
) -> tuple[OSVGP, torch.Tensor]:
    """Thirty sites on a line with 3 of 100 positive, and one among them with another number."""
    X = torch.linspace(0.0, 1.0, 31, dtype=torch.float64).unsqueeze(-1)
    Y = torch.tensor([[3.0, 100.0]]).double().repeat(31, 1)
    Y[15, 0] = other
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 0.2
    model = OSVGP(X[:0], Y[:0], BinomialLikelihood(outliers=outliers, outlier_beta=beta), kernel)
    model.mean_module.constant = -3.0
    return model.update(X, Y), X


def test_an_outlier_does_not_move_its_neighbours(tmp_path: Path) -> None:
    robust, X = _model(0.02)
    plain, _ = _model(0.0)
    truth = float(torch.logit(torch.tensor(0.03)))
    with torch.no_grad():
        assert (robust.posterior(X).mean - truth).abs().max() < 0.25
        assert (plain.posterior(X).mean - truth).abs().max() > 1.0
    robust.save(tmp_path / "model")
    loaded = OSVGP.load(tmp_path / "model")
    assert loaded.likelihood.outliers == 0.02
    assert torch.equal(loaded.posterior(X).mean, robust.posterior(X).mean)
    assert counts(loaded, X, 100).outliers == Outliers(0.02, 1.0, 30.0)


def test_outliers_like_all_counts_have_their_prevalences() -> None:
    """Against the largest likelihood of a fine grid of concentrations, by scipy."""
    random = np.random.default_rng(0)
    trials = random.integers(20, 100, 400)
    positives = random.binomial(trials, random.beta(0.6, 8.0, 400))
    found = Outliers.like(*(torch.as_tensor(c).double() for c in (positives, trials)), 0.1)
    mean = (positives.sum() + 0.5) / (trials.sum() + 1.0)
    sums = np.geomspace(1.0, 50.0, 400)
    logs = [betabinom.logpmf(positives, trials, s * mean, s * (1.0 - mean)).sum() for s in sums]
    assert found.a / (found.a + found.b) == pytest.approx(mean)
    assert found.a + found.b == pytest.approx(sums[int(np.argmax(logs))], rel=0.02)
    none = torch.zeros(0).double()
    assert Outliers.like(none, none, 0.1) == Outliers(0.1)


def test_a_village_without_positives_may_be_an_outlier_where_prevalences_are_low() -> None:
    """A uniform prevalence hardly ever gives none of 100: then it is no likely outlier."""
    low, X = _model(0.2, other=0.0, beta=(0.5, 12.0))
    uniform, _ = _model(0.2, other=0.0, beta=(1.0, 1.0))
    truth = float(torch.logit(torch.tensor(0.03)))
    with torch.no_grad():
        gaps = [float((m.posterior(X).mean - truth).abs().max()) for m in (low, uniform)]
    assert gaps[0] < 0.7 * gaps[1]


@pytest.mark.parametrize("family", [AutoGP, WISKI])
def test_rows_that_are_held_begin_without_outliers(family: type) -> None:
    """At the prior each of these rows would look like an outlier."""
    _, X = _model(0.0)
    Y = torch.tensor([[3.0, 100.0]]).double().repeat(31, 1)
    Y[15, 0] = 60.0
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 0.2
    likelihood = BinomialLikelihood(outliers=0.02)
    model = family(X, Y, likelihood=likelihood, covar_module=kernel)
    with torch.no_grad():
        model.mean_module.constant = torch.tensor(-1.0)
        found = model.clear().update(X, Y).posterior(X).mean
    assert (found - torch.logit(torch.tensor(0.03))).abs().max() < 0.3


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_is_from_0_to_1(share: float) -> None:
    with pytest.raises(ValueError, match="outliers as a share"):
        BinomialLikelihood(outliers=share)


@pytest.mark.parametrize("beta", [(0.0, 1.0), (1.0, float("inf"))])
def test_parameters_of_a_beta_distribution_are_positive(beta: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="outlier_beta to be two positive"):
        BinomialLikelihood(outlier_beta=beta)


def test_a_bound_by_drawn_functions_needs_a_concave_logarithm() -> None:
    X = torch.rand(5, 1).double()
    with pytest.raises(Exception, match="contaminated"):
        QSGP(X, torch.ones(5, 2).double(), BinomialLikelihood(outliers=0.01))
