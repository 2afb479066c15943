"""Sufficient statistics of observations, and the posterior over whitened weights that they give."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from bo_stream.linalg import (
    cholesky_with_jitter,
    inverse_lower,
    row_product,
    safe_cholesky,
    solve_lower,
    solve_rows,
)
from bo_stream.tensors import cached_for_autograd, map_tensors, zip_tensors

G = TypeVar("G")
G_contra = TypeVar("G_contra", contravariant=True)


@dataclass(frozen=True)
class SufficientStatistics(Generic[G]):
    """Statistics of n observations with features Φ, targets Y and noise D.

    Law: ``statistics(A ∪ B) = statistics(A) + statistics(B)``. Each of m outputs has two target
    columns [Y, 1], so that every affine change of Y (a constant mean, a new standardisation) is
    exact without the data. D is relative noise: 1 where the noise variance is inferred.
    [Stanton2021, section 4 and appendix A.5]

    Attributes:
        gram: ``Φᵀ D⁻¹ Φ``, dense ``... x p x p`` or a value made of tensors that are linear in D⁻¹;
            one for all outputs (leading ``... x 1``) or one each (``... x m``).
        moment: ``Φᵀ D⁻¹ [Y, 1]``, ``... x m x p x 2``.
        energy: ``[Y, 1]ᵀ D⁻¹ [Y, 1]``, ``... x m x 2 x 2``.
        totals: ``[Y, 1]ᵀ [Y, 1]``, ``... x m x 2 x 2``, unweighted: sums, squares and count.
        log_noise: ``log |D|``, ``... x m``.
        noise_sum: ``tr D``, ``... x m``.
    """

    gram: G
    moment: Tensor
    energy: Tensor
    totals: Tensor
    log_noise: Tensor
    noise_sum: Tensor

    @property
    def count(self) -> Tensor:
        """Number of observations, ``... x m``; not whole after forgetting."""
        return self.totals[..., 1, 1]

    def __add__(self, other: Self) -> Self:
        return zip_tensors(torch.add, self, other)

    def scale(self, factor: float) -> Self:
        """Weight every observation by ``factor``: exponential forgetting."""
        return map_tensors(self, lambda tensor: tensor * factor)

    def select(self, outputs: list[int]) -> Self:
        """Copy the statistics of some of the outputs; a gram of all outputs stays whole."""
        return replace(
            self,
            gram=map_tensors(
                self.gram,
                lambda gram: gram.clone() if gram.shape[-3] == 1 else gram[..., outputs, :, :],
            ),
            moment=self.moment[..., outputs, :, :],
            energy=self.energy[..., outputs, :, :],
            totals=self.totals[..., outputs, :, :],
            log_noise=self.log_noise[..., outputs],
            noise_sum=self.noise_sum[..., outputs],
        )

    def map_targets(self, matrix: Tensor) -> Self:
        """Return the statistics of targets ``[Y, 1] @ matrix``, ``... x m x 2 x 2``; exact."""
        return replace(
            self,
            moment=self.moment @ matrix,
            energy=matrix.mT @ self.energy @ matrix,
            totals=matrix.mT @ self.totals @ matrix,
        )

    def pull_back(self, T: PullBack[G]) -> SufficientStatistics[Tensor]:
        """Return the statistics of the weights ``v_new`` with ``v_old = T v_new``.

        ``Tᵀ gram T`` and ``Tᵀ moment``, in new tensors: these may be accumulated in place.
        Source: the congruence of Bui, Nguyen and Turner (2017) for a moved basis.
        """
        sums = (self.energy, self.totals, self.log_noise, self.noise_sum)
        return SufficientStatistics(
            T.congruence(self.gram), T.transpose(self.moment), *(each.clone() for each in sums)
        )


Whitened = SufficientStatistics[Tensor]
"""Statistics in whitened weights, whose prior is N(0, I)."""


class PullBack(Protocol[G_contra]):
    """Linear map T between weights, ``v_old = T v_new``, in its action on statistics."""

    def congruence(self, gram: G_contra) -> Tensor:
        """Compute ``Tᵀ gram T``, dense ``... x r x r``."""
        ...

    def transpose(self, moment: Tensor) -> Tensor:
        """Compute ``Tᵀ moment``, ``... x p x 2 -> ... x r x 2``."""
        ...


@dataclass(frozen=True)
class MatrixMap:
    """Map ``v_old = matrix v_new`` between dense weights.

    Attributes:
        matrix: ``... x p x r``.
    """

    matrix: Tensor

    def congruence(self, gram: Tensor) -> Tensor:
        """Compute ``matrixᵀ gram matrix``. Cost O(p² r)."""
        return self.matrix.mT @ gram @ self.matrix

    def transpose(self, moment: Tensor) -> Tensor:
        """Compute ``matrixᵀ moment``. Cost O(p r)."""
        return self.matrix.mT @ moment


@dataclass(frozen=True)
class Regrouping:
    """Map ``v_old = T v_new`` in which each old value is a new one; diagonal grams stay diagonal.

    Attributes:
        index: Position of each old value among the new ones, ``p``.
        size: Number of new values.
    """

    index: Tensor
    size: int

    def congruence(self, gram: Tensor) -> Tensor:
        """Compute ``Tᵀ gram T`` of diagonals stored as columns, ``... x p x 1``. Cost O(p)."""
        return self.transpose(gram)

    def transpose(self, moment: Tensor) -> Tensor:
        """Compute ``Tᵀ moment``: sums of rows. Cost O(p)."""
        zeros = moment.new_zeros(*moment.shape[:-2], self.size, moment.shape[-1])
        return zeros.index_add_(-2, self.index, moment)


def weighted_statistics(
    features: Tensor, targets: Tensor, noise: Tensor, weight: Tensor
) -> SufficientStatistics[Tensor]:
    """Compute the dense statistics of a batch of observations. Cost O(n p²).

    Args:
        features: Φ, ``... x m x n x p``.
        targets: ``... x m x n``.
        noise: Relative noise D, ``... x (1 or m) x n``.
        weight: 1 to add, −1 to retract, 0 to skip, ``... x (1 or m) x n``.
    """
    product = partial(row_product, features.mT)
    gram = product(features * (weight / noise).unsqueeze(-1))
    return _with_sums(gram, product, targets, noise, weight)


def padded(statistics: SufficientStatistics[Tensor], n: int) -> SufficientStatistics[Tensor]:
    """Append n weights without data to dense statistics."""
    return replace(
        statistics,
        gram=torch.nn.functional.pad(statistics.gram, (0, n, 0, n)),
        moment=torch.nn.functional.pad(statistics.moment, (0, 0, 0, n)),
    )


def continued(
    statistics: SufficientStatistics[Tensor],
    features: Tensor,
    targets: Tensor,
    noise: Tensor,
    weight: Tensor,
) -> SufficientStatistics[Tensor]:
    """Extend dense statistics by g features that are zero at all but n observations.

    ``features`` are all features of these observations, ``... x m x n x p``, the last g new;
    targets, noise and weight as in :func:`weighted_statistics`. Cost O(n p g + p²).
    """
    known = statistics.gram.shape[-1]
    total = padded(statistics, features.shape[-1] - known)
    weighted = features[..., known:] * (weight / noise).unsqueeze(-1)
    cross = features.mT @ weighted
    total.gram[..., known:] += cross
    total.gram[..., known:, :known] += cross[..., :known, :].mT
    total.moment[..., known:, :] += weighted.mT @ target_columns(targets)
    return total


def grouped_statistics(
    groups: Tensor, size: int, targets: Tensor, noise: Tensor, weight: Tensor
) -> SufficientStatistics[Tensor]:
    """Compute the statistics of observations whose features are indicators of ``size`` groups.

    ``groups`` are from 0 to ``size − 1``, ``... x n``; the rest as in :func:`weighted_statistics`.
    The gram is diagonal and stored as a column, ``... x m x size x 1``. Cost O(n + size).
    """

    def by_group(weighted: Tensor) -> Tensor:
        index = groups.unsqueeze(-2).unsqueeze(-1).expand_as(weighted)
        zeros = weighted.new_zeros(*weighted.shape[:-2], size, weighted.shape[-1])
        return zeros.scatter_add_(-2, index, weighted)

    precision = (weight / noise).expand_as(targets)
    return _with_sums(by_group(precision.unsqueeze(-1)), by_group, targets, noise, weight)


def _with_sums(
    gram: Tensor,
    to_weights: Callable[[Tensor], Tensor],
    targets: Tensor,
    noise: Tensor,
    weight: Tensor,
) -> SufficientStatistics[Tensor]:
    """Compute the statistics besides the gram; ``to_weights`` is the product with Φᵀ."""
    columns = target_columns(targets)
    weighted = columns * (weight / noise).unsqueeze(-1)
    return SufficientStatistics(
        gram,
        to_weights(weighted),
        row_product(columns.mT, weighted),
        row_product(columns.mT, columns * weight.unsqueeze(-1)),
        (weight * noise.log()).sum(-1).expand(targets.shape[:-1]),
        (weight * noise).sum(-1).expand(targets.shape[:-1]),
    )


def target_columns(targets: Tensor) -> Tensor:
    """Return the columns [Y, 1], ``... x n -> ... x n x 2``."""
    return torch.stack((targets, torch.ones_like(targets)), dim=-1)


# --- the posterior over whitened weights, and the marginal likelihood ----------------------------


MOST_ROWS = 64
"""Largest number of observations that are conditioned on; for more the weights are solved again."""

_FEW_OBSERVED, _MOST_OBSERVED = 64, 192
"""Number of observations after which the weights are solved for again, so that neither costs nor
rounding errors add up: an eighth of the rank, within these. Measured: with fewer of them solving
costs more than what an update saves."""


_LARGE = 384
"""Size from which on a triangular solve is faster on a CPU than the product with the inverse: it
reads half as many numbers."""


@dataclass(frozen=True)
class DenseRoot:
    """Root S of a covariance as a matrix.

    Attributes:
        matrix: S, ``... x r x r``.
    """

    matrix: Tensor

    def row_product(self, rows: Tensor) -> Tensor:
        """Compute ``rows S``, ``... x n x r``. Cost O(n r²)."""
        return row_product(rows, self.matrix)

    def product(self, columns: Tensor) -> Tensor:
        """Compute ``S columns``, ``... x r x n``. Cost O(n r²)."""
        return self.matrix @ columns

    def log_precision(self) -> Tensor:
        """Compute ``−log |S Sᵀ|``, ``...``. Cost O(r³)."""
        return -2.0 * torch.linalg.slogdet(self.matrix)[1]


@dataclass(frozen=True)
class InverseRoot:
    """Root S = L⁻ᵀ of the inverse of a matrix ``L Lᵀ``, from its Cholesky factor.

    Attributes:
        factor: L, ``... x r x r``.
    """

    factor: Tensor

    @cached_for_autograd
    def matrix(self) -> Tensor:
        """S, ``... x r x r``. Cost O(r³)."""
        return inverse_lower(self.factor).mT

    def row_product(self, rows: Tensor) -> Tensor:
        """Compute ``rows S``, ``... x n x r``. Cost O(n r²)."""
        if self.factor.shape[-1] >= _LARGE and rows.is_cpu:
            return solve_rows(self.factor, rows)
        return row_product(rows, self.matrix)

    def product(self, columns: Tensor) -> Tensor:
        """Compute ``S columns``, ``... x r x n``. Cost O(n r²)."""
        return torch.linalg.solve_triangular(self.factor.mT, columns, upper=True)

    def log_precision(self) -> Tensor:
        """Compute ``−log |S Sᵀ|``, ``...``. Cost O(r)."""
        return 2.0 * self.factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


@dataclass(frozen=True)
class WeightPosterior:
    """Normal distribution q(w) = N(m, S Sᵀ) of whitened weights, whose prior is N(0, I).

    Stored as ``m = m₀ + S₀ a`` and ``S Sᵀ = S₀ (I − C Cᵀ) S₀ᵀ``, so that an observation reads the
    large S₀ once and appends a column to C.

    Attributes:
        base_mean: m₀, ``... x m x r x 1``.
        base: S₀, ``... x m x r x r``.
        shift: a, ``... x m x r x 1``.
        downdate: C, ``... x m x r x k``.
        observed: Number k of observations since the base.
    """

    base_mean: Tensor
    base: DenseRoot | InverseRoot
    shift: Tensor
    downdate: Tensor
    observed: int = 0

    @classmethod
    def of(cls, mean: Tensor, root: Tensor) -> WeightPosterior:
        """Make N(mean, root rootᵀ)."""
        return cls(mean, DenseRoot(root), torch.zeros_like(mean), root[..., :0])

    @cached_for_autograd
    def mean(self) -> Tensor:
        """Mean m, ``... x m x r x 1``. Cost O(r²)."""
        return self.base_mean + self.base.product(self.shift) if self.observed else self.base_mean

    @cached_for_autograd
    def root(self) -> Tensor:
        """Root S of the covariance, ``... x m x r x r``. Cost O(k r²)."""
        if not self.observed:
            return self.base.matrix
        return _less_product(self.base.matrix, self.base.product(self.downdate), self._change.mT)

    @cached_for_autograd
    def _change(self) -> Tensor:
        """Matrix M with ``S = S₀ (I − C Mᵀ)``, ``... x m x r x k``. Cost O(k² r + k³)."""
        return self.downdate @ _root_change(self.downdate.mT @ self.downdate, -1.0)

    def row_product(self, rows: Tensor) -> Tensor:
        """Compute ``rows S``, ``... x m x n x r``. Cost O(n r (r + k))."""
        product = self.base.row_product(rows)
        return product - product @ self.downdate @ self._change.mT if self.observed else product

    def covariance(self) -> Tensor:
        """Compute ``S Sᵀ``, ``... x m x r x r``. Cost O(r³)."""
        return self.root @ self.root.mT

    def covariance_times(self, columns: Tensor) -> Tensor:
        """Compute ``S Sᵀ columns``, ``... x m x r x n``. Cost O(n r (r + k))."""
        rows = self.base.row_product(columns.mT)  # thin products are faster this way round
        rows = rows - rows @ self.downdate @ self.downdate.mT
        return self.base.product(rows.mT)

    def log_precision(self) -> Tensor:
        """Compute ``−log |S₀ S₀ᵀ|``, ``... x m``. Cost O(r) after :func:`solve`, else O(r³)."""
        return self.base.log_precision()

    def has_room_for(self, n: int) -> bool:
        """Return whether to :meth:`observe` n observations costs less than to solve again."""
        r = self.downdate.shape[-2]
        most = min(max(r // 8, _FEW_OBSERVED), _MOST_OBSERVED, r)
        return n <= MOST_ROWS and self.observed + n <= most

    def observe(self, features: Tensor, residual: Tensor, noise: Tensor) -> WeightPosterior:
        """Condition on n more observations. Cost O(n r (r + k)), for n small against r.

        Equal to solving again with the observations' statistics added.

        Args:
            features: Whitened, ``... x m x n x r``.
            residual: Outcomes less the prior mean, ``... x m x n``.
            noise: Variances, ``... x m x n``.
        """
        rows = self.base.row_product(features)
        explained = row_product(rows, self.downdate)
        gain = (rows - row_product(explained, self.downdate.mT)).mT
        covariance = row_product(rows, gain) + torch.diag_embed(noise)
        factor, _ = cholesky_with_jitter(covariance, is_new=True)
        predicted = row_product(features, self.base_mean) + row_product(rows, self.shift)
        innovation = residual.unsqueeze(-1) - predicted
        columns = torch.linalg.solve_triangular(factor, gain.mT, upper=False).mT
        whitened = torch.linalg.solve_triangular(factor, innovation, upper=False)
        return WeightPosterior(
            self.base_mean,
            self.base,
            shift=self.shift + row_product(columns, whitened),
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
        noise.new_full(noise.shape[:-1], noise.shape[-1]),
    )


def solve(evidence: InformationForm) -> WeightPosterior:
    """Compute the weight posterior N(Q⁻¹ moment, Q⁻¹) with ``Q = I + gram``. Cost O(r³).

    Q is never smaller than the identity, hence no jitter is needed. [Stanton2021, eq. 11, 12,
    14 and 15, in whitened weights; eq. 15 without its factor σ²]
    """
    factor = safe_cholesky(weight_precision(evidence.gram))
    mean = torch.cholesky_solve(evidence.moment, factor)
    return WeightPosterior(mean, InverseRoot(factor), torch.zeros_like(mean), factor[..., :0])


def weight_precision(gram: Tensor) -> Tensor:
    """Compute ``Q = I + gram``, ``... x r x r``, of which a factorisation reads one half.

    [Stanton2021, eq. 12]
    """
    total = gram.clone()
    total.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return total


def log_marginal_likelihood(
    evidence: InformationForm, mean: Tensor, log_determinant: Tensor
) -> Tensor:
    """Compute ``log N(y − μ; 0, Φ P Φᵀ + N)`` by the determinant and inversion lemmas, ``... x m``.

    ``−½ (n log 2π + log |N| + log |I + P gram| + energy − momentᵀ mean)``. Cost O(r).
    [Stanton2021, eq. 13, its log terms and the factor of K corrected]

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
