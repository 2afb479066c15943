"""Evaluation of points in processes of their own, which can hang or die without harm."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Protocol, Self, TypeAlias

from bo_stream.errors import UsageError
from bo_stream.loops.optimization.objectives import NoOutcomeError, Objective, P, V, Work

_READY = "ready"
_SECONDS_TO_END = 2.0


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


class Workers(Generic[P, V]):
    """An evaluator in worker processes, which are replaced when one dies or exceeds the timeout.

    Example:
        >>> with Workers(objective, count=4, timeout=60.0) as workers:
        ...     workers.submit(Task(0, (0.5,), 0))
        ...     workers.next_outcome()
    """

    def __init__(self, work: Work[P, V], count: int, timeout: float | None = None) -> None:
        """Prepare to start up to ``count`` processes as they are needed.

        Args:
            work: Function of the tasks; it can be pickled.
            count: Largest number of processes.
            timeout: Seconds after which an attempt has failed and its process is killed.
        """
        if count < 1:
            raise UsageError(f"Expected workers of at least 1, got {count}.")
        if timeout is not None and not timeout > 0.0:
            raise UsageError(f"Expected timeout above 0 seconds, got {timeout}.")
        self._work, self._count, self._timeout = work, count, timeout
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker[P, V]] = []
        self._tasks: deque[Task[P]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def submit(self, task: Task[P]) -> None:
        """Add a task; it begins when a worker is free."""
        self._tasks.append(task)
        if len(self._workers) < min(self._count, self._open):
            self._start()
        self._hand_out()

    @property
    def _open(self) -> int:
        return len(self._tasks) + sum(worker.task is not None for worker in self._workers)

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(self._work, theirs))
        process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours))

    def _hand_out(self) -> None:
        for worker in self._workers:
            if self._tasks and worker.ready and worker.task is None:
                worker.give(self._tasks.popleft())

    def next_outcome(self) -> Outcome[V]:
        """Wait for the next outcome; a hanging or dying worker gives one too (see :meth:`poll`)."""
        while True:
            outcome = self.poll(None)
            if outcome is not None:
                return outcome

    def poll(self, seconds: float | None) -> Outcome[V] | None:
        """Wait for an outcome for some seconds (None: any time); None may be returned sooner.

        Raises:
            UsageError: A process cannot even be started.
        """
        outcome = self._heard(seconds) or self._overdue()
        self._hand_out()
        return outcome

    def cancel(self, key: int) -> None:
        """Drop a task; its worker, if it has begun, is stopped."""
        self._tasks = deque(task for task in self._tasks if task.key != key)
        for worker in list(self._workers):
            if worker.task is not None and worker.task.key == key:
                self._remove(worker)

    def _heard(self, seconds: float | None) -> Outcome[V] | None:
        ready = wait([worker.connection for worker in self._workers], self._patience(seconds))
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            outcome = self._message(worker)
            if outcome is not None:
                return outcome
        return None

    def _message(self, worker: _Worker[P, V]) -> Outcome[V] | None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            return self._lost(worker)
        if isinstance(message, Outcome):
            worker.task = None
            return message
        worker.ready = True
        return None

    def _lost(self, worker: _Worker[P, V]) -> Outcome[V] | None:
        worker.process.join(_SECONDS_TO_END)
        code = worker.process.exitcode
        self._remove(worker)
        if not worker.ready:
            raise UsageError(
                f"A worker process ended while it started (exit code {code}). A script that "
                "evaluates in workers needs its code under: if __name__ == '__main__'."
            )
        return worker.failed(f"the worker process died (exit code {code})")

    def _remove(self, worker: _Worker[P, V]) -> None:
        worker.end()
        self._workers.remove(worker)
        if len(self._workers) < min(self._count, self._open):
            self._start()

    def _patience(self, seconds: float | None) -> float | None:
        """Limit the wait to the time at which the first task is overdue."""
        started = [worker.started for worker in self._workers if worker.task is not None]
        if self._timeout is None or not started:
            return seconds
        left = max(0.0, min(started) + self._timeout - time.monotonic())
        return left if seconds is None else min(left, seconds)

    def _overdue(self) -> Outcome[V] | None:
        for worker in list(self._workers):
            late = worker.task is not None and self._timeout is not None
            if late and time.monotonic() - worker.started >= (self._timeout or 0.0):
                self._remove(worker)
                return worker.failed(f"no outcome within {self._timeout:g} s: stopped")
        return None

    def close(self) -> None:
        """Kill the workers."""
        self._tasks.clear()
        for worker in self._workers:
            worker.end()
        self._workers = []


PointEvaluator: TypeAlias = Evaluator[tuple[float, ...], float]
"""Evaluator of points of d inputs with one outcome."""


def evaluator(objective: Objective, count: int, timeout: float | None) -> PointEvaluator:
    """Return an evaluator in workers, or in this process if ``count`` is 0.

    One function of BoTorch's at a time without a timeout is evaluated in this process too: unlike
    a function of the user's own, it cannot end its process or hang.
    """
    harmless = count == 1 and timeout is None and not objective.is_own
    return InProcess(objective) if count == 0 or harmless else Workers(objective, count, timeout)


@dataclass
class _Worker(Generic[P, V]):
    process: BaseProcess
    connection: Connection
    ready: bool = False
    task: Task[P] | None = None
    started: float = 0.0

    def give(self, task: Task[P]) -> None:
        self.task, self.started = task, time.monotonic()
        with suppress(OSError):  # one that has died is found so when it is listened to
            self.connection.send(task)

    def failed(self, error: str) -> Outcome[V] | None:
        """Return the outcome of the present task, if any, when the worker is lost."""
        if self.task is None:
            return None
        return Outcome(self.task.key, None, error, time.monotonic() - self.started)

    def end(self) -> None:
        self.process.kill()  # before its connection is closed, which it would complain of
        self.connection.close()
        self.process.join(_SECONDS_TO_END)


def _work(work: Work[Any, Any], connection: Connection) -> None:
    """Do tasks in a worker process until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends its step
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work.prepare()
    connection.send(_READY)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(attempt(work, task))


def _end_with_parent() -> None:
    """End with the run: one that is killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def attempt(work: Work[P, V], task: Task[P]) -> Outcome[V]:
    """Evaluate once; there is an outcome whatever the function raises or returns."""
    started = time.monotonic()
    value, error = None, None
    try:
        value = work.evaluate(task.X, task.key, task.attempt)
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
