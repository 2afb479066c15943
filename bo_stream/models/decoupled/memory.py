"""Memory of a decoupled model: its posterior, observations to draw from, the optimisers' state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bo_stream.models.decoupled.posterior import DecoupledPosterior
from bo_stream.models.outcomes.selection import subset_moments
from bo_stream.models.stochastic.replay import HoldsRows, Replay
from bo_stream.tensors import map_tensors

Moments = dict[str, Any]


@dataclass(frozen=True)
class DecoupledMemory(HoldsRows):
    """Variational parameters, observations, and the state of training. A step makes another value.

    Attributes:
        posterior: The variational parameters.
        replay: Observations in units of the process, outcomes ``batch_shape x n x m``.
        steps: Taken so far.
        unit: What inputs vary by, from the first data.
        hyper_names: Hyperparameters that learned last.
        hyper_moments: Adam's state for them, or None before the first step.
        variational_moments: The same for the variational parameters.
        begun: Whether there was a call to fit.
    """

    posterior: DecoupledPosterior
    replay: Replay
    steps: int
    unit: float
    hyper_names: tuple[str, ...] = ()
    hyper_moments: Moments | None = None
    variational_moments: Moments | None = None
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
        """Copy for some of the outputs."""
        *lead, of = self._batch
        hyper, variational = self.hyper_moments, self.variational_moments
        index = torch.tensor(outputs, device=self.posterior.coefficients.device)

        def chosen(tensor: Tensor) -> Tensor:
            return tensor.index_select(len(lead), index)

        return replace(
            self,
            posterior=map_tensors(self.posterior, chosen),
            replay=self.replay.select(outputs),
            hyper_moments=hyper and subset_moments(hyper, torch.Size(lead), of, outputs),
            variational_moments=variational and _mapped(variational, chosen),
        )

    def to(self, device: torch.device) -> DecoupledMemory:
        """Move to another device, Adam's moments too."""
        hyper, variational = self.hyper_moments, self.variational_moments
        return replace(
            self,
            posterior=map_tensors(self.posterior, lambda t: t.to(device)),
            replay=self.replay.to(device),
            hyper_moments=hyper and _mapped(hyper, lambda t: t.to(device)),
            variational_moments=variational and _mapped(variational, lambda t: t.to(device)),
        )


def _mapped(moments: Moments, rule: Callable[[Tensor], Tensor]) -> Moments:
    """Apply a rule to Adam's moments, but not to its counts of steps, which stay on the CPU."""
    state = {
        number: {name: t if name == "step" else rule(t) for name, t in tensors.items()}
        for number, tensors in moments["state"].items()
    }
    return {**moments, "state": state}
