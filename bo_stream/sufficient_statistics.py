"""Sufficient statistics of a Gaussian linear model, stored instead of the observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from bo_stream.tensors import map_tensors, zip_tensors

G = TypeVar("G")
G_contra = TypeVar("G_contra", contravariant=True)


@dataclass(frozen=True)
class SufficientStatistics(Generic[G]):
    """Statistics of n observations with features Φ, targets Y and noise D.

    Law: ``statistics(A ∪ B) = statistics(A) + statistics(B)``. Each of m outputs has two target
    columns [Y, 1], so that every affine change of Y (a constant mean, a new standardisation) is
    exact without the data. D is relative noise: 1 where the noise variance is inferred.

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

    def to(self, device: torch.device) -> Self:
        """Move the statistics to a device."""
        return map_tensors(self, lambda tensor: tensor.to(device))

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
    gram = features.mT @ (features * (weight / noise).unsqueeze(-1))
    return _with_sums(gram, lambda weighted: features.mT @ weighted, targets, noise, weight)


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
        columns.mT @ weighted,
        columns.mT @ (columns * weight.unsqueeze(-1)),
        (weight * noise.log()).sum(-1).expand(targets.shape[:-1]),
        (weight * noise).sum(-1).expand(targets.shape[:-1]),
    )


def target_columns(targets: Tensor) -> Tensor:
    """Return the columns [Y, 1], ``... x n -> ... x n x 2``."""
    return torch.stack((targets, torch.ones_like(targets)), dim=-1)
