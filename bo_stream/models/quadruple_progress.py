"""What steps of a quadruply stochastic Gaussian process change, and how they are taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bo_stream.models.adagrad import AdaGrad
from bo_stream.models.control_points import ControlPoints
from bo_stream.models.weight_posterior import ChevronPosterior


@dataclass(frozen=True)
class Schedule:
    """How steps are taken.

    Attributes:
        functions: Basis functions m̃ of a draw.
        rate: AdaGrad's, of the weights.
        hyper_rate: Adam's, of the hyperparameters; 0: they stay.
        frozen: Steps before the hyperparameters begin to move.
        half_life: Steps in which both rates fall to half.
        seed: Of all draws.
    """

    functions: int
    rate: float
    hyper_rate: float
    frozen: int
    half_life: float
    seed: int

    def decay(self, step: int) -> float:
        """Of both rates at a step."""
        return float(0.5 ** (step / self.half_life))


@dataclass
class Progress:
    """What steps change, beside the hyperparameters.

    Attributes:
        posterior: Of the weights.
        moved: Of its coefficients, by AdaGrad.
        scaled: Of its learned scales, by AdaGrad.
        control: Support points, once there are any.
        precisions: Of functions that have their own, ``m x p``, else None.
        moments: Of Adam.
        steps: Taken so far.
    """

    posterior: ChevronPosterior
    moved: AdaGrad
    scaled: AdaGrad
    control: ControlPoints | None = None
    precisions: Tensor | None = None
    moments: dict[str, Any] | None = None
    steps: int = 0

    @classmethod
    def start(cls, posterior: ChevronPosterior, precisions: Tensor | None = None) -> Progress:
        """Before the first step."""
        moved, scaled = (AdaGrad.on(t) for t in (posterior.coefficients, posterior.log_scale))
        return cls(posterior, moved, scaled, precisions=precisions)

    def map(self, rule: Callable[[Tensor], Tensor]) -> Progress:
        """A rule for all tensors of the weights, ``m x ...``, without support points."""
        return replace(
            self,
            posterior=self.posterior.map(rule),
            moved=AdaGrad(rule(self.moved.squares)),
            scaled=AdaGrad(rule(self.scaled.squares)),
            control=None,
            precisions=None if self.precisions is None else rule(self.precisions),
        )

    def grown(self, first: Progress) -> Progress:
        """With further functions, as another progress has them before its first step."""
        old, new = self.precisions, first.precisions
        return replace(
            self,
            posterior=self.posterior.grown(first.posterior),
            moved=AdaGrad(torch.cat((self.moved.squares, first.moved.squares), 1)),
            scaled=AdaGrad(self._grown_scales(first)),
            precisions=new if old is None or new is None else torch.cat((old, new), 1),
        )

    def _grown_scales(self, first: Progress) -> Tensor:
        own, new = self.scaled.squares, first.scaled.squares
        return own if self.posterior.is_measured else torch.cat((own, new), 1)

    def clone(self) -> Progress:
        """A copy that stays."""
        copy = self.map(torch.clone)
        return replace(copy, control=None if self.control is None else self.control.clone())
