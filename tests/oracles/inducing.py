"""Sparse Gaussian processes and their bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracles.kernels import DenseKernel


@dataclass(frozen=True)
class SGPR:
    """Batch sparse regression, densely. [Titsias2009, eq. 6 and 9]

    Attributes:
        K: Prior covariance of the n data, ``n x n``.
        cross: Between data and inducing points, ``n x M``.
        inner: Of the inducing points, ``M x M``.
        y: Outcomes less the prior mean, ``n``.
        noise: Variances, ``n``.
    """

    K: Tensor
    cross: Tensor
    inner: Tensor
    y: Tensor
    noise: Tensor

    def bound(self) -> Tensor:
        """log N(y; 0, Q + D) − ½ tr(D⁻¹ (K − Q))."""
        Q = self.cross @ torch.linalg.solve(self.inner, self.cross.mT)
        normal = torch.distributions.MultivariateNormal(
            torch.zeros_like(self.y), Q + torch.diag(self.noise)
        )
        return normal.log_prob(self.y) - 0.5 * ((self.K - Q).diagonal() / self.noise).sum()

    def predict(self, test_cross: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance at t points: their covariance with Z, ``t x M``, and prior."""
        A = self.inner + self.cross.mT @ (self.cross / self.noise.unsqueeze(-1))
        mean = test_cross @ torch.linalg.solve(A, self.cross.mT @ (self.y / self.noise))
        explained = test_cross @ torch.linalg.solve(self.inner, test_cross.mT)
        return mean, test - explained + test_cross @ torch.linalg.solve(A, test_cross.mT)


def two_basis_bound(
    K: Tensor,
    cross: Tensor,
    inner: Tensor,
    y: Tensor,
    noise: float | Tensor,
    rank: int,
    nugget: float = 1e-9,
) -> Tensor:
    """The bound at the best mean of all functions and the best covariance of so many of them.

    Functions are the prior's eigenfunctions in the span of the inducing points: all for the mean,
    the leading ones for the covariance, whose bound is Titsias's but for the mean's misfit.

    Args:
        K: Prior covariance of the n data, ``n x n``.
        cross: Between data and inducing points, ``n x M``.
        inner: Of the inducing points, ``M x M``.
        y: Outcomes less the prior mean, ``n``.
        noise: Variance.
        rank: Functions of the covariance.
        nugget: Noise of the inducing points' values, in parts of their variance.
    """
    n, sigma2 = len(y), torch.as_tensor(noise).to(y)
    half = torch.linalg.cholesky(inner + nugget * torch.diag(inner.diagonal()))
    features = torch.linalg.solve(half, cross.mT).mT
    _, directions = torch.linalg.eigh((features.mT @ features).detach())
    z = (features @ directions).flip(-1)
    fit = y @ torch.linalg.solve(z @ z.mT + sigma2 * torch.eye(n).to(y), y)
    few = z[:, :rank]
    learned = torch.logdet(torch.eye(rank).to(y) + few.mT @ few / sigma2)
    left = (K.diagonal() - few.square().sum(-1)).sum()
    constant = n * (2.0 * torch.pi * sigma2).log()
    return -0.5 * (fit + learned + constant + left / sigma2)


def online_bound(
    old_X: Tensor,
    old_y: Tensor,
    old_Z: Tensor,
    old_kernel: DenseKernel,
    X: Tensor,
    y: Tensor,
    Z: Tensor,
    kernel: DenseKernel,
    noise: float,
) -> Tensor:
    """The collapsed online bound of new data after a batch of old ones. [Bui2017, eq. 7]

    The old posterior of the values at the old points, over their old prior, is a likelihood of
    pseudo-outcomes ``D S⁻¹ m`` with covariance ``D = (S⁻¹ − K'⁻¹)⁻¹``.
    """
    eye = torch.eye(len(old_Z), dtype=X.dtype)
    K_old, cross = old_kernel(old_Z, old_Z), old_kernel(old_X, old_Z)
    A = K_old + cross.mT @ cross / noise
    S = K_old @ torch.linalg.solve(A, K_old)
    m = K_old @ torch.linalg.solve(A, cross.mT @ old_y / noise)
    S_inverse, K_inverse = torch.linalg.solve(S, eye), torch.linalg.solve(K_old, eye)
    D = torch.linalg.inv(S_inverse - K_inverse)
    pseudo = D @ S_inverse @ m
    both = torch.cat((kernel(X, Z), kernel(old_Z, Z)))
    Q = both @ torch.linalg.solve(kernel(Z, Z), both.mT)
    covariance = Q + torch.block_diag(noise * torch.eye(len(X), dtype=X.dtype), D)
    normal = torch.distributions.MultivariateNormal(torch.zeros(len(both)).to(X), covariance)
    n = len(X)
    missed_new = (kernel(X, X) - Q[:n, :n]).diagonal().sum() / noise
    missed_old = (torch.linalg.solve(D, kernel(old_Z, old_Z) - Q[n:, n:])).diagonal().sum()
    log_determinants = torch.logdet(S) - torch.logdet(K_old) - torch.logdet(D)
    constant = len(old_Z) * math.log(2.0 * math.pi)
    quadratic = m @ S_inverse @ D @ S_inverse @ m - m @ S_inverse @ m
    delta = -0.5 * (log_determinants - quadratic - constant)
    return normal.log_prob(torch.cat((y, pseudo))) - 0.5 * (missed_new + missed_old) + delta


def online_update(
    former: tuple[Tensor, Tensor],
    K_old: Tensor,
    kernel: DenseKernel,
    old_Z: Tensor,
    Z: Tensor,
    X: Tensor,
    y: Tensor,
    noise: float,
    printed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the values at Z after a batch. [Galy-Fajou2021, appendix A.1]

    Args:
        former: Mean and covariance of the values at the old points.
        K_old: Their prior covariance by the old hyperparameters, ``K'`` there.
        kernel: Of the new hyperparameters.
        old_Z: The old points.
        Z: The new ones.
        X: Inputs of the batch.
        y: Its outcomes less the prior mean.
        noise: Variance.
        printed: With Σ for Σ⁻¹ in the mean.
    """
    m, S = former
    inner = kernel(Z, Z)
    of_old, of_new = (torch.linalg.solve(inner, kernel(Z, A)).mT for A in (old_Z, X))
    D_inverse = torch.linalg.inv(S) - torch.linalg.inv(K_old)
    precision = of_new.mT @ of_new / noise + of_old.mT @ D_inverse @ of_old
    covariance = torch.linalg.inv(precision + torch.linalg.inv(inner))
    told = S @ m if printed else torch.linalg.solve(S, m)
    return covariance @ (of_new.mT @ y / noise + of_old.mT @ told), covariance
