"""Bayesian linear regression in weight space, and bounds of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.oracles.clustered import kl_of_normals
from tests.oracles.likelihoods import LogProb, Normal, expectation


@dataclass(frozen=True)
class WeightSpace:
    """``y ~ N(Φ w, noise I)``, ``w ~ N(0, S⁻¹)``, with everything dense. [Evans2020, section 2]

    Attributes:
        functions: Φ, ``n x p``.
        precision: S, ``p x p``.
        y: ``n``.
        noise: Their variance.
    """

    functions: Tensor
    precision: Tensor
    y: Tensor
    noise: Tensor

    def loss_of_mean(self, mean: Tensor) -> Tensor:
        """``L_μ`` of eq. 2."""
        f = self.functions @ mean
        return (f.square() - 2.0 * self.y * f).sum() / self.noise + mean @ self.precision @ mean

    def loss_of_covariance(self, C: Tensor) -> Tensor:
        """``L_Σ`` of eq. 2, of a root ``Σ = C Cᵀ``."""
        spread = (self.functions @ C).square().sum() / self.noise
        return spread + (self.precision @ C @ C.mT).trace() - torch.logdet(C @ C.mT)

    def constant(self) -> Tensor:
        """``L_const`` of eq. 2."""
        n, p = self.functions.shape
        logs = n * (2.0 * math.pi * self.noise).log() - torch.logdet(self.precision)
        return logs - p + self.y.square().sum() / self.noise

    def bound(self, mean: Tensor, C: Tensor) -> Tensor:
        """Eq. 2."""
        losses = self.loss_of_mean(mean) + self.loss_of_covariance(C) + self.constant()
        return -0.5 * losses

    def posterior(self) -> Normal:
        """Of the weights, in closed form."""
        precision = self.functions.mT @ self.functions / self.noise + self.precision
        mean = torch.linalg.solve(precision, self.functions.mT @ self.y) / self.noise
        return Normal(mean, torch.linalg.inv(precision))

    def log_marginal_likelihood(self) -> Tensor:
        """``log p(y)``."""
        K = self.functions @ torch.linalg.solve(self.precision, self.functions.mT)
        K = K + self.noise * torch.eye(len(self.y), dtype=K.dtype)
        return torch.distributions.MultivariateNormal(torch.zeros_like(self.y), K).log_prob(self.y)

    def best_diagonal(self) -> Tensor:
        """Proposition 1: entries of the diagonal of C where its columns hold nothing else."""
        own = self.functions.square().sum(0) + self.noise * self.precision.diagonal()
        return (self.noise / own).sqrt()

    def with_function(self, values: Tensor, cross: Tensor, own: Tensor) -> WeightSpace:
        """One function more: its values at the data, and its row and entry of S. [appendix G]"""
        functions = torch.cat((self.functions, values.unsqueeze(-1)), -1)
        top = torch.cat((self.precision, cross.unsqueeze(-1)), -1)
        bottom = torch.cat((cross, own.reshape(1))).unsqueeze(0)
        return replace(self, functions=functions, precision=torch.cat((top, bottom)))


def bound_of_likelihood(
    functions: Tensor, precision: Tensor, mean: Tensor, C: Tensor, log_prob: LogProb
) -> Tensor:
    """The bound for any likelihood: eq. 5 with its standard deviation, by quadrature, less KL."""
    data = expectation(log_prob, functions @ mean, (functions @ C).square().sum(-1)).sum()
    prior = torch.linalg.inv(precision)
    return data - kl_of_normals(mean, C @ C.mT, torch.zeros_like(mean), prior)


def bound_of_single_functions(
    functions: Tensor, mean: Tensor, diagonal: Tensor, log_prob: LogProb
) -> Tensor:
    """Theorem 3, corrected, for a diagonal C: expected over draws of one of p functions.

    ``φ μ + φ C ε`` is estimated by ``p (φ_i μ_i + φ_i c_i ε_i)``.
    """
    p = functions.shape[-1]
    each = [
        expectation(
            log_prob,
            p * functions[:, i] * mean[i],
            (p * functions[:, i] * diagonal[i]).square(),
        ).sum()
        for i in range(p)
    ]
    return torch.stack(each).mean()
