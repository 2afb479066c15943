"""The exact Gaussian process, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.linalg import cho_factor, cho_solve
from torch import Tensor

from tests.oracles.kernels import DenseKernel


@dataclass(frozen=True)
class DenseGP:
    """The exact Gaussian process: a kernel, a constant mean, and all the data.

    Attributes:
        kernel: ``... x n x d, ... x n' x d -> ... x n x n'``.
        mean: Constant prior mean, ``... x 1``.
        X: ``... x n x d``.
        y: ``... x n``.
        noise: Variances, ``... x n``.
    """

    kernel: DenseKernel
    mean: Tensor
    X: Tensor
    y: Tensor
    noise: Tensor

    def noisy_covariance(self) -> Tensor:
        """``k(X, X) + N``."""
        return self.kernel(self.X, self.X) + torch.diag_embed(self.noise)

    def posterior(self, T: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``... x t`` and covariance ``... x t x t``. [Rasmussen & Williams, eq. 2.23–24]"""
        cross = self.kernel(T, self.X)
        gain = torch.linalg.solve(self.noisy_covariance(), cross.mT).mT
        mean = self.mean + (gain @ (self.y - self.mean).unsqueeze(-1)).squeeze(-1)
        return mean, self.kernel(T, T) - gain @ cross.mT

    def precise_posterior(self, T: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of one process, ``t`` each, solved in numpy's widest floats.

        By a Cholesky factor, a column at a time. [Rasmussen & Williams, algorithm 2.1]
        """
        wide = self.noisy_covariance().numpy().astype(np.longdouble)
        columns = torch.cat((self.kernel(self.X, T), (self.y - self.mean).unsqueeze(-1)), -1)
        solved = columns.numpy().astype(np.longdouble)
        for j in range(len(wide)):
            wide[j:, j] /= np.sqrt(wide[j, j])
            solved[j] /= wide[j, j]
            below = wide[j + 1 :, j]
            wide[j + 1 :, j + 1 :] -= np.outer(below, below)
            solved[j + 1 :] -= np.outer(below, solved[j])
        mean = solved[:, :-1].T @ solved[:, -1]
        prior = self.kernel(T, T).diagonal().numpy()
        variance = prior - np.square(solved[:, :-1]).sum(0)
        return self.mean + torch.tensor(mean.astype(float)), torch.tensor(variance.astype(float))

    def refined_posterior(self, T: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`precise_posterior`, of thousands of observations.

        Solved in float64, and refined by residuals in numpy's widest floats until a correction is
        no smaller than the one before. [Higham, Accuracy and Stability of Numerical Algorithms,
        section 12.1] The condition number of the covariance must be below 1e15.
        """
        covariance = self.noisy_covariance().numpy()
        factor, wide = cho_factor(covariance, lower=True), covariance.astype(np.longdouble)
        columns = torch.cat((self.kernel(self.X, T), (self.y - self.mean).unsqueeze(-1)), -1)
        right = columns.numpy().astype(np.longdouble)
        solved = cho_solve(factor, columns.numpy()).astype(np.longdouble)
        former, size = np.inf, np.abs(solved).max()
        while size < 0.5 * former:
            correction = cho_solve(factor, (right - wide @ solved).astype(float))
            solved += correction
            former, size = size, np.abs(correction).max()
        assert size < 1e-6 * np.abs(solved).max()
        mean = right[:, :-1].T @ solved[:, -1]
        known = (right[:, :-1] * solved[:, :-1]).sum(0)
        variance = self.kernel(T, T).diagonal().numpy() - known
        return self.mean + torch.tensor(mean.astype(float)), torch.tensor(variance.astype(float))

    def log_marginal_likelihood(self) -> Tensor:
        """[Rasmussen & Williams, eq. 2.30], ``...``."""
        covariance = self.noisy_covariance()
        residual = (self.y - self.mean).unsqueeze(-1)
        misfit = (residual.mT @ torch.linalg.solve(covariance, residual))[..., 0, 0]
        n = self.X.shape[-2]
        return -0.5 * (misfit + torch.logdet(covariance) + n * math.log(2.0 * math.pi))

    def condition(self, X: Tensor, y: Tensor, noise: Tensor) -> DenseGP:
        """The same process with more data."""
        return replace(
            self,
            X=torch.cat((self.X, X), -2),
            y=torch.cat((self.y, y), -1),
            noise=torch.cat((self.noise, noise), -1),
        )

    def without(self, rows: list[int]) -> DenseGP:
        """The same process with less data: all but some rows."""
        left = [i for i in range(self.X.shape[-2]) if i not in rows]
        return replace(
            self, X=self.X[..., left, :], y=self.y[..., left], noise=self.noise[..., left]
        )


def heteroscedastic_stream(
    mean: DenseGP, noise: DenseGP, batches: list[tuple[Tensor, Tensor]]
) -> tuple[DenseGP, DenseGP]:
    """Processes of y and of its log noise variance, each batch predicted, then put into both.

    Log squares as measurements: ψ(1/2) + log 2 and ψ'(1/2) are the mean and variance of log χ².
    """
    for X, y in batches:
        m, covariance = mean.posterior(X)
        g, uncertainty = noise.posterior(X)
        expected = torch.exp(g + 0.5 * uncertainty.diagonal(dim1=-2, dim2=-1))
        share = expected / (expected + covariance.diagonal(dim1=-2, dim2=-1))
        measured = torch.log(share * (y - m) ** 2) + 1.2703628454614782
        noise = noise.condition(X, measured, math.pi**2 / 2.0 / share**2)
        mean = mean.condition(X, y, expected)
    return mean, noise


def condition_in_turn(
    mean: Tensor, covariance: Tensor, rows: list[int], y: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """A joint normal conditioned on noisy values of some of its entries, one after another."""
    for row, value, variance in zip(rows, y, noise, strict=True):
        gain = covariance[:, row] / (covariance[row, row] + variance)
        mean = mean + gain * (value - mean[row])
        covariance = covariance - torch.outer(gain, covariance[row])
    return mean, covariance


def integrated_posterior_variance(gp: DenseGP, X: Tensor, noise: Tensor, points: Tensor) -> Tensor:
    """Mean variance at ``points`` once X (``q x d``) is observed with variances ``noise`` (q).

    The variance does not depend on what is observed. The negative of it is qNIPV.
    """
    conditioned = gp.condition(X, torch.zeros_like(noise), noise)
    return conditioned.posterior(points)[1].diagonal(dim1=-2, dim2=-1).mean(-1)


def standardization(Y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and Bessel-corrected standard deviation of ``... x n x m`` outcomes, ``... x 1 x m``."""
    n = Y.shape[-2]
    mean = Y.sum(-2, keepdim=True) / n
    return mean, ((Y - mean).square().sum(-2, keepdim=True) / (n - 1)).sqrt()


def in_order(values: Tensor, outputs: int) -> Tensor:
    """``... x n x m`` outcomes as the targets ``... x n`` (one output) or ``... x m x n``."""
    return values.squeeze(-1) if outputs == 1 else values.mT
