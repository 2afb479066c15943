"""Executors of engines such as Dask and Ray, and of threads; checks before use."""

from __future__ import annotations

import math
import os
import pickle
import platform
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, final

from bo_stream.errors import UsageError

T = TypeVar("T")

SECONDS_BETWEEN_LOOKS = 5.0
"""Time between two looks at how many workers a cluster has."""

SECONDS_TO_ANSWER = 10.0
"""Time in which a Dask cluster must answer."""


class LostTaskError(RuntimeError):
    """An error for a task that ended with its worker or its scheduler; it may be done again."""


class LostTaskWarning(UserWarning):
    """A warning that tasks were lost with their workers, and are done again."""


class WaitingWarning(UserWarning):
    """A warning that nothing happens until a scheduler or a worker is there."""


class EngineFuture(Future[T], ABC):
    """A future whose task can be stopped while it runs."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the task, started or not, and free its worker; the future is cancelled or lost."""

    @abstractmethod
    def seconds_running(self) -> float | None:
        """Return for how long the task has run, as far as the engine knows; None: not started."""


class EngineExecutor(Executor, ABC):
    """An executor of this package: its futures can be stopped, its workers examined."""

    @abstractmethod
    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> EngineFuture[T]:
        """Do ``fn(*args, **kwargs)`` on a worker; a lost one gives a ``LostTaskError``."""

    @property
    def workers(self) -> int | None:
        """Most tasks that can run at a time, if further ones would count as running; else None."""
        return None

    @property
    def capacity(self) -> int:
        """Number of tasks that the executor does at a time now, as far as known; at least 1.

        Raises:
            OSError: The cluster does not answer.
        """
        return self.workers or os.cpu_count() or 1

    def dumps(self, value: Any) -> bytes:
        """Pickle a value by the engine's own pickle; by Python's where it has none."""
        return pickle.dumps(value)

    def on_workers(self, fn: Callable[..., T], *args: Any) -> Mapping[str, T | Exception]:
        """Call a function on each worker that might differ from here; return results by worker.

        Workers of this machine, which run this interpreter, are not called.
        """
        return {}


def threads_of(client: Any) -> int:
    """Count the threads of the workers of a Dask client's cluster; 1 without any.

    Raises:
        OSError: The scheduler does not answer.
    """
    if client.status != "running":  # which the client would wait for
        raise ConnectionError("the Dask scheduler does not answer")
    return max(1, sum(client.nthreads(callback_timeout=SECONDS_TO_ANSWER).values()))


class WorkerCount:
    """The number of tasks that an executor does at a time, while its workers come and go.

    The executor is asked at most once in ``SECONDS_BETWEEN_LOOKS``. While a cluster does not answer
    the previous number is used, at first one.
    """

    def __init__(self, executor: Executor) -> None:
        """Store the executor, without asking it."""
        self._executor = executor
        self._known, self._next_look = 1, -math.inf

    def now(self) -> int:
        """Return the number; at least 1."""
        if time.monotonic() >= self._next_look:
            executor = self._executor
            client = getattr(executor, "_client", None)
            with suppress(OSError):
                if isinstance(executor, EngineExecutor):
                    self._known = executor.capacity
                elif client is not None and hasattr(client, "nthreads"):  # of Dask's own executor
                    self._known = threads_of(client)
                else:
                    number: Any = getattr(executor, "_max_workers", None)  # of Python's pools
                    is_known = isinstance(number, int) and number > 0
                    self._known = number if is_known else os.cpu_count() or 1
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


# --- checks before tasks are given to workers: versions, pickles ----------------------------------


_PACKAGES = ("bo-stream", "torch")
"""Distributions whose versions must be the same on workers as here."""

_Dumps = Callable[[Any], bytes]


def check_workers(executor: Executor) -> None:
    """Check that all present workers have the versions of bo_stream and torch that are here.

    Workers of Dask and Ray are asked. Workers of this machine run this interpreter; other executors
    are not asked: see :func:`check_versions`.

    Raises:
        UsageError: One has another version, or lacks the package; it is named.
    """
    if not isinstance(executor, EngineExecutor):
        return
    for package, wanted in versions().items():
        for worker, result in executor.on_workers(version, package).items():
            if not isinstance(result, OSError):  # of a worker that is gone; tasks check again
                _check_version(worker, package, result, wanted)


def check_versions(expected: Mapping[str, str]) -> None:
    """Check, on a worker, that it has the expected versions, by distribution.

    Raises:
        UsageError: It has another one.
    """
    for package, wanted in expected.items():
        _check_version(platform.node(), package, versions()[package], wanted)


@cache
def versions() -> Mapping[str, str]:
    """Return the versions that are here, by distribution."""
    return {package: version(package) for package in _PACKAGES}


def _check_version(worker: str, package: str, found: str | Exception, wanted: str) -> None:
    name = package.replace("-", "_")
    if isinstance(found, Exception):
        found = f"no version of it ({type(found).__name__}: {found})"
    # local parts do not count: builds for a processor or a GPU are alike
    if found.partition("+")[0] != wanted.partition("+")[0]:
        raise UsageError(
            f"The worker {worker} has {name} {found}, and here is {wanted}: install {name} "
            f"{wanted} there, or start workers of this environment."
        )


def end_threads(
    threads: Sequence[threading.Thread],
    calls: SimpleQueue[Any],
    wait: bool,
    cancel_futures: bool,
) -> None:
    """End threads that serve a queue of calls, each of which begins with its future.

    Args:
        threads: That end where they get None.
        calls: The queue.
        wait: Whether to return when they have ended.
        cancel_futures: Whether calls that have not begun are cancelled.
    """
    with suppress(Empty):
        while cancel_futures:
            if (call := calls.get_nowait()) is not None:
                call[0].cancel()
    for _ in threads:
        calls.put(None)
    if wait:
        for thread in threads:
            thread.join()


@final
class DaemonThreadExecutor(Executor):
    """An executor of up to N threads that end with the interpreter, in the middle of a task too.

    At its end the interpreter waits for the threads of Python's own ``ThreadPoolExecutor``: one
    task that hangs would hold up the process for ever. One that hangs in a backward pass of torch
    aborts the process there, with exit code 134.
    """

    def __init__(self, count: int) -> None:
        """Prepare threads; they are started as they are needed."""
        self._max_workers, self._lock, self._is_closed = count, threading.Lock(), False
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Do ``fn(*args, **kwargs)`` in a thread."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("The executor is shut down: expected one that is open.")
            self._calls.put((future, partial(fn, *args, **kwargs)))
            if len(self._threads) < self._max_workers:
                self._threads.append(threading.Thread(target=self._serve, daemon=True))
                self._threads[-1].start()
        return future

    def _serve(self) -> None:
        """Do calls one after the other."""
        while (call := self._calls.get()) is not None:
            future, do = call
            if future.set_running_or_notify_cancel():
                try:
                    result = do()
                except BaseException as error:  # the function may raise anything
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del call, future, do  # else they live on while the thread waits

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads when their tasks are done; overrides ``Executor.shutdown``."""
        with self._lock:
            self._is_closed = True
        end_threads(self._threads, self._calls, wait, cancel_futures)


def check_picklable(name: str, value: Any, executor: Executor | None = None) -> None:
    """Check that a value can be sent to the workers of an executor.

    Args:
        name: Name of the value, for the message.
        value: The value.
        executor: Executor whose pickle is used; None: Python's. Threads need no pickle.

    Raises:
        UsageError: It cannot; the innermost part that cannot be pickled is named.
    """
    if isinstance(executor, ThreadPoolExecutor | DaemonThreadExecutor):
        return
    cloudpickle = sys.modules.get("cloudpickle")  # of Dask, loky and submitit, which load it
    dumps: _Dumps
    if isinstance(executor, EngineExecutor):
        dumps = executor.dumps
    elif executor is None or isinstance(executor, ProcessPoolExecutor) or cloudpickle is None:
        dumps = pickle.dumps
    else:
        dumps = cloudpickle.dumps
    path, part, error = name, value, _why_not(value, dumps)
    if error is None:
        return
    is_innermost = False
    while not is_innermost:
        is_innermost = True
        for suffix, inner in _parts(part):
            if (reason := _why_not(inner, dumps)) is not None:
                path, part, error, is_innermost = path + suffix, inner, reason, False
                break
    kind, qualname = type(part).__name__, getattr(part, "__qualname__", None)
    raise UsageError(
        f"{path}, {f'the {kind} {qualname}' if qualname else f'a {kind}'}, cannot be pickled, as "
        f"it must be to reach the workers ({' '.join(str(error).split())}). Give a function at the "
        "top level of a module, and plain values."
    )


def _why_not(value: Any, dumps: _Dumps) -> Exception | None:
    try:
        dumps(value)
    except Exception as error:  # a class may raise anything when it is pickled
        return error
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """List the parts of a value, each with the text that leads to it from the value's name."""
    if isinstance(value, partial):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, tuple | list | set | frozenset):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif not isinstance(value, type):
        state: Mapping[str, Any] = getattr(value, "__dict__", {})
        yield from ((f".{name}", part) for name, part in state.items())
