"""Expected uncertainties of target points after a set of observations, by quadrature."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, ndtr, xlogy

Array = NDArray[np.float64]

Uncertainty = Callable[[Array, Array], Array]
"""Of values with some means and variances, ``... x M`` each."""


def normal_grid(points: int) -> tuple[Array, Array]:
    """Nodes and weights of a standard normal expectation, by the trapezoidal rule."""
    nodes = np.linspace(-9.0, 9.0, points)
    weights = np.exp(-0.5 * nodes**2)
    return nodes, weights / weights.sum()


def variance(mean: Array, spread: Array) -> Array:
    """Variance of the values."""
    return spread


def prevalence_variance(mean: Array, spread: Array) -> Array:
    """Variance of their logistic function."""
    nodes, weights = normal_grid(81)
    chance = expit(mean[..., None] + np.sqrt(spread)[..., None] * nodes)
    return chance**2 @ weights - (chance @ weights) ** 2


def exceedance(mean: Array, spread: Array, threshold: float) -> Array:
    """Probability of a value above a threshold."""
    return ndtr((mean - threshold) / np.sqrt(spread))


def entropy(threshold: float) -> Uncertainty:
    """Entropy of whether a value is above a threshold."""

    def of(mean: Array, spread: Array) -> Array:
        chance = exceedance(mean, spread, threshold)
        return -xlogy(chance, chance) - xlogy(1.0 - chance, 1.0 - chance)

    return of


def misclassification(threshold: float) -> Uncertainty:
    """Probability of the less probable of the two sides of a threshold."""

    def of(mean: Array, spread: Array) -> Array:
        return ndtr(-np.abs(mean - threshold) / np.sqrt(spread))

    return of


def expected(
    uncertainty: Uncertainty, mean: Array, spread: Array, removed: Array, points: int = 1001
) -> Array:
    """Average over the means that observations lead to which remove some of the variance."""
    nodes, weights = normal_grid(points)
    later = mean[..., None, :] + np.sqrt(removed)[..., None, :] * nodes[:, None]
    left = np.broadcast_to((spread - removed)[..., None, :], later.shape)
    return np.einsum("...km,k->...m", uncertainty(later, left), weights)


def removed_variance(covariance: Array, noise: Array, sites: Sequence[int], first: int) -> Array:
    """Variance that observations at some sites remove from all points from ``first`` on.

    Args:
        covariance: Of sites and targets, ``(N + M) x (N + M)``.
        noise: Of the sites, ``N``.
        sites: Indices of those observed.
        first: Index N of the first target.
    """
    chosen = list(sites)
    own = covariance[np.ix_(chosen, chosen)] + np.diag(noise[chosen])
    cross = covariance[chosen, first:]
    return np.einsum("im,im->m", cross, np.linalg.solve(own, cross))


def total(
    uncertainty: Uncertainty,
    mean: Array,
    covariance: Array,
    noise: Array,
    weights: Array,
    sites: Sequence[int],
) -> float:
    """Expected weighted sum over the targets after observations at some sites.

    Args:
        uncertainty: Of a target.
        mean: Of sites and targets, ``N + M``.
        covariance: Of sites and targets.
        noise: Of the sites, ``N``.
        weights: Of the targets, ``M``.
        sites: Indices of those observed.
    """
    first = len(noise)
    removed = removed_variance(covariance, noise, sites, first)
    spread = np.diag(covariance)[first:]
    return float(expected(uncertainty, mean[first:], spread, removed) @ weights)


def greedy(
    value: Callable[[list[int]], float],
    candidates: Sequence[int],
    q: int,
    pending: Sequence[int] = (),
    costs: Array | None = None,
) -> list[int]:
    """Pick q sites one after the other, each of the largest fall of a set's value, per cost."""
    chosen: list[int] = []
    for _ in range(q):
        now = value([*pending, *chosen])
        falls = {
            i: (now - value([*pending, *chosen, i])) / (1.0 if costs is None else costs[i])
            for i in candidates
            if i not in chosen and i not in pending
        }
        chosen.append(max(falls, key=lambda i: (falls[i], -i)))
    return chosen
