"""Executors by their names: ``processes:4``, ``threads:4``, ``dask:tcp://host:8786``, ``ray``."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from bo_stream.errors import UsageError, check_one_of, check_whole
from bo_stream.executors.processes import ProcessExecutor

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
    kind, rest = parsed(spec or "processes")
    number = _number(rest, workers)
    if kind in ("processes", "threads") and resources:
        raise UsageError(f"An executor of {kind} has no resources: they are for dask and ray.")
    address = "" if rest.isdigit() else rest
    if kind == "processes":
        processes = ProcessExecutor(number)
        try:
            yield processes
        finally:
            processes.kill()
    elif kind == "threads":
        threads = ThreadPoolExecutor(number)
        try:
            yield threads
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
    elif kind == "dask":
        yield from _dask(address, number, resources)
    else:
        yield from _ray(address, number, resources)


def parsed(spec: str) -> tuple[str, str]:
    """Return the kind of a specification, and its number or address as text, or nothing.

    Raises:
        UsageError: There is no such kind, the number is 0, or processes or threads have an address.
    """
    kind, _, rest = spec.partition(":")
    check_one_of("executor", kind, KINDS)
    if kind in ("processes", "threads") and rest and not rest.isdigit():
        raise UsageError(f"Expected {kind}:N with a number of workers, got {spec!r}.")
    if rest.isdigit():
        check_whole("workers", int(rest), 1)
    return kind, rest


def _number(rest: str, workers: int | None = None) -> int:
    number = int(rest) if rest.isdigit() else workers or os.cpu_count() or 1
    check_whole("workers", number, 1)
    return number


def places(spec: str | Executor) -> int | None:
    """Return how many tasks threads can run at a time; None for other kinds."""
    if isinstance(spec, str) and parsed(spec)[0] == "threads":
        return _number(parsed(spec)[1])
    return None


def has_address(spec: str) -> bool:
    """Return whether a specification leads to something that runs already."""
    _, rest = parsed(spec)
    return bool(rest) and not rest.isdigit()


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
