"""What squared residuals tell of a noise variance, on the scale of logarithms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG_SQUARE_MEAN = float(torch.digamma(torch.tensor(0.5, dtype=torch.float64))) + math.log(2.0)
"""Mean of the log of a squared standard normal number, ψ(1/2) + log 2 = −1.27."""

LOG_SQUARE_VARIANCE = 0.5 * math.pi**2
"""Its variance, ψ'(1/2)."""

SMALLEST_SQUARE = 1e-6
"""Least squared residual, in parts of its expectation: the logarithm of 0 is none. One standard
normal square in 1,200 is smaller, so the mean of the log moves by 2e-3.
"""

SMALLEST_SHARE = 1e-3
"""Least share of the noise in a residual's variance that is reckoned with."""


def log_squares(residual: Tensor, variance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Measurements of the log noise variance and their variances, ``...`` each.

    A residual e of a prediction with the variance v has ``log e² = log(σ² + v) + log χ²``. With s
    the noise expected and ρ = s / (s + v) its share, ``e² ρ`` is to measure σ²: the target is
    ``log e² + log ρ − E log χ²``, unbiased where s is. It moves with log σ² by the share ρ only, so
    it counts as one of the variance ``ψ'(1/2) / ρ²``: where the prediction is uncertain a residual
    says little about the noise.

    Args:
        residual: Outcome less its predicted mean.
        variance: Of the prediction, noise not included.
        noise: Expected noise variance s.
    """
    total = noise + variance.clamp_min(0.0)
    share = (noise / total).clamp_min(SMALLEST_SHARE)
    square = residual.square().maximum(SMALLEST_SQUARE * total)
    return square.log() + share.log() - LOG_SQUARE_MEAN, LOG_SQUARE_VARIANCE / share.square()


def expected_exponential(mean: Tensor, variance: Tensor) -> Tensor:
    """Mean of ``exp(g)`` for a normal g."""
    return (mean + 0.5 * variance).exp()
