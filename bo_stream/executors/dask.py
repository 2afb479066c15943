"""An executor of a Dask cluster, whose scheduler may be restarted under it."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_for_all
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar
from uuid import uuid4

from distributed import Client, KilledWorker
from distributed.protocol.pickle import dumps

from bo_stream.errors import UsageError
from bo_stream.executors.engine import (
    SECONDS_TO_ANSWER,
    EngineExecutor,
    EngineFuture,
    LostTaskError,
    WaitingWarning,
    threads_of,
)

T = TypeVar("T")

SECONDS_TO_CONNECT = 5.0
"""Most seconds until a scheduler must answer."""

SECONDS_WITHOUT_SCHEDULER = 120.0
"""Most seconds until a scheduler that was lost must be back."""

_began: dict[str, float] = {}
"""On a worker: the start of each task under way, by key, on its monotonic clock."""


class DaskExecutor(EngineExecutor):
    """An executor of a Dask cluster.

    Workers may come and go: Dask does the tasks of a lost one again. With a scheduler all tasks
    under way are lost (``LostTaskError``), and the next ``submit`` waits until there is one again,
    with a ``WaitingWarning``.
    To stop a running task, its worker is ended, if it has a nanny to start another one; other tasks
    of this worker are done again by Dask.

    Attributes:
        address: Address of the scheduler.
        patience: Seconds in which a scheduler that was lost must be back.
    """

    def __init__(
        self,
        address: str,
        resources: Mapping[str, float] | None = None,
        patience: float = SECONDS_WITHOUT_SCHEDULER,
    ) -> None:
        """Connect to a scheduler.

        Args:
            address: Its address, as in ``tcp://host:8786``.
            resources: Needs of each task, by names of the workers' resources.
            patience: Seconds in which a scheduler that was lost must be back.

        Raises:
            UsageError: None answers within ``SECONDS_TO_CONNECT``.
        """
        self.address, self.patience = address, patience
        self._resources = dict(resources or {})
        self._client = _connected(address)
        self._stops: set[Future[dict[str, None]]] = set()

    @property
    def capacity(self) -> int:
        """Number of threads of all present workers."""
        return threads_of(self._client)

    def dumps(self, value: Any) -> bytes:
        """Pickle a value by Dask's pickle, which also takes functions of a script."""
        return dumps(value)

    def on_workers(self, fn: Callable[..., T], *args: Any) -> Mapping[str, T | Exception]:
        """Call a function on each present worker; return values or errors by address."""
        return self._client.run(fn, *args, on_error="return")

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> DaskFuture[T]:
        """Do ``fn(*args, **kwargs)`` on a worker.

        Raises:
            UsageError: The scheduler was lost, and is not back in time.
        """
        end = time.monotonic() + self.patience
        if self._client.status != "running":  # Dask's client waits only for some seconds
            warnings.warn(
                f"The Dask scheduler at {self.address} has not answered since "
                f"{datetime.now():%H:%M:%S}: waiting for it for {self.patience:g} s at most.",
                WaitingWarning,
                stacklevel=2,
            )
        while self._client.status != "running":
            if time.monotonic() > end:
                raise UsageError(
                    f"The Dask scheduler at {self.address} was lost, and has not been back for "
                    f"{self.patience:g} s. What came in before is kept; start it again, then go "
                    "on."
                )
            if self._client.status == "closed":
                with suppress(UsageError):
                    self._client = _connected(self.address)
            time.sleep(0.1)
        key, resources = f"bo_stream-{uuid4().hex}", self._resources or None
        task = self._client.submit(
            _timed, key, fn, args, kwargs, key=key, pure=False, resources=resources
        )
        return DaskFuture(self, task)

    def _on_all_workers(self, fn: Callable[..., T], *args: Any) -> Future[dict[str, T]]:
        """Call a function on all workers without waiting; those without an answer are left out."""
        client = self._client

        async def ask() -> dict[str, T]:
            return await client.run(fn, *args, on_error="ignore")

        loop: Any = client.loop
        return asyncio.run_coroutine_threadsafe(ask(), loop.asyncio_loop)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Disconnect; overrides ``Executor.shutdown``. The cluster goes on."""
        wait_for_all(self._stops.copy(), SECONDS_TO_ANSWER)
        self._client.close()


class DaskFuture(EngineFuture[T]):
    """A future of a Dask cluster."""

    def __init__(self, executor: DaskExecutor, task: Any) -> None:
        """Follow a future of Dask's client, which is none of ``concurrent.futures``."""
        super().__init__()
        self._executor, self._task, self._submitted = executor, task, time.monotonic()
        self.add_done_callback(self._release)
        task.client.loop.add_callback(self._settle)

    async def _settle(self) -> None:
        """Take over the value or the error of Dask's future."""
        with suppress(InvalidStateError):  # it was cancelled
            try:
                self.set_result(await self._task)
            except KilledWorker:
                self.set_exception(LostTaskError("the Dask workers that were given it died"))
            except (Exception, asyncio.CancelledError) as error:
                status = self._task.status
                if status == "error":  # of the task itself
                    self.set_exception(error)
                else:
                    where = "scheduler" if status == "cancelled" else "worker that had the result"
                    self.set_exception(LostTaskError(f"the Dask {where} was lost"))

    def _release(self, _: Future[T]) -> None:
        """Let Dask forget the task, which it would do again if the result's worker is lost."""
        with suppress(Exception):  # the client may be closed
            self._task.cancel() if self.cancelled() else self._task.release()

    def stop(self) -> None:
        """Cancel the task, and end the worker that is at it, if a nanny starts another one."""
        self.cancel()
        stops = self._executor._stops
        with suppress(RuntimeError):  # the client's loop has ended
            stops.add(stop := self._executor._on_all_workers(_leave_if_at, self._task.key))
            stop.add_done_callback(stops.discard)

    def seconds_running(self) -> float | None:
        """Return for how long a worker has been at the task; None if no worker is.

        If the cluster does not answer, the time since the task was submitted is returned.
        """
        try:
            answer = self._executor._on_all_workers(_seconds_since_begin, self._task.key)
            seconds = answer.result(SECONDS_TO_ANSWER)
        except Exception:  # a cluster in trouble may raise anything
            return time.monotonic() - self._submitted
        return max((value for value in seconds.values() if value is not None), default=None)


def _connected(address: str) -> Client:
    try:
        return Client(address, timeout=SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"No Dask scheduler answers at {address} within {SECONDS_TO_CONNECT:g} s ({reason}). "
            "Check the address, and that it runs: dask scheduler."
        ) from error


def _timed(key: str, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """Do a call on a worker, and record its start meanwhile."""
    _began[key] = time.monotonic()
    try:
        return fn(*args, **kwargs)
    finally:
        _began.pop(key, None)


def _seconds_since_begin(key: str) -> float | None:
    """Return for how long this worker has been at a task."""
    return time.monotonic() - _began[key] if key in _began else None


def _leave_if_at(key: str, dask_worker: Any) -> None:
    """End this worker if it is at a task: nothing else stops a thread."""
    if key in _began and dask_worker.nanny is not None:
        os._exit(1)
