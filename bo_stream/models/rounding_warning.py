"""Telling a user that outcomes are too far out for float64 at inducing points."""

from __future__ import annotations

import warnings

from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from bo_stream.allocation.novelty import NOVEL
from bo_stream.models.warning_level import users_stack_level

FAR_OUT = 1e4
"""Norm of whitened weights beyond which outcomes are not draws from the prior."""

MOST_ERROR = 0.1
"""Error of a posterior mean, in posterior standard deviations, that passes without a warning."""


def error_of_rounding(weights: Tensor, precision: Tensor) -> float:
    """Error of a posterior mean by rounding, in posterior standard deviations.

    ``NOVEL · |w| / σ²``: a kernel in float64 at inducing points is known up to ``NOVEL`` of the
    prior variance, and the whitened weights w multiply what is missed. Against a process in 60
    digits (a squared exponential kernel, lengthscale 0.4, 40 inputs on a line, one outcome of 1e5
    or 1e8, noise 1e-2 to 1e-6) the largest errors were 0.1 to 2 times this; in two and three
    dimensions, where kernel matrices are better conditioned, less than a hundredth of it.

    Args:
        weights: Whitened, in posterior mean, ``... x m x M x 1``.
        precision: Of an observation, ``1 / σ²``, in mean, ``... x m``.
    """
    norm = weights.square().sum((-2, -1)).sqrt()
    if norm.numel() == 0 or float(norm.max()) <= FAR_OUT:
        return 0.0
    return NOVEL * float((norm * precision).max())


def warn_of_rounding(error: float) -> None:
    """Warn with what there is to do.

    Args:
        error: See :func:`error_of_rounding`.
    """
    warnings.warn(
        "Outcomes lie so far from the process that float64 does not resolve the others: posterior "
        f"means may be off by up to {error:.1g} posterior standard deviations. Drop or clip "
        "outliers, standardise Y, or raise the noise variance.",
        NumericalWarning,
        stacklevel=users_stack_level(),
    )
