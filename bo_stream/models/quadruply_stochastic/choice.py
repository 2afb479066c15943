"""What a user chooses: functions, covariance, and how steps are taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bo_stream.allocation.allocator import checked_number


@dataclass(frozen=True)
class FourierFeatures:
    """Random Fourier features, for RBF and Matérn kernels.

    Attributes:
        count: Number of features, even: a cosine and a sine of each frequency. Up to 10⁷; more are
            never worse, and cost memory but no time in a step.
        seed: Of the frequencies.
    """

    count: int = 20_000
    seed: int = 0

    def __post_init__(self) -> None:
        if checked_number("count", self.count, 2) % 2 != 0:
            raise ValueError(f"Expected an even count of Fourier features, got {self.count}.")


@dataclass(frozen=True)
class InducingAtData:
    """Kernel functions at the data, for any kernel.

    Attributes:
        max_points: Most of them; data beyond add none.
    """

    max_points: int = 100_000

    def __post_init__(self) -> None:
        checked_number("max_points", self.max_points)


@dataclass(frozen=True)
class MeanField:
    """A posterior covariance of weights that is diagonal: none of its columns is dense."""

    columns: ClassVar[int] = 0


@dataclass(frozen=True)
class Chevron:
    """A posterior covariance of weights whose root has a few dense columns.

    Attributes:
        columns: How many; the first functions are theirs. Memory and time are this many times
            those of ``MeanField``.
    """

    columns: int

    def __post_init__(self) -> None:
        checked_number("columns", self.columns)


@dataclass(frozen=True)
class Schedule:
    """Sizes and rates of steps; see :class:`~bo_stream.QSGP` for the defaults.

    Attributes:
        batch_size: Observations of a step.
        functions: Basis functions m̃ of a draw.
        control_points: Of the control variate.
        update_steps: Of an update.
        initial_points: Observations of the exact GP before the first step of a fit.
        freeze_steps: Steps before the hyperparameters begin to move.
        learning_rate: AdaGrad's, of the weights.
        hyper_rate: Adam's, of the hyperparameters; 0: they stay.
        half_life: Steps in which both rates fall to half.
        arithmetic: Dtype of steps, and of what is stored of weights.
        seed: Of all draws.
    """

    batch_size: int | None
    functions: int | None
    control_points: int
    update_steps: int
    initial_points: int
    freeze_steps: int
    learning_rate: float
    hyper_rate: float
    half_life: float
    arithmetic: torch.dtype
    seed: int

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "functions": 1, "control_points": 0, "update_steps": 0}
        for name, lowest in {**least, "initial_points": 0, "freeze_steps": 0}.items():
            value = getattr(self, name)
            if value is not None:
                checked_number(name, value, lowest)
        for name in ("learning_rate", "half_life"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"Expected {name} to be positive, got {getattr(self, name)}.")
        if not self.hyper_rate >= 0.0:
            raise ValueError(f"Expected hyper_rate to be at least 0, got {self.hyper_rate}.")
        if self.arithmetic not in (torch.float32, torch.float64):
            raise ValueError(
                f"Expected arithmetic in torch.float32 or torch.float64, got {self.arithmetic}."
            )
