"""Log squared residuals measure a log noise variance without bias."""

from __future__ import annotations

import pytest
import torch
from scipy.special import polygamma

from bo_stream.models.wiski.heteroscedastic_inference import (
    LOG_SQUARE_MEAN,
    LOG_SQUARE_VARIANCE,
    SMALLEST_SQUARE,
    expected_exponential,
    log_squares,
)
from bo_stream.testing.streams import assert_close


def test_the_constants_are_those_of_the_log_of_a_chi_square() -> None:
    draws = torch.randn(2_000_000, dtype=torch.float64).square().log()
    assert float(draws.mean()) == pytest.approx(LOG_SQUARE_MEAN, abs=5e-3)
    assert pytest.approx(float(polygamma(1, 0.5)), rel=1e-12) == LOG_SQUARE_VARIANCE


@pytest.mark.parametrize("variance", [0.0, 0.3, 3.0])
def test_measurements_are_unbiased_at_the_expected_noise(variance: float) -> None:
    noise = torch.full((1_000_000,), 0.5, dtype=torch.float64)
    levels = (torch.arange(len(noise), dtype=torch.float64) + 0.5) / len(noise)
    residual = (noise + variance).sqrt() * torch.special.ndtri(levels)
    measured, variances = log_squares(residual, torch.full_like(noise, variance), noise)
    assert float((measured - noise.log()).mean()) == pytest.approx(0.0, abs=1e-2)
    share = 0.5 / (0.5 + variance)
    assert float(measured.var()) == pytest.approx(LOG_SQUARE_VARIANCE, rel=1e-2)
    assert_close(variances, torch.full_like(noise, LOG_SQUARE_VARIANCE / share**2))


def test_an_exact_prediction_measures_the_smallest_square() -> None:
    noise, zero = torch.tensor([0.5]).double(), torch.zeros(1).double()
    measured, _ = log_squares(zero, zero, noise)
    assert_close(measured, (SMALLEST_SQUARE * noise).log() - LOG_SQUARE_MEAN)


def test_the_mean_of_an_exponential() -> None:
    draws = (0.3 + 0.8 * torch.randn(2_000_000, dtype=torch.float64)).exp()
    expected = expected_exponential(torch.tensor(0.3), torch.tensor(0.64))
    assert float(draws.mean()) == pytest.approx(float(expected), rel=5e-3)
