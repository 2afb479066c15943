"""Arms that are evaluated in processes of their own, and what came of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from bo_stream.loops.optimization.evaluation import Outcome, Task
from bo_stream.loops.optimization.reports import FunctionOfParameters, Report
from bo_stream.loops.optimization.workers import Workers

Arm: TypeAlias = tuple[int, str]
"""Index of a trial and name of one of its arms."""


@dataclass(frozen=True)
class Result:
    """What came of an arm.

    Attributes:
        report: Values by metric, or None.
        error: Why there are none, or None.
    """

    report: Report | None
    error: str | None


@dataclass
class _Job:
    arm: Arm
    task: Task[Mapping[str, Any]]


class Evaluations:
    """Worker processes and the arms that they are at."""

    def __init__(self, function: str, workers: int, timeout: float | None, retries: int) -> None:
        """Start processes as they are needed.

        Args:
            function: ``package.module:function``.
            workers: Most processes.
            timeout: Seconds after which an attempt has failed and its process is killed.
            retries: How often a failed attempt is made again.

        Raises:
            UsageError: workers or timeout is out of range.
        """
        self._workers = Workers(FunctionOfParameters(function), workers, timeout)
        self._retries = retries
        self._jobs: dict[int, _Job] = {}
        self._results: dict[Arm, Result] = {}
        self._keys = 0

    def begin(self, arm: Arm, parameters: Mapping[str, Any]) -> None:
        """Evaluate an arm when a process is free."""
        self._submit(_Job(arm, Task(self._keys, parameters, 0)))
        self._keys += 1

    def _submit(self, job: _Job) -> None:
        self._jobs[job.task.key] = job
        self._workers.submit(job.task)

    def at_work(self) -> set[Arm]:
        """Arms that nothing has come of yet."""
        return {job.arm for job in self._jobs.values()}

    def take(self, arm: Arm) -> Result | None:
        """What came of an arm, once; None: nothing yet."""
        return self._results.pop(arm, None)

    def wait(self, seconds: float) -> None:
        """Until something has come of an arm, or no longer than this; then take in all there is.

        Raises:
            UsageError: A process cannot even be started.
        """
        end, came = time.monotonic() + seconds, False
        while self._jobs:
            left = 0.0 if came else max(0.0, end - time.monotonic())
            outcome = self._workers.poll(left)
            if outcome is not None:
                came = self._settle(outcome) or came
            elif left == 0.0:
                return

    def _settle(self, outcome: Outcome[Report]) -> bool:
        job = self._jobs.pop(outcome.key)
        task = job.task
        if outcome.error is not None and task.attempt < self._retries:
            self._submit(_Job(job.arm, Task(task.key, task.X, task.attempt + 1)))
            return False
        self._results[job.arm] = Result(outcome.value, outcome.error)
        return True

    def cancel(self, trial: int) -> None:
        """Give up the arms of a trial."""
        for key, job in list(self._jobs.items()):
            if job.arm[0] == trial:
                self._workers.cancel(key)
                del self._jobs[key]
        for arm in [arm for arm in self._results if arm[0] == trial]:
            del self._results[arm]

    def close(self) -> None:
        """End the processes."""
        self._workers.close()
        self._jobs.clear()
