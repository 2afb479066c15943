"""What a decoupled model remembers: its posterior, the data to learn from, how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.models.decoupled_leaves import Moments, moved_moments, select_moments
from bo_stream.models.decoupled_posterior import DecoupledPosterior
from bo_stream.models.replay import Replay
from bo_stream.models.rows_memory import HoldsRows
from bo_stream.models.subset import subset_moments


@dataclass(frozen=True)
class DecoupledMemory(HoldsRows):
    """A value: a step makes another.

    Attributes:
        posterior: The variational parameters.
        replay: Observations in units of the process, outcomes ``batch_shape x n x m``.
        steps: Taken so far.
        unit: What inputs vary by, from the first data.
        hyper_names: Hyperparameters that learned last.
        hyper_moments: Adam's state for them, or None before the first step.
        leaf_moments: The same for the variational parameters.
        begun: Whether there was a call to fit.
    """

    posterior: DecoupledPosterior
    replay: Replay
    steps: int
    unit: float
    hyper_names: tuple[str, ...] = ()
    hyper_moments: Moments | None = None
    leaf_moments: Moments | None = None
    begun: bool = False

    @property
    def _batch(self) -> torch.Size:
        return self.posterior.coefficients.shape[:-1]

    @property
    def counts(self) -> Tensor:
        """Number of observations that came, ``... x m``."""
        like = self.posterior.coefficients
        return like.new_full(self._batch, float(self.replay.count))

    def select(self, outputs: list[int]) -> DecoupledMemory:
        """A copy for some of the outputs."""
        *lead, of = self._batch
        hyper, leaves = self.hyper_moments, self.leaf_moments
        index = torch.tensor(outputs, device=self.posterior.coefficients.device)
        return replace(
            self,
            posterior=self.posterior.map(lambda t: t.index_select(len(lead), index)),
            replay=self.replay.select(outputs),
            hyper_moments=hyper and subset_moments(hyper, torch.Size(lead), of, outputs),
            leaf_moments=leaves and select_moments(leaves, len(lead), outputs),
        )

    def to(self, device: torch.device) -> DecoupledMemory:
        """On another device, Adam's moments too."""
        hyper, leaves = self.hyper_moments, self.leaf_moments
        return replace(
            self,
            posterior=self.posterior.map(lambda t: t.to(device)),
            replay=self.replay.to(device),
            hyper_moments=hyper and moved_moments(hyper, device),
            leaf_moments=leaves and moved_moments(leaves, device),
        )
