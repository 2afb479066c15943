"""Likelihoods beside their names in the oracle, and outcomes that they can have."""

from __future__ import annotations

from collections.abc import Callable

from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from torch import Tensor

NOISE, FREEDOM = 0.5, 5.0


def _with_noise(likelihood: Likelihood) -> Likelihood:
    likelihood = likelihood.double()
    likelihood.noise = NOISE
    return likelihood


def _student() -> Likelihood:
    likelihood = _with_noise(StudentTLikelihood())
    likelihood.deg_free = FREEDOM
    return likelihood


LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "gaussian": lambda: _with_noise(GaussianLikelihood()),
    "bernoulli": lambda: BernoulliLikelihood().double(),
    "laplace": lambda: _with_noise(LaplaceLikelihood()),
    "poisson": lambda: PoissonLikelihood().double(),
    "student": _student,
}
CONCAVE = ("gaussian", "bernoulli", "laplace", "poisson")
OTHERS = ("bernoulli", "laplace", "poisson", "student")


def field(X: Tensor) -> Tensor:
    """A smooth function of the first two inputs, ``... x n x d -> ... x n x 1``."""
    return 2.0 * (4.0 * X[..., :1]).sin() + X[..., 1:2]


def outcomes(name: str, X: Tensor) -> Tensor:
    """Drawn from a likelihood at the field."""
    drawn: Tensor = LIKELIHOODS[name]()(field(X).squeeze(-1)).sample()
    return drawn.unsqueeze(-1)
