"""Expectations of binomial counts, positives out of trials, whose logit is normal."""

from __future__ import annotations

import math

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor
from torch.nn.functional import logsigmoid

NODES = 32
"""Nodes of Gauss-Hermite quadrature."""

_BISECTIONS, _NEWTON_STEPS = 30, 3


def log_prob(positives: Tensor, trials: Tensor, logit: Tensor) -> Tensor:
    """Compute the log probability of counts, finite for none and for all positive.

    Args:
        positives: Whole numbers from 0 to the trials, ``...``.
        trials: Whole numbers from 1, ``...``.
        logit: Of the probability of one positive, ``...``.
    """
    chance = positives * logsigmoid(logit) + (trials - positives) * logsigmoid(-logit)
    return log_choices(positives, trials) + chance


def log_choices(positives: Tensor, trials: Tensor) -> Tensor:
    """Compute the log of the binomial coefficient of trials over positives."""
    return (trials + 1).lgamma() - (positives + 1).lgamma() - (trials - positives + 1).lgamma()


def expected_log_prob(positives: Tensor, trials: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Compute ``E log p(positives | f)`` for a logit ``f ~ N(mean, variance)``.

    Only ``E log(1 + exp(f))`` is by quadrature: the rest is linear in f. Differentiable in both
    moments; all tensors broadcast.
    """
    nodes, weights = normal_nodes(mean)
    logits = mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * nodes
    softplus = -(logsigmoid(-logits) * weights).sum(-1)
    return log_choices(positives, trials) + positives * mean - trials * softplus


def log_marginal(positives: Tensor, trials: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Compute ``log E p(positives | f)`` for a logit ``f ~ N(mean, variance)``.

    The nodes lie about the mode of the integrand, in its own width: about the mean they would miss
    the narrow likelihood of many trials. The integral does not depend on where they lie, so they
    are held fixed under differentiation. All tensors broadcast.
    """
    positives, trials, mean, variance = torch.broadcast_tensors(positives, trials, mean, variance)
    centre, width = _mode(positives, trials, mean.detach(), variance.detach())
    nodes, weights = normal_nodes(mean)
    logits = centre.unsqueeze(-1) + width.unsqueeze(-1) * nodes
    gap = logits - mean.unsqueeze(-1)
    log_normal = -0.5 * (gap.square() / variance.unsqueeze(-1) - nodes.square())
    log_normal = log_normal + (width / variance.sqrt()).log().unsqueeze(-1)
    likelihood = log_prob(positives.unsqueeze(-1), trials.unsqueeze(-1), logits)
    return (likelihood + log_normal + weights.log()).logsumexp(-1)


@torch.no_grad()
def _mode(
    positives: Tensor, trials: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mode and width of likelihood times normal: log-concave, by bisection, then Newton."""
    low = mean - variance * (trials - positives)
    high = mean + variance * positives
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        rises = positives - trials * middle.sigmoid() > (middle - mean) / variance
        low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
    mode = 0.5 * (low + high)
    for _ in range(_NEWTON_STEPS):
        slope = positives - trials * mode.sigmoid() - (mode - mean) / variance
        mode = mode + slope * _width(trials, mode, variance).square()
    return mode, _width(trials, mode, variance)


def _width(trials: Tensor, logit: Tensor, variance: Tensor) -> Tensor:
    """Return the deviation of the normal that has the curvature of likelihood times normal."""
    chance = logit.sigmoid()
    return (trials * chance * (1.0 - chance) + variance.reciprocal()).rsqrt()


def normal_nodes(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of a standard normal expectation."""
    nodes, weights = hermegauss(NODES)
    return like.new_tensor(nodes), like.new_tensor(weights / math.sqrt(2.0 * math.pi))
