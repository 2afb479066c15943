"""Evaluate points: one attempt, its outcome or why there is none; in this process to begin with."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from bo_stream.loops.optimization.objectives import Objective
from bo_stream.loops.optimization.trials import LARGEST


@dataclass(frozen=True)
class Task:
    """One attempt at one trial.

    Attributes:
        key: Of the trial.
        X: The point.
        attempt: Counts from 0.
    """

    key: int
    X: tuple[float, ...]
    attempt: int


@dataclass(frozen=True)
class Outcome:
    """What came of a task.

    Attributes:
        key: Of the trial.
        value: The outcome, or None.
        error: Why there is none, or None.
        seconds: Wall time.
    """

    key: int
    value: float | None
    error: str | None
    seconds: float


class Evaluator(ABC):
    """Takes tasks, gives outcomes in the order of completion. Use it in a ``with`` block."""

    @abstractmethod
    def submit(self, task: Task) -> None:
        """Add a task."""

    @abstractmethod
    def next_outcome(self) -> Outcome:
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


class InProcess(Evaluator):
    """One task after the other, in this process; nothing can stop one that hangs."""

    def __init__(self, objective: Objective) -> None:
        """Of an objective."""
        self._objective = objective
        self._tasks: deque[Task] = deque()

    def submit(self, task: Task) -> None:
        """Add a task."""
        self._tasks.append(task)

    def next_outcome(self) -> Outcome:
        """Do the first task."""
        return attempt(self._objective, self._tasks.popleft())

    def close(self) -> None:
        """Forget the tasks."""
        self._tasks.clear()


def attempt(objective: Objective, task: Task) -> Outcome:
    """Evaluate once; whatever the function raises or returns, there is an outcome."""
    started = time.monotonic()
    try:
        result = objective.measure(task.X, task.key, task.attempt)
        value, error = _as_number(result)
    except (Exception, SystemExit) as raised:  # the user's function may raise anything
        value, error = None, _in_one_line(raised)
    return Outcome(task.key, value, error, time.monotonic() - started)


def _as_number(result: Any) -> tuple[float | None, str | None]:
    array = np.asarray(result)
    if array.dtype.kind not in "iuf":
        return None, f"expected one number, got {type(result).__name__} {str(result)[:40]!r}"
    if array.shape not in ((), (1,)):
        return None, f"expected one number, got shape {array.shape}"
    value = float(array.reshape(()))
    if abs(value) <= LARGEST:
        return value, None
    excess = f", larger in size than {LARGEST:g}" if np.isfinite(value) else ""
    return None, f"the value is {value}{excess}"


def _in_one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # the user's error may be broken too
        text = "an error without words"
    return " ".join(f"{type(error).__name__}: {text}".split())[:500]
