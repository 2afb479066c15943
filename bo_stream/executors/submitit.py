"""An executor of submitit's jobs, of Slurm or of this machine, which have no callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, TypeVar

from cloudpickle import dumps

from bo_stream.errors import check_whole
from bo_stream.executors.engine import EngineExecutor, EngineFuture, LostTaskError
from bo_stream.storage.archive import one_line

T = TypeVar("T")

AT_ONCE = 100
"""Default of the most jobs at a time: clusters limit how many a user may have."""


class SubmititExecutor(EngineExecutor):
    """An executor over one of submitit, for which each task is a job.

    A job that ends without a result, by a time limit or with its node, is lost
    (``LostTaskError``).

    Example:
        >>> jobs = submitit.AutoExecutor("logs")
        >>> jobs.update_parameters(timeout_min=60, slurm_partition="short")
        >>> with SubmititExecutor(jobs) as executor:
        ...     executor.submit(math.sqrt, 2.0).result()
    """

    def __init__(
        self, executor: Any, at_once: int = AT_ONCE, seconds_between_looks: float = 1.0
    ) -> None:
        """Prepare to submit jobs.

        Args:
            executor: An executor of submitit, with its parameters.
            at_once: Most jobs that are to be submitted at a time, waiting ones among them.
            seconds_between_looks: Time between two looks at the jobs under way, each at the file of
                its result; submitit itself asks Slurm once a minute.

        Raises:
            UsageError: ``at_once`` is no whole number of at least 1.
        """
        check_whole("at_once", at_once, 1)
        self._executor, self._at_once = executor, at_once
        self._seconds = seconds_between_looks
        self._lock = Lock()
        self._open: set[SubmititFuture[Any]] = set()

    @property
    def workers(self) -> int:
        """Most jobs that are to be submitted at a time; the cluster decides how many run."""
        return self._at_once

    def dumps(self, value: Any) -> bytes:
        """Pickle a value by submitit's pickle, which also takes functions of a script."""
        return dumps(value)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> SubmititFuture[T]:
        """Do ``fn(*args, **kwargs)`` in a job."""
        future: SubmititFuture[T] = SubmititFuture(self._executor.submit(fn, *args, **kwargs))
        with self._lock:
            self._open.add(future)
            if len(self._open) == 1:
                Thread(target=self._look, daemon=True).start()
        return future

    def _look(self) -> None:
        """Settle the futures of jobs that end, until none is under way."""
        while True:
            with self._lock:
                self._open = {future for future in self._open if not future.done()}
                if not self._open:
                    return
            for future in self._open.copy():
                future.settle_if_ended()
            time.sleep(self._seconds)


class SubmititFuture(EngineFuture[T]):
    """A future of a job of submitit."""

    def __init__(self, job: Any) -> None:
        """Follow a job."""
        super().__init__()
        self._job = job
        self._began: float | None = None
        self.add_done_callback(self._release)

    def settle_if_ended(self) -> None:
        """Take over the value or the error of the job, if it has ended."""
        with suppress(InvalidStateError):  # it was cancelled
            try:
                if self._job.done():
                    self.set_result(self._job.result())
            except InvalidStateError:
                raise
            except Exception as error:  # of the function, of submitit, or of the file system
                lost = type(error).__name__ == "UncompletedJobError"
                self.set_exception(LostTaskError(one_line(error)) if lost else error)

    def _release(self, _: Future[T]) -> None:
        if self.cancelled():
            with suppress(Exception):  # the cluster may not answer; the outcome is ignored
                self._job.cancel(check=False)

    def stop(self) -> None:
        """Cancel the job, begun or not."""
        self.cancel()

    def seconds_running(self) -> float | None:
        """Return the time since a call of this method first saw the job run."""
        if self._began is None and self._job.state == "RUNNING":
            self._began = time.monotonic()
        return None if self._began is None else time.monotonic() - self._began
