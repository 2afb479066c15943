"""Draws against the mean and the covariance that they ought to have."""

from __future__ import annotations

from torch import Tensor

ERRORS = 6.0
"""Standard errors that a moment may be off: one in 10⁹ is."""


def assert_moments(draws: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Mean and joint covariance of ``N x ... x n`` independent draws, each by its standard error.

    The standard errors are those of the draws themselves, which need not be normal.

    Args:
        draws: ``N x ... x n``.
        mean: ``... x n``.
        covariance: ``... x n x n``.
    """
    about = draws - mean
    _assert_mean(about, mean * 0.0)
    _assert_mean(about.unsqueeze(-1) * about.unsqueeze(-2), covariance)


def _assert_mean(values: Tensor, expected: Tensor) -> None:
    error = (values.mean(0) - expected).abs()
    bound = ERRORS * values.std(0) / len(values) ** 0.5
    worst = (error / bound.clamp_min(1e-300)).max()
    assert bool((error <= bound + 1e-12).all()), f"{ERRORS * float(worst):.1f} standard errors"
