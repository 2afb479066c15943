"""An executor of a Dask cluster, whose scheduler may be restarted under it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar
from uuid import uuid4

from distributed import Client, KilledWorker
from distributed.protocol.pickle import dumps

from bo_stream.errors import UsageError
from bo_stream.executors.engine import EngineExecutor, EngineFuture, LostTaskError

T = TypeVar("T")

SECONDS_TO_CONNECT = 5.0
"""Time in which a scheduler must answer."""

SECONDS_WITHOUT_SCHEDULER = 120.0
"""Time in which a scheduler that was lost must be back."""

_SECONDS_TO_RESTART = 30.0

_began: dict[str, float] = {}
"""On a worker: the start of each task under way, by key, on its monotonic clock."""


class DaskExecutor(EngineExecutor):
    """An executor of a Dask cluster.

    Workers may come and go: Dask does the tasks of a lost one again. When the scheduler is lost the
    tasks under way are (``LostTaskError``), and the next ``submit`` waits until there is one again.
    To stop a task that has begun, its worker is restarted by its nanny, and what else this worker
    was at is done again by Dask.
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
            resources: What each task needs of a worker's resources, by name.
            patience: Seconds in which a scheduler that was lost must be back.

        Raises:
            UsageError: None answers within ``SECONDS_TO_CONNECT``.
        """
        self._address, self._patience = address, patience
        self._resources = dict(resources or {})
        self._client = _connected(address)
        self._stopping = ThreadPoolExecutor(1)  # restarts take seconds

    @property
    def workers(self) -> None:
        """No limit: a task that waits for a worker has not begun."""
        return None

    def dumps(self, value: Any) -> bytes:
        """Pickle a value as Dask does, which also takes functions of a script."""
        return dumps(value)

    def on_workers(self, fn: Callable[..., T], *args: Any) -> Mapping[str, T | Exception]:
        """Call a function on each worker that there is now."""
        return self._client.run(fn, *args, on_error="return")

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> DaskFuture[T]:
        """Do ``fn(*args, **kwargs)`` on a worker.

        Raises:
            UsageError: The scheduler was lost, and is not back in time.
        """
        client, key = self._reconnected(), f"bo_stream-{uuid4().hex}"
        executor = client.get_executor(pure=False, resources=self._resources or None)
        return DaskFuture(self, key, executor.submit(_timed, key, fn, args, kwargs, key=key))

    def _reconnected(self) -> Client:
        """Return a client with a scheduler; Dask's own waits for one only for some seconds."""
        end = time.monotonic() + self._patience
        while self._client.status != "running":
            if time.monotonic() > end:
                raise UsageError(
                    f"The Dask scheduler at {self._address} was lost, and has not been back for "
                    f"{self._patience:g} s. What came in before is kept; start it again, then go "
                    "on."
                )
            if self._client.status == "closed":
                with suppress(UsageError):
                    self._client = _connected(self._address)
            time.sleep(0.1)
        return self._client

    def seconds_running(self, key: str) -> float | None:
        """Return for how long a worker has been at a task; None if none is, or none answers."""
        with suppress(Exception):  # a cluster in trouble may raise anything
            return self._running(key)[0]
        return None

    def _running(self, key: str) -> tuple[float | None, list[str]]:
        """Return the longest time for which workers have been at a task, and their addresses."""
        found = self._client.run(_seconds_since_begin, key, on_error="ignore")
        at_it = {address: value for address, value in found.items() if value is not None}
        return max(at_it.values(), default=None), list(at_it)

    def stop(self, key: str) -> None:
        """Restart the workers that are at a task."""
        self._stopping.submit(self._stop, key)

    def _stop(self, key: str) -> None:
        with suppress(Exception):  # without nannies: then they are busy for as long as it takes
            _, addresses = self._running(key)
            if addresses:
                self._client.restart_workers(addresses, timeout=_SECONDS_TO_RESTART)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Disconnect; overrides ``Executor.shutdown``. The cluster goes on."""
        self._stopping.shutdown(wait)
        self._client.close()


class DaskFuture(EngineFuture[T]):
    """A future of a Dask cluster."""

    def __init__(self, executor: DaskExecutor, key: str, inner: Future[T]) -> None:
        """Follow the future of Dask's own executor."""
        super().__init__()
        self._executor, self._key, self._inner = executor, key, inner
        inner.add_done_callback(self._settle)
        self.add_done_callback(lambda _: inner.cancel() if self.cancelled() else None)

    def _settle(self, inner: Future[T]) -> None:
        with suppress(InvalidStateError):  # it was cancelled
            if inner.cancelled():
                self.set_exception(LostTaskError("the Dask scheduler was lost"))
            elif (error := inner.exception()) is None:
                self.set_result(inner.result())
            elif isinstance(error, KilledWorker):
                self.set_exception(RuntimeError(f"its workers died ({error})"))
            else:
                self.set_exception(error)

    def stop(self) -> None:
        """Cancel the task, and restart the worker that is at it."""
        self._executor.stop(self._key)
        self.cancel()

    def seconds_running(self) -> float | None:
        """Ask the cluster for how long the task has run."""
        return self._executor.seconds_running(self._key)


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
    """Do a call on a worker, and let it be known meanwhile when it began."""
    _began[key] = time.monotonic()
    try:
        return fn(*args, **kwargs)
    finally:
        _began.pop(key, None)


def _seconds_since_begin(key: str) -> float | None:
    """Return for how long this worker has been at a task."""
    return time.monotonic() - _began[key] if key in _began else None
