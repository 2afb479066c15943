"""An executor of a Ray cluster: Ray has none of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bo_stream.executors.engine import EngineExecutor, EngineFuture, LostTaskError

T = TypeVar("T")


class RayExecutor(EngineExecutor):
    """An executor of the Ray cluster that this process is connected to by ``ray.init``.

    A task whose worker or node is lost has a ``LostTaskError``. A running task is stopped by
    the end of its worker, which Ray replaces.

    Example:
        >>> ray.init()
        >>> with RayExecutor(num_cpus=2) as executor:
        ...     executor.submit(math.sqrt, 2.0).result()
    """

    def __init__(self, num_cpus: float = 1.0, **resources: float) -> None:
        """Prepare tasks.

        Args:
            num_cpus: Number of processors that each task needs.
            resources: Further needs of each task: ``num_gpus``, ``memory``, or resources of one's
                own.
        """
        known = ("num_gpus", "memory")
        options = {name: resources.pop(name) for name in known if name in resources}
        self._cpus = num_cpus
        self._task: Any = ray.remote(_call)
        self._options: dict[str, Any] = {"max_retries": 0, "num_cpus": num_cpus}
        self._options |= {**options, "resources": resources}

    @property
    def workers(self) -> int | None:
        """Number of tasks for which the cluster has processors now."""
        if not self._cpus:
            return None
        return max(1, int(ray.cluster_resources().get("CPU", 0.0) / self._cpus))

    def dumps(self, value: Any) -> bytes:
        """Pickle a value by Ray's pickle, which also takes functions of a script."""
        return cloudpickle.dumps(value)

    def on_workers(self, fn: Callable[..., T], *args: Any) -> Mapping[str, T | Exception]:
        """Call a function on each node of the cluster; return values or errors by address."""
        nodes = {
            node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]
        }
        calls = {
            address: self._task.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(fn, args, {})
            for address, node in nodes.items()
        }
        results: dict[str, T | Exception] = {}
        for address, call in calls.items():
            try:
                results[address] = ray.get(call)
            except RayTaskError as error:
                results[address] = error.cause
            except RayError as error:
                results[address] = error
        return results

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> RayFuture[T]:
        """Do ``fn(*args, **kwargs)`` in a worker."""
        return RayFuture(self._task.options(**self._options).remote(fn, args, kwargs))


class RayFuture(EngineFuture[T]):
    """A future of a Ray cluster."""

    def __init__(self, reference: Any) -> None:
        """Follow a reference to a task's result."""
        super().__init__()
        self._reference, self._submitted = reference, time.monotonic()
        reference.future().add_done_callback(self._settle)

    def _settle(self, inner: Future[T]) -> None:
        error = inner.exception()
        with suppress(InvalidStateError):  # it was cancelled
            if error is None:
                self.set_result(inner.result())
            elif isinstance(error, RayError) and not isinstance(error, RayTaskError):
                reason = str(error).strip().splitlines()[0]
                self.set_exception(LostTaskError(f"{type(error).__name__}: {reason}"))
            else:
                self.set_exception(getattr(error, "cause", None) or error)

    def stop(self) -> None:
        """Cancel the task; its worker, if it has begun, is ended."""
        self.cancel()
        with suppress(ValueError, RuntimeError):  # it has ended, or Ray has
            ray.cancel(self._reference, force=True)

    def seconds_running(self) -> float | None:
        """Return the time since the task was submitted: Ray does not say when it began."""
        return time.monotonic() - self._submitted


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return fn(*args, **kwargs)
