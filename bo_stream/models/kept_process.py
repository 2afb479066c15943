"""A posterior process, kept for a state of the hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from bo_stream.bases.basis import Basis
from bo_stream.models.memory import Observations
from bo_stream.process.process import PosteriorProcess, WeightSpaceProcess
from bo_stream.tensors import State

SOLVED_ROWS = 64
"""Larger updates drop the solved posterior."""

SOLVED_OBSERVED = 192
"""Observations after which it is solved anew, so that neither costs nor rounding errors add up."""


@dataclass(frozen=True)
class KeptProcess:
    """What a model solved, or put together, last.

    Attributes:
        state: Of the model.
        process: The posterior.
    """

    state: State
    process: PosteriorProcess


@dataclass(frozen=True)
class SolvedWeights:
    """The posterior in the weights of features at one state of all hyperparameters.

    Attributes:
        state: Of the model.
        process: The posterior.
    """

    state: State
    process: WeightSpaceProcess

    def can_take(self, data: Observations, basis: Basis) -> bool:
        """Say whether a batch is small, adds, and meets the basis that was solved in."""
        n = len(data)
        young = self.process.weights.observed + n <= min(SOLVED_OBSERVED, basis.rank)
        return n <= SOLVED_ROWS and young and data.sign > 0 and self.process.basis is basis

    def after(self, features: Tensor, outcomes: Tensor, noise: Tensor) -> SolvedWeights:
        """Condition on a batch of standardised outcomes. Cost O(n r²)."""
        centred = outcomes - self.process.prior_mean
        weights = self.process.weights.observe(features, centred, noise)
        return SolvedWeights(self.state, replace(self.process, weights=weights))
