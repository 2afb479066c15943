"""An executor of processes of this machine: each can be killed, and is replaced."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from bo_stream.errors import UsageError, check_whole
from bo_stream.executors.engine import EngineExecutor, EngineFuture, LostTaskError

T = TypeVar("T")

_READY = b"ready"
_SECONDS_TO_END = 2.0
_SPAWN = multiprocessing.get_context("spawn")


class ProcessExecutor(EngineExecutor):
    """An executor of up to N processes, started as they are needed.

    A process that dies loses its own task only (``LostTaskError``) and is replaced; in Python's
    ``ProcessPoolExecutor`` all tasks are lost, and the pool is of no use any more. Processes end
    with the one that started them, even if that is killed.

    Example:
        >>> with ProcessExecutor(4) as executor:
        ...     executor.submit(math.sqrt, 2.0).result()
    """

    def __init__(self, count: int, initializer: Callable[[], None] | None = None) -> None:
        """Prepare processes.

        Args:
            count: Largest number of processes.
            initializer: Called in each before its first task; can be pickled.
        """
        check_whole("workers", count, 1)
        self._count, self._initializer = count, initializer
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._processes: set[_Process] = set()
        self._open = 0
        self._is_closed = False
        atexit.register(self.kill)  # which comes before multiprocessing waits for processes

    @property
    def workers(self) -> None:
        """No limit: a task that waits for a process has not started."""
        return None

    @property
    def capacity(self) -> int:
        """Largest number of processes."""
        return self._count

    def dumps(self, value: Any) -> bytes:
        """Pickle a value."""
        return pickle.dumps(value)

    def on_workers(self, fn: Callable[..., T], *args: Any) -> Mapping[str, T | Exception]:
        """Return nothing: the processes are of this interpreter."""
        return {}

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> ProcessFuture[T]:
        """Do ``fn(*args, **kwargs)`` in a process.

        A task whose process dies has a ``LostTaskError``; one whose process cannot even be started,
        a ``UsageError``.
        """
        future: ProcessFuture[T] = ProcessFuture()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("The executor is shut down: expected one that is open.")
            self._calls.put(_Call(future, pickle.dumps((fn, args, kwargs))))
            self._open += 1
            if len(self._threads) < min(self._count, self._open):
                self._threads.append(threading.Thread(target=self._serve, daemon=True))
                self._threads[-1].start()
        return future

    def _serve(self) -> None:
        """Do calls in a process of this thread, which is started again when it has died."""
        process: _Process | None = None
        while (call := self._calls.get()) is not None:
            try:
                if process is None or not process.is_alive:
                    process = self._started()
                process.do(call)
            except Exception as error:
                call.fail(error)
            with self._lock:
                self._open -= 1
        if process is not None:
            process.end()

    def _started(self) -> _Process:
        process = _Process(self._initializer)
        with self._lock:
            self._processes = {each for each in self._processes if each.is_alive} | {process}
            if self._is_closed:
                process.kill()
        process.wait_until_ready()
        return process

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes when their tasks are done; overrides ``Executor.shutdown``."""
        with self._lock:
            self._is_closed = True
        while cancel_futures:
            try:
                call = self._calls.get_nowait()
            except Empty:
                break
            if call is not None:
                call.future.cancel()
        for _ in self._threads:
            self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()
        atexit.unregister(self.kill)

    def kill(self) -> None:
        """End the processes at once; waiting tasks are cancelled, running tasks are lost."""
        with self._lock:
            self._is_closed = True
            processes = list(self._processes)
        for process in processes:
            process.kill()
        self.shutdown(cancel_futures=True)


class ProcessFuture(EngineFuture[T]):
    """A future of a process; its task is stopped by the process's end."""

    def __init__(self) -> None:
        """Begin as a task that waits."""
        super().__init__()
        self._process_lock = threading.Lock()
        self._process: _Process | None = None
        self._began: float | None = None

    def begin(self, process: _Process) -> bool:
        """Note the process that does the task; False if the task was cancelled."""
        with self._process_lock:
            self._process, self._began = process, time.monotonic()
            return self.set_running_or_notify_cancel()

    def end(self) -> None:
        """Forget the process, which may do another task next."""
        with self._process_lock:
            self._process = None

    def stop(self) -> None:
        """Cancel the task, or kill the process that does it."""
        with self._process_lock:
            if not self.cancel() and self._process is not None:
                self._process.kill()

    def seconds_running(self) -> float | None:
        """Return for how long the process has been at the task."""
        return None if self._began is None else time.monotonic() - self._began


@dataclass(frozen=True)
class _Call:
    future: ProcessFuture[Any]
    pickled: bytes

    def fail(self, error: Exception) -> None:
        if self.future.running() or self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class _Process:
    """A process and the connection to it."""

    def __init__(self, initializer: Callable[[], None] | None) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self._process: BaseProcess = _SPAWN.Process(target=_serve, args=(initializer, theirs))
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def wait_until_ready(self) -> None:
        try:
            self._connection.recv_bytes()
        except (EOFError, OSError):
            raise UsageError(
                f"A worker process ended while it started ({self.died()}). A script that evaluates "
                "in workers needs its code under: if __name__ == '__main__'."
            ) from None

    def do(self, call: _Call) -> None:
        """Do a call and settle its future."""
        if not call.future.begin(self):
            return
        try:
            self._connection.send_bytes(call.pickled)
            value, error = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            value, error = None, LostTaskError(f"the worker process died ({self.died()})")
        call.future.end()
        if error is None:
            call.future.set_result(value)
        else:
            call.future.set_exception(error)

    def kill(self) -> None:
        self._process.kill()

    def died(self) -> str:
        """End a process that has closed its connection; return its exit code as text."""
        self._process.join(_SECONDS_TO_END)
        self.end()
        return f"exit code {self._process.exitcode}"

    def end(self) -> None:
        self.kill()  # before its connection is closed, which it would complain of
        self._connection.close()
        self._process.join(_SECONDS_TO_END)


def _serve(initializer: Callable[[], None] | None, connection: Connection) -> None:
    """Do calls in a worker process until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if initializer is not None:
        initializer()
    connection.send_bytes(_READY)
    with suppress(EOFError, OSError):
        while True:
            connection.send_bytes(_reply(connection.recv_bytes()))


def _reply(pickled: bytes) -> bytes:
    """Do a call and pickle its value and its error; one of them is None."""
    try:
        fn, args, kwargs = pickle.loads(pickled)
        return pickle.dumps((fn(*args, **kwargs), None))
    except (Exception, SystemExit) as error:  # the function may raise anything
        raised = error
    try:
        pickled = pickle.dumps((None, raised))
        pickle.loads(pickled)
        return pickled
    except Exception:  # an error of the user's own may not come back as it went
        return pickle.dumps((None, RuntimeError(f"{type(raised).__name__}: {raised}")))


def _end_with_parent() -> None:
    """End with the parent: one that is killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
