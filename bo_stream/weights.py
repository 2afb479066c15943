"""The posterior over whitened weights and the marginal likelihood, from statistics alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from bo_stream.linalg import (
    cholesky_with_jitter,
    inverse_lower,
    inverse_root,
    safe_cholesky,
    solve_lower,
)
from bo_stream.sufficient_statistics import SufficientStatistics
from bo_stream.tensors import zip_tensors

MOST_ROWS = 64
"""Largest number of observations that are conditioned on; for more the weights are solved again."""

_MOST_OBSERVED = 192
"""Number of observations after which the weights are solved for again, so that neither costs nor
rounding errors add up."""


@dataclass(frozen=True)
class WeightPosterior:
    """Normal distribution q(w) = N(m, S Sᵀ) of whitened weights, whose prior is N(0, I).

    Stored as ``m = m₀ + S₀ a`` and ``S Sᵀ = S₀ (I − C Cᵀ) S₀ᵀ``, so that an observation reads the
    large S₀ once and appends a column to C.

    Attributes:
        base_mean: m₀, ``... x m x r x 1``.
        base_root: S₀, ``... x m x r x r``.
        shift: a, ``... x m x r x 1``.
        downdate: C, ``... x m x r x k``.
        observed: Number k of observations since the base.
    """

    base_mean: Tensor
    base_root: Tensor
    shift: Tensor
    downdate: Tensor
    observed: int = 0

    @classmethod
    def of(cls, mean: Tensor, root: Tensor) -> WeightPosterior:
        """Make N(mean, root rootᵀ)."""
        return cls(mean, root, torch.zeros_like(mean), root[..., :0])

    @cached_property
    def mean(self) -> Tensor:
        """Mean m, ``... x m x r x 1``. Cost O(r²)."""
        return self.base_mean + self.base_root @ self.shift if self.observed else self.base_mean

    @cached_property
    def root(self) -> Tensor:
        """Root S of the covariance, ``... x m x r x r``. Cost O(k r²)."""
        if not self.observed:
            return self.base_root
        change = self.downdate @ _root_change(self.downdate.mT @ self.downdate, -1.0)
        return _less_product(self.base_root, self.base_root @ self.downdate, change.mT)

    def covariance(self) -> Tensor:
        """Compute ``S Sᵀ``, ``... x m x r x r``. Cost O(r³)."""
        return self.root @ self.root.mT

    def covariance_times(self, columns: Tensor) -> Tensor:
        """Compute ``S Sᵀ columns``, ``... x m x r x n``. Cost O(n r (r + k))."""
        rows = columns.mT @ self.base_root  # thin products are faster this way round
        rows = rows - rows @ self.downdate @ self.downdate.mT
        return (rows @ self.base_root.mT).mT

    def log_precision(self) -> Tensor:
        """Compute ``−log |S Sᵀ|``, ``... x m``, for a triangular root, as of :func:`solve`."""
        return -2.0 * self.base_root.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def has_room_for(self, n: int) -> bool:
        """Return whether to :meth:`observe` n observations costs less than to solve again."""
        young = self.observed + n <= min(_MOST_OBSERVED, self.base_root.shape[-1])
        return n <= MOST_ROWS and young

    def observe(self, features: Tensor, residual: Tensor, noise: Tensor) -> WeightPosterior:
        """Condition on n more observations. Cost O(n r (r + k)), for n small against r.

        Equal to solving again with the observations' statistics added.

        Args:
            features: Whitened, ``... x m x n x r``.
            residual: Outcomes less the prior mean, ``... x m x n``.
            noise: Variances, ``... x m x n``.
        """
        rows = features @ self.base_root
        explained = rows @ self.downdate
        gain = rows.mT - self.downdate @ explained.mT
        factor, _ = cholesky_with_jitter(rows @ gain + torch.diag_embed(noise))
        innovation = residual.unsqueeze(-1) - features @ self.base_mean - rows @ self.shift
        columns = torch.linalg.solve_triangular(factor, gain.mT, upper=False).mT
        whitened = torch.linalg.solve_triangular(factor, innovation, upper=False)
        return replace(
            self,
            shift=self.shift + columns @ whitened,
            downdate=torch.cat((self.downdate, columns), -1),
            observed=self.observed + noise.shape[-1],
        )

    def observe_many(self, features: Tensor, residual: Tensor, noise: Tensor) -> WeightPosterior:
        """Condition as :meth:`observe`, on n observations that are not few against r.

        Cost O(n r² + r³); methods of the result then cost as much as after :func:`solve`.
        """
        root = self.root
        rows = features @ root
        weighted = rows / noise.unsqueeze(-1)
        inverse = inverse_lower(safe_cholesky(weight_precision(weighted.mT @ rows)))
        innovation = residual.unsqueeze(-1) - features @ self.mean
        gain = inverse.mT @ (inverse @ (weighted.mT @ innovation))
        return WeightPosterior.of(self.mean + root @ gain, root @ inverse.mT)

    def retract(self, features: Tensor, residual: Tensor, noise: Tensor) -> WeightPosterior:
        """Remove n observations that were conditioned on. Cost O(n r² + n³).

        Law: undoes :meth:`observe`, whose arguments it takes. With
        ``D = (N − Φ S Sᵀ Φᵀ)^(-1/2) Φ S`` the covariance is ``S (I + Dᵀ D) Sᵀ``.

        Raises:
            NotPSDError: They explain more than is known, hence were not conditioned on.
        """
        rows = features @ self.root
        factor = safe_cholesky(torch.diag_embed(noise) - rows @ rows.mT)
        columns = solve_lower(factor, rows)
        innovation = solve_lower(factor, residual.unsqueeze(-1) - features @ self.mean)
        change = _root_change(columns @ columns.mT, 1.0) @ columns
        root = _less_product(self.root, self.root @ columns.mT, -change)
        return WeightPosterior.of(self.mean - self.root @ (columns.mT @ innovation), root)


def _root_change(product: Tensor, sign: float) -> Tensor:
    """Return M with ``I ± C M Cᵀ`` a root of ``I ± C Cᵀ``, ``... x k x k``, from ``Cᵀ C``."""
    values, vectors = torch.linalg.eigh(product)
    root = (1.0 + sign * values).clamp_min(max(sign, 0.0)).sqrt()
    return (vectors / (1.0 + root).unsqueeze(-2)) @ vectors.mT


def _less_product(matrix: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Compute ``matrix − left right`` in one pass over the large matrix."""
    stacks = (part.flatten(0, -3) for part in (matrix, left, right))
    return torch.baddbmm(*stacks, alpha=-1.0).view_as(matrix)


@dataclass(frozen=True)
class InformationForm:
    """Information form of observations of whitened weights, with targets less the prior mean μ.

    Attributes:
        gram: ``Φᵀ N⁻¹ Φ``, ``... x m x r x r``, with N the noise covariance.
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

    def __add__(self, other: InformationForm) -> InformationForm:
        return zip_tensors(torch.add, self, other)


def at_noise(
    statistics: SufficientStatistics[Tensor], level: Tensor, residual: Tensor
) -> InformationForm:
    """Turn statistics at relative noise D into information form at the noise ``level · D``.

    Args:
        statistics: Statistics in whitened weights.
        level: Noise variance where D is 1, ``... x m``.
        residual: Coefficients of the columns [Y, 1] in the targets, ``... x m x 2 x 1``:
            ``[1, −μ]`` for a constant mean μ.
    """
    precision = level.reciprocal()[..., None, None]
    return InformationForm(
        statistics.gram * precision,
        statistics.moment @ residual * precision,
        (residual.mT @ statistics.energy @ residual * precision)[..., 0, 0],
        statistics.log_noise + statistics.count * level.log(),
        statistics.count,
    )


def evidence_of(features: Tensor, residual: Tensor, noise: Tensor) -> InformationForm:
    """Compute the information form of n observations. Cost O(n r²).

    The arguments are the same as for :meth:`WeightPosterior.observe`.
    """
    weighted = features / noise.unsqueeze(-1)
    return InformationForm(
        weighted.mT @ features,
        weighted.mT @ residual.unsqueeze(-1),
        (residual.square() / noise).sum(-1),
        noise.log().sum(-1),
        torch.full_like(noise[..., 0], noise.shape[-1]),
    )


def solve(evidence: InformationForm) -> WeightPosterior:
    """Compute the weight posterior N(Q⁻¹ moment, Q⁻¹) with ``Q = I + gram``. Cost O(r³).

    Q is never smaller than the identity, hence no jitter is needed. Source: Stanton et al. (2021),
    WISKI, section 4.1, in whitened weights.
    """
    root = inverse_root(weight_precision(evidence.gram))
    return WeightPosterior.of(root @ (root.mT @ evidence.moment), root)


def weight_precision(gram: Tensor) -> Tensor:
    """Compute ``Q = I + gram``, symmetrised, ``... x r x r``."""
    total = 0.5 * (gram + gram.mT)
    total.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return total


def log_marginal_likelihood(
    evidence: InformationForm, mean: Tensor, log_determinant: Tensor
) -> Tensor:
    """Compute ``log N(y − μ; 0, Φ P Φᵀ + N)`` by the determinant and inversion lemmas, ``... x m``.

    ``−½ (n log 2π + log |N| + log |I + P gram| + energy − momentᵀ mean)``. Cost O(r). Source:
    WISKI, eq. 13 with its log terms corrected.

    Args:
        evidence: Information form of the observations.
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
