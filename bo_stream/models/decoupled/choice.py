"""What the constructor of a decoupled model checks and chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, cast, get_args

import torch
from torch import Tensor

from bo_stream.allocation.allocator import checked_number
from bo_stream.bases.functions import InducingFunctions
from bo_stream.models.decoupled.growth import Growth, SpectralSpread
from bo_stream.models.decoupled.learner import Schedule
from bo_stream.models.decoupled.memory import Learned
from bo_stream.models.decoupled.posterior import (
    DecoupledPosterior,
    DirectSpread,
    HybridSpread,
    Spread,
)

Parametrization = Literal["spectral", "hybrid", "direct"]
Preconditioner = Literal["block", "jacobi"]


@dataclass(frozen=True)
class DecoupledOptions:
    """Options of a decoupled model, checked.

    Attributes:
        growth: Caps of the bases.
        schedule: Of steps.
        parametrization: Of the covariance.
        preconditioner: Of the mean's coefficients.
        factors: Whether inducing functions have lengthscale factors.
        mean_points: Whether α moves.
        update_steps: Steps of an update.
        max_rows: Most observations to hold.
        initial_points: Of the exact process before the first step of a fit; 0: none.
    """

    growth: Growth
    schedule: Schedule
    parametrization: Parametrization
    preconditioner: Preconditioner | None
    factors: bool
    mean_points: bool
    update_steps: int
    max_rows: int | None
    initial_points: int

    def checked(self) -> Self:
        """These, if they can be.

        Raises:
            ValueError: One is out of range.
        """
        schedule = self.schedule
        checked_number("update_steps", self.update_steps, 0)
        checked_number("initial_points", self.initial_points, 0)
        checked_number("num_columns", schedule.columns)
        for name, number in (("batch_size", schedule.batch_size), ("max_rows", self.max_rows)):
            if number is not None:
                checked_number(name, number)
        if schedule.columns > max(self.growth.mean, 1):
            raise ValueError(
                f"Expected num_columns of at most num_mean = {self.growth.mean}, got "
                f"{schedule.columns}: a step cannot visit more columns than there are."
            )
        _check_within("batch_size", schedule.batch_size, "max_rows", self.max_rows)
        if not schedule.learning_rate >= 0.0:
            raise ValueError(f"Expected learning_rate of at least 0, got {schedule.learning_rate}.")
        for name, rate in (
            ("natural_rate", schedule.natural_rate),
            ("mean_rate", schedule.mean_rate),
        ):
            if rate is not None and not 0.0 < rate <= 1.0:
                raise ValueError(f"Expected {name} in (0, 1], got {rate}.")
        _check_among("parametrization", self.parametrization, get_args(Parametrization))
        if self.factors and self.parametrization == "spectral" and not self.mean_points:
            raise ValueError(
                "Expected learn_mean_points with lengthscale_factors, got False: the functions of "
                "a spectral parametrization combine the mean's, which would stay as they are. "
                "Give it, or the parametrization 'hybrid'."
            )
        _check_among("preconditioner", self.preconditioner, (*get_args(Preconditioner), None))
        return self

    def start(self, batch: torch.Size, like: Tensor) -> DecoupledPosterior:
        """No functions yet.

        Args:
            batch: ``batch_shape x m``.
            like: Whose last size is the number of inputs, and whose device to be on.
        """
        none = like.new_zeros(*batch, 0, like.shape[-1])
        functions = InducingFunctions(none, none if self.factors else None)
        jacobi, square = self.preconditioner == "jacobi", like.new_zeros(*batch, 0, 0)
        moment, spread = square.new_zeros(*batch, 0, 1), cast(Spread, DirectSpread(square, jacobi))
        if self.parametrization == "hybrid":
            spread = HybridSpread(moment, square)
        if self.parametrization == "spectral":
            spread = SpectralSpread(moment, square, square)
        return DecoupledPosterior(functions, none[..., 0], functions, spread, jacobi)

    def learned(self, unit: float) -> Learned:
        """What moves by Adam."""
        return Learned(self.preconditioner != "block", self.mean_points, unit)


def _check_among(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise ValueError(f"Expected {name} to be one of {known}, got {value!r}.")


def _check_within(name: str, number: int | None, bound: str, most: int | None) -> None:
    if number is not None and most is not None and number > most:
        raise ValueError(f"Expected {name} of at most {bound} = {most}, got {number}.")
