"""Covariances of weights in factors, and the low-rank change between two of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.weights import WeightPosterior

AGREEMENT = 1e-10
"""Frobenius norm of a difference, per square root of the rank r, that counts as rounding error."""

_SPARE = 8
_PROBES = 4


@dataclass(frozen=True)
class Change:
    """A change ``− U diag(λ) Uᵀ`` of a covariance.

    Attributes:
        directions: U, ``m x r x k``.
        amounts: λ, ``m x k``; positive where variance is lost.
    """

    directions: Tensor
    amounts: Tensor


@dataclass(frozen=True)
class WeightCovariance:
    """``Σ − V Vᵀ``, never formed.

    Attributes:
        weights: With covariance Σ, ``m x r x r``.
        downdate: V, ``m x r x k``.
    """

    weights: WeightPosterior
    downdate: Tensor

    @classmethod
    def of(cls, weights: WeightPosterior) -> WeightCovariance:
        """Σ alone."""
        return cls(weights, weights.base_root[..., :0])

    def times(self, columns: Tensor) -> Tensor:
        """The product with ``m x r x k`` columns. Cost O(k r²)."""
        explained = columns.mT @ self.downdate @ self.downdate.mT
        return self.weights.covariance_times(columns) - explained.mT

    def without(self, direction: Tensor) -> WeightCovariance:
        """Less ``v vᵀ``, ``m x r x 1``."""
        return replace(self, downdate=torch.cat((self.downdate, direction), -1))


def same(first: WeightCovariance, second: WeightCovariance) -> bool:
    """Whether two covariances agree to rounding, from random probes. Cost O(r²)."""
    probes = _columns(first.downdate, _PROBES, seed=1)
    return _negligible(first.times(probes) - second.times(probes))


def low_rank_change(old: WeightCovariance, new: WeightCovariance, rank: int) -> Change | None:
    """The change from one covariance to another if it has about this rank, else None.

    A randomised range finder and a check with fresh probes; exact to rounding. Cost O(r² rank).
    Source: Halko, Martinsson and Tropp (2011), algorithms 4.1 and 5.3.
    """
    width = rank + _SPARE
    if 4 * width > old.downdate.shape[-2]:
        return None
    sketch = _lost(old, new, _columns(old.downdate, width, seed=2))
    basis = torch.linalg.qr(sketch).Q
    inner = basis.mT @ _lost(old, new, basis)
    amounts, vectors = torch.linalg.eigh(0.5 * (inner + inner.mT))
    change = Change(basis @ vectors, amounts)
    probes = _columns(old.downdate, _PROBES, seed=1)
    found = change.directions @ (amounts.unsqueeze(-1) * (change.directions.mT @ probes))
    return change if _negligible(_lost(old, new, probes) - found) else None


def _lost(old: WeightCovariance, new: WeightCovariance, columns: Tensor) -> Tensor:
    return old.times(columns) - new.times(columns)


def _columns(like: Tensor, count: int, seed: int) -> Tensor:
    """Standard normal columns, the same at every call, ``r x count``."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(like.shape[-2], count, generator=generator, dtype=like.dtype)
    return columns.to(like.device)


def _negligible(images: Tensor) -> bool:
    """Of probes under a difference: their mean square length is its squared Frobenius norm."""
    return bool(images.square().mean() <= AGREEMENT**2)
