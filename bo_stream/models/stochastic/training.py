"""Stochastic training: steps on batches, in one process or several."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean, linear_regression, pstdev
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

from bo_stream.collective import ALONE, Collective
from bo_stream.models.stochastic.replay import Batch, Replay, StreamReplay

DEFAULT_STEPS = 2000
"""Steps of a training that is given neither steps nor seconds. Source: [Cheng2017, section 4]."""

WINDOW = 20
"""Estimates of the bound whose mean is the smoothed bound."""

EXPLODED = 30.0
"""Fall of the smoothed bound below its best at which a training stops, in :meth:`_Watch.fall`."""

PATIENCE = 100
"""Steps in which a bound that the first of them bring down has to recover."""

LOST = 2.0
"""Fall below where it began that is no recovery, in the unit of :meth:`_Watch.is_lost`."""

CHECKED = 50
"""Steps between copies of the learner's state, and points of the trace."""

_TAIL = 1000
"""Most estimates of the bound whose slope says whether it is still rising."""

T = TypeVar("T")

NUMERICAL_ERRORS = (NotPSDError, NanError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
"""Of matrices that cannot be factorised."""


class Trainable(Protocol):
    """The interface of what :func:`train` trains: the part of a model that learns.

    Attributes:
        num_steps: Steps taken so far, by all trainings: schedules go on from there.
        learning_rate: Of the first step; an error about divergence names it.
        num_data: Observations that the bound is of.
    """

    num_steps: int
    learning_rate: float
    num_data: float

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


@dataclass(frozen=True)
class Training:
    """What a training did: its steps, where its time went, and whether it has come far.

    Attributes:
        steps: That it took.
        seconds: That it took, of wall time, from the call on.
        trace: Step, counted over all trainings, and smoothed bound there, in nats.
        start: Seconds of these before the first step: hyperparameters to begin with.
        final: Seconds after the last one: whether the model has become better.
        rise: Slope of the bound over the last half of the steps, nats an observation and step; NaN
            of fewer than ``WINDOW`` steps.
        gain: What as many steps again as the model has taken would add to the bound at that slope,
            nats an observation; NaN likewise.
        coverage: Share of outcomes in the central 90 % intervals that the model predicts for them,
            where there is a row that no step has drawn of such rows; None: not computed.
        is_kept: Whether what was learned was kept: False where it predicted worse than the model
            before the call.
    """

    steps: int
    seconds: float
    trace: tuple[tuple[int, float], ...]
    start: float = 0.0
    final: float = 0.0
    rise: float = math.nan
    gain: float = math.nan
    coverage: float | None = None
    is_kept: bool = True

    @property
    def stepping(self) -> float:
        """Seconds of the steps."""
        return self.seconds - self.start - self.final


def train(
    learner: Trainable,
    steps: int | None,
    seconds: float | None,
    *,
    progress: bool,
    started: float | None = None,
    collective: Collective = ALONE,
    before_step: Callable[[float], object] | None = None,
    is_over: Callable[[], bool] | None = None,
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
        started: Monotonic time from which seconds count; default: now.
        collective: Processes that take the steps together; they end by the clock of the first.
        before_step: Called before each step with the part of the limit that is spent, in [0, 1).
        is_over: Called every ``CHECKED`` steps; where it returns True the training ends.

    Raises:
        ModelFittingError: The training diverged.
        ValueError: A limit is negative or not a number.
    """
    check_limits(steps, seconds)
    if steps is None and seconds is None:
        steps = DEFAULT_STEPS
    most, longest = (math.inf if limit is None else float(limit) for limit in (steps, seconds))
    watch, taken, now = _Watch(learner), 0, time.monotonic()
    started = now if started is None else started
    clock = ALONE if seconds is None else collective
    spent = agreed(now - started, clock)
    with Bar(progress) as bar:
        try:
            while taken < most and spent < longest:
                if before_step is not None:
                    before_step(max(taken / most, spent / longest))
                try:
                    estimate = learner.take_step()
                except NUMERICAL_ERRORS as error:
                    raise _DivergenceError(f"a step failed: {error}") from error
                watch.add(estimate)
                taken, spent = taken + 1, agreed(time.monotonic() - started, clock)
                if taken % CHECKED == 0:
                    watch.check()
                    watch.keep()
                    if is_over is not None and is_over():
                        break
                if bar.is_shown:
                    part = max(taken / most, spent / longest)
                    bar.show(min(part, 1.0), learner.num_steps, watch.smoothed)
            if taken % CHECKED != 0:
                watch.check()
        except _DivergenceError as divergence:
            raise watch.failure(divergence) from divergence.__cause__
        except BaseException:
            learner.restore(watch.checked)
            raise
    spent = time.monotonic() - started
    rise = watch.rise()
    gain = rise * learner.num_steps
    return Training(taken, spent, tuple(watch.trace), now - started, rise=rise, gain=gain)


def agreed(seconds: float, collective: Collective) -> float:
    """Return the time that the first process has spent: all processes end by its clock."""
    if collective.is_alone:
        return seconds
    return float(collective.agreed(torch.tensor(seconds, dtype=torch.float64)))


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


class _Watch:
    """The smoothed bound of a learner, and states of it to go back to.

    Attributes:
        trace: Steps and smoothed bounds.
        checked: State at the last check.
    """

    def __init__(self, learner: Trainable) -> None:
        self._learner = learner
        self._first, self._count = math.nan, 0
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._estimates: deque[float] = deque(maxlen=_TAIL)
        self._best, self._spread = -math.inf, 0.0
        self.trace: list[tuple[int, float]] = []
        # the good one is of the last check at which the bound was about as good as ever
        self.checked = self._good = learner.learned_state()

    @property
    def smoothed(self) -> float:
        return fmean(self._recent) if self._recent else math.nan

    def fall(self) -> float:
        """Compute how far the smoothed bound is below its best value so far, at least 0.

        In units of a tenth of that value's size plus the standard deviation of the estimates that
        it is the mean of; 0 of fewer than ``WINDOW`` estimates.
        """
        if len(self._recent) < WINDOW or self.smoothed >= self._best:
            return 0.0
        scale = 0.1 * abs(self._best) + self._spread
        return (self._best - self.smoothed) / scale if scale > 0.0 else math.inf

    def is_lost(self) -> bool:
        """Say whether the smoothed bound is far below where it began."""
        unit = abs(self._first) + self._learner.num_data + pstdev(self._recent)
        return self._first - self.smoothed > LOST * unit

    def add(self, estimate: float) -> None:
        if not math.isfinite(estimate):
            raise _DivergenceError(f"the bound became {estimate}")
        self._recent.append(estimate)
        self._estimates.append(estimate)
        self._count += 1
        if self._count == 1:
            self._first = estimate
        lost = self._count == PATIENCE and self.is_lost()
        if lost or self.fall() > EXPLODED:
            former = self._first if lost else self._best
            raise _DivergenceError(f"the bound fell from {former:.4g} to {self.smoothed:.4g}")
        if len(self._recent) == WINDOW and self.smoothed > self._best:
            self._best, self._spread = self.smoothed, pstdev(self._recent)

    def rise(self) -> float:
        """Fit a line to the estimates of the last half of the steps; what of it is no chance.

        Returns:
            Its slope in nats an observation and step, drawn to 0 by twice its standard error; NaN
            of fewer than ``WINDOW`` estimates.
        """
        if self._count < WINDOW:
            return math.nan
        last = list(self._estimates)[-min(self._count // 2, _TAIL) :]
        slope, _ = linear_regression(range(len(last)), last)
        centre, middle = fmean(last), 0.5 * (len(last) - 1)
        left = [y - centre - slope * (i - middle) for i, y in enumerate(last)]
        squares = len(last) * (len(last) ** 2 - 1) / 12.0
        error = math.sqrt(sum(e * e for e in left) / max(len(last) - 2, 1) / squares)
        certain = math.copysign(max(abs(slope) - 2.0 * error, 0.0), slope)
        return certain / max(self._learner.num_data, 1.0)

    def check(self) -> None:
        if not self._learner.is_valid:
            raise _DivergenceError("what was learned is no longer finite, or not positive")
        self.trace.append((self._learner.num_steps, self.smoothed))

    def keep(self) -> None:
        self.checked = self._learner.learned_state()
        if self.fall() <= 1.0 and not self.is_lost():
            self._good = self.checked

    def failure(self, divergence: _DivergenceError) -> ModelFittingError:
        """Go back to the last good state, and return what to raise."""
        failed_at, rate = self._learner.num_steps, self._learner.learning_rate
        self._learner.restore(self._good)
        return ModelFittingError(
            f"Training diverged near step {failed_at}: {divergence}. The model is as it was after "
            f"step {self._learner.num_steps}. Expected a learning_rate that suits the data, got "
            f"{rate:g}: build the model with a smaller one, {rate / 3.0:.1g} say."
        )


class Bar:
    """A progress bar, or none.

    Attributes:
        is_shown: Whether it is drawn.
    """

    def __init__(self, wanted: bool) -> None:
        """Show a work that is done in steps, if wanted and where standard error is a terminal."""
        console, self.is_shown = _screen(wanted)
        self._progress = Progress(
            TextColumn("step {task.fields[step]:,}"),
            BarColumn(),
            TextColumn("bound {task.fields[bound]:,.5g}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
        )
        self._task = self._progress.add_task("", total=1.0, step=0, bound=math.nan)

    def __enter__(self) -> Bar:
        if self.is_shown:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_shown:  # before release 15 one that is disabled ends with an empty line
            self._progress.stop()

    def show(self, part: float, step: int, bound: float) -> None:
        """Show how much is done in [0, 1], the step, and the bound there."""
        self._progress.update(self._task, completed=part, step=step, bound=bound)


def tracked(parts: Iterable[T], total: int, wanted: bool) -> Iterator[T]:
    """Yield so many parts of a long work one after the other, with a bar on a terminal."""
    console, shown = _screen(wanted)
    yield from track(parts, "all data", total, console=console) if shown else parts


def waiting(what: str, wanted: bool) -> AbstractContextManager[object]:
    """Show a spinner on a terminal while something is done whose length is not known."""
    console, shown = _screen(wanted)
    return console.status(what) if shown else nullcontext()


def _screen(wanted: bool) -> tuple[Console, bool]:
    """Return standard error, and whether to draw there: if wanted, and if it is a terminal."""
    console = Console(stderr=True, highlight=False)
    return console, wanted and console.is_terminal


# --- observations of which each process stores some, drawn as if one stored all ------------------


@dataclass(frozen=True)
class ShardedReplay(Replay):
    """Rows in one order over all processes, each of which is stored by one of them.

    Places are drawn from all rows by the same random numbers everywhere, and each process gets
    those rows of a draw that it holds: together they have the draw of a process that holds all.

    Attributes:
        own: Rows of this process.
        held: Number of rows of all processes.
        count: Observations of all processes.
        here: Places of this process's rows among all, ascending, on the CPU.
        collective: The processes.
    """

    own: StreamReplay
    held: int
    count: int
    here: Tensor
    collective: Collective

    @classmethod
    def shared_out(cls, whole: StreamReplay, collective: Collective) -> ShardedReplay:
        """Give each process an equal part of rows that all of them hold."""
        held, size, rank = whole.held, collective.size, collective.rank
        here = torch.arange(held * rank // size, held * (rank + 1) // size)
        own = StreamReplay.empty(whole.at(here[:0])).plus(whole.at(here))
        return cls(own, held, whole.count, here, collective)

    def emptied(self) -> ShardedReplay:
        """Return one of no rows, of the same processes."""
        rows = StreamReplay.empty(self.at(self.here[:0]))
        return ShardedReplay.shared_out(rows, self.collective)

    @property
    def left_alone(self) -> StreamReplay:
        """This process's rows, which stand for all observations."""
        return replace(self.own, count=self.count)

    def at(self, index: Tensor) -> Batch:
        """Return the rows at some indices that this process stores."""
        return self.own.at(self._found(index)[0])

    def _found(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Find places here: positions of rows, and where these are in the index."""
        if len(self.here) == 0:
            return index[:0], index[:0]
        positions = torch.searchsorted(self.here, index).clamp_max(len(self.here) - 1)
        found = torch.nonzero(self.here[positions] == index).flatten()
        return positions[found], found

    def completed(self, rows: Batch, places: Tensor) -> Batch:
        """Put the rows of a draw together, on each process."""
        _, found = self._found(places)
        X, Y = (self.collective.assembled(t, found, len(places)) for t in (rows.X, rows.Y))
        return Batch(X, Y)

    def plus(self, new: Batch) -> ShardedReplay:
        """Add rows of each process, in the order of ranks."""
        counts = self.collective.counts(len(new), new.X.device)
        first = self.held + sum(counts[: self.collective.rank])
        return replace(
            self,
            own=self.own.plus(new),
            here=torch.cat((self.here, torch.arange(first, first + len(new)))),
            held=self.held + sum(counts),
            count=self.count + sum(counts),
        )

    def select(self, outputs: list[int]) -> ShardedReplay:
        """Select some of the outputs."""
        return replace(self, own=self.own.select(outputs))

    def to(self, device: torch.device) -> ShardedReplay:
        """Move to another device."""
        return replace(self, own=self.own.to(device))
