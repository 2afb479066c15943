"""Distribution functions of counts of many trials, at a cost that does not grow with the trials.

Of n trials of one probability p at most y are positive where p is below the (y + 1)-th smallest of
n uniform numbers, U. That is distributed as Beta(y + 1, n − y) [David and Nagaraja, Order
Statistics, 2003, section 2.1]. So ``P(Y ≤ y) = P(p < U)`` is one integral over U, whatever
distribution p has: of its distribution function, if U is the narrower of the two, else the other
way round.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaincc, expit, log_expit, ndtr

Array = NDArray[np.float64]

REACH = 9.0
"""Standard deviations on both sides that are integrated over."""

TAIL = 37.0
"""Logarithm of what is left of a density where it falls exponentially."""

NODES = 192
"""Nodes of the trapezoidal rule over the logit."""

NODES_OF_LATENT, INNER_NODES = 64, 96
"""Nodes over the latent logit, and of the integral at each, of beta-binomial counts."""

NARROW, FAR = 400.0, 400.0
"""Trials in units of concentration, and positives as well as negatives, from which two nodes of
that integral are enough: U is so narrow that they miss less than ``(1 / 400)² / 12``."""


def chance_up_to(
    positives: Array, trials: Array, mean: Array, variance: Array, concentration: Array | None
) -> Array:
    """Compute the probability of so many positives or fewer, by quadrature, ``n``.

    Args:
        positives: Whole numbers from 0 to the trials, ``n``.
        trials: ``n``.
        mean: Of the logit of prevalence, which is normal, ``n``.
        variance: Of that logit, ``n``.
        concentration: Of a beta-binomial, ``n``; None: binomial.
    """
    result: Array = np.ones(len(positives))
    some = positives < trials
    y, n, m, deviation = (t[some] for t in (positives, trials, mean, np.sqrt(variance)))
    if concentration is None:
        result[some] = _normal_below(y + 1.0, n - y, m, deviation)
        return result
    # Nodes are close where the distribution function given the logit f goes from 1 to 0: they are
    # even in t, of which f is sinh, in units of that width.
    s, share = concentration[some], (y + 0.5) / (n + 1.0)
    middle = np.log(share) - np.log1p(-share)
    width = np.sqrt((1.0 / s + 1.0 / n) / (share * (1.0 - share)))
    low, high = (np.arcsinh((m + r * deviation - middle) / width) for r in (-REACH, REACH))
    narrow = (n >= NARROW * (s + 1.0)) & (y >= FAR) & (n - y >= FAR)
    total, weights = np.zeros(len(y)), np.zeros(len(y))
    for step in np.linspace(0.0, 1.0, NODES_OF_LATENT):
        t = low + (high - low) * step
        f = middle + width * np.sinh(t)
        weight = np.exp(-0.5 * ((f - m) / deviation) ** 2) * np.cosh(t)
        given, below = (y + 1.0, n - y, s * expit(f), s * expit(-f)), np.empty(len(y))
        a, b, c, d = (each[narrow] for each in given)
        below[narrow] = _below_narrow(a, b, c, d)
        a, b, c, d = (each[~narrow] for each in given)
        below[~narrow] = _beta_below(a, b, c, d, INNER_NODES)
        total, weights = total + weight * below, weights + weight
    result[some] = total / weights
    return result


def outliers_up_to(positives: Array, trials: Array, a: float, b: float) -> Array:
    """Compute that probability for a prevalence distributed as Beta(a, b), ``n``."""
    result: Array = np.ones(len(positives))
    some = positives < trials
    y, n = positives[some], trials[some]
    result[some] = _beta_below(y + 1.0, n - y, np.full(len(y), a), np.full(len(y), b))
    return result


def _normal_below(a: Array, b: Array, mean: Array, deviation: Array) -> Array:
    """Compute ``P(f < logit U)`` for a normal f and U ~ Beta(a, b)."""
    result = np.empty(len(a))
    wide = deviation > _spread(a, b)
    logits, density = _bell(a[wide], b[wide])
    below = ndtr((logits - mean[wide, None]) / deviation[wide, None])
    result[wide] = (density * below).sum(-1)
    rest = ~wide
    z, weights = _normal_weights(NODES)
    rates = expit(mean[rest, None] + deviation[rest, None] * z)
    result[rest] = betaincc(a[rest, None], b[rest, None], rates) @ weights
    return result


def _beta_below(a: Array, b: Array, c: Array, d: Array, nodes: int = NODES) -> Array:
    """Compute ``P(p < U)`` for p ~ Beta(c, d) and U ~ Beta(a, b)."""
    result = np.empty(len(a))
    wide = _spread(c, d) > _spread(a, b)
    logits, density = _bell(a[wide], b[wide], nodes)
    below = betainc(c[wide, None], d[wide, None], expit(logits))
    result[wide] = (density * below).sum(-1)
    rest = ~wide
    logits, density = _bell(c[rest], d[rest], nodes)
    above = betaincc(a[rest, None], b[rest, None], expit(logits))
    result[rest] = (density * above).sum(-1)
    return result


def _below_narrow(a: Array, b: Array, c: Array, d: Array) -> Array:
    """Compute that probability for an U much narrower than p, by the Gauss rule of two nodes.

    It has the mean m, standard deviation v and skewness g of U: nodes ``m + v (g/2 ± r/2)`` with
    ``r = √(4 + g²)`` and weights ``(1 ∓ g/r) / 2``.
    """
    size = a + b
    mean, deviation = a / size, np.sqrt(a * b / (size + 1.0)) / size
    skewness = 2.0 * (b - a) * np.sqrt((size + 1.0) / (a * b)) / (size + 2.0)
    root = np.sqrt(4.0 + skewness**2)
    nodes = (mean + 0.5 * deviation * (skewness + sign * root) for sign in (1.0, -1.0))
    upper, lower = (betainc(c, d, node) for node in nodes)
    result: Array = 0.5 * (upper + lower) - 0.5 * (skewness / root) * (upper - lower)
    return result


def _spread(a: Array, b: Array) -> Array:
    """Return about the standard deviation of the logit of a Beta variable."""
    spread: Array = np.sqrt(1.0 / a + 1.0 / b)
    return spread


def _bell(a: Array, b: Array, nodes: int = NODES) -> tuple[Array, Array]:
    """Return nodes over the logit of Beta variables and their probabilities, ``n x nodes``."""
    mode, reach = np.log(a) - np.log(b), REACH * _spread(a, b)
    low, high = mode - reach - TAIL / a, mode + reach + TAIL / b
    steps = np.linspace(0.0, 1.0, nodes)
    logits: Array = low[:, None] + (high - low)[:, None] * steps
    x, y = a[:, None], b[:, None]
    log = x * log_expit(logits) + y * log_expit(-logits)
    density = np.exp(log - log.max(-1, keepdims=True))
    return logits, density / density.sum(-1, keepdims=True)


def _normal_weights(number: int) -> tuple[Array, Array]:
    """Return nodes of the standard normal distribution and their probabilities."""
    nodes = np.linspace(-REACH, REACH, number)
    weights = np.exp(-0.5 * nodes**2)
    return nodes, weights / weights.sum()
