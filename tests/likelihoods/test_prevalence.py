"""The posterior of a prevalence against adaptive integration, and its gradients."""

import pytest
import torch
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultivariateNormal
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm
from torch import Tensor

from bo_stream.likelihoods.counts import PrevalencePosterior

MEAN = torch.tensor([-3.0, 0.2, 1.5], dtype=torch.float64)
VARIANCE = torch.tensor([0.4, 1.0, 2.0], dtype=torch.float64)


def _posterior(mean: Tensor = MEAN, variance: Tensor = VARIANCE) -> PrevalencePosterior:
    return PrevalencePosterior(GPyTorchPosterior(MultivariateNormal(mean, variance.diag_embed())))


def test_moments() -> None:
    posterior = _posterior()
    for i, (m, v) in enumerate(zip(MEAN.tolist(), VARIANCE.tolist(), strict=True)):
        law = norm(m, v**0.5)
        first, second = (
            quad(lambda f, p=p, law=law: expit(f) ** p * law.pdf(f), m - 12, m + 12, epsrel=1e-10)[
                0
            ]
            for p in (1, 2)
        )
        assert float(posterior.mean[i, 0]) == pytest.approx(first, rel=1e-6)
        assert float(posterior.variance[i, 0]) == pytest.approx(second - first**2, rel=1e-4)


def test_exceedance_inverts_quantiles() -> None:
    posterior = _posterior()
    levels = torch.tensor([0.05, 0.5, 0.9], dtype=torch.float64)
    quantiles = posterior.quantile(levels)
    assert quantiles.shape == (3, 3, 1)
    for k, level in enumerate(levels.tolist()):
        for i in range(3):
            above = posterior.exceedance(float(quantiles[k, i, 0]))[i, 0]
            assert float(above) == pytest.approx(1.0 - level, abs=1e-9)


@pytest.mark.parametrize("threshold", [0.0, 1.0, 10.0, -0.1, float("nan")])
def test_thresholds_that_cannot_be(threshold: float) -> None:
    with pytest.raises(ValueError, match="Expected threshold"):
        _posterior().exceedance(threshold)


@pytest.mark.parametrize("level", [0.0, 1.0, 1.5, -0.1, float("nan")])
def test_probabilities_that_cannot_be(level: float) -> None:
    with pytest.raises(ValueError, match="Expected probabilities"):
        _posterior().quantile(torch.tensor([0.5, level]))


def test_gradients() -> None:
    def summary(mean: Tensor, variance: Tensor) -> Tensor:
        p = _posterior(mean, variance)
        level = torch.tensor(0.9, dtype=torch.float64)
        return torch.cat((p.mean, p.variance, p.quantile(level), p.exceedance(0.1)))

    moments = (MEAN.clone().requires_grad_(), VARIANCE.clone().requires_grad_())
    assert torch.autograd.gradcheck(summary, moments)


def test_samples_are_prevalences() -> None:
    posterior = _posterior()
    draws = posterior.rsample(torch.Size([4]))
    assert draws.shape == (4, 3, 1)
    assert bool(((draws > 0) & (draws < 1)).all())
