"""Latent Gaussian processes of counts: Laplace's and variational approximations, long chains."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

Array = NDArray[np.float64]


def laplace(K: Array, positives: Array, examined: Array, mean: float = 0.0) -> tuple[Array, Array]:
    """Mode of the logits and their covariance there (Rasmussen and Williams, 2006, section 3.4)."""
    f = np.full(len(K), mean)
    precision = np.linalg.inv(K)
    for _ in range(100):
        chance = expit(f)
        weight = examined * chance * (1.0 - chance)
        slope = positives - examined * chance - precision @ (f - mean)
        f = f + np.linalg.solve(precision + np.diag(weight), slope)
    return f, np.linalg.inv(precision + np.diag(weight))


def variational(K: Array, positives: Array, examined: Array) -> tuple[Array, Array]:
    """Mean and variance of the logits in the best normal approximation (Opper, Archambeau, 2009).

    At its optimum the precision is that of the prior and of a site for each row, of precision
    ``w = examined E p (1 - p)``, and the mean is ``K E (positives - examined p)``. Found by halves
    of the way to what these say, the expectations by quadrature.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    mean, variance = np.zeros(len(K)), np.diag(K)
    precision, shift = np.zeros(len(K)), np.zeros(len(K))
    for _ in range(200):
        chance = expit(mean[:, None] + np.sqrt(variance)[:, None] * nodes)
        site = examined * (chance * (1.0 - chance) @ weights)
        slope = positives - examined * (chance @ weights)
        precision = 0.5 * (precision + site)
        shift = 0.5 * (shift + slope + site * mean)
        covariance = np.linalg.solve(np.eye(len(K)) + K * precision, K)
        mean, variance = covariance @ shift, np.diag(covariance)
    return mean, variance


def elliptical_slices(
    K: Array,
    log_likelihood: Callable[[Array], Array],
    mean: float = 0.0,
    chains: int = 300,
    steps: int = 1000,
) -> Array:
    """Draw the logits given their counts by elliptical slice sampling (Murray and others, 2010).

    Args:
        K: Prior covariance, ``n x n``.
        log_likelihood: Maps logits, ``chains x n``, to ``chains``.
        mean: Of the prior.
        chains: Independent ones, from draws of the prior.
        steps: Of each; the first fifth is dropped.

    Returns:
        ``kept x chains x n``.
    """
    random, root = np.random.default_rng(0), np.linalg.cholesky(K + 1e-10 * np.eye(len(K)))
    f, kept = random.standard_normal((chains, len(K))) @ root.T, []
    for step in range(steps):
        level = log_likelihood(mean + f) - random.exponential(size=chains)
        other = random.standard_normal(f.shape) @ root.T
        angle = random.uniform(0.0, 2.0 * np.pi, chains)
        low, high = angle - 2.0 * np.pi, angle.copy()
        while True:
            tried = f * np.cos(angle)[:, None] + other * np.sin(angle)[:, None]
            outside = log_likelihood(mean + tried) <= level
            if not outside.any():
                break
            low = np.where(outside & (angle < 0.0), angle, low)
            high = np.where(outside & (angle >= 0.0), angle, high)
            angle = np.where(outside, random.uniform(low, high), angle)
        f = tried
        if step >= steps // 5:
            kept.append(mean + f)
    return np.stack(kept)
