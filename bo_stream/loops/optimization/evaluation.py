"""Tasks, their outcomes, and what evaluates them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self

from bo_stream.loops.optimization.objectives import NoOutcomeError, P, V, Work


@dataclass(frozen=True)
class Task(Generic[P]):
    """One attempt at a trial.

    Attributes:
        key: Key of the trial.
        X: The point.
        attempt: Number of the attempt, from 0.
    """

    key: int
    X: P
    attempt: int


@dataclass(frozen=True)
class Outcome(Generic[V]):
    """The result of a task.

    Attributes:
        key: Key of the trial.
        value: The outcome, or None.
        error: Reason why there is none, or None.
        seconds: Wall time.
    """

    key: int
    value: V | None
    error: str | None
    seconds: float


class Evaluator(Protocol[P, V]):
    """What does tasks: here, in worker processes, or on a cluster.

    A task that is submitted has one outcome, whatever its function does, unless it is cancelled.
    It may be evaluated more than once, where workers are lost; one outcome is given of it.
    An evaluator is a context manager that closes itself.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: Any) -> None: ...

    def submit(self, task: Task[P]) -> None:
        """Add a task; its key is that of no other task under way."""

    def poll(self, seconds: float | None) -> Outcome[V] | None:
        """Wait for an outcome for some seconds (None: any time); None may be returned sooner.

        Raises:
            UsageError: Nothing can be evaluated any more; the message says why.
        """

    def next_outcome(self) -> Outcome[V]:
        """Wait for the next outcome, of the tasks that were submitted."""

    def cancel(self, key: int) -> None:
        """Drop a task: it has no outcome. A key that is not under way changes nothing."""

    def close(self) -> None:
        """Drop all tasks and end what was started for them."""


class InProcess(Generic[P, V]):
    """An evaluator in this process, one task after the other; nothing can stop one that hangs."""

    def __init__(self, work: Work[P, V]) -> None:
        """Prepare to do a work for each task."""
        self._work = work
        self._tasks: deque[Task[P]] = deque()

    @property
    def capacity(self) -> int:
        """Number of tasks that are done at a time."""
        return 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def submit(self, task: Task[P]) -> None:
        """Add a task."""
        self._tasks.append(task)

    def poll(self, seconds: float | None) -> Outcome[V] | None:
        """Do the next task, however long it takes; None if there is none."""
        return self.next_outcome() if self._tasks else None

    def next_outcome(self) -> Outcome[V]:
        """Do the next task."""
        return attempt(self._work, self._tasks.popleft())

    def cancel(self, key: int) -> None:
        """Drop a task that waits."""
        self._tasks = deque(task for task in self._tasks if task.key != key)

    def close(self) -> None:
        """Drop all tasks."""
        self._tasks.clear()


def attempt(work: Work[P, V], task: Task[P]) -> Outcome[V]:
    """Evaluate once; there is an outcome whatever the function raises or returns."""
    started = time.monotonic()
    value, error = None, None
    try:
        value = work.evaluate(task.X, task.key, task.attempt)
    except NoOutcomeError as wrong:
        error = str(wrong)
    except (Exception, SystemExit) as raised:  # the user's function may raise anything
        error = in_one_line(raised)
    return Outcome(task.key, value, error, time.monotonic() - started)


def in_one_line(error: BaseException) -> str:
    """Return an error's kind and text, shortened."""
    try:
        text = str(error)
    except Exception:  # the user's error may be broken too
        text = "an error without words"
    return " ".join(f"{type(error).__name__}: {text}".split())[:500]
