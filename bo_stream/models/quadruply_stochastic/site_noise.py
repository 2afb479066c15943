"""The noise variance of a Gaussian likelihood that is about as sharp as another."""

from __future__ import annotations

import math

from botorch.exceptions.errors import UnsupportedError
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    PoissonLikelihood,
)
from torch import Tensor, ones

from bo_stream.likelihoods.outcome_model import LogisticLikelihood

LOG_CONCAVE = (
    GaussianLikelihood,
    LaplaceLikelihood,
    BernoulliLikelihood,
    LogisticLikelihood,
    PoissonLikelihood,
)
"""Likelihoods whose logarithm is concave in the function value."""


def check_log_concave(likelihood: Likelihood) -> None:
    """Check that Theorem 3 bounds a likelihood.

    Raises:
        UnsupportedError: Its logarithm is not known to be concave.
    """
    if not isinstance(likelihood, LOG_CONCAVE):
        names = ", ".join(one.__name__ for one in LOG_CONCAVE)
        raise UnsupportedError(
            f"Expected a likelihood whose logarithm is concave ({names}), got "
            f"{type(likelihood).__name__}: with a few functions drawn, Jensen's inequality would "
            "not make the estimate a lower bound. For outliers take LaplaceLikelihood, for any "
            "likelihood OSVGP."
        )


def site_noise(likelihood: Likelihood) -> Tensor:
    """Its own variance, that of a Laplace outcome, or one over the largest curvature, ``m`` or 1.

    The curvature is at f = 0: 1/4 for the logistic likelihood, 2/π for the probit. For counts it
    grows with the count; 1 is that of a count of about five.
    """
    if isinstance(likelihood, GaussianLikelihood):
        return likelihood.noise.reshape(-1)
    if isinstance(likelihood, LaplaceLikelihood):
        return 2.0 * likelihood.noise.reshape(-1)
    curved = {LogisticLikelihood: 4.0, BernoulliLikelihood: 0.5 * math.pi}
    return curved.get(type(likelihood), 1.0) * ones(1)
