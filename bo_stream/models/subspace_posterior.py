"""The posterior of weights under a prior that need not be inverted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.linalg import safe_cholesky, solve_lower, solve_one_plus_product
from bo_stream.weights import GaussianEvidence


@dataclass(frozen=True)
class SubspacePosterior:
    """The posterior of weights with prior N(0, P): mean ``P u``, covariance ``P − P K P``.

    P need not be inverted: with A the evidence's gram, ``K = (I + A P)⁻¹ A`` and ``u = (I + A P)⁻¹
    moment``.

    Attributes:
        K: ``... x m x r x r``.
        u: ``... x m x r x 1``.
        log_determinant: ``log |I + A P|``, ``... x m``.
    """

    K: Tensor
    u: Tensor
    log_determinant: Tensor


def subspace_posterior(evidence: GaussianEvidence, prior: Tensor) -> SubspacePosterior:
    """By one LU factor. Cost O(r³).

    Args:
        evidence: Of the observations.
        prior: Covariance P of the weights, ``... x m x r x r``.

    Raises:
        NotPSDError: Hyperparameters are NaN or infinite.
    """
    gain, log_determinant = solve_one_plus_product(
        evidence.gram, prior, torch.cat((evidence.gram, evidence.moment), -1)
    )
    return SubspacePosterior(gain[..., :-1], gain[..., -1:], log_determinant)


def thin_subspace_posterior(G: Tensor, b: Tensor, prior: Tensor) -> SubspacePosterior:
    """The same from a root of the evidence. Cost O(r² k).

    With ``A = G Gᵀ``: ``(I + A P)⁻¹ G = G (I + Gᵀ P G)⁻¹``.

    Args:
        G: ``... x m x r x k``.
        b: The moment is ``G b``, ``... x m x k x 1``.
        prior: Covariance P of the weights, ``... x m x r x r``.

    Raises:
        NotPSDError: Hyperparameters are NaN or infinite.
    """
    inner = G.mT @ (prior @ G)
    inner.diagonal(dim1=-2, dim2=-1).add_(1.0)
    factor = safe_cholesky(inner)
    rows = solve_lower(factor, G.mT)
    log_determinant = 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return SubspacePosterior(rows.mT @ rows, rows.mT @ solve_lower(factor, b), log_determinant)
