"""The posterior in the weights of features, carried along small updates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from bo_stream.bases.basis import Basis
from bo_stream.models.memory import Observations
from bo_stream.process.process import WeightSpaceProcess
from bo_stream.tensors import State

SOLVED_ROWS = 64
"""Larger updates drop the solved posterior."""

SOLVED_OBSERVED = 192
"""Observations after which it is solved anew, so that neither costs nor rounding errors add up."""


@dataclass(frozen=True)
class Solved:
    """The posterior process at one state of all hyperparameters.

    Attributes:
        state: Of the model.
        process: The posterior.
    """

    state: State
    process: WeightSpaceProcess

    def can_take(self, data: Observations, basis: Basis) -> bool:
        """Whether a batch is small, adds, and meets the basis that was solved in."""
        n = data.X.shape[-2]
        small = n <= SOLVED_ROWS
        young = self.process.weights.observed + n <= min(SOLVED_OBSERVED, basis.rank)
        return small and young and data.sign > 0 and self.process.basis is basis

    def after(self, features: Tensor, outcomes: Tensor, noise: Tensor) -> Solved:
        """The posterior after a batch of standardised outcomes. Cost O(n r²)."""
        residual = outcomes - self.process.prior_mean
        weights = self.process.weights.observe(features, residual, noise)
        return Solved(self.state, replace(self.process, weights=weights))
