"""Bayesian linear regression on features, and features that a former network's stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracles.likelihoods import Normal


@dataclass(frozen=True)
class LinearRegression:
    """``y = Φ w + ε`` with ``w ~ N(0, v I)``, ``ε ~ N(0, diag noise)``. [Bishop2006, section 3.3]

    Attributes:
        features: Φ, ``n x r``.
        y: ``n``.
        noise: Variances, ``n``.
        variance: v.
    """

    features: Tensor
    y: Tensor
    noise: Tensor
    variance: Tensor

    def weights(self) -> Normal:
        """Their posterior. [eq. 3.53, 3.54]"""
        weighted = self.features / self.noise.unsqueeze(-1)
        prior = torch.eye(self.features.shape[-1], dtype=weighted.dtype) / self.variance
        covariance = torch.linalg.inv(prior + weighted.mT @ self.features)
        return Normal(covariance @ weighted.mT @ self.y, covariance)

    def posterior(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the function at ``t x r`` features. [eq. 3.58, 3.59]"""
        w = self.weights()
        return features @ w.mean, features @ w.covariance @ features.mT

    def log_marginal_likelihood(self) -> Tensor:
        """``log N(y; 0, v Φ Φᵀ + N)``."""
        covariance = self.variance * self.features @ self.features.mT + torch.diag(self.noise)
        misfit = self.y @ torch.linalg.solve(covariance, self.y)
        return -0.5 * (misfit + torch.logdet(covariance) + len(self.y) * math.log(2.0 * math.pi))


def carried_features(former: Tensor, rows: Tensor, rows_former: Tensor, ridge: float) -> Tensor:
    """Features ``A φ`` that stand for unknown ones.

    A is the matrix nearest to the identity, by ``ridge``, that maps former features of some rows
    to theirs: least ``|Ψ − Φ Aᵀ|² + ε |A − I|²``.

    Args:
        former: φ, ``n x r``.
        rows: Ψ, ``w x r``.
        rows_former: Φ, ``w x r``.
        ridge: ε in parts of the mean square sum of a feature over the rows.
    """
    r = former.shape[-1]
    epsilon = ridge * max(float(rows_former.square().sum() / r), 1.0)
    eye = math.sqrt(epsilon) * torch.eye(r, dtype=former.dtype)
    left, right = torch.cat((rows_former, eye)), torch.cat((rows, eye))
    return former @ torch.linalg.lstsq(left, right).solution
