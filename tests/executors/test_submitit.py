"""Jobs as submitit's, which are asked whether they have ended, as futures that say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bo_stream.errors import UsageError
from bo_stream.executors import LostTaskError, SubmititExecutor, check_picklable, check_workers
from bo_stream.loops.optimization.executed import Executed
from bo_stream.loops.optimization.objectives import Objective, Task
from tests.executors.clusters import PATIENCE
from tests.executors.functions import double, fail

pytestmark = pytest.mark.filterwarnings("ignore::bo_stream.executors.LostTaskWarning")


class UncompletedJobError(RuntimeError):
    """Raised for a job without a result; of the name of submitit's."""


class FailedJobError(UncompletedJobError):
    """Raised for a job whose function raised; of the name of submitit's."""


class Job:
    """A job with the methods of submitit's; it runs when it is told, in this process."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.state = "PENDING"
        self._value: Any = None
        self._error: Exception | None = None

    def end(self) -> None:
        try:
            self._value = self._call()
        except Exception as error:
            self._error = FailedJobError(f"failed during processing: {error}")
        self.state = "FINISHED"

    def lose(self) -> None:
        self._error = UncompletedJobError("has not produced any output")
        self.state = "NODE_FAIL"

    def done(self) -> bool:
        return self.state not in ("PENDING", "RUNNING")

    def result(self) -> Any:
        assert self.done()
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self, check: bool = True) -> None:
        assert not check
        self.state = "CANCELLED"


class Jobs:
    """An executor with the method of submitit's."""

    def __init__(self) -> None:
        self.all: list[Job] = []

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Job:
        self.all.append(Job(lambda: fn(*args, **kwargs)))
        return self.all[-1]


def opened(at_once: int = 4) -> tuple[Jobs, SubmititExecutor]:
    jobs = Jobs()
    return jobs, SubmititExecutor(jobs, at_once, seconds_between_looks=0.01)


def test_values_errors_and_losses_come_back() -> None:
    jobs, executor = opened()
    check_workers(executor)
    check_picklable("work", lambda: 3, executor)
    futures = [executor.submit(double, 2.0), executor.submit(fail, "no"), executor.submit(double)]
    jobs.all[2].lose()
    jobs.all[1].end()
    assert isinstance(futures[2].exception(PATIENCE), LostTaskError)
    assert "failed during processing: no" in str(futures[1].exception(PATIENCE))
    assert not isinstance(futures[1].exception(), LostTaskError)
    assert not futures[0].done()
    jobs.all[0].end()
    assert futures[0].result(PATIENCE) == 4.0
    later = executor.submit(double, 3.0)  # when no job was under way any more
    jobs.all[3].end()
    assert later.result(PATIENCE) == 6.0


def test_a_job_that_is_dropped_is_cancelled() -> None:
    jobs, executor = opened()
    first, second = executor.submit(double, 1.0), executor.submit(double, 2.0)
    first.stop()
    assert (jobs.all[0].state, jobs.all[1].state) == ("CANCELLED", "PENDING")
    jobs.all[1].end()
    assert second.result(PATIENCE) == 4.0
    assert first.cancelled()


def test_the_time_of_a_job_begins_when_it_is_first_seen_to_run() -> None:
    jobs, executor = opened()
    future = executor.submit(double, 1.0)
    assert future.seconds_running() is None
    jobs.all[0].state = "RUNNING"
    begun = future.seconds_running()
    assert begun is not None
    assert begun <= (future.seconds_running() or 0.0)
    future.stop()


def test_a_lost_job_is_submitted_again_and_no_more_than_asked_are_under_way() -> None:
    jobs, executor = opened(at_once=1)
    bowl = Objective("tests.loops.functions:bowl", ((-1.0, 2.0),))
    with Executed(bowl, executor) as evaluator:
        for key in range(2):
            evaluator.submit(Task(key, (1.7 - key,), 0))
        assert len(jobs.all) == 1
        jobs.all[0].lose()
        assert evaluator.poll(PATIENCE) is None
        assert (evaluator.losses, len(jobs.all)) == (1, 2)
        came = {}
        for job in (1, 2):
            jobs.all[job].end()
            outcome = evaluator.next_outcome()
            came[outcome.key] = outcome.value
    assert came == {0: 1.0, 1: 0.0}


def test_a_number_of_jobs_is_checked() -> None:
    with pytest.raises(UsageError, match="at_once to be a whole number of at least 1"):
        SubmititExecutor(Jobs(), at_once=0)
