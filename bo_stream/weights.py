"""The posterior over whitened weights, and the marginal likelihood, from statistics alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.linalg import inverse_root, safe_cholesky, solve_lower
from bo_stream.sufficient_statistics import SufficientStatistics


@dataclass(frozen=True)
class WeightPosterior:
    """q(w) = N(mean, root rootᵀ) over whitened weights, whose prior is N(0, I).

    Attributes:
        mean: ``... x m x r x 1``.
        root: ``... x m x r x r``.
    """

    mean: Tensor
    root: Tensor

    def observe(self, features: Tensor, residual: Tensor, noise: Tensor) -> WeightPosterior:
        """The posterior after n more observations. Cost O(n r²), for n small against r.

        Law: equal to solving anew with the observations' statistics added. The root is updated as a
        root, so that the covariance stays positive; it loses its triangular shape. Source: the
        square root form of the Kalman update of Andrews (1968).

        Args:
            features: Whitened, ``... x m x n x r``.
            residual: Outcomes less the prior mean, ``... x m x n``.
            noise: Actual variances, ``... x m x n``.
        """
        V = features @ self.root
        image = self.root @ V.mT
        factor = safe_cholesky(V @ V.mT + torch.diag_embed(noise))
        surprise = residual.unsqueeze(-1) - features @ self.mean
        mean = self.mean + image @ torch.cholesky_solve(surprise, factor)
        half = solve_lower(factor + torch.diag_embed(noise.sqrt()), V)
        inner = torch.linalg.solve_triangular(factor.mT, half, upper=True)
        return WeightPosterior(mean, _less_product(self.root, image, inner))

    def covariance(self) -> Tensor:
        """``root rootᵀ``, ``... x m x r x r``. Cost O(r³)."""
        return self.root @ self.root.mT

    def log_precision(self) -> Tensor:
        """``log |Q|``, ``... x m``, fresh from :func:`solve`: the root is triangular there."""
        return -2.0 * self.root.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def _less_product(matrix: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``matrix − left right`` in one pass over the large matrix."""
    stacks = (part.flatten(0, -3) for part in (matrix, left, right))
    return torch.baddbmm(*stacks, alpha=-1.0).view_as(matrix)


@dataclass(frozen=True)
class GaussianEvidence:
    """What observations at their actual noise say of whitened weights with residual targets.

    Attributes:
        gram: ``Φᵀ N⁻¹ Φ``, ``... x m x r x r``, with N the actual noise.
        moment: ``Φᵀ N⁻¹ (y − μ)``, ``... x m x r x 1``.
        energy: ``(y − μ)ᵀ N⁻¹ (y − μ)``, ``... x m``.
        log_noise: ``log |N|``, ``... x m``.
        count: n, ``... x m``.
    """

    gram: Tensor
    moment: Tensor
    energy: Tensor
    log_noise: Tensor
    count: Tensor

    def __add__(self, other: GaussianEvidence) -> GaussianEvidence:
        """Evidence of both groups of observations."""
        return GaussianEvidence(
            self.gram + other.gram,
            self.moment + other.moment,
            self.energy + other.energy,
            self.log_noise + other.log_noise,
            self.count + other.count,
        )


def at_noise(
    statistics: SufficientStatistics[Tensor], level: Tensor, residual: Tensor
) -> GaussianEvidence:
    """Turn statistics at relative noise D into evidence at the actual noise ``level · D``.

    Args:
        statistics: Pulled back to whitened weights.
        level: The noise level, ``... x m``.
        residual: The combination of the columns [Y, 1] that is to be explained, ``... x m x 2 x
            1``: ``[1, −μ]`` for a constant mean μ.
    """
    precision = level.reciprocal()[..., None, None]
    return GaussianEvidence(
        statistics.gram * precision,
        statistics.moment @ residual * precision,
        (residual.mT @ statistics.energy @ residual * precision)[..., 0, 0],
        statistics.log_noise + statistics.count * level.log(),
        statistics.count,
    )


def solve(evidence: GaussianEvidence) -> WeightPosterior:
    """The weight posterior ``Q⁻¹ moment, Q⁻¹`` with ``Q = I + gram``. Cost O(r³).

    Q is never smaller than the identity, hence no jitter is needed. Source: Stanton et al. (2021),
    WISKI, section 4.1, in whitened weights.
    """
    root = inverse_root(_precision(evidence.gram))
    return WeightPosterior(root @ (root.mT @ evidence.moment), root)


def _precision(gram: Tensor) -> Tensor:
    """``Q = I + gram``, symmetrised, ``... x r x r``."""
    total = 0.5 * (gram + gram.mT)
    total.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return total


def log_marginal_likelihood(
    evidence: GaussianEvidence, mean: Tensor, log_determinant: Tensor
) -> Tensor:
    """``log N(y − μ; 0, Φ P Φᵀ + N)`` by the determinant and inversion lemmas, ``... x m``.

    ``−½ (n log 2π + log |N| + log |I + P gram| + energy − momentᵀ mean)``. Cost O(r). Source:
    WISKI, eq. 13 with its log terms corrected.

    Args:
        evidence: Of the observations.
        mean: Posterior mean of the weights, ``... x m x r x 1``.
        log_determinant: ``log |I + P gram|`` for weights with prior covariance P, ``... x m``.
    """
    explained = (evidence.moment * mean).sum((-2, -1))
    return -0.5 * (
        evidence.count * math.log(2 * math.pi)
        + evidence.log_noise
        + log_determinant
        + evidence.energy
        - explained
    )
