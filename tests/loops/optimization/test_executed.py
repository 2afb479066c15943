"""Evaluation on executors, of this machine and of users' own."""

from __future__ import annotations

import threading
import time
import warnings
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from bo_stream.errors import UsageError
from bo_stream.executors import LostTaskError, LostTaskWarning, ProcessExecutor, WaitingWarning
from bo_stream.executors.engine import (
    SECONDS_BETWEEN_LOOKS,
    EngineExecutor,
    EngineFuture,
)
from bo_stream.loops.optimization.executed import Executed, point_evaluator
from bo_stream.loops.optimization.objectives import Objective, Outcome, Task, Work


@dataclass(frozen=True)
class Twice(Work[float, float]):
    """Doubles."""

    parts: dict[int, threading.Event] = field(default_factory=dict)

    def prepare(self) -> None:
        pass

    def evaluate(self, X: float, key: int, attempt: int) -> float:
        if X < 0.0:
            raise ValueError("negative")
        return 2.0 * X


class Held(Executor):
    """Does nothing until told; its futures are at hand."""

    def __init__(self) -> None:
        self.calls: list[tuple[Future[Any], Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append((future, lambda: fn(*args, **kwargs)))
        return future

    def begin(self, number: int) -> None:
        """From now on it cannot be cancelled."""
        assert self.calls[number][0].set_running_or_notify_cancel()

    def do(self, number: int) -> None:
        future, call = self.calls[number]
        future.set_result(call())


class Engine(Held, EngineExecutor):
    """The same with futures that know whether their tasks have begun."""

    workers = None
    capacity = 1

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> EngineFuture[Any]:
        future = Known()
        self.calls.append((future, lambda: fn(*args, **kwargs)))
        return future

    def dumps(self, value: Any) -> bytes:
        return b""

    def on_workers(self, fn: Any, *args: Any) -> dict[str, Any]:
        return {}


class Known(EngineFuture[Any]):
    """A future that begins when told."""

    seconds: float | None = None

    def stop(self) -> None:
        self.cancel()

    def seconds_running(self) -> float | None:
        return self.seconds


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def tasks(*X: float) -> list[Task[float]]:
    return [Task(key, x, 0) for key, x in enumerate(X)]


def held(*X: float, **settings: Any) -> tuple[Held, Executed[float, float]]:
    executor = Held()
    evaluator = Executed(Twice(), executor, **settings)
    for task in tasks(*X):
        evaluator.submit(task)
    return executor, evaluator


def values(outcomes: list[Outcome[float]]) -> dict[int, float | None]:
    return {outcome.key: outcome.value for outcome in outcomes}


def test_outcomes_come_as_they_are_ready_with_failures_among_them() -> None:
    with (
        ThreadPoolExecutor(3) as executor,
        Executed(Twice(), executor, at_once=3) as evaluator,
    ):
        for task in tasks(1.0, -1.0, 3.0, 4.0):
            evaluator.submit(task)
        came = [evaluator.next_outcome() for _ in range(4)]
        assert evaluator.poll(None) is None
        with pytest.raises(UsageError, match="no task whose outcome could come"):
            evaluator.next_outcome()
    assert values(came) == {0: 2.0, 1: None, 2: 6.0, 3: 8.0}
    assert {outcome.error for outcome in came} == {None, "ValueError: negative"}


def test_no_more_tasks_than_asked_are_under_way() -> None:
    executor, evaluator = held(1.0, 2.0, 3.0, at_once=2)
    assert len(executor.calls) == 2
    assert evaluator.poll(0.0) is None
    executor.do(1)
    assert evaluator.poll(None) == evaluator_outcome(1, 4.0)
    assert len(executor.calls) == 3
    executor.do(2)
    executor.do(0)
    assert values([evaluator.next_outcome(), evaluator.next_outcome()]) == {0: 2.0, 2: 6.0}


def evaluator_outcome(key: int, value: float) -> Any:
    class Same:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Outcome) and (other.key, other.value) == (key, value)

    return Same()


@pytest.mark.parametrize(
    "loss", [LostTaskError("the worker died"), BrokenExecutor("the pool"), None], ids=repr
)
def test_a_lost_task_is_submitted_again_and_is_no_failure(loss: Exception | None) -> None:
    executor, evaluator = held(1.0, 2.0)
    first = executor.calls[0][0]
    if loss is None:
        assert first.cancel()  # as Dask's own executor does when its scheduler is lost
    else:
        first.set_exception(loss)
    with pytest.warns(LostTaskWarning, match="done again: 1 evaluations"):
        assert evaluator.poll(None) is None
    assert len(executor.calls) == 3
    executor.do(2)
    executor.do(1)
    assert values([evaluator.next_outcome(), evaluator.next_outcome()]) == {0: 2.0, 1: 4.0}
    assert evaluator.losses == 1


@pytest.mark.filterwarnings("ignore::bo_stream.executors.LostTaskWarning")
def test_a_task_that_is_lost_again_and_again_has_failed() -> None:
    executor, evaluator = held(1.0, resubmissions=2)
    for number in range(3):
        executor.calls[number][0].set_exception(LostTaskError("the worker died"))
        outcome = evaluator.poll(None)
    assert outcome is not None
    assert outcome.error == "the worker died, 3 times"
    assert (len(executor.calls), evaluator.losses) == (3, 3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("bo_stream.loops.optimization.executed.time", found)
    return found


def test_a_late_outcome_of_what_was_given_up_is_ignored(clock: Clock) -> None:
    executor, evaluator = held(1.0, 2.0, at_once=2, timeout=60.0)
    executor.begin(0)
    executor.do(1)
    assert values([evaluator.next_outcome()]) == {1: 4.0}
    clock.now = 61.0
    outcome = evaluator.next_outcome()
    assert (outcome.key, outcome.error) == (0, "no outcome within 60 s: abandoned")
    evaluator.submit(Task(0, 5.0, 1))
    executor.do(0)
    assert evaluator.poll(0.0) is None
    executor.do(2)
    assert values([evaluator.next_outcome()]) == {0: 10.0}
    assert evaluator.poll(0.0) is None


def test_a_task_that_waits_in_the_executor_can_be_cancelled_when_it_is_late(clock: Clock) -> None:
    executor, evaluator = held(1.0, at_once=1, timeout=60.0)
    clock.now = 59.0
    assert evaluator.poll(0.0) is None
    clock.now = 60.0
    assert evaluator.next_outcome().error == "no outcome within 60 s: stopped"
    assert executor.calls[0][0].cancelled()


def test_places_that_are_never_free_again_are_said(clock: Clock) -> None:
    executor, evaluator = held(1.0, 2.0, at_once=1, timeout=60.0)
    executor.begin(0)
    clock.now = 61.0
    assert evaluator.next_outcome().error == "no outcome within 60 s: abandoned"
    assert evaluator.poll(0.0) is None
    clock.now = 122.0
    with pytest.raises(UsageError, match="All 1 places are taken by evaluations beyond"):
        evaluator.next_outcome()
    executor.do(0)
    assert evaluator.poll(0.0) is None
    executor.do(1)
    assert values([evaluator.next_outcome()]) == {1: 4.0}


def test_a_wait_for_workers_is_said_once_in_a_time_of_silence(clock: Clock) -> None:
    executor = Engine()
    evaluator = Executed(Twice(), executor)
    for task in tasks(1.0, 2.0):
        evaluator.submit(task)

    def warnings_at(now: float) -> int:
        clock.now = now
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert evaluator.poll(0.0) is None
        assert all(each.category is WaitingWarning for each in caught)
        assert all("none of 2 evaluations has begun" in str(each.message) for each in caught)
        return len(caught)

    assert [warnings_at(now) for now in (59.0, 61.0, 200.0)] == [0, 1, 0]
    executor.do(0)
    assert values([evaluator.next_outcome()]) == {0: 2.0}
    evaluator.submit(Task(2, 3.0, 0))
    executor.calls[1][0].seconds = 0.0  # it has begun: what it takes, it takes
    assert [warnings_at(now) for now in (270.0, 340.0)] == [0, 0]
    executor.calls[1][0].seconds = None  # its worker is gone
    assert [warnings_at(now) for now in (390.0, 401.0, 500.0)] == [0, 1, 0]


class Cluster(Engine):
    """Workers that come and go, of which none takes what waits; None: it does not answer."""

    size: int | None = 1

    @property
    def workers(self) -> int:
        return self.capacity

    @property
    def capacity(self) -> int:
        if self.size is None:
            raise ConnectionError("nobody there")
        return self.size


def test_a_cluster_is_given_as_many_tasks_as_it_has_workers_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, executor = Clock(), Cluster()
    monkeypatch.setattr("bo_stream.executors.engine.time", clock)
    evaluator = Executed(Twice(), executor)
    for task in tasks(*range(6)):
        evaluator.submit(task)
    for size, expected in [(1, 1), (3, 3), (None, 3), (5, 5), (2, 5)]:
        executor.size = size
        clock.now += SECONDS_BETWEEN_LOOKS
        assert evaluator.poll(0.0) is None
        assert len(executor.calls) == expected
    executor.do(0)
    assert values([evaluator.next_outcome()]) == {0: 0.0}
    assert (evaluator.capacity, len(executor.calls)) == (2, 5)


def test_what_is_cancelled_has_no_outcome() -> None:
    executor, evaluator = held(1.0, 2.0, 3.0, at_once=2)
    evaluator.cancel(0)  # given to the executor
    evaluator.cancel(2)  # waits
    evaluator.cancel(7)  # unknown
    assert executor.calls[0][0].cancelled()
    executor.do(1)
    assert values([evaluator.next_outcome()]) == {1: 4.0}
    assert evaluator.poll(None) is None
    evaluator.submit(Task(0, 4.0, 1))
    executor.do(2)
    assert values([evaluator.next_outcome()]) == {0: 8.0}


def test_a_key_under_way_is_refused() -> None:
    _, evaluator = held(1.0)
    with pytest.raises(UsageError, match="The task 0 is under way"):
        evaluator.submit(Task(0, 2.0, 0))


def test_an_executor_that_is_shut_down_is_said_and_the_task_is_kept() -> None:
    executor = ThreadPoolExecutor(1)
    evaluator = Executed(Twice(), executor, at_once=1)
    executor.shutdown()
    with pytest.raises(UsageError, match="ThreadPoolExecutor takes no tasks any more"):
        evaluator.submit(Task(0, 1.0, 0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"at_once": 0}, "at_once to be a whole number of at least 1"),
        ({"timeout": 0.0}, "timeout above 0"),
        ({"resubmissions": -1}, "resubmissions to be a whole number of at least 0"),
    ],
)
def test_numbers_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Executed(Twice(), Held(), **settings)


def test_work_that_cannot_be_pickled_is_named_before_anything_is_submitted() -> None:
    executor = Held()
    with pytest.raises(UsageError, match=r"work\.parts\[3\]\._cond\._lock, a \w+, cannot be"):
        Executed(Twice({3: threading.Event()}), executor)
    assert executor.calls == []


def test_a_worker_of_another_version_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes when all checks are over: its tasks look at what it has."""
    executor, evaluator = held(1.0)
    here = {"bo-stream": "0.0.1", "torch": "2.0"}
    monkeypatch.setattr("bo_stream.executors.engine.versions", lambda: here)
    future, call = executor.calls[0]
    with pytest.raises(UsageError) as caught:
        call()
    future.set_exception(caught.value)
    with pytest.raises(UsageError, match=r"The worker .* has bo_stream 0\.0\.1, and here is"):
        evaluator.next_outcome()


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::bo_stream.executors.LostTaskWarning")
def test_processes_that_hang_or_die() -> None:
    """A hanging one is killed alone; a deadly point has failed when it was tried often enough."""
    box = ((0.0, 2.0),)
    dying = Objective("tests.loops.functions:die", box)
    executor = ProcessExecutor(2, dying.prepare)
    with executor, Executed(dying, executor, resubmissions=1) as evaluator:
        for key, x in enumerate((0.5, 1.7)):
            evaluator.submit(Task(key, (x,), 0))
        came = {o.key: o for o in (evaluator.next_outcome() for _ in range(2))}
        assert came[1].value == 1.0
        assert came[0].error == "the worker process died (exit code 7), 2 times"
        assert evaluator.losses == 2
    hanging = Objective("tests.loops.functions:hang", box)
    with point_evaluator(hanging, 1, 20.0, "processes:2") as evaluator:
        started = time.monotonic()
        for key, x in enumerate((1.7, 1.7, 0.5)):
            evaluator.submit(Task(key, (x,), 0))
        assert [evaluator.next_outcome().value for _ in range(2)] == [1.0, 1.0]
        evaluator.cancel(2)
        evaluator.submit(Task(3, (1.7,), 0))
        assert evaluator.next_outcome().value == 1.0
        assert time.monotonic() - started < 600.0  # as long as it would hang
