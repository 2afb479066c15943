"""Dirichlet classification and expectations of a softmax."""

from __future__ import annotations

import math
from itertools import product

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor


def dirichlet_observations(
    labels: list[int], classes: int, alpha_epsilon: float
) -> tuple[Tensor, Tensor]:
    """Scores and noise variances, ``n x classes`` each. [Milios et al., 2018, eq. 5 and 6]"""
    alpha = torch.tensor(
        [[alpha_epsilon + (label == k) for k in range(classes)] for label in labels],
        dtype=torch.float64,
    ).view(-1, classes)
    noise = torch.log(1.0 / alpha + 1.0)
    return torch.log(alpha) - noise / 2.0, noise


def softmax_expectations(mean: Tensor, variance: Tensor, order: int = 160) -> tuple[Tensor, Tensor]:
    """``E softmax(f)`` and the expected entropy of it, on a grid of all differences of m scores.

    Of the differences from the first score, which have the variance of that one in common.
    """
    nodes, weights = (torch.from_numpy(a) for a in hermegauss(order))
    weights, others = weights / weights.sum(), len(mean) - 1
    root = torch.linalg.cholesky(variance[1:].diag() + variance[0])
    grid, joint = (
        torch.cartesian_prod(*[part] * others).reshape(-1, others) for part in (nodes, weights)
    )
    differences = mean[1:] - mean[0] + grid @ root.mT
    scores, joint = torch.nn.functional.pad(differences, (1, 0)), joint.prod(-1)
    p = scores.softmax(-1)
    return joint @ p, joint @ -(p * scores.log_softmax(-1)).sum(-1)


def label_information(scores: Tensor) -> float:
    """Mutual information of q labels with scores that were drawn jointly, ``S x q x m``.

    ``H(E Π p) - E Σ H(p)`` over all ``m^q`` joint labels.
    """
    p = scores.softmax(-1)
    q, m = p.shape[1:]
    joint = 0.0
    for labels in product(range(m), repeat=q):
        probability = float(math.prod(p[:, i, k] for i, k in enumerate(labels)).mean())
        joint -= probability * math.log(probability)
    return joint + float((p * p.log()).sum((-2, -1)).mean())
