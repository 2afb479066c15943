"""Decoupled bases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracles.likelihoods import expectation


@dataclass(frozen=True)
class DecoupledOracle:
    """A decoupled Gaussian process by its formulas. [Cheng2017, eq. 8 to 10]

    Attributes:
        alpha: ``K_α``, ``M_α x M_α``.
        a: ``M_α``.
        beta: ``K_β``, ``M_β x M_β``.
        B: ``M_β x M_β``.
        constant: Prior mean.
    """

    alpha: Tensor
    a: Tensor
    beta: Tensor
    B: Tensor
    constant: float = 0.0

    def mean(self, cross: Tensor) -> Tensor:
        """From ``k(x, α)``."""
        return self.constant + cross @ self.a

    def covariance(self, prior: Tensor, cross: Tensor) -> Tensor:
        """From ``k(x, x')`` and ``k(x, β)``; ``(B⁻¹ + K_β)⁻¹ = B (I + K_β B)⁻¹``."""
        eye = torch.eye(len(self.beta), dtype=prior.dtype)
        inner = self.B @ torch.linalg.inv(eye + self.beta @ self.B)
        return prior - cross @ inner @ cross.mT

    def divergence(self) -> Tensor:
        """Of q from the prior. [eq. 9]"""
        eye = torch.eye(len(self.beta), dtype=self.beta.dtype)
        whole = eye + self.beta @ self.B
        inner = self.B @ torch.linalg.inv(whole)
        traced = (self.beta @ inner).trace()
        return 0.5 * (self.a @ self.alpha @ self.a + torch.logdet(whole) - traced)

    def bound(
        self, prior: Tensor, alpha: Tensor, beta: Tensor, log_prob: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Of all outcomes, from ``k(x, x)``, ``k(x, α)``, ``k(x, β)``; by quadrature. [eq. 10]"""
        variance = self.covariance(prior, beta).diagonal()
        return expectation(log_prob, self.mean(alpha), variance).sum() - self.divergence()


def hybrid_divergence(
    K: Tensor, m: Tensor, S: Tensor, cross: Tensor, alpha: Tensor, a: Tensor
) -> Tensor:
    """Of the hybrid parametrization, ``−log |K⁻¹ S|`` halved. [Cheng2017, eq. 14, corrected]

    Args:
        K: Prior covariance of the shared values.
        m: Their part of the mean.
        S: Their posterior covariance.
        cross: ``k(X̃, α_r)``.
        alpha: ``K_α_r``.
        a: Of the residual functions.
    """
    inner = torch.linalg.inv(K)
    mean = 0.5 * m @ inner @ m + m @ inner @ cross @ a + 0.5 * a @ alpha @ a
    spread = (S @ inner).trace() - len(K) - torch.logdet(inner @ S)
    return mean + 0.5 * spread
