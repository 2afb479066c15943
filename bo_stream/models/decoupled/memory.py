"""What a decoupled model remembers: its posterior, the data to learn from, how far it has come."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpytorch import Module
from torch import Tensor
from torch.nn import Parameter

from bo_stream.bases.functions import InducingFunctions
from bo_stream.models.decoupled.growth import SpectralSpread
from bo_stream.models.decoupled.posterior import DecoupledPosterior, DirectSpread
from bo_stream.models.hyperparameters import subset_moments
from bo_stream.models.stochastic.optimisers import Ascent
from bo_stream.models.stochastic.replay import HoldsRows, Replay

Moments = dict[str, Any]


@dataclass(frozen=True)
class Learned:
    """Which of a posterior's tensors move by Adam.

    Attributes:
        coefficients: The mean's.
        mean_points: α's points, and factors if it has any.
        unit: What inputs vary by: a step of points is relative to it.
    """

    coefficients: bool
    mean_points: bool
    unit: float


class Leaves(Module):
    """Tensors of a posterior as parameters, points in units of what inputs vary by."""

    def __init__(self, posterior: DecoupledPosterior, learned: Learned) -> None:
        """Copy them.

        Args:
            posterior: With M > 0 functions or none.
            learned: Which.
        """
        super().__init__()
        self._posterior, self._unit = posterior, learned.unit
        self._tied = isinstance(posterior.spread, SpectralSpread)
        chosen = {} if self._tied else {"beta": posterior.beta}
        if learned.mean_points:
            chosen["alpha"] = posterior.alpha
        for name, functions in chosen.items():
            self._add(f"{name}_points", functions.points / learned.unit)
            if functions.log_factors is not None:
                self._add(f"{name}_factors", functions.log_factors)
        if isinstance(posterior.spread, DirectSpread):
            self._add("root", posterior.spread.root)
        if learned.coefficients:
            self._add("coefficients", posterior.coefficients)

    def _add(self, name: str, value: Tensor) -> None:
        self.register_parameter(name, Parameter(value.detach().clone()))

    def planted(self) -> DecoupledPosterior:
        """The posterior with these in it, differentiable in them."""
        p, own = self._posterior, dict(self.named_parameters())
        spread = p.spread
        if isinstance(spread, DirectSpread):
            spread = replace(spread, root=own["root"])
        alpha, beta = (self._functions(n, getattr(p, n), own) for n in ("alpha", "beta"))
        if self._tied:
            beta = alpha.rows(slice(0, len(beta)))
        return replace(
            p,
            alpha=alpha,
            beta=beta,
            coefficients=own.get("coefficients", p.coefficients),
            spread=spread,
        )

    def _functions(
        self, name: str, functions: InducingFunctions, own: dict[str, Parameter]
    ) -> InducingFunctions:
        if f"{name}_points" not in own:
            return functions
        points = own[f"{name}_points"] * self._unit
        return InducingFunctions(points, own.get(f"{name}_factors"))

    def moved(self, posterior: DecoupledPosterior) -> DecoupledPosterior:
        """A posterior whose other tensors have moved, with these as they are now."""
        self._posterior = posterior
        return self.planted().map(lambda tensor: tensor.detach().clone())


def ascent_of(leaves: Leaves, rate: float, moments: Moments | None) -> Ascent:
    """Of all leaves, from moments of as many functions or fewer: further ones have none yet."""
    parameters = list(leaves.parameters())
    if moments is not None:
        moments = _padded(moments, parameters)
    return Ascent(leaves, parameters, rate, moments)


def _padded(moments: Moments, parameters: list[Parameter]) -> Moments:
    padded = deepcopy(moments)
    for i, parameter in enumerate(parameters):
        for name, value in padded["state"].get(i, {}).items():
            if name != "step":
                padded["state"][i][name] = _in_corner(value, parameter.shape)
    return padded


def _in_corner(value: Tensor, shape: torch.Size) -> Tensor:
    """A tensor's values at the beginning of each dimension, and zeros."""
    result = value.new_zeros(shape)
    result[tuple(slice(0, size) for size in value.shape)] = value
    return result


def select_moments(moments: Moments, dimension: int, outputs: list[int]) -> Moments:
    """A copy for some of the outputs, which stay a dimension of their own."""
    picked = deepcopy(moments)
    for state in picked["state"].values():
        for name, value in state.items():
            if name != "step":
                index = torch.tensor(outputs, device=value.device)
                state[name] = value.index_select(dimension, index)
    return picked


def moved_moments(moments: Moments, device: torch.device) -> Moments:
    """Adam's state on another device, but for its counts of steps, which stay on the CPU."""
    state = {
        number: {name: t if name == "step" else t.to(device) for name, t in tensors.items()}
        for number, tensors in moments["state"].items()
    }
    return {**moments, "state": state}


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
