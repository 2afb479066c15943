"""What is predicted at an observation from all others, in closed form."""

from __future__ import annotations

from torch import Tensor


def leave_one_out(
    outcomes: Tensor, mean: Tensor, variance: Tensor, noise: Tensor, least_share: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Mean and variance at each observation, had it not been observed.

    Of the posterior variance v and the noise variance s, the share ``(s − v) / s`` is what the
    others leave to the observation itself: ``v / share`` is the variance without it, and
    ``y − (y − mean) / share`` the mean.

    Args:
        outcomes: What was observed, ``...``.
        mean: Posterior mean there, given all.
        variance: Posterior variance there, given all.
        noise: Of the observations.
        least_share: What smaller shares are raised to.
    """
    share = (1.0 - variance / noise).clamp_min(least_share)
    return outcomes - (outcomes - mean) / share, variance / share
