"""Evaluation on any executor: processes, threads, Dask, Ray, or one of the user's."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from queue import Empty, SimpleQueue
from typing import Generic, TypeAlias

from bo_stream.errors import UsageError, check_whole
from bo_stream.executors.engine import (
    EngineExecutor,
    EngineFuture,
    LostTaskError,
    LostTaskWarning,
    WaitingWarning,
    WorkerCount,
    check_picklable,
    check_workers,
    is_lost,
    versions,
)
from bo_stream.executors.processes import ProcessExecutor, executor_of, places
from bo_stream.loops.optimization.objectives import (
    Evaluator,
    InProcess,
    Objective,
    Outcome,
    P,
    Task,
    V,
    Work,
    attempt,
)
from bo_stream.storage.archive import one_line

RESUBMISSIONS = 3
"""How often a task that was lost with its worker is submitted again."""

SECONDS_OF_SILENCE = 60.0
"""Time without an outcome after which a check is made that some evaluation has begun."""

PointEvaluator: TypeAlias = Evaluator[tuple[float, ...], float]
"""Evaluator of points of d inputs with one outcome."""


class Executed(Evaluator[P, V]):
    """An evaluator over an executor; see ``Evaluator``.

    A task that is lost with its worker is submitted again, at most ``RESUBMISSIONS`` times; this is
    no attempt of the function's. A task beyond the timeout is stopped where the executor can do
    so (those of ``executor_of``, except threads); else it is abandoned: it occupies a worker until
    it ends, and its late outcome is ignored. While an executor of this package has nobody who
    begins a task, for ``SECONDS_OF_SILENCE``, there is a ``WaitingWarning``.

    Attributes:
        losses: How often a task was lost.

    Example:
        >>> with Executed(objective, executor, at_once=8, timeout=60.0) as evaluator:
        ...     evaluator.submit(Task(0, (0.5,), 0))
        ...     evaluator.next_outcome()
    """

    def __init__(
        self,
        work: Work[P, V],
        executor: Executor,
        at_once: int | None = None,
        timeout: float | None = None,
        resubmissions: int = RESUBMISSIONS,
    ) -> None:
        """Prepare to do a work for each task.

        Args:
            work: Function of the tasks; it can be pickled.
            executor: Where it runs; not shut down.
            at_once: Most tasks that the executor is given at a time; None: as many as it is known
                to run, while its workers come and go, or all.
            timeout: Seconds after which an attempt has failed. They count from the begin of the
                evaluation with processes and Dask, else from when the executor is given the task.
            resubmissions: How often a lost task is submitted again.

        Raises:
            UsageError: A number is out of range, the work cannot be pickled, or a worker has
                another version of bo_stream or torch.
        """
        check_timeout(timeout)
        if at_once is not None:
            check_whole("at_once", at_once, 1)
        check_whole("resubmissions", resubmissions, 0)
        check_picklable("work", work, executor)
        check_workers(executor)
        self.losses = 0
        self._work, self._executor, self._at_once = work, executor, at_once
        self._capacity = WorkerCount(executor)
        # a task that waits for one of an engine's known workers would count as running
        has_workers = isinstance(executor, EngineExecutor) and executor.workers is not None
        self._is_limited = at_once is not None or has_workers
        self._timeout, self._resubmissions = timeout, resubmissions
        self._open: dict[int, _Submission[P, V]] = {}
        self._waiting: deque[_Submission[P, V]] = deque()
        self._abandoned: set[Future[Outcome[V]]] = set()
        self._last_abandoned = 0.0
        self._next_check = math.inf  # that some evaluation has begun
        self._ended: SimpleQueue[tuple[int, Future[Outcome[V]]]] = SimpleQueue()

    @property
    def capacity(self) -> int:
        """Number of tasks that are done at a time, as far as the executor says, as it is now."""
        return self._capacity.now() if self._at_once is None else self._at_once

    def submit(self, task: Task[P]) -> None:
        """Add a task; it is given to the executor when that has room.

        Raises:
            UsageError: One of this key is under way, or the executor takes none any more.
        """
        if task.key in self._open:
            raise UsageError(f"The task {task.key} is under way: expected another key.")
        submission: _Submission[P, V] = _Submission(task)
        self._open[task.key] = submission
        self._waiting.append(submission)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give tasks that wait to the executor, while it has room."""
        while self._waiting:
            under_way = len(self._open) - len(self._waiting) + len(self._abandoned)
            if self._is_limited and under_way >= self.capacity:
                return
            self._begin(self._waiting[0])
            self._waiting.popleft()

    def _is_full_of_abandoned(self) -> bool:
        return self._is_limited and len(self._abandoned) >= self.capacity

    def _begin(self, submission: _Submission[P, V]) -> None:
        task = submission.task
        try:
            future = self._executor.submit(attempt, self._work, task, versions())
        except RuntimeError as error:  # a broken pool, or one that was shut down
            raise UsageError(
                f"The {type(self._executor).__name__} takes no tasks any more "
                f"({one_line(error)}). What came in before is kept: go on with another one."
            ) from error
        submission.future, submission.handed_out = future, time.monotonic()
        submission.next_look = submission.handed_out + (self._timeout or 0.0)
        self._next_check = submission.handed_out + SECONDS_OF_SILENCE
        future.add_done_callback(lambda ended: self._ended.put((task.key, ended)))

    def next_outcome(self) -> Outcome[V]:
        """Wait for the next outcome; see :meth:`poll`."""
        while self._open:
            outcome = self.poll(None)
            if outcome is not None:
                return outcome
        raise UsageError("There is no task whose outcome could come: submit one first.")

    def poll(self, seconds: float | None) -> Outcome[V] | None:
        """Wait for an outcome for some seconds (None: any time); None may be returned sooner.

        Raises:
            UsageError: No worker can be started, one has another version, the scheduler stays lost,
                or all places are taken by evaluations that cannot be stopped.
        """
        if not self._open:
            return None
        self._hand_out()
        # wait until a task may be overdue, or none has begun for long
        looks = [self._next_check]
        if self._timeout is not None:
            looks += [each.next_look for each in self._open.values() if each.future is not None]
            if self._is_full_of_abandoned():
                looks.append(self._last_abandoned + self._timeout)
        limit = max(0.0, min(looks) - time.monotonic())
        limit = limit if seconds is None else min(limit, seconds)
        outcome = self._ended_within(None if limit == math.inf else limit) or self._overdue()
        self._hand_out()
        return outcome

    def _ended_within(self, seconds: float | None) -> Outcome[V] | None:
        """Wait for the next future that ends, and return the outcome of its task.

        None: none ended, it was abandoned, or its task was lost and is submitted again.
        """
        try:
            key, future = self._ended.get(timeout=seconds)
        except Empty:
            self._look_for_workers()
            return None
        self._next_check = time.monotonic() + SECONDS_OF_SILENCE
        submission = self._open.get(key)
        if submission is None or submission.future is not future:
            self._abandoned.discard(future)
            return None
        error = CancelledError("cancelled") if future.cancelled() else future.exception()
        if error is not None and is_lost(error) and submission.losses < self._resubmissions:
            self.losses += 1
            submission.losses += 1
            submission.future = None
            self._waiting.append(submission)
            last = error if isinstance(error, LostTaskError) else one_line(error)
            warnings.warn(
                f"Lost with their workers, and done again: {self.losses} evaluations "
                f"(last: {last}).",
                LostTaskWarning,
                stacklevel=2,
            )
            return None
        del self._open[key]
        if error is None:
            return future.result()
        if isinstance(error, UsageError):
            raise error
        text = one_line(error)  # the function is not the reason
        if is_lost(error):
            self.losses += 1
            times = f", {submission.losses + 1} times" if submission.losses else ""
            text = f"{error}{times}"
        return Outcome(key, None, text, time.monotonic() - submission.handed_out)

    def _look_for_workers(self) -> None:
        """Warn, once in a time of silence, if no evaluation has begun, as far as is known."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + SECONDS_OF_SILENCE
        futures = [each.future for each in self._open.values() if each.future is not None]
        have_begun = [
            not isinstance(future, EngineFuture) or future.seconds_running() is not None
            for future in futures
        ]
        if futures and not any(have_begun):
            self._next_check = math.inf
            warnings.warn(
                f"{datetime.now():%H:%M:%S}: none of {len(futures)} evaluations has begun, and "
                f"none has ended for {SECONDS_OF_SILENCE:g} s. They wait for workers of the "
                f"{type(self._executor).__name__}: start some, with the resources that were asked "
                "for, if any.",
                WaitingWarning,
                stacklevel=2,
            )

    def _overdue(self) -> Outcome[V] | None:
        """Give up the first task that has run for longer than the timeout."""
        if self._timeout is None:
            return None
        now = time.monotonic()
        for submission in self._open.values():
            future = submission.future
            if future is None or submission.next_look > now:
                continue
            if isinstance(future, EngineFuture):
                seconds = future.seconds_running() or 0.0
            else:
                seconds = now - submission.handed_out
            if seconds >= self._timeout:
                done = "stopped" if self._dropped(submission) else "abandoned"
                error = f"no outcome within {self._timeout:g} s: {done}"
                return Outcome(submission.task.key, None, error, seconds)
            submission.next_look = now + self._timeout - seconds
        if self._is_full_of_abandoned() and now >= self._last_abandoned + self._timeout:
            raise UsageError(
                f"All {self.capacity} places are taken by evaluations beyond the timeout, which a "
                f"{type(self._executor).__name__} cannot stop. What came in before is kept. "
                "Processes can be stopped: processes:N."
            )
        return None

    def cancel(self, key: int) -> None:
        """Drop a task, and stop it if it has begun, where the executor can do so."""
        submission = self._open.get(key)
        if submission is not None:
            self._dropped(submission)

    def _dropped(self, submission: _Submission[P, V]) -> bool:
        """Drop a task, and return whether it does not run any more."""
        del self._open[submission.task.key]
        future = submission.future
        if future is None:
            self._waiting.remove(submission)
            return True
        if isinstance(future, EngineFuture):
            future.stop()
            return True
        if not future.cancel():
            self._abandoned.add(future)
            self._last_abandoned = time.monotonic()
        return future.cancelled()

    def close(self) -> None:
        """Drop all tasks; the executor is left to whom it belongs."""
        for key in list(self._open):
            self.cancel(key)


@dataclass(eq=False)
class _Submission(Generic[P, V]):
    """A task under way.

    Attributes:
        task: The task.
        future: Its future; None while it waits.
        losses: How often it was lost.
        handed_out: When the executor was given it, on the monotonic clock.
        next_look: When it may have run for longer than the timeout.
    """

    task: Task[P]
    future: Future[Outcome[V]] | None = None
    losses: int = 0
    handed_out: float = 0.0
    next_look: float = 0.0


def check_timeout(timeout: float | None) -> None:
    """Raise a ``UsageError`` unless a timeout is None or above 0 seconds."""
    if timeout is not None and not timeout > 0.0:
        raise UsageError(f"Expected timeout above 0 seconds, got {timeout}.")


@contextmanager
def worker_processes(
    work: Work[P, V], count: int, timeout: float | None = None
) -> Iterator[Executed[P, V]]:
    """Evaluate in processes of this machine within the block.

    One that dies or exceeds the timeout is replaced, and its task has failed: here the function is
    to blame.

    Args:
        work: Function of the tasks; it can be pickled.
        count: Largest number of processes; they start as they are needed.
        timeout: Seconds after which an attempt has failed and its process is killed.

    Raises:
        UsageError: A number is out of range, or the work cannot be pickled.
    """
    executor = ProcessExecutor(count, work.prepare)
    try:
        with Executed(work, executor, timeout=timeout, resubmissions=0) as evaluator:
            yield evaluator
    finally:
        executor.kill()


@contextmanager
def point_evaluator(
    objective: Objective,
    workers: int,
    timeout: float | None,
    executor: str | Executor | None = None,
    resources: Mapping[str, float] | None = None,
) -> Iterator[PointEvaluator]:
    """Evaluate an objective, within the block, on an executor, in processes, or in this process.

    Args:
        objective: The objective.
        workers: Number of processes if no executor is named; 0: this one. One function of BoTorch's
            at a time without a timeout is evaluated in this process too: unlike a function of the
            user's own, it cannot end its process or hang.
        timeout: Seconds after which an evaluation has failed.
        executor: See :func:`bo_stream.executors.executor_of`.
        resources: What each evaluation needs, where the executor has it.

    Raises:
        UsageError: An argument is out of range, or the executor cannot be had.
    """
    if executor is not None:
        with (
            executor_of(executor, None, resources) as opened,
            Executed(objective, opened, places(executor), timeout) as evaluator,
        ):
            yield evaluator
    elif workers == 0 or (workers == 1 and timeout is None and not objective.is_own):
        with InProcess(objective) as here:
            yield here
    else:
        with worker_processes(objective, workers, timeout) as processes:
            yield processes
