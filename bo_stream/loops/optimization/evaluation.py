"""Evaluate points: one attempt, its outcome or why there is none; in this process to begin with."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeAlias

from bo_stream.loops.optimization.work import NoOutcomeError, P, V, Work


@dataclass(frozen=True)
class Task(Generic[P]):
    """One attempt at one trial.

    Attributes:
        key: Of the trial.
        X: The point.
        attempt: Counts from 0.
    """

    key: int
    X: P
    attempt: int


@dataclass(frozen=True)
class Outcome(Generic[V]):
    """What came of a task.

    Attributes:
        key: Of the trial.
        value: The outcome, or None.
        error: Why there is none, or None.
        seconds: Wall time.
    """

    key: int
    value: V | None
    error: str | None
    seconds: float


class Evaluator(ABC, Generic[P, V]):
    """Takes tasks, gives outcomes in the order of completion. Use it in a ``with`` block."""

    @abstractmethod
    def submit(self, task: Task[P]) -> None:
        """Add a task."""

    @abstractmethod
    def next_outcome(self) -> Outcome[V]:
        """Wait for an outcome of a submitted task."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; tasks at work are lost."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


PointEvaluator: TypeAlias = Evaluator[tuple[float, ...], float]
"""Of points of d inputs and one outcome."""


class InProcess(Evaluator[P, V]):
    """One task after the other, in this process; nothing can stop one that hangs."""

    def __init__(self, work: Work[P, V]) -> None:
        """Of what each task does."""
        self._work = work
        self._tasks: deque[Task[P]] = deque()

    def submit(self, task: Task[P]) -> None:
        """Add a task."""
        self._tasks.append(task)

    def next_outcome(self) -> Outcome[V]:
        """Do the first task."""
        return attempt(self._work, self._tasks.popleft())

    def close(self) -> None:
        """Forget the tasks."""
        self._tasks.clear()


def attempt(work: Work[P, V], task: Task[P]) -> Outcome[V]:
    """Evaluate once; whatever the function raises or returns, there is an outcome."""
    started = time.monotonic()
    value, error = None, None
    try:
        value = work.read(work.measure(task.X, task.key, task.attempt))
    except NoOutcomeError as wrong:
        error = str(wrong)
    except (Exception, SystemExit) as raised:  # the user's function may raise anything
        error = _in_one_line(raised)
    return Outcome(task.key, value, error, time.monotonic() - started)


def _in_one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # the user's error may be broken too
        text = "an error without words"
    return " ".join(f"{type(error).__name__}: {text}".split())[:500]
