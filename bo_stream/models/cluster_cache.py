"""What a model of clusters keeps solved between calls, and how few observations change it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.models.centre_solver import CholeskySolver
from bo_stream.models.clustered_process import ClusteredProcess
from bo_stream.module_state import State
from bo_stream.process import PosteriorProcess

MOST_PENDING = 64
"""Observations that a solved process is conditioned on before it is solved anew."""


@dataclass(frozen=True)
class SolvedClusters:
    """The posterior process at one state of all hyperparameters.

    An observation in a cluster is one at its centre, so that a process conditioned there is the
    process solved anew: exact, at the cost of O(q M²) for q observations since.

    Attributes:
        state: Of the model.
        base: When it was last solved.
        process: With what came since.
        pending: Inputs ``... x q x d``, outcomes and noise ``... x m x q`` of those.
    """

    state: State
    base: ClusteredProcess
    process: PosteriorProcess
    pending: tuple[Tensor, Tensor, Tensor] | None = None

    def can_take(self, count: int) -> bool:
        """Whether so many more are few enough, and there is a factor to condition with."""
        waiting = 0 if self.pending is None else self.pending[0].shape[-2]
        return waiting + count <= MOST_PENDING and isinstance(self.base.solver, CholeskySolver)

    def after(self, X: Tensor, outcomes: Tensor, noise: Tensor) -> SolvedClusters:
        """The posterior after a batch.

        Args:
            X: Centres of its clusters, ``... x q x d``.
            outcomes: Standardised, ``... x m x q``.
            noise: Actual variances, ``... x m x q``.
        """
        batch = (X, outcomes, noise)
        if self.pending is not None:
            olds = zip(self.pending, batch, (-2, -1, -1), strict=True)
            X, outcomes, noise = (torch.cat((old, new), dim) for old, new, dim in olds)
        process = self.base.condition(X, outcomes, noise)
        return replace(self, process=process, pending=(X, outcomes, noise))
