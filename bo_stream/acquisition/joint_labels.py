"""Entropies of several labels at once, from joint draws of the class probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.models.softmax import entropy

MAX_CONFIGURATIONS = 1024
"""Up to this many joint values of q labels are enumerated, beyond it as many are drawn."""


@dataclass(frozen=True)
class JointEntropies:
    """Of q labels, in nats.

    Attributes:
        joint: ``H(E Π p)``, ``...``.
        expected: ``E Σ H(p)``, ``...``: what is left when the scores are known.
    """

    joint: Tensor
    expected: Tensor


def joint_entropies(
    probabilities: Tensor, max_configurations: int, generator: torch.Generator
) -> JointEntropies:
    """Entropies of q labels whose probabilities were drawn S times, jointly.

    All ``m^q`` joint values are enumerated where there are at most ``max_configurations``, at
    O(S m^q): then ``joint - expected`` is never negative. Else as many are drawn: an estimate whose
    gradient is that of its expectation. Source: Kirsch, van Amersfoort and Gal (2019), BatchBALD,
    eq. 12 and 13.

    Args:
        probabilities: ``S x ... x q x m``.
        max_configurations: At most so many.
        generator: Of the draws.
    """
    q, m = probabilities.shape[-2:]
    expected = entropy(probabilities).sum(-1).mean(0)
    if m**q <= max_configurations:
        return JointEntropies(entropy(_enumerated(probabilities).mean(0)), expected)
    labels = _drawn(probabilities.detach(), max_configurations, generator)
    likelihoods = _likelihoods(probabilities, labels)
    weights, surprise = likelihoods / likelihoods.detach(), -likelihoods.detach().log()
    mean = surprise.mean(-1, keepdim=True)
    joint = mean + (weights * (surprise - mean)).mean(-1, keepdim=True)
    return JointEntropies(joint.squeeze(-1), expected)


def _enumerated(probabilities: Tensor) -> Tensor:
    """Probabilities of all joint labels, ``S x ... x m^q``."""
    joint = probabilities[..., 0, :]
    for i in range(1, probabilities.shape[-2]):
        joint = (joint.unsqueeze(-1) * probabilities[..., i, :].unsqueeze(-2)).flatten(-2)
    return joint


def _drawn(probabilities: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Joint labels, ``... x q x count``, each of a random draw of the probabilities."""
    which = torch.randint(probabilities.shape[0], (count,), generator=generator)
    cumulative = probabilities.cumsum(-1)[which.to(probabilities.device), ..., :-1]
    shape = (count, *[1] * (probabilities.ndim - 3), probabilities.shape[-2], 1)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64).to(probabilities)
    return (uniform > cumulative).sum(-1).movedim(0, -1)


def _likelihoods(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Mean probability over the draws of joint labels, ``... x count``."""
    total = torch.zeros((), dtype=probabilities.dtype, device=probabilities.device)
    for i in range(probabilities.shape[-2]):
        chosen = labels[..., i, :].expand(*probabilities.shape[:-2], labels.shape[-1])
        total = total + probabilities[..., i, :].gather(-1, chosen).clamp_min(1e-300).log()
    return total.exp().mean(0)


@dataclass(frozen=True)
class Hypotheses:
    """Joint labels of what has been picked, and how likely each makes each draw of the scores.

    Attributes:
        weights: Probability of each, ``C``.
        draws: Posterior probability of each draw given it, ``C x S``.
    """

    weights: Tensor
    draws: Tensor

    @classmethod
    def none(cls, draws: int, like: Tensor) -> Hypotheses:
        """Nothing was picked yet."""
        return cls(like.new_ones(1), like.new_full((1, draws), 1.0 / draws))

    def conditional_entropy(self, probabilities: Tensor) -> Tensor:
        """Of one more label given those picked, ``n``, for probabilities ``S x n x m``.

        Cost O(C S n m).
        """
        draws, n, m = probabilities.shape
        given = (self.draws @ probabilities.reshape(draws, n * m)).view(-1, n, m)
        return torch.einsum("c,cn->n", self.weights, entropy(given))

    def after(
        self, probabilities: Tensor, max_configurations: int, generator: torch.Generator
    ) -> Hypotheses:
        """With one more label, of which the draws have probabilities ``S x m``."""
        given = self.draws @ probabilities
        weights = self.weights.unsqueeze(-1) * given
        draws = self.draws.unsqueeze(1) * probabilities.mT / given.unsqueeze(-1).clamp_min(1e-300)
        weights, draws = weights.flatten(), draws.flatten(0, 1)
        if len(weights) <= max_configurations:
            return Hypotheses(weights, draws)
        chosen = torch.multinomial(weights, max_configurations, True, generator=generator)
        return Hypotheses(torch.full_like(weights[chosen], 1.0 / max_configurations), draws[chosen])
