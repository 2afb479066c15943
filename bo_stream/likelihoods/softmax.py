"""Expectations of a softmax of independent Gaussian scores, by one-dimensional quadrature.

A softmax is the law of the largest score after Gumbel noise: ``softmax_k(f)`` is the probability of
``k = argmax_j (f_j + g_j)``. With independent scores, ``F_j(t) = E exp(-exp(f_j - t))`` the
distribution function of ``f_j + g_j`` and ``F_j'`` its density, all are integrals over a line:

    E softmax_k                = ∫ F_k'(t) Π_{j≠k} F_j(t) dt
    E [f_k softmax_k]          = ∫ E[f_k exp(f_k - t - exp(f_k - t))] Π_{j≠k} F_j(t) dt
    E log Σ_j exp f_j + 0.577… = ∫ t (Π_j F_j)'(t) dt

That integral and the expectations inside are trapezoidal sums, which converge exponentially for
such functions (Trefethen and Weideman, 2014): deterministic, and differentiable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

STEP = 0.42
"""Step of the sums, in units of Gumbel noise: an error of about ``exp(-π² / STEP)``, 6e-11."""

ROWS = 64
"""Points treated at a time, for a processor's cache."""

_NORMAL_WIDTH = 6.4
_GUMBEL_BELOW, _GUMBEL_ABOVE = 3.2, 25.0
_EULER = 0.57721566490153286


@dataclass(frozen=True)
class SoftmaxMoments:
    """Moments of ``p = softmax(f)``, f Gaussian, in nats.

    Attributes:
        probabilities: ``E p``, ``... x m``.
        expected_entropy: ``E H(p)``, ``...``.
    """

    probabilities: Tensor
    expected_entropy: Tensor

    @property
    def entropy(self) -> Tensor:
        """Entropy ``H(E p)``, ``...``."""
        return entropy(self.probabilities)

    @property
    def information(self) -> Tensor:
        """Mutual information ``H(E p) - E H(p)`` of label and scores, ``...``, never negative."""
        return (self.entropy - self.expected_entropy).clamp_min(0.0)


def softmax_moments(mean: Tensor, variance: Tensor, step: float = STEP) -> SoftmaxMoments:
    """Compute the moments for independent scores.

    Cost O(m T H), T and H growing with the largest deviation.

    Args:
        mean: ``... x m``, float64.
        variance: ``... x m``.
        step: Of the sums: twice as much is four times as fast, at the root of the accuracy.
    """
    shape = mean.shape
    rows = (moment.reshape(-1, shape[-1]).split(ROWS) for moment in (mean, variance))
    parts = [_moments(means, variances, step) for means, variances in zip(*rows, strict=True)]
    return SoftmaxMoments(
        torch.cat([part.probabilities for part in parts]).view(shape),
        torch.cat([part.expected_entropy for part in parts]).view(shape[:-1]),
    )


def _moments(mean: Tensor, variance: Tensor, step: float) -> SoftmaxMoments:
    mean = mean - mean.detach().amax(-1, keepdim=True)  # changes nothing but rounding errors
    deviation = variance.clamp_min(0.0).add(1e-18).sqrt()
    nodes = _outer_nodes(mean, deviation, step)
    distribution, density, weighted = _perturbed(mean, deviation, nodes, step)
    others = _product_of_others(distribution)
    parts = step * torch.stack((density * others, weighted * others)).sum(-1)
    log_sum = step * (nodes.squeeze(-2) * (density * others).sum(-2)).sum(-1) - _EULER
    total = parts[0].sum(-1)
    expected_entropy = log_sum / total - parts[1].sum(-1) / total
    return SoftmaxMoments(parts[0] / total.unsqueeze(-1), expected_entropy.clamp_min(0.0))


def entropy(probabilities: Tensor) -> Tensor:
    """Compute ``-Σ p log p`` over the last dimension, in nats, with finite gradients at zero."""
    return -torch.xlogy(probabilities, probabilities.clamp_min(1e-300)).sum(-1)


@torch.no_grad()
def _outer_nodes(mean: Tensor, deviation: Tensor, step: float) -> Tensor:
    """Return nodes where the largest perturbed score may lie, ``... x 1 x T``."""
    reach = _NORMAL_WIDTH * deviation
    low = (mean - reach).amax(-1) - _GUMBEL_BELOW
    high = (mean + reach).amax(-1) + _GUMBEL_ABOVE
    count = int(((high - low) / step).amax().ceil()) + 1 if mean.numel() else 1
    steps = torch.arange(count, dtype=mean.dtype, device=mean.device)
    return (low.unsqueeze(-1) + step * steps).unsqueeze(-2)


def _perturbed(
    mean: Tensor, deviation: Tensor, nodes: Tensor, step: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``F_j``, ``F_j'`` and density times score, at the nodes, ``... x m x T`` each.

    Relative to each score's mean, ``exp(f - t)`` is an outer product, hence one exponential a pair.
    """
    normal, weights = _normal_nodes(deviation, step)
    spread = deviation.unsqueeze(-1) * normal
    rise, fall = spread.exp(), (mean.unsqueeze(-1) - nodes).exp()
    below = (-fall.unsqueeze(-1) * rise.unsqueeze(-2)).exp()
    at = weights * rise
    columns = torch.stack((weights.expand_as(at), at, at * spread), -1)
    distribution, density, moved = (below @ columns).unbind(-1)
    return distribution, fall * density, fall * (moved + mean.unsqueeze(-1) * density)


@torch.no_grad()
def _normal_nodes(deviation: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of a standard normal expectation, fine against unit noise."""
    largest = float(deviation.amax()) if deviation.numel() else 0.0
    spacing = step * min(2.0, 1.0 / max(largest, 1e-9))
    count = math.ceil(_NORMAL_WIDTH / spacing)
    nodes = spacing * torch.arange(-count, count + 1).to(deviation)
    weights = (-0.5 * nodes.square()).exp()
    return nodes, weights / weights.sum()


def _product_of_others(factors: Tensor) -> Tensor:
    """Compute for each k the product over all j ≠ k, ``... x m x T``, without a division."""
    ones = torch.ones_like(factors[..., :1, :])
    before = torch.cat((ones, factors[..., :-1, :]), -2).cumprod(-2)
    after = torch.cat((ones, factors[..., 1:, :].flip(-2)), -2).cumprod(-2).flip(-2)
    return before * after


def sampled_softmax(mean: Tensor, variance: Tensor, num_samples: int, seed: int | None) -> Tensor:
    """Average the softmax of drawn independent scores, ``... x m``. Cost O(m num_samples).

    The draws are common to all points, from a generator of their own if there is a seed.
    """
    generator = None if seed is None else torch.Generator(mean.device).manual_seed(seed)
    shape = (num_samples, mean.shape[-1])
    noise = torch.randn(shape, generator=generator, dtype=mean.dtype, device=mean.device)
    deviation, total = variance.clamp_min(0.0).sqrt(), torch.zeros_like(mean)
    for draw in noise:
        total = total + (mean + deviation * draw).softmax(-1)
    return total / num_samples
