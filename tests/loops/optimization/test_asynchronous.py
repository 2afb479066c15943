from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.optimization import (
    Optimizer,
    Trial,
    load_optimizer,
    run_asynchronously,
    save_optimizer,
)
from bo_stream.loops.optimization.asynchronous import AsynchronousRun
from bo_stream.loops.optimization.executed import Executed
from bo_stream.loops.optimization.objectives import InProcess, Objective, Outcome, Task
from bo_stream.loops.optimization.trials import JOURNAL, Journal, journaled_trials
from bo_stream.loops.run import StopRequest
from tests.loops.functions import bowl
from tests.loops.optimization.test_executed import Engine
from tests.loops.optimizing import QUICK, points

RANDOM = replace(QUICK, acquisition="random")
ROOT = Path(__file__).parents[3]
PATIENCE = 300.0


class Anyhow:
    """An evaluator whose outcomes come in random order, some of them twice or to unknown keys."""

    def __init__(self, function: Callable[[list[float]], float] = bowl, seed: int = 0) -> None:
        self.function, self.random = function, random.Random(seed)
        self.tasks: dict[int, Task[tuple[float, ...]]] = {}
        self.submitted: list[Task[tuple[float, ...]]] = []
        self.under_way: list[int] = []
        self.again: list[Outcome[float]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def submit(self, task: Task[tuple[float, ...]]) -> None:
        assert task.key not in self.tasks
        self.tasks[task.key] = task
        self.submitted.append(task)

    def poll(self, seconds: float | None) -> Outcome[float] | None:
        return self.next_outcome() if self.tasks else None

    def next_outcome(self) -> Outcome[float]:
        if self.again and self.random.random() < 0.2:
            return self.again.pop()
        self.under_way.append(len(self.tasks))
        task = self.tasks.pop(self.random.choice(list(self.tasks)))
        try:
            outcome = Outcome(task.key, self.function(list(task.X)), None, 1.0)
        except ValueError as error:
            return Outcome(task.key, None, str(error), 1.0)
        self.again += [outcome, replace(outcome, key=10**6)]
        return outcome

    def cancel(self, key: int) -> None:
        self.tasks.pop(key, None)

    def close(self) -> None:
        self.tasks.clear()


def statuses(optimizer: Optimizer) -> Counter[str]:
    return Counter(trial.status for trial in optimizer.ledger)


def test_all_trials_are_evaluated_once_and_as_many_as_asked_for_at_a_time() -> None:
    optimizer, evaluator, seen = Optimizer(RANDOM), Anyhow(), list[Trial]()
    run_asynchronously(optimizer, evaluator, 60, 7, on_trial=seen.append)
    assert statuses(optimizer) == {"told": 60}
    assert sorted(trial.key for trial in seen) == list(range(60))
    assert sorted(task.key for task in evaluator.submitted) == list(range(60))
    assert all(bowl(list(trial.X)) == trial.Y for trial in optimizer.ledger)
    assert max(evaluator.under_way) == 7


class Elastic(Engine):
    """Workers that come and go: at each look a task ends if all are busy or no more will come.

    Attributes:
        busy: Number of tasks under way at the end of each.
    """

    def __init__(self, total: int, sizes: dict[int, int]) -> None:
        super().__init__()
        self.total, self.sizes, self.busy = total, sizes, list[int]()

    @property
    def capacity(self) -> int:
        """As many as the sizes say, by the number of tasks that have ended."""
        size = next(n for ended, n in sorted(self.sizes.items()) if len(self.busy) < ended)
        left = [number for number, (future, _) in enumerate(self.calls) if not future.done()]
        if left and (len(left) >= size or len(self.calls) == self.total):
            self.busy.append(len(left))
            self.do(left[0])
        return size


def test_as_many_are_under_way_as_there_are_workers_while_they_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers, six after ten outcomes, and one after thirty."""
    monkeypatch.setattr("bo_stream.executors.engine.SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr("bo_stream.loops.optimization.asynchronous.SECONDS_BETWEEN_LOOKS", 0.01)
    optimizer, workers = Optimizer(RANDOM), Elastic(60, {10: 2, 30: 6, 61: 1})
    objective = Objective("tests.loops.functions:bowl", RANDOM.bounds)
    run_asynchronously(optimizer, Executed(objective, workers), 60)
    assert statuses(optimizer) == {"told": 60}
    assert workers.busy == [2] * 10 + [6] * 20 + [5, 4, 3, 2] + [1] * 26


@pytest.mark.parametrize("acquisition", ["TS", "qLogEI"])
@pytest.mark.usefixtures("whole_fits")
def test_finds_the_minimum(acquisition: str) -> None:
    optimizer = Optimizer(replace(QUICK, acquisition=acquisition))
    run_asynchronously(optimizer, Anyhow(), 14, 3, ahead=0)
    assert optimizer.best().trial.X[0] == pytest.approx(0.7, abs=0.1)
    assert sum(trial.origin == "model" for trial in optimizer.ledger) > 6


def test_evaluations_go_on_while_points_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice that takes as long as three outcomes, for which points were chosen ahead."""
    optimizer, evaluator = Optimizer(RANDOM), Anyhow()
    ask, came, slow = optimizer.ask, threading.Semaphore(0), list[int]()

    def slowly(q: int) -> list[Trial]:
        if len(optimizer.ledger) >= 16:
            slow.append(q)
            for _ in range(3):
                assert came.acquire(timeout=PATIENCE)
        return ask(q)

    monkeypatch.setattr(optimizer, "ask", slowly)
    run_asynchronously(optimizer, evaluator, 40, 8, ahead=8, on_trial=lambda _: came.release())
    assert slow
    assert statuses(optimizer) == {"told": 40}


def half(x: list[float]) -> float:
    if x[0] < 0.5:
        raise ValueError("forbidden ground")
    return bowl(x)


def test_failures_are_tried_again_and_count() -> None:
    optimizer, evaluator = Optimizer(RANDOM), Anyhow(half)
    run_asynchronously(optimizer, evaluator, 30, 4, retries=2)
    assert set(statuses(optimizer)) == {"told", "failed"}
    assert len(optimizer.ledger) == 30
    for trial in optimizer.ledger:
        assert trial.attempts == (3 if trial.status == "failed" else 1)
        assert (trial.X[0] < 0.5) == (trial.status == "failed")
        attempts = [task.attempt for task in evaluator.submitted if task.key == trial.key]
        assert attempts == list(range(trial.attempts))


def never(x: list[float]) -> float:
    raise ValueError("no power")


def test_a_function_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    optimizer = Optimizer(RANDOM)
    with pytest.raises(UsageError, match="All 5 trials failed, the last one with: no power"):
        run_asynchronously(optimizer, Anyhow(never), 100, 5, folder=tmp_path)
    assert statuses(load_optimizer(tmp_path)[0])["failed"] == 5


def test_trials_may_be_amended_and_withdrawn_meanwhile() -> None:
    """When the first of four outcomes has come; those of the others are left out then."""
    optimizer, evaluator = Optimizer(RANDOM), Anyhow()

    def interfere(trial: Trial) -> None:
        if len(evaluator.under_way) == 1:
            first, _, last = optimizer.pending
            optimizer.amend(trial.key, 42.0)
            optimizer.withdraw(first.key)
            optimizer.amend(last.key, 7.0)

    run_asynchronously(optimizer, evaluator, 25, 4, on_trial=interfere)
    assert statuses(optimizer) == {"told": 25, "withdrawn": 1}
    assert sorted(trial.Y or 0.0 for trial in optimizer.ledger)[-1] == 42.0
    assert sum(trial.Y == 7.0 for trial in optimizer.ledger) == 1


def test_another_trial_takes_the_place_of_each_that_is_withdrawn() -> None:
    optimizer = Optimizer(RANDOM)

    def withdraw(trial: Trial) -> None:
        if trial.key % 2:
            optimizer.withdraw(trial.key)

    run_asynchronously(optimizer, Anyhow(half), 12, 3, on_trial=withdraw)
    kept = statuses(optimizer)
    assert kept["told"] + kept["failed"] == 12
    assert kept["withdrawn"] == sum(trial.key % 2 for trial in optimizer.ledger)


def test_points_registered_or_to_be_tried_again_meanwhile_are_evaluated() -> None:
    optimizer, registered, retried = Optimizer(RANDOM), list[Trial](), list[int]()

    def add(trial: Trial) -> None:
        if len(registered) < 2:
            registered.append(optimizer.register(trial.X))
        if trial.status == "failed" and trial.attempts == 1:
            retried.append(optimizer.retry(trial.key).key)

    run_asynchronously(optimizer, Anyhow(half), 40, 3, on_trial=add)
    ends = statuses(optimizer)
    assert ends["told"] + ends["failed"] == 40
    assert len(retried) > 0
    assert {optimizer.ledger[key].attempts for key in retried[:-3]} == {2}
    assert all(optimizer.ledger[trial.key].attempts > 0 for trial in registered)


def test_points_that_another_thread_registers_are_evaluated() -> None:
    optimizer, evaluator = Optimizer(RANDOM), Anyhow()
    poll = evaluator.next_outcome

    def register_and_poll() -> Outcome[float]:  # between two calls of on_trial
        if len(optimizer.ledger) < 10:
            optimizer.register((0.25,))
        return poll()

    with mock.patch.object(evaluator, "next_outcome", register_and_poll):
        run_asynchronously(optimizer, evaluator, 20, 3, ahead=0)
    assert statuses(optimizer) == {"told": 20}
    assert sum(trial.origin == "hand" for trial in optimizer.ledger) > 0


def test_failures_that_are_withdrawn_end_a_run_too() -> None:
    optimizer = Optimizer(RANDOM)

    def broken(x: list[float]) -> float:
        raise ValueError("broken")

    with pytest.raises(UsageError, match="trials failed"):
        run_asynchronously(
            optimizer, Anyhow(broken), 12, 3, on_trial=lambda trial: optimizer.withdraw(trial.key)
        )


def test_a_run_that_ends_by_an_error_leaves_no_task_to_another_one() -> None:
    def interrupt(trial: Trial) -> None:
        raise Killed

    evaluator = InProcess(Objective("tests.loops.functions:bowl", RANDOM.bounds))
    first, second = Optimizer(RANDOM), Optimizer(replace(RANDOM, seed=1))
    with pytest.raises(Killed):
        run_asynchronously(first, evaluator, 8, 4, on_trial=interrupt)
    assert evaluator.poll(0.0) is None
    for optimizer in (second, first):
        run_asynchronously(optimizer, evaluator, 8, 4)
        assert statuses(optimizer) == {"told": 8}
        assert all(bowl(list(trial.X)) == trial.Y for trial in optimizer.ledger)


def test_a_stop_lets_what_is_under_way_end() -> None:
    optimizer, evaluator = Optimizer(RANDOM), Anyhow()
    stop = StopRequest(lambda: None)
    run = AsynchronousRun(optimizer, evaluator, 50, 6)
    for count, _ in enumerate(run.trials(stop), 1):
        if count == 10:
            stop.made = True
            submitted = len(evaluator.submitted)
    assert len(evaluator.submitted) == submitted
    assert statuses(optimizer)["told"] == submitted
    run_asynchronously(optimizer, evaluator, 50, 6)
    assert statuses(optimizer) == {"told": 50}


class Killed(BaseException):
    """Ends a run at any place."""


@pytest.mark.parametrize("at", [1, 9, 23])
def test_a_run_goes_on_from_what_a_kill_leaves(at: int, tmp_path: Path) -> None:
    """The folder as it is when an outcome was reported: its outcome is there, and all before."""
    optimizer, seen, left = Optimizer(RANDOM), list[Trial](), tmp_path / "left"

    def kill(trial: Trial) -> None:
        seen.append(trial)
        if len(seen) == at - 1:  # after the outcome was written
            seen[0] = optimizer.amend(seen[0].key, 42.0)
        if len(seen) == at:
            shutil.copytree(tmp_path / "run", left)
            raise Killed

    with pytest.raises(Killed):
        run_asynchronously(optimizer, Anyhow(half), 40, 5, folder=tmp_path / "run", on_trial=kill)
    for folder in (left, tmp_path / "run"):  # the latter was written at the end
        loaded, run = load_optimizer(folder)
        assert run is None
        for trial in seen:
            assert loaded.ledger[trial.key] == trial
        assert statuses(loaded)["told"] + statuses(loaded)["failed"] == at
        assert at == 1 or loaded.ledger[seen[0].key].Y == 42.0
        assert points(loaded.ledger) == points(optimizer.ledger)[: len(loaded.ledger)]
        run_asynchronously(loaded, Anyhow(half), 40, 5, folder=folder)
        assert statuses(loaded)["told"] + statuses(loaded)["failed"] == 40
        again, _ = load_optimizer(folder)
        assert list(again.ledger) == list(loaded.ledger)


def test_a_folder_of_another_optimization_is_left_alone(tmp_path: Path) -> None:
    first, second = Optimizer(RANDOM), Optimizer(replace(RANDOM, seed=1))
    run_asynchronously(first, Anyhow(), 5, 2, folder=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match="holds another optimization, of 5 trials"):
        run_asynchronously(second, Anyhow(), 5, 2, folder=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_journal_of_another_run_is_not_read(tmp_path: Path) -> None:
    optimizer = Optimizer(RANDOM)
    run_asynchronously(optimizer, Anyhow(), 5, 2, folder=tmp_path)
    journal = Journal(tmp_path)
    journal.begin(0)
    journal.add([replace(optimizer.ledger[0], Y=99.0)])
    journal.close()
    assert [trial.Y for trial in journaled_trials(tmp_path, journal.name)] == [99.0]
    loaded, _ = load_optimizer(tmp_path)
    assert list(loaded.ledger) == list(optimizer.ledger)
    save_optimizer(tmp_path, loaded, journal=journal.name)
    assert load_optimizer(tmp_path)[0].ledger[0].Y == 99.0


def test_a_line_that_was_cut_short_is_left_out_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    optimizer = Optimizer(RANDOM)
    trials = optimizer.ask(3)
    journal = Journal(tmp_path)
    journal.begin(0)
    journal.add(trials)
    journal.close()
    content = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(content[:-5])
    assert list(journaled_trials(tmp_path, journal.name)) == trials[:2]
    (tmp_path / JOURNAL).write_bytes(content.replace(b'"key": 1', b'"kex": 1'))
    with pytest.raises(UsageError, match=r"damaged in line 3 .* its trial is evaluated again"):
        list(journaled_trials(tmp_path, journal.name))


def test_what_comes_while_a_checkpoint_is_written_is_kept(tmp_path: Path) -> None:
    optimizer = Optimizer(RANDOM)
    before, during = optimizer.ask(2)
    journal = Journal(tmp_path)
    journal.add([before])
    mark = journal.mark()
    journal.add([during])
    journal.begin(mark)
    journal.close()
    assert list(journaled_trials(tmp_path, journal.name)) == [during]
    assert list(journaled_trials(tmp_path / "none", journal.name)) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"total": 0}, "total to be a whole number of at least 1"),
        ({"at_once": 0}, "at_once to be a whole number of at least 1"),
        ({"ahead": -1}, "ahead to be a whole number of at least 0"),
        ({"retries": -1}, "retries to be a whole number of at least 0"),
    ],
)
def test_numbers_are_checked(wrong: dict[str, int], message: str) -> None:
    optimizer = Optimizer(RANDOM)
    numbers: dict[str, int] = {"total": 5, "at_once": 2, **wrong}
    with pytest.raises(UsageError, match=message):
        run_asynchronously(optimizer, Anyhow(), **numbers)
    assert len(optimizer.ledger) == 0


SCRIPT = """
from pathlib import Path
from bo_stream.loops.optimization import Optimizer, run_asynchronously
from bo_stream.loops.optimization.executed import worker_processes
from tests.loops.optimization.test_asynchronous import RANDOM
from bo_stream.loops.optimization.objectives import Objective

if __name__ == "__main__":
    objective = Objective("tests.loops.functions:bowl", RANDOM.bounds)
    with worker_processes(objective, 2) as workers:
        run_asynchronously(
            Optimizer(RANDOM), workers, 10**6, 2, folder=Path("run"),
            on_trial=lambda trial: print(trial.key, repr(trial.Y), flush=True),
        )
"""


@pytest.mark.integration
def test_every_reported_outcome_survives_kill_9(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    reported = [process.stdout.readline().split() for _ in range(25)]
    process.send_signal(signal.SIGKILL)
    reported += [line.split() for line in process.stdout.read().splitlines()]
    process.stdout.close()
    process.wait(PATIENCE)
    optimizer, _ = load_optimizer(tmp_path / "run")
    for key, Y in filter(lambda words: len(words) == 2, reported):
        assert float(Y) == optimizer.ledger[int(key)].Y
    total = len(optimizer.ledger)
    run_asynchronously(optimizer, Anyhow(), total, 2, folder=tmp_path / "run")
    assert statuses(optimizer) == {"told": total}
