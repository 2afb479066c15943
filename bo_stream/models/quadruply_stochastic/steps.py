"""Steps of a quadruply stochastic model: draw data and functions, estimate, move."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bo_stream.allocation.allocator import checked_number
from bo_stream.models.prior import Hyperparameters
from bo_stream.models.quadruply_stochastic.estimator import (
    DrawnFunctions,
    Estimator,
    Minibatch,
    SampledGradient,
)
from bo_stream.models.quadruply_stochastic.memory import Layout, Progress
from bo_stream.models.quadruply_stochastic.weight_posterior import LARGEST, best_precisions
from bo_stream.models.stochastic.optimisers import ConstrainedAdam
from bo_stream.models.stochastic.replay import generator_at
from bo_stream.models.stochastic.training import all_finite

COVARIANCE_RATE = 0.1
"""Rate of the dense columns of C, relative to that of the mean."""

BATCH_SIZE = 500
"""Observations of a step where the user does not say."""

FUNCTIONS = 20_000
"""Functions of a draw where the user does not say."""


class Steps:
    """A learner that steps move, for :func:`~bo_stream.models.stochastic.training.train`."""

    def __init__(
        self,
        progress: Progress,
        hyper: Hyperparameters,
        layout: Layout,
        data: Callable[[torch.Generator], Minibatch],
        num_data: float,
        schedule: Schedule,
        learned: list[Parameter],
        log_precision: Tensor | None = None,
    ) -> None:
        """Go on from some progress.

        Args:
            progress: Its tensors are moved in place.
            hyper: In float64; moved in place.
            layout: Of the functions.
            data: Draws some.
            num_data: Number of all of them.
            schedule: How to step.
            learned: Those of the hyperparameters that are learned.
            log_precision: ``log |S|``, ``m``, of an S that is not diagonal.
        """
        self.progress, self.hyper = progress, hyper
        self.num_data = num_data
        self._layout, self._data, self._schedule = layout, data, schedule
        self._log_precision = log_precision
        self._parameters = learned if schedule.hyper_rate > 0.0 else []
        self._adam = self._new_adam(progress.moments)

    def _new_adam(self, moments: dict[str, Any] | None) -> ConstrainedAdam:
        return ConstrainedAdam(self.hyper, self._parameters, self._schedule.hyper_rate, moments)

    @property
    def num_steps(self) -> int:
        """Steps taken so far."""
        return self.progress.steps

    @property
    def learning_rate(self) -> float:
        """AdaGrad's, of the first step."""
        return self._schedule.learning_rate

    @property
    def is_valid(self) -> bool:
        """Whether all that steps move is finite, and positive where it has to be. Cost O(p)."""
        return self.hyper.are_valid and all_finite(self.progress.posterior)

    def learned_state(self) -> tuple[Progress, dict[str, Any]]:
        """Copy all that steps change. Cost O(p)."""
        progress = replace(self.progress.clone(), moments=self.moments)
        return progress, deepcopy(self.hyper.state_dict())

    def restore(self, state: tuple[Progress, dict[str, Any]]) -> None:
        """Go back to a state, which stays as it is."""
        progress, hyper = state
        self.progress = progress.clone()
        self.hyper.load_state_dict(hyper)
        self._adam = self._new_adam(progress.moments)

    @property
    def moments(self) -> dict[str, Any] | None:
        """A copy of Adam's, or those that it began with where no hyperparameter is learned."""
        return self._adam.moments() or self.progress.moments

    @property
    def estimator(self) -> Estimator:
        """Estimates of the bound as it is now."""
        progress = self.progress
        return Estimator(
            progress.posterior,
            progress.control,
            self.hyper,
            lambda hyper: self._layout.basis(hyper.covar_module, progress.precisions),
            self._schedule.drawn(progress.posterior.size),
            self._log_precision,
        )

    def take_step(self) -> float:
        """Draw, estimate the bound, and move what was drawn.

        Cost O((ñ + n̄) m̃ (d + k)), whatever the numbers of data and of functions.
        """
        progress, schedule, estimator = self.progress, self._schedule, self.estimator
        generator = generator_at(schedule.seed, progress.steps)
        data = self._data(generator)
        learns = bool(self._parameters) and progress.steps >= schedule.freeze_steps
        evaluated = estimator.evaluated(estimator.draws(generator), data, learns)
        with torch.enable_grad():
            value = estimator.value(evaluated, data, learns).sum()
            if learns:
                self._adam.set_rate(schedule.hyper_rate * schedule.decay(progress.steps))
                self._adam.ascend(value + self.hyper.log_prior())
            else:
                (-value).backward()
        self._move(evaluated)
        self._measure(evaluated, data)
        if progress.steps >= schedule.freeze_steps:
            self._relevance(evaluated, data)
        progress.steps += 1
        return float(value.detach())

    @torch.no_grad()
    def _move(self, evaluated: list[DrawnFunctions]) -> None:
        """Move what was drawn by AdaGrad, and the control variate after it."""
        progress, schedule = self.progress, self._schedule
        posterior, gradient = progress.posterior, SampledGradient.of(evaluated)
        rate, index = schedule.learning_rate * schedule.decay(progress.steps), gradient.drawn.index
        rates = torch.full_like(gradient.coefficients[:1, :1], COVARIANCE_RATE * rate)
        rates[..., 0] = rate
        moves = progress.moved.ascend(posterior.coefficients, index, gradient.coefficients, rates)
        learned = index < posterior.log_scale.shape[-1]
        before = posterior.learned_scale(index[learned])
        scales = gradient.log_scale[:, learned]
        progress.scaled.ascend(posterior.log_scale, index[learned], scales, rate)
        supports = [one.support for one in evaluated if one.support is not None]
        if progress.control is not None and supports:
            diagonal = posterior.learned_scale(index[learned]).exp() - before.exp()
            moves[:, learned] += _on_diagonal(diagonal, index[learned], posterior.columns)
            progress.control.follow(torch.cat(supports, -1), gradient.drawn.parts(moves))

    @torch.no_grad()
    def _measure(self, evaluated: list[DrawnFunctions], data: Minibatch) -> None:
        """Average squares of the drawn functions over about one pass through the data."""
        measured = self.progress.posterior.mean_squares
        if measured is None:
            return
        visits = 1.0 + self.progress.steps * len(evaluated[0].draw.index) / measured.shape[-1]
        share = max(1.0 / visits, min(1.0, 1.0 / data.weight))
        for one in evaluated:
            index, squares = one.draw.index, one.squares.detach() / len(data.X)
            measured[:, index] += share * (squares - measured[:, index])

    @torch.no_grad()
    def _relevance(self, evaluated: list[DrawnFunctions], data: Minibatch) -> None:
        """Set precisions of the drawn functions, if they have their own, to the bound's maximum.

        Of those whose column is dense ``1 / E w²``, which raises the bound and has the same fixed
        points. [Tipping2001]
        """
        posterior, precisions = self.progress.posterior, self.progress.precisions
        if precisions is None or posterior.mean_squares is None:
            return
        noise = self.hyper.likelihood.noise.reshape(-1, 1).to(precisions)
        for one in evaluated:
            index = one.draw.index
            moment = posterior.dense_columns(index).square().sum(-1)
            sharpness = data.count * posterior.mean_squares[:, index] / noise
            single = best_precisions(moment, sharpness)
            dense = moment.clamp_min(1.0 / LARGEST).reciprocal()
            precisions[:, index] = torch.where(index < posterior.columns, dense, single)


def _on_diagonal(values: Tensor, index: Tensor, columns: int) -> Tensor:
    """Put entries of the diagonal into rows of mean and columns, ``m x k x (1 + columns)``."""
    places = torch.arange(-1, columns, device=index.device)
    return values.unsqueeze(-1) * (index.unsqueeze(-1) == places)


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
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_size", 1),
            ("functions", 1),
            ("control_points", 0),
            ("update_steps", 0),
            ("initial_points", 0),
            ("freeze_steps", 0),
        ):
            value = getattr(self, name)
            if value is not None:
                checked_number(name, value, least)
        for name in ("learning_rate", "half_life"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"Expected {name} to be positive, got {getattr(self, name)}.")
        if not self.hyper_rate >= 0.0:
            raise ValueError(f"Expected hyper_rate to be at least 0, got {self.hyper_rate}.")

    def rows(self, held: int) -> int:
        """Return the size of a minibatch of those that are held."""
        return min(BATCH_SIZE, held) if self.batch_size is None else self.batch_size

    def drawn(self, size: int) -> int:
        """Return how many functions are drawn of so many."""
        return min(FUNCTIONS, size) if self.functions is None else self.functions

    def decay(self, step: int) -> float:
        """Compute the part of both rates that is left at a step."""
        return float(0.5 ** (step / self.half_life))
