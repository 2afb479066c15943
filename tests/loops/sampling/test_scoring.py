from __future__ import annotations

import pytest
import torch

from bo_stream import WISKI
from bo_stream.loops.predictions import predict, score


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
    assert result.nll == pytest.approx(-normal.log_prob(Y).mean().item())
    inside = (tail > 0.025) & (tail < 0.975)
    assert result.coverage == pytest.approx(inside.double().mean().item())
