"""Likelihoods that are not Gaussian, by quadrature and by L-BFGS."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from tests.oracles.kernels import DenseKernel

LogProb = Callable[[Tensor], Tensor]
"""``log p(y | f)`` of n outcomes at values of f, ``k x n`` to ``k x n``."""


def log_probs(name: str, y: Tensor, noise: float = 0.5, freedom: float = 5.0) -> LogProb:
    """Of some outcomes, by the formulas of their distributions."""

    def log_prob(f: Tensor) -> Tensor:
        if name == "bernoulli":
            return torch.special.log_ndtr((2.0 * y - 1.0) * f)
        if name == "poisson":
            rate = torch.nn.functional.softplus(f)
            return y * rate.log() - rate - torch.lgamma(y + 1.0)
        if name == "laplace":
            return -(y - f).abs() / math.sqrt(noise) - math.log(2.0 * math.sqrt(noise))
        if name == "gaussian":
            return -0.5 * ((y - f) ** 2 / noise + math.log(2.0 * math.pi * noise))
        assert name == "student"
        constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
        tail = (freedom + 1) / 2 * torch.log1p((y - f) ** 2 / (freedom * noise))
        return constant - 0.5 * math.log(freedom * math.pi * noise) - tail

    return log_prob


def expectation(log_prob: LogProb, mean: Tensor, variance: Tensor) -> Tensor:
    """``E log p(y | f)`` of each outcome, by the trapezoidal rule over 18 standard deviations.

    Where log p has a kink the error is below 1e-5, and that of the slopes below 5e-3.
    """
    t = torch.linspace(-9.0, 9.0, 3001, dtype=torch.float64).unsqueeze(-1)
    weights = torch.exp(-0.5 * t**2) * (t[1] - t[0]) / math.sqrt(2.0 * math.pi)
    return (weights * log_prob(mean + variance.sqrt() * t)).sum(0)


def variational_optimum(
    mean: Tensor, covariance: Tensor, log_prob: LogProb, power: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, covariance and bound of the best normal q of n values, by L-BFGS over all its numbers.

    Maximises ``power Σ E_q log p(y | f) − KL(q ‖ N(mean, covariance))``.
    """
    n, root = len(mean), torch.linalg.cholesky(covariance)
    centre = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    lower = torch.eye(n, dtype=torch.float64).requires_grad_()

    def bound() -> Tensor:
        L = lower.tril()
        m, S = mean + root @ centre, root @ L
        data = expectation(log_prob, m, S.square().sum(-1)).sum()
        log_determinant = L.diagonal().abs().log().sum()
        return power * data - 0.5 * (centre @ centre + L.square().sum() - n) + log_determinant

    optimiser = torch.optim.LBFGS(
        [centre, lower],
        max_iter=500,
        tolerance_grad=1e-10,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -bound()
        loss.backward()
        return loss

    optimiser.step(closure)
    with torch.no_grad():
        S = root @ lower.tril()
        return mean + root @ centre, S @ S.mT, bound()


@dataclass(frozen=True)
class Normal:
    """A joint normal distribution.

    Attributes:
        mean: ``n``.
        covariance: ``n x n``.
    """

    mean: Tensor
    covariance: Tensor

    def divergence(self, other: Normal) -> Tensor:
        """KL of this from another."""
        p, q = (
            torch.distributions.MultivariateNormal(d.mean, 0.5 * (d.covariance + d.covariance.mT))
            for d in (self, other)
        )
        return torch.distributions.kl_divergence(p, q)

    def given_values(self, prior: Tensor, cross: Tensor, inner: Tensor, constant: float) -> Normal:
        """Values elsewhere, where this is of values at inducing points: their prior covariances."""
        gain = torch.linalg.solve(inner, cross.mT).mT
        mean = constant + gain @ (self.mean - constant)
        return Normal(mean, prior - gain @ (inner - self.covariance) @ gain.mT)


def uncollapsed_bound(
    q_new: Normal,
    q_old: Normal,
    log_prob: LogProb,
    X: Tensor,
    Z: Tensor,
    old_Z: Tensor,
    kernel: DenseKernel,
    old_kernel: DenseKernel,
    constant: float,
    beta: float = 1.0,
) -> Tensor:
    """The uncollapsed online bound with its three divergences. [Stanton2021, eq. A.7 and A.8]"""
    inner, a = kernel(Z, Z), old_Z

    def prior(K: Tensor) -> Normal:
        return Normal(torch.full((len(K),), constant, dtype=K.dtype), K)

    at_data = q_new.given_values(kernel(X, X), kernel(X, Z), inner, constant)
    at_old = q_new.given_values(kernel(a, a), kernel(a, Z), inner, constant)
    data = expectation(log_prob, at_data.mean, at_data.covariance.diagonal()).sum()
    divergences = (
        q_new.divergence(prior(inner))
        + at_old.divergence(q_old)
        - at_old.divergence(prior(old_kernel(a, a)))
    )
    return data - beta * divergences


def moments_given_outcomes(mean: Tensor, covariance: Tensor, log_prob: LogProb) -> Normal:
    """Exact posterior mean and covariance of two values, by tensor-product quadrature."""
    nodes, weights = (torch.from_numpy(a) for a in hermegauss(120))
    grid = torch.cartesian_prod(nodes, nodes)
    values = mean + grid @ torch.linalg.cholesky(covariance).mT
    mass = torch.cartesian_prod(weights, weights).prod(-1) * log_prob(values).sum(-1).exp()
    mass = mass / mass.sum()
    centre = mass @ values
    return Normal(centre, (values - centre).mT @ ((values - centre) * mass.unsqueeze(-1)))
