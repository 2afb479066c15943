"""Telling a user that points are too few for what the observations say."""

from __future__ import annotations

import warnings

from botorch.exceptions.warnings import BotorchWarning

from bo_stream.models.warning_level import users_stack_level


class CoarsePointsWarning(BotorchWarning):
    """Inducing points, centres or grid nodes miss more of the process than the noise hides."""


def warn_of_coarse_points(ratio: float, points: int, max_points: int) -> None:
    """Warn with what there is to do.

    Args:
        ratio: Prior variance that the points leave unknown at the observations, in mean, in units
            of their noise variances.
        points: Their number.
        max_points: The largest.
    """
    warnings.warn(
        f"{points:,} inducing points leave, in mean over the observations, {ratio:.2g} times the "
        "noise variance of the process unknown: the approximation is coarser than the noise. Raise "
        f"max_points ({max_points:,}), or take an allocator that takes more points.",
        CoarsePointsWarning,
        stacklevel=users_stack_level(),
    )


def warn_of_coarse_centres(ratio: float, resolution: float, max_centres: int) -> None:
    """Warn with what there is to do.

    Args:
        ratio: Prior variance of the process between an input and the centre where it acts, in mean
            over the observations, in units of their noise variances.
        resolution: Largest distance of an input from its centre.
        max_centres: Largest number of centres.
    """
    warnings.warn(
        f"At a resolution of {resolution:.2g} the process differs between inputs and their "
        f"clusters' centres by {ratio:.2g} times the noise variance, in mean over the "
        "observations: the approximation is coarser than the noise. Build the model with a larger "
        f"max_centres ({max_centres:,}), or give it a finer resolution.",
        CoarsePointsWarning,
        stacklevel=users_stack_level(),
    )
