"""The loop of training steps: limits, a progress bar, and a stop at divergence."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any, Protocol, TypeVar

import torch
from botorch.exceptions.errors import ModelFittingError
from linear_operator.utils.errors import NanError, NotPSDError
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)
from torch import Tensor

from bo_stream.tensors import map_tensors

DEFAULT_STEPS = 2000
"""Steps of a training that is given neither steps nor seconds. Source: [Cheng2017, section 4]."""

WINDOW = 20
"""Estimates of the bound whose mean is the smoothed bound."""

EXPLODED = 30.0
"""Fall of the smoothed bound below its best at which a training stops, in :meth:`_Bound.scale`."""

PATIENCE = 100
"""Steps in which a bound that the first of them bring down has to recover."""

LOST = 2.0
"""Fall below where it began that is no recovery, in the unit of :attr:`_Bound.lost`."""

T = TypeVar("T")

NUMERICAL_ERRORS = (NotPSDError, NanError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
"""Of matrices that cannot be factorised."""


class Trainable(Protocol):
    """The interface of what :func:`train` trains: a model, or the part of one that learns."""

    @property
    def num_steps(self) -> int:
        """Steps taken so far, by all trainings: schedules go on from there."""
        ...

    @property
    def learning_rate(self) -> float:
        """Rate of the first step; an error about divergence names it."""
        ...

    @property
    def num_data(self) -> float:
        """Observations that the bound is of."""
        ...

    @property
    def is_valid(self) -> bool:
        """Whether all that was learned is finite, and positive where it has to be."""
        ...

    def take_step(self) -> float:
        """Take a step; return its unbiased estimate of the bound of all data, in nats."""
        ...

    def learned_state(self) -> Any:
        """Copy all that a step changes, moments of the optimiser and ``num_steps`` too."""
        ...

    def restore(self, state: Any) -> None:
        """Go back to what :meth:`learned_state` returned, which stays as it is."""
        ...


def all_finite(value: object) -> bool:
    """Say whether all tensors of a value are finite; see :func:`map_tensors`."""
    finite = list[bool]()

    def look(tensor: Tensor) -> Tensor:
        finite.append(bool(tensor.isfinite().all()))
        return tensor

    map_tensors(value, look)
    return all(finite)


@dataclass(frozen=True)
class Training:
    """Steps, time and trace of a training.

    Attributes:
        steps: That it took.
        seconds: That it took, of wall time.
        trace: Step, counted over all trainings, and smoothed bound there, in nats.
    """

    steps: int
    seconds: float
    trace: tuple[tuple[int, float], ...]

    def after(self, seconds: float) -> Training:
        """Count the time before it, too."""
        return replace(self, seconds=seconds + self.seconds)


def train(
    learner: Trainable,
    steps: int | None,
    seconds: float | None,
    *,
    progress: bool,
    check_every: int = 50,
) -> Training:
    """Take steps until a limit, watching the bound.

    A training that diverges goes back to the last good state and raises: where an estimate of the
    bound, or what was learned, is not finite, where a matrix cannot be factorised, or where the
    mean of the last ``WINDOW`` estimates has fallen too far below the best such mean, by
    ``EXPLODED`` times a tenth of that mean's size plus the standard deviation of its estimates.
    First steps may bring the bound far down; after ``PATIENCE`` of them it must not be below the
    first estimate by ``LOST`` times that estimate's size, plus the standard deviation, plus a nat
    for each observation. Any other error, Ctrl-C included, leaves the learner as it was at the last
    check, and passes on. Another call goes on from there.

    Args:
        learner: Changed in place.
        steps: Most steps to take.
        seconds: Begin no step after so many; where both are given the first limit to be reached
            counts, where neither is ``DEFAULT_STEPS``.
        progress: Whether to draw a bar, where standard error is a terminal.
        check_every: Steps between copies of the learner's state, and points of the trace.

    Raises:
        ModelFittingError: The training diverged.
        ValueError: A limit is negative or not a number.
    """
    limit = _Limit.of(steps, seconds)
    run = _Run(learner, check_every)
    with Bar(progress) as bar:
        try:
            while not limit.reached(run.steps, run.seconds):
                run.step()
                bar.show(limit.part(run.steps, run.seconds), learner.num_steps, run.bound.smoothed)
            run.finish()
        except _DivergenceError as divergence:
            raise run.failure(divergence) from divergence.__cause__
        except BaseException:
            learner.restore(run.checked)
            raise
    return run.training()


@dataclass(frozen=True)
class _Limit:
    steps: float
    seconds: float

    @classmethod
    def of(cls, steps: int | None, seconds: float | None) -> _Limit:
        if steps is None and seconds is None:
            steps = DEFAULT_STEPS
        check_limits(steps, seconds)
        return cls(
            math.inf if steps is None else steps, math.inf if seconds is None else float(seconds)
        )

    def reached(self, steps: int, seconds: float) -> bool:
        return steps >= self.steps or seconds >= self.seconds

    def part(self, steps: int, seconds: float) -> float:
        """Return how much of it is done, in [0, 1]; 0 of a limit of 0 is all."""
        if self.reached(steps, seconds):
            return 1.0
        return max(steps / self.steps, seconds / self.seconds)


def check_limits(steps: int | None, seconds: float | None) -> None:
    """Check the limits of a training.

    Raises:
        ValueError: One is negative or not a number.
    """
    for name, value in (("steps", steps), ("seconds", seconds)):
        if value is not None and not value >= 0:
            raise ValueError(f"Expected {name} to be at least 0, got {value}.")


class _DivergenceError(Exception):
    """Why a training stops."""


class _Bound:
    """The smoothed bound, where it began, and the best that it has been."""

    def __init__(self, num_data: float) -> None:
        self._num_data = num_data
        self._first, self._count = math.nan, 0
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._best, self._spread = -math.inf, 0.0

    @property
    def smoothed(self) -> float:
        return fmean(self._recent) if self._recent else math.nan

    @property
    def scale(self) -> float:
        """Size that the smoothed bound may well move by."""
        return 0.1 * abs(self._best) + self._spread

    @property
    def fall(self) -> float:
        """How far the smoothed bound is below its best, in scales; 0 while there are few."""
        if len(self._recent) < WINDOW or self.smoothed >= self._best:
            return 0.0
        return (self._best - self.smoothed) / self.scale if self.scale > 0.0 else math.inf

    @property
    def lost(self) -> bool:
        """Whether the smoothed bound is far below where it began."""
        unit = abs(self._first) + self._num_data + pstdev(self._recent)
        return self._first - self.smoothed > LOST * unit

    def add(self, estimate: float) -> None:
        if not math.isfinite(estimate):
            raise _DivergenceError(f"the bound became {estimate}")
        self._recent.append(estimate)
        self._count += 1
        if self._count == 1:
            self._first = estimate
        if self._count == PATIENCE and self.lost:
            raise self._fell_from(self._first)
        if self.fall > EXPLODED:
            raise self._fell_from(self._best)
        if len(self._recent) == WINDOW and self.smoothed > self._best:
            self._best, self._spread = self.smoothed, pstdev(self._recent)

    def _fell_from(self, value: float) -> _DivergenceError:
        return _DivergenceError(f"the bound fell from {value:.4g} to {self.smoothed:.4g}")


class _Run:
    """A training under way.

    Attributes:
        steps: Taken in it.
        bound: Watched.
        checked: State at the last check.
        good: State at the last check at which the bound was about as good as ever.
    """

    def __init__(self, learner: Trainable, check_every: int) -> None:
        self._learner, self._check_every = learner, check_every
        self._started = time.monotonic()
        self._trace: list[tuple[int, float]] = []
        self.steps, self.bound = 0, _Bound(learner.num_data)
        self.checked = self.good = learner.learned_state()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def step(self) -> None:
        try:
            estimate = self._learner.take_step()
        except NUMERICAL_ERRORS as error:
            raise _DivergenceError(f"a step failed: {error}") from error
        self.bound.add(estimate)
        self.steps += 1
        if self.steps % self._check_every == 0:
            self._check()

    def finish(self) -> None:
        """Check what the steps since the last check did."""
        if self.steps % self._check_every != 0:
            self._check_learned()
            self._note()

    def _check_learned(self) -> None:
        if not self._learner.is_valid:
            raise _DivergenceError("what was learned is no longer finite, or not positive")

    def _check(self) -> None:
        self._check_learned()
        self._note()
        self.checked = self._learner.learned_state()
        if self.bound.fall <= 1.0 and not self.bound.lost:
            self.good = self.checked

    def _note(self) -> None:
        self._trace.append((self._learner.num_steps, self.bound.smoothed))

    def failure(self, divergence: _DivergenceError) -> ModelFittingError:
        """Go back to the last good state, and return what to raise."""
        failed_at, rate = self._learner.num_steps, self._learner.learning_rate
        self._learner.restore(self.good)
        return ModelFittingError(
            f"Training diverged near step {failed_at}: {divergence}. The model is as it was after "
            f"step {self._learner.num_steps}. Expected a learning_rate that suits the data, got "
            f"{rate:g}: build the model with a smaller one, {rate / 3.0:.1g} say."
        )

    def training(self) -> Training:
        return Training(self.steps, self.seconds, tuple(self._trace))


class Bar:
    """A progress bar, or none."""

    def __init__(self, wanted: bool) -> None:
        """Show a work that is done in steps.

        Args:
            wanted: Whether to draw it, where standard error is a terminal.
        """
        console, shown = _screen(wanted)
        self._progress = Progress(
            TextColumn("step {task.fields[step]:,}"),
            BarColumn(),
            TextColumn("bound {task.fields[bound]:,.5g}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            disable=not shown,
        )
        self._task = self._progress.add_task("", total=1.0, step=0, bound=math.nan)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, part: float, step: int, bound: float) -> None:
        """Show how much is done in [0, 1], the step, and the bound there."""
        self._progress.update(self._task, completed=part, step=step, bound=bound)


def tracked(parts: Iterable[T], total: int, wanted: bool) -> Iterator[T]:
    """Yield parts of a long work one after the other, with a bar on a terminal.

    Args:
        parts: Of the work.
        total: Their number.
        wanted: Whether to draw it.
    """
    console, shown = _screen(wanted)
    yield from track(parts, "all data", total, console=console, disable=not shown)


def waiting(what: str, wanted: bool) -> AbstractContextManager[object]:
    """Show a spinner on a terminal while something is done whose length is not known.

    Args:
        what: Is done.
        wanted: Whether to draw it.
    """
    console, shown = _screen(wanted)
    return console.status(what) if shown else nullcontext()


def _screen(wanted: bool) -> tuple[Console, bool]:
    """Return standard error, and whether to draw there: if wanted, and if it is a terminal."""
    console = Console(stderr=True, highlight=False)
    return console, wanted and console.is_terminal
