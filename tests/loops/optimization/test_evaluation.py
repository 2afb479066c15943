from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from bo_stream.errors import UsageError
from bo_stream.loops.optimization.executed import Executed, point_evaluator, worker_processes
from bo_stream.loops.optimization.objectives import (
    Evaluator,
    InProcess,
    Objective,
    Outcome,
    Task,
    attempt,
    find_objective,
)

BOX = ((0.0, 2.0),)


def own(name: str) -> Objective:
    return find_objective(f"tests.loops.functions:{name}", None, 0.0, BOX, 0)


def tasks(*X: float) -> list[Task]:
    return [Task(key, (x,), 0) for key, x in enumerate(X)]


def outcomes(workers: Evaluator, todo: list[Task]) -> list[Outcome]:
    for task in todo:
        workers.submit(task)
    return [workers.next_outcome() for _ in todo]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("half_forbidden", "ValueError: forbidden ground"),
        ("leave", "SystemExit: 3"),
        ("nan", "the value is nan"),
        ("infinite", "the value is inf"),
        ("enormous", r"the value is 1e\+300, larger in size than 1e\+75"),
        ("mute", "Mute: an error without words"),
        ("pair", r"expected one number, got shape \(2,\)"),
        ("text", "expected one number, got str '1.0'"),
        ("nothing", "expected one number, got NoneType 'None'"),
        ("ragged", "ValueError: "),
    ],
)
def test_what_is_no_number_is_a_failure(name: str, error: str) -> None:
    outcome = attempt(own(name), Task(3, (0.5,), 0))
    assert (outcome.key, outcome.value) == (3, None)
    assert outcome.error is not None
    assert "\n" not in outcome.error
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(outcome.error)


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (np.ma.masked, "got a masked one"),
        (np.ma.array([5.0], mask=[True]), "got a masked one"),
        (10**400, r"an integer, larger in size than 1e\+75"),
    ],
)
def test_results_that_numpy_reads_as_something_else_are_failures(
    result: object, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.loops.functions.bowl", lambda x: result)
    outcome = attempt(own("bowl"), Task(0, (0.5,), 0))
    assert outcome.value is None
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(outcome.error)


def test_integers_of_any_length_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.loops.functions.bowl", lambda x: -(10**30))
    assert attempt(own("bowl"), Task(0, (0.5,), 0)).value == -1e30


@pytest.mark.parametrize(
    "number", [2, 2.0, np.float32(2.0), np.array([2.0]), torch.tensor(2.0), torch.tensor([2.0])]
)
def test_any_single_number_will_do(number: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.loops.functions.bowl", lambda x: number)
    assert attempt(own("bowl"), Task(0, (0.5,), 0)).value == 2.0


@pytest.mark.integration
def test_outcomes_come_as_they_are_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with worker_processes(own("slow"), count=2) as workers:
        outcomes(workers, tasks(-1.0, -2.0))  # both have started
        came = outcomes(workers, tasks(1.5, 0.1, 0.2))
    assert [outcome.key for outcome in came] == [1, 2, 0]
    assert [outcome.value for outcome in came] == [0.1, 0.2, 1.5]
    assert came[-1].seconds >= 1.5


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "timeout", "error"),
    [
        ("hang", 15.0, "no outcome within 15 s: stopped"),
        ("die", 90.0, "the worker process died (exit code 7)"),
    ],
)
def test_hanging_and_dying_workers_are_replaced(name: str, timeout: float, error: str) -> None:
    started = time.monotonic()
    with worker_processes(own(name), count=2, timeout=timeout) as workers:
        came = {o.key: o for o in outcomes(workers, tasks(0.5, 1.7, 0.6, 1.7))}
    assert [came[key].error for key in range(4)] == [error, None, error, None]
    assert [came[key].value for key in (1, 3)] == [1.0, 1.0]
    assert time.monotonic() - started < 300.0  # and not 600, the time of what hangs


@pytest.mark.integration
def test_workers_give_what_this_process_gives() -> None:
    objective = find_objective("Branin", None, 2.0, None, seed=5)
    todo = [Task(key, (0.1 * key, 3.0), key % 2) for key in range(4)]
    here = InProcess(objective)
    for task in todo:
        here.submit(task)
    expected = {o.key: o.value for o in (here.next_outcome() for _ in todo)}
    with worker_processes(objective, count=2) as workers:
        assert {o.key: o.value for o in outcomes(workers, todo)} == expected


def test_tasks_of_this_process_are_done_when_asked_for_and_can_be_cancelled() -> None:
    with InProcess(own("bowl")) as here:
        for task in tasks(1.7, 0.7, 2.7):
            here.submit(task)
        with pytest.raises(UsageError, match="The task 2 is under way: expected another key"):
            here.submit(Task(2, (9.0, 9.0), 0))
        here.cancel(0)
        first = here.poll(0.0)
        assert first is not None
        assert (first.key, first.value) == (1, 0.0)
        here.submit(Task(1, (0.7, 0.0), 1))
        here.close()
        assert here.poll(None) is None


def test_a_function_of_one_s_own_is_kept_out_of_this_process_unless_asked() -> None:
    branin = find_objective("Branin", None, 0.0, None, 0)
    for objective, count, timeout, kind in (
        (own("bowl"), 1, None, Executed),
        (own("bowl"), 0, None, InProcess),
        (branin, 1, None, InProcess),
        (branin, 1, 5.0, Executed),
        (branin, 2, None, Executed),
    ):
        with point_evaluator(objective, count, timeout) as evaluator:
            assert isinstance(evaluator, kind)


@pytest.mark.parametrize(
    ("count", "timeout", "message"),
    [
        (-1, None, "workers to be a whole number of at least 1, got -1"),
        (2, 0.0, "timeout above 0 seconds, got 0"),
        (1, math.nan, "timeout above 0"),
    ],
)
def test_counts_are_checked(count: int, timeout: float | None, message: str) -> None:
    with (
        pytest.raises(UsageError, match=message),
        point_evaluator(own("bowl"), count, timeout),
    ):
        pass


@pytest.mark.integration
def test_a_worker_that_cannot_begin_is_an_error() -> None:
    with (
        worker_processes(Objective("tests.loops.nowhere:f", BOX), count=1) as workers,
        pytest.raises(UsageError, match="ended while it started"),
    ):
        outcomes(workers, tasks(0.5))
