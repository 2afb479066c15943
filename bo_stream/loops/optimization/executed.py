"""Evaluation on any executor: threads, processes, Dask, Ray, or what a user brings."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any, Generic, Self

from bo_stream.loops.optimization.evaluation import Outcome, Task
from bo_stream.loops.optimization.objectives import P, V, Work


class Executed(Generic[P, V]):
    """An evaluator over an executor; see ``Evaluator`` in ``evaluation.py``.

    Example:
        >>> with Executed(objective, executor, at_once=8, timeout=60.0) as evaluator:
        ...     evaluator.submit(Task(0, (0.5,), 0))
        ...     evaluator.next_outcome()
    """

    def __init__(
        self, work: Work[P, V], executor: Executor, at_once: int, timeout: float | None = None
    ) -> None:
        """Prepare to do a work for each task.

        Args:
            work: Function of the tasks; it can be pickled.
            executor: Where it runs; not closed.
            at_once: Most tasks that the executor is given at a time.
            timeout: Seconds after which an attempt has failed.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def submit(self, task: Task[P]) -> None:
        """Add a task; it begins when the executor has room."""
        raise NotImplementedError

    def poll(self, seconds: float | None) -> Outcome[V] | None:
        """Wait for an outcome for some seconds (None: any time); None may be returned sooner."""
        raise NotImplementedError

    def next_outcome(self) -> Outcome[V]:
        """Wait for the next outcome."""
        raise NotImplementedError

    def cancel(self, key: int) -> None:
        """Drop a task."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop all tasks."""
        raise NotImplementedError
