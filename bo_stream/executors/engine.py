"""What an engine of this package offers beyond ``concurrent.futures``: stopping, clocks, checks."""

from __future__ import annotations

import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

SECONDS_BETWEEN_LOOKS = 5.0
"""Time between two looks at how many workers a cluster has."""

_SECONDS_TO_ANSWER = 10.0


class LostTaskError(RuntimeError):
    """An error for a task that ended with its worker or its scheduler; it may be done again."""


class LostTaskWarning(UserWarning):
    """A warning that tasks were lost with their workers, and are done again."""


class WaitingWarning(UserWarning):
    """A warning that nothing goes on until a scheduler or a worker is there."""


class EngineFuture(Future[T], ABC):
    """A future whose task can be stopped while it runs."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the task, begun or not, and free its place; the future is cancelled or lost."""

    @abstractmethod
    def seconds_running(self) -> float | None:
        """Return for how long the task has run, as far as the engine knows; None: not begun."""


class EngineExecutor(Executor, ABC):
    """An executor of this package: its futures can be stopped, its workers examined."""

    @abstractmethod
    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> EngineFuture[T]:
        """Do ``fn(*args, **kwargs)`` on a worker; a lost one gives a ``LostTaskError``."""

    @property
    @abstractmethod
    def workers(self) -> int | None:
        """Number of tasks that can run at a time, if what exceeds it would count as running."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Number of tasks that it does at a time, as it is now; at least 1.

        Raises:
            OSError: The cluster does not answer.
        """

    @abstractmethod
    def dumps(self, value: Any) -> bytes:
        """Pickle a value as the engine does."""

    @abstractmethod
    def on_workers(self, fn: Callable[..., T], *args: Any) -> Mapping[str, T | Exception]:
        """Call a function on each worker that might differ from here, and return by worker."""


def capacity_of(executor: Executor) -> int:
    """Return how many tasks an executor does at a time, as far as it says; else the processors.

    Raises:
        OSError: Its cluster does not answer.
    """
    if isinstance(executor, EngineExecutor):
        return executor.capacity
    client = getattr(executor, "_client", None)
    if client is not None and hasattr(client, "nthreads"):  # of Dask's own executor
        return threads_of(client)
    number = getattr(executor, "_max_workers", None)  # of Python's pools
    return number if isinstance(number, int) and number > 0 else os.cpu_count() or 1


def threads_of(client: Any) -> int:
    """Count the threads of the workers of a Dask client's cluster; 1 without any.

    Raises:
        OSError: The scheduler does not answer.
    """
    if client.status != "running":  # which the client would wait for
        raise ConnectionError("the Dask scheduler does not answer")
    return max(1, sum(client.nthreads(callback_timeout=_SECONDS_TO_ANSWER).values()))


class Capacity:
    """How many tasks an executor does at a time while its workers come and go.

    It is asked at most once in ``SECONDS_BETWEEN_LOOKS``. While a cluster does not answer it counts
    as it did before, and as one worker at first.
    """

    def __init__(self, executor: Executor) -> None:
        """Prepare to ask an executor."""
        self._executor = executor
        self._known, self._next_look = 1, -math.inf

    def now(self) -> int:
        """Return the number; at least 1."""
        if time.monotonic() >= self._next_look:
            with suppress(OSError):
                self._known = capacity_of(self._executor)
            self._next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
        return self._known


def is_lost(error: BaseException) -> bool:
    """Return whether a future's error says that its task was lost, not that it failed.

    A future of Dask's own executor is cancelled when its scheduler is lost, and has a
    ``KilledWorker`` if all workers that were given the task died, on which it may only have waited.
    """
    kinds: list[type[BaseException]] = [LostTaskError, BrokenExecutor, CancelledError]
    if "distributed" in sys.modules:
        kinds.append(sys.modules["distributed"].KilledWorker)
    return isinstance(error, tuple(kinds))
