"""An executor of processes of this machine that can be killed, and executors by their names."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, TypeVar

from bo_stream.errors import UsageError, check_one_of, check_whole
from bo_stream.executors.engine import (
    DaemonThreadExecutor,
    EngineExecutor,
    EngineFuture,
    LostTaskError,
    end_threads,
)
from bo_stream.storage.archive import one_line

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
        self._calls: SimpleQueue[tuple[ProcessFuture[Any], bytes] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._processes: set[_Process] = set()
        self._open = 0
        self._is_closed = False
        atexit.register(self.kill)  # which comes before multiprocessing waits for processes

    @property
    def capacity(self) -> int:
        """Largest number of processes."""
        return self._count

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> ProcessFuture[T]:
        """Do ``fn(*args, **kwargs)`` in a process.

        A task whose process dies has a ``LostTaskError``; one whose process cannot even be started,
        a ``UsageError``.
        """
        future: ProcessFuture[T] = ProcessFuture()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("The executor is shut down: expected one that is open.")
            self._calls.put((future, pickle.dumps((fn, args, kwargs))))
            self._open += 1
            if len(self._threads) < min(self._count, self._open):
                self._threads.append(threading.Thread(target=self._serve, daemon=True))
                self._threads[-1].start()
        return future

    def _serve(self) -> None:
        """Do calls in a process of this thread, which is started again when it has died."""
        process: _Process | None = None
        while (call := self._calls.get()) is not None:
            future, pickled = call
            try:
                if process is None or not process.child.is_alive():
                    process = _Process(self._initializer)
                    with self._lock:
                        alive = {each for each in self._processes if each.child.is_alive()}
                        self._processes = alive | {process}
                        if self._is_closed:
                            process.child.kill()
                    process.wait_until_ready()
                process.do(future, pickled)
            except Exception as error:
                if future.running() or future.set_running_or_notify_cancel():
                    future.set_exception(error)
            with self._lock:
                self._open -= 1
        if process is not None:
            process.end()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes when their tasks are done; overrides ``Executor.shutdown``."""
        with self._lock:
            self._is_closed = True
        end_threads(self._threads, self._calls, wait, cancel_futures)
        atexit.unregister(self.kill)

    def kill(self) -> None:
        """End the processes at once; waiting tasks are cancelled, running tasks are lost."""
        with self._lock:
            self._is_closed = True
            processes = list(self._processes)
        for process in processes:
            process.child.kill()
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
                self._process.child.kill()

    def seconds_running(self) -> float | None:
        """Return for how long the process has been at the task."""
        return None if self._began is None else time.monotonic() - self._began


class _Process:
    """A process and the connection to it.

    Attributes:
        child: The process, started.
    """

    def __init__(self, initializer: Callable[[], None] | None) -> None:
        self._connection, theirs = _SPAWN.Pipe()
        self.child: BaseProcess = _SPAWN.Process(target=_serve, args=(initializer, theirs))
        self.child.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        try:
            self._connection.recv_bytes()
        except (EOFError, OSError):
            raise UsageError(
                f"A worker process ended while it started ({self.died()}). A script that evaluates "
                "in workers needs its code under: if __name__ == '__main__'."
            ) from None

    def do(self, future: ProcessFuture[Any], pickled: bytes) -> None:
        """Do a pickled call and set the result or the error of its future.

        Raises:
            Exception: The value cannot be unpickled; the process is as good as before.
        """
        if not future.begin(self):
            return
        try:
            self._connection.send_bytes(pickled)
            reply = self._connection.recv_bytes()
        except (EOFError, OSError):
            lost = LostTaskError(f"the worker process died ({self.died()})")
            reply = pickle.dumps((None, lost))
        future.end()
        value, error = pickle.loads(reply)
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def died(self) -> str:
        """End a process that has closed its connection; return its exit code as text."""
        self.child.join(_SECONDS_TO_END)
        self.end()
        return f"exit code {self.child.exitcode}"

    def end(self) -> None:
        self.child.kill()  # before its connection is closed, which it would complain of
        self._connection.close()
        self.child.join(_SECONDS_TO_END)


def _serve(initializer: Callable[[], None] | None, connection: Connection) -> None:
    """Do calls in a worker process until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if initializer is not None:
        initializer()
    connection.send_bytes(_READY)
    own = os.getpid()
    with suppress(EOFError, OSError):
        while True:
            reply = _reply(connection.recv_bytes())
            if os.getpid() != own:  # a child that the function has forked and not ended
                os._exit(1)
            connection.send_bytes(reply)


def _reply(pickled: bytes) -> bytes:
    """Do a call and pickle its value and its error; one of them is None."""
    try:
        fn, args, kwargs = pickle.loads(pickled)
        return pickle.dumps((fn(*args, **kwargs), None))
    except BaseException as error:  # the function may raise anything
        raised = error
    try:
        pickled = pickle.dumps((None, raised))
        pickle.loads(pickled)
        return pickled
    except Exception:  # an error of the user's own may not come back as it went
        return pickle.dumps((None, RuntimeError(one_line(raised))))


def _end_with_parent() -> None:
    """End with the parent: one that is killed cannot end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# --- executors by their names: ``processes:4``, ``dask:tcp://host:8786``, ``ray`` ----------------


KINDS = ("processes", "threads", "dask", "ray")

_SECONDS_TO_CONNECT = 5.0

_LOCAL_CLUSTER = {
    "distributed.deploy.lost-worker-timeout": "10 minutes",  # they load torch first
    "distributed.scheduler.worker-saturation": 1.0,  # none waits behind a deadly task
}


@contextmanager
def executor_of(
    spec: str | Executor | None = None,
    workers: int | None = None,
    resources: Mapping[str, float] | None = None,
) -> Iterator[Executor]:
    """Open an executor for the block, and end all that was started for it with the block.

    Args:
        spec: ``processes:4`` or ``threads:4`` of this machine; ``dask:4`` (worker processes of this
            machine) or ``dask:ADDRESS`` (of a scheduler); ``ray:4`` or ``ray:ADDRESS``. An executor
            is yielded, and not shut down. None: processes.
        workers: Number for a ``spec`` without one, as ``processes``; None: as many as processors.
        resources: Needs of each task, where the engine has resources. Dask: resources that workers
            were started with. Ray: ``num_cpus``, ``num_gpus``, ``memory``, or resources of one's
            own.

    Raises:
        UsageError: The specification is not understood, its package is missing, or nobody answers
            at the address.

    Example:
        >>> with executor_of("dask:tcp://host:8786") as executor:
        ...     executor.submit(math.sqrt, 2.0).result()
    """
    if isinstance(spec, Executor):
        if resources:
            raise UsageError("Give resources to the executor itself, or its specification here.")
        yield spec
        return
    if spec is not None and not isinstance(spec, str):
        raise UsageError(
            "Expected executor to be a text or an Executor of concurrent.futures, got a "
            f"{type(spec).__name__}. One of submitit: SubmititExecutor(it) of bo_stream.executors."
        )
    kind, number, address = parsed(spec or "processes")
    number = number or workers or os.cpu_count() or 1
    check_whole("workers", number, 1)
    if kind in ("processes", "threads") and resources:
        raise UsageError(f"An executor of {kind} has no resources: they are for dask and ray.")
    if kind == "processes":
        processes = ProcessExecutor(number)
        try:
            yield processes
        finally:
            processes.kill()
    elif kind == "threads":
        threads = DaemonThreadExecutor(number)
        try:
            yield threads
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
    elif kind == "dask":
        yield from _dask(address, number, resources)
    else:
        yield from _ray(address, number, resources)


def parsed(spec: str) -> tuple[str, int | None, str]:
    """Return the kind of a specification, its number or None, and its address or nothing.

    Raises:
        UsageError: There is no such kind, the number is 0, or processes or threads have an address.
    """
    kind, _, rest = spec.partition(":")
    check_one_of("executor", kind, KINDS)
    if kind in ("processes", "threads") and rest and not rest.isdigit():
        raise UsageError(f"Expected {kind}:N with a number of workers, got {spec!r}.")
    if not rest.isdigit():
        return kind, None, rest
    check_whole("workers", int(rest), 1)
    return kind, int(rest), ""


def places(spec: str | Executor) -> int | None:
    """Return how many tasks threads can run at a time; None for other kinds."""
    kind, number, _ = parsed(spec) if isinstance(spec, str) else ("", None, "")
    return (number or os.cpu_count() or 1) if kind == "threads" else None


def has_address(spec: str) -> bool:
    """Return whether a specification leads to something that runs already."""
    return parsed(spec)[2] != ""


def _dask(address: str, count: int, resources: Mapping[str, float] | None) -> Iterator[Executor]:
    distributed = _engine("distributed", "dask")
    import dask

    from bo_stream.executors.dask import DaskExecutor

    if address:
        with DaskExecutor(address, resources) as executor:
            yield executor
        return
    with (
        dask.config.set(_LOCAL_CLUSTER),
        distributed.LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            dashboard_address=":0",
            resources=dict(resources or {}),
        ) as cluster,
        DaskExecutor(cluster.scheduler_address, resources) as executor,
    ):
        yield executor


def _ray(address: str, count: int, resources: Mapping[str, float] | None) -> Iterator[Executor]:
    ray = _engine("ray", "ray")
    from bo_stream.executors.ray import RayExecutor

    starts = not ray.is_initialized()
    if starts and address:
        host, _, port = address.rpartition("//")[2].rpartition(":")
        if port.isdigit():  # Ray itself waits long for an address that does not answer
            try:
                socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
            except OSError as error:
                raise UsageError(
                    f"Nothing answers at {address} within {_SECONDS_TO_CONNECT:g} s ({error}). "
                    "Check the address, and that Ray runs there: ray start --head."
                ) from error
        try:
            ray.init(address, log_to_driver=False)
        except Exception as error:  # of its client, of gRPC, and of its own
            raise UsageError(f"No Ray cluster answers at {address}: {error}") from error
    elif starts:
        ray.init(num_cpus=count, include_dashboard=False, log_to_driver=False)
    try:
        yield RayExecutor(**dict(resources or {}))
    finally:
        if starts:
            ray.shutdown()


def _engine(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"The executor {extra} needs a package: pip install 'bo-stream[{extra}]'."
        ) from error
