"""``E log p(y | f)`` and ``log E p(y | f)`` under a normal f, smooth in its mean and variance."""

from __future__ import annotations

import math
from functools import singledispatch

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
)
from linear_operator.operators import DiagLinearOperator
from torch import Tensor


def independent(mean: Tensor, variance: Tensor) -> MultivariateNormal:
    """Uncorrelated normals, as gpytorch's likelihoods take them."""
    return MultivariateNormal(mean, DiagLinearOperator(variance))


@singledispatch
def expected_log_prob(likelihood: Likelihood, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """By the likelihood's own ``expected_log_prob``: Gauss-Hermite quadrature.

    Args:
        likelihood: In the dtype of the outcomes.
        Y: ``... x n``.
        mean: Of f, ``... x n``.
        variance: Of f, ``... x n``.
    """
    value: Tensor = likelihood.expected_log_prob(Y, independent(mean, variance))
    return value


@expected_log_prob.register
def _gaussian(likelihood: GaussianLikelihood, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """In closed form: gpytorch's own does not broadcast the noise of a batch of outputs."""
    noise = likelihood.noise
    return -0.5 * (((Y - mean).square() + variance) / noise + (2.0 * math.pi * noise).log())


@expected_log_prob.register
def _laplace(likelihood: LaplaceLikelihood, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """In closed form: quadrature of the kink of ``|y − f|`` has steps for a slope.

    ``E|t| = s √(2/π) exp(−m²/2s²) + m erf(m / s√2)`` for ``t ~ N(m, s²)``, the folded normal.
    """
    scale, gap, deviation = likelihood.noise.sqrt(), Y - mean, variance.sqrt()
    ratio = gap / deviation
    folded = deviation * math.sqrt(2.0 / math.pi) * (-0.5 * ratio.square()).exp()
    folded = folded + gap * torch.erf(ratio / math.sqrt(2.0))
    return -folded / scale - (2.0 * scale).log()


@expected_log_prob.register
def _bernoulli(
    likelihood: BernoulliLikelihood, Y: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """By its quadrature, of torch's log normal cdf: gpytorch's has no right second derivative."""
    signs = 2.0 * Y - 1.0
    normal = torch.distributions.Normal(mean, variance.sqrt())
    value: Tensor = likelihood.quadrature(lambda f: torch.special.log_ndtr(signs * f), normal)
    return value


@singledispatch
def log_marginal(likelihood: Likelihood, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """``log E p(y | f)`` by the likelihood's own ``log_marginal``: in closed form or by quadrature.

    Args:
        likelihood: In the dtype of the outcomes.
        Y: ``... x n``.
        mean: Of f, ``... x n``.
        variance: Of f, ``... x n``.
    """
    value: Tensor = likelihood.log_marginal(Y, independent(mean, variance))
    return value


@log_marginal.register
def _laplace_marginal(
    likelihood: LaplaceLikelihood, Y: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    """In closed form: the density has a kink, which quadrature of 20 nodes gets wrong by percents.

    ``E exp(−|y − f| / b) / 2b`` for ``f ~ N(m, s²)`` is ``exp(s² / 2b²) / 2b`` times the sum of
    ``exp(±g / b) Φ(∓g / s − s / b)``, where ``g = y − m``.
    """
    scale, deviation = likelihood.noise.sqrt(), variance.sqrt()
    gap, ratio = Y - mean, deviation / scale
    above, below = (
        sign * gap / scale + torch.special.log_ndtr(-sign * gap / deviation - ratio)
        for sign in (1.0, -1.0)
    )
    return torch.logaddexp(above, below) + 0.5 * ratio.square() - (2.0 * scale).log()
