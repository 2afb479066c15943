"""What one more observation at each candidate is worth, kept up to date as Σ changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.acquisition.sites import Sites
from bo_stream.acquisition.weight_covariance import (
    Change,
    WeightCovariance,
    low_rank_change,
    same,
)
from bo_stream.bases.basis import Basis
from bo_stream.process import WeightSpaceProcess
from bo_stream.weights import WeightPosterior


@dataclass(frozen=True)
class Gains:
    """The reduction of the integrated variance ``tr(G Σ)`` by each of N candidates.

    An observation with noise σ² at z takes ``Σ z zᵀ Σ / (zᵀ Σ z + σ²)`` from Σ, hence
    ``zᵀ Σ G Σ z / (zᵀ Σ z + σ²)`` from the integrated variance.

    Attributes:
        sites: The candidates.
        gram: G, ``m x r x r``.
        covariance: Σ.
        numerator: ``zᵀ Σ G Σ z``, ``m x N``.
        variance: ``zᵀ Σ z``, ``m x N``.
    """

    sites: Sites
    gram: Tensor
    covariance: WeightCovariance
    numerator: Tensor
    variance: Tensor

    @classmethod
    def of(cls, sites: Sites, gram: Tensor, weights: WeightPosterior) -> Gains:
        """Computed anew. Cost O(r³) and two quadratic forms at all candidates."""
        covariance = weights.covariance()
        forms = torch.stack((covariance @ gram @ covariance, covariance))
        numerator, variance = sites.quadratic(forms)
        return cls(sites, gram, WeightCovariance.of(weights), numerator, variance)

    def anew(self, weights: WeightPosterior) -> Gains:
        """Of the same candidates under another posterior, computed anew."""
        return Gains.of(self.sites, self.gram, weights)

    def value(self, noise: Tensor) -> Tensor:
        """Reduction per output, ``m x N``, for noise ``m x N``."""
        return self.numerator.clamp_min(0.0) / (self.variance.clamp_min(0.0) + noise)

    def observing(self, site: int, noise: Tensor) -> Gains:
        """After an observation at a candidate with noise ``m x 1``; a rank-one change.

        Cost O(r²) and two functions at all candidates.
        """
        feature = self.sites.feature(site)
        image = self.covariance.times(feature)
        total = (feature * image).sum(-2) + noise
        direction = image / total.sqrt().unsqueeze(-1)
        changed = self._changed(Change(direction, torch.ones_like(total)))
        return replace(changed, covariance=self.covariance.without(direction))

    def moved(self, change: Change, covariance: WeightCovariance) -> Gains:
        """After a change of rank k to a new covariance. Cost O(k r²) and 2k functions."""
        return replace(self._changed(change), covariance=covariance)

    def _changed(self, change: Change) -> Gains:
        """``zᵀ Σ' G Σ' z`` and ``zᵀ Σ' z`` for ``Σ' = Σ − U diag(λ) Uᵀ``, multiplied out."""
        integrated = self.gram @ change.directions
        columns = torch.cat((change.directions, self.covariance.times(integrated)), -1)
        own, cross = self.sites.linear(columns).chunk(2, dim=-2)
        weighted = own * change.amounts.unsqueeze(-1)
        inner = change.directions.mT @ integrated
        numerator = self.numerator - (weighted * (2.0 * cross - inner @ weighted)).sum(-2)
        return replace(self, numerator=numerator, variance=self.variance - (weighted * own).sum(-2))


@dataclass(frozen=True)
class Followed:
    """Gains as of the last choice, from which those under a later posterior may follow.

    Attributes:
        before: The gains at that time.
        after: The gains had the choice been observed.
    """

    before: Gains
    after: Gains

    @property
    def basis(self) -> Basis:
        """The basis that they hold for."""
        return self.before.sites.basis

    def followed(self, space: WeightSpaceProcess, rank: int) -> Gains | None:
        """The gains under a later posterior, or None where they do not follow cheaply.

        Args:
            space: The posterior.
            rank: How many observations have come since.
        """
        if space.basis is not self.basis:
            return None
        if space.weights is self.before.covariance.weights:
            return self.before
        new = WeightCovariance.of(space.weights)
        for known in (self.after, self.before):
            if same(known.covariance, new):
                return replace(known, covariance=new)
        change = low_rank_change(self.before.covariance, new, rank)
        return None if change is None else self.before.moved(change, new)
