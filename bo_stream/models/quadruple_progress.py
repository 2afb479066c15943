"""What steps of a quadruply stochastic Gaussian process change, and how they are taken."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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
        moments: Of Adam.
        steps: Taken so far.
    """

    posterior: ChevronPosterior
    moved: AdaGrad
    scaled: AdaGrad
    control: ControlPoints | None = None
    moments: dict[str, Any] | None = None
    steps: int = 0

    @classmethod
    def start(cls, posterior: ChevronPosterior) -> Progress:
        """Before the first step."""
        moved, scaled = (AdaGrad.on(t) for t in (posterior.coefficients, posterior.log_scale))
        return cls(posterior, moved, scaled)

    def clone(self) -> Progress:
        """A copy that stays."""
        return replace(
            self,
            posterior=self.posterior.clone(),
            moved=AdaGrad(self.moved.squares.clone()),
            scaled=AdaGrad(self.scaled.squares.clone()),
            control=None if self.control is None else self.control.clone(),
        )


@dataclass(frozen=True)
class Drawn:
    """Data of a step.

    Attributes:
        X: Transformed inputs, ``b x d``.
        targets: Transformed outcomes, ``m x b``.
        count: Number n of all data.
    """

    X: Tensor
    targets: Tensor
    count: float

    @property
    def weight(self) -> float:
        """How many of the data each stands for."""
        return self.count / len(self.X)
