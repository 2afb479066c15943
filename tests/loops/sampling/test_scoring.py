from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from botorch.models.transforms.outcome import Standardize
from gpytorch.likelihoods import LaplaceLikelihood, Likelihood, StudentTLikelihood
from scipy.stats import laplace, norm
from scipy.stats import t as student_t

from bo_stream import OSVGP, WISKI
from bo_stream.loops.run import Score, predict, score
from bo_stream.loops.sampling.results import draw_curve, mean_over_run


def observe(X: torch.Tensor) -> torch.Tensor:
    return 30.0 + 7.0 * torch.sin(5.0 * X.sum(-1, keepdim=True))


@pytest.fixture
def model() -> WISKI:
    X = torch.rand(30, 2, dtype=torch.float64)
    return WISKI(X, observe(X), grid_size=12).update(X + 0.01, observe(X + 0.01))


def test_predictions_are_the_posterior_s(model: WISKI) -> None:
    X = torch.rand(200, 2, dtype=torch.float64)
    mean, variance = predict(model, X)
    posterior = model.posterior(X)
    torch.testing.assert_close(mean, posterior.mean.squeeze(-1))
    torch.testing.assert_close(variance, posterior.variance.squeeze(-1), rtol=1e-8, atol=1e-10)
    assert not mean.requires_grad


def test_scores_agree_with_the_normal_distribution_s_own(model: WISKI) -> None:
    X = torch.rand(400, 2, dtype=torch.float64)
    Y = observe(X) + torch.randn(400, 1, dtype=torch.float64)
    with torch.no_grad():
        posterior = model.posterior(X, observation_noise=True)
        normal = torch.distributions.Normal(posterior.mean, posterior.variance.sqrt())
    tail = normal.cdf(Y)
    result = score(model, X, Y)
    assert result.observations == 60
    assert result.rmse == pytest.approx((Y - posterior.mean).square().mean().sqrt().item())
    assert result.rmse_sd == pytest.approx(result.rmse / Y.std().item())
    assert result.mae == pytest.approx((Y - posterior.mean).abs().mean().item())
    assert result.mae_sd == pytest.approx(result.mae / Y.std().item())
    assert result.wrong is None
    assert result.nll == pytest.approx(-normal.log_prob(Y).mean().item())
    inside = (tail > 0.025) & (tail < 0.975)
    assert result.coverage == pytest.approx(inside.double().mean().item())


@pytest.mark.parametrize("kind", [StudentTLikelihood, LaplaceLikelihood])
def test_scores_under_other_noise_are_of_its_own_distribution(kind: type[Likelihood]) -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(300, 2, dtype=torch.float64, generator=generator)
    noise = torch.randn(300, 1, dtype=torch.float64, generator=generator)
    Y = observe(X) + noise**3
    model = OSVGP(X[:100], Y[:100], kind().double(), outcome_transform=Standardize(m=1))
    result = score(model, X[100:], Y[100:])
    mean, variance = (value.numpy()[:, None] for value in predict(model, X[100:]))
    nodes = np.linspace(-9.0, 9.0, 2001)  # values of the process, in its standard deviations
    weights = norm.pdf(nodes) / norm.pdf(nodes).sum()
    width = float(model.outcome_scale() * model.likelihood.noise.sqrt())
    values, truth = mean + np.sqrt(variance) * nodes, Y[100:].numpy()
    given = laplace(values, width)
    if kind is StudentTLikelihood:
        given = student_t(model.likelihood.deg_free.item(), values, width)
    density, tail = given.pdf(truth) @ weights, given.cdf(truth) @ weights
    assert result.nll == pytest.approx(-np.log(density).mean(), rel=1e-3)
    assert result.coverage == pytest.approx((abs(tail - 0.5) <= 0.475).mean(), abs=0.005)


def test_wrong_calls_are_counted_in_the_units_of_the_outcomes(model: WISKI) -> None:
    X = torch.rand(50, 2, dtype=torch.float64)
    mean = predict(model, X)[0]
    middle = mean.median().item()
    Y = mean.clone()
    Y[:20] = 2.0 * middle - Y[:20]  # on the other side, but for the median itself
    expected = ((mean > middle) != (middle < Y)).double().mean().item()
    assert 0.3 < expected <= 0.4
    assert score(model, X, Y.unsqueeze(-1), middle).wrong == pytest.approx(expected)


def test_equal_outcomes_have_no_standard_deviation_to_compare_with(model: WISKI) -> None:
    X = torch.rand(50, 2, dtype=torch.float64)
    result = score(model, X, torch.full((50, 1), 0.1, dtype=torch.float64))
    assert math.isnan(result.rmse_sd)
    assert math.isnan(result.mae_sd)
    assert result.rmse > 0.0
    draw_curve({"chosen": [result]}, {"chosen": "c"}, "y").canvas.draw()


def test_the_mean_over_a_run_weighs_scores_by_observations() -> None:
    """At 10, 20 and 40: the integral of straight lines, over 30."""
    curve = [
        Score(n, rmse, 0.5 * rmse, 1.0, 0.5, -rmse, 0.9, wrong)
        for n, rmse, wrong in ((10, 4.0, 0.3), (20, 2.0, 0.2), (40, 1.0, 0.0))
    ]
    mean = mean_over_run(curve)
    assert mean.observations == 40
    assert mean.rmse == pytest.approx((10 * 3.0 + 20 * 1.5) / 30)
    assert mean.nll == pytest.approx(-mean.rmse)
    assert mean.wrong == pytest.approx((10 * 0.25 + 20 * 0.1) / 30)
    assert mean_over_run(curve[:1]) == curve[0]
