"""A Dask cluster whose workers and scheduler are killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
from distributed import Client
from typer.testing import CliRunner

from bo_stream.cli import app
from bo_stream.errors import UsageError
from bo_stream.executors import (
    DaskExecutor,
    WaitingWarning,
    check_picklable,
    check_workers,
    executor_of,
)
from bo_stream.executors.engine import WorkerCount
from bo_stream.loops.optimization.executed import Executed
from bo_stream.loops.optimization.objectives import Objective, Outcome, Task
from bo_stream.loops.run import OPTIMIZATION
from tests.executors.clusters import PATIENCE, dask, free_port, other_version, scheduler, worker
from tests.executors.functions import double, fail, leave, process, wait_for

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::bo_stream.executors.LostTaskWarning"),
]

BOX = ((-10.0, 10.0),)


@pytest.fixture(scope="module")
def cluster() -> Iterator[DaskExecutor]:
    """Two worker processes with nannies, and a resource."""
    with executor_of("dask:2", resources={"token": 1.0}) as executor:
        assert isinstance(executor, DaskExecutor)
        yield executor


def evaluator_of(name: str, executor: DaskExecutor, **settings: float) -> Executed:
    return Executed(Objective(f"tests.loops.functions:{name}", BOX), executor, **settings)


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def outcomes(evaluator: Executed, count: int) -> dict[int, Outcome[float]]:
    found = [evaluator.next_outcome() for _ in range(count)]
    assert len({outcome.key for outcome in found}) == count
    return {outcome.key: outcome for outcome in found}


def test_values_and_errors_come_back(cluster: DaskExecutor) -> None:
    check_workers(cluster)
    assert list(cluster.map(double, [1.0, 2.0])) == [2.0, 4.0]
    assert cluster.submit(lambda: 3).result(PATIENCE) == 3
    check_picklable("work", lambda: 3, cluster)
    with pytest.raises(ValueError, match="not this"):
        cluster.submit(fail, "not this").result(PATIENCE)


def test_a_task_without_the_resources_it_needs_waits(cluster: DaskExecutor, tmp_path: Path) -> None:
    """Each worker has one token, and each task needs one: two are under way at most."""
    gates = [tmp_path / str(number) for number in range(3)]
    futures = [cluster.submit(wait_for, str(gate)) for gate in gates]
    until(lambda: len(list(tmp_path.glob("*.begun"))) == 2)
    running = [future.seconds_running() is not None for future in futures]
    assert sorted(running) == [False, True, True]
    for gate in gates:
        gate.touch()
    assert [future.result(PATIENCE) for future in futures] == list(map(str, gates))


def test_a_worker_that_dies_is_no_failure_of_the_others(cluster: DaskExecutor) -> None:
    deadly = cluster.submit(leave, 7)
    with evaluator_of("bowl", cluster) as evaluator:
        for key in range(4):
            evaluator.submit(Task(key, (float(key),), 0))
        came = outcomes(evaluator, 4)
    assert all(outcome.error is None for outcome in came.values())
    deadly.stop()


def test_dask_s_own_executor_will_do(cluster: DaskExecutor) -> None:
    with (
        Client(cluster.address, set_as_default=False) as client,
        Executed(Objective("tests.loops.functions:bowl", BOX), client.get_executor()) as evaluator,
    ):
        for key in range(2):
            evaluator.submit(Task(key, (1.7 - key,), 0))
        came = outcomes(evaluator, 2)
    assert {key: outcome.value for key, outcome in came.items()} == {0: 1.0, 1: 0.0}


def test_an_evaluation_that_hangs_is_stopped(cluster: DaskExecutor) -> None:
    """Its worker is restarted, so that its place is free again."""
    with evaluator_of("hang", cluster, timeout=3.0) as evaluator:
        for key in range(2):
            evaluator.submit(Task(key, (0.5,), 0))
        came = outcomes(evaluator, 2)
        assert {o.error for o in came.values()} == {"no outcome within 3 s: stopped"}
    with evaluator_of("bowl", cluster) as evaluator:
        evaluator.submit(Task(2, (1.7,), 0))
        assert evaluator.next_outcome().value == 1.0


def test_a_scheduler_is_killed_and_started_again_and_each_outcome_comes_once() -> None:
    port = free_port()
    with (
        dask(*scheduler(port)) as first,
        dask(*worker(port)),
        opened(port) as executor,
        evaluator_of("slow", executor) as evaluator,
    ):
        for key, seconds in enumerate((0.01, 1.0, 0.5, 0.5)):
            evaluator.submit(Task(key, (seconds,), 0))
        assert evaluator.next_outcome().key == 0
        first.kill()
        first.wait(PATIENCE)
        with (
            dask(*scheduler(port)),
            dask(*worker(port)),
            pytest.warns(WaitingWarning, match=r"has not answered since [\d:]+: waiting for it"),
        ):
            came = outcomes(evaluator, 3)
        assert evaluator.losses == 3
    assert {key: outcome.value for key, outcome in came.items()} == {1: 1.0, 2: 0.5, 3: 0.5}


@contextmanager
def opened(port: int) -> Iterator[DaskExecutor]:
    """An executor of a scheduler that is being started."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            executor = DaskExecutor(f"tcp://127.0.0.1:{port}")
        except UsageError:
            assert time.monotonic() < end
        else:
            break
    with executor:
        yield executor


def test_a_cluster_without_workers_is_said_and_the_run_goes_on_when_one_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bo_stream.loops.optimization.executed.SECONDS_OF_SILENCE", 0.5)
    port = free_port()
    with (
        dask(*scheduler(port)),
        opened(port) as executor,
        evaluator_of("bowl", executor) as evaluator,
    ):
        evaluator.submit(Task(0, (1.7,), 0))
        with pytest.warns(WaitingWarning, match="wait for workers of the DaskExecutor") as caught:
            until(lambda: evaluator.poll(None) is None and len(caught) > 0)
        with dask(*worker(port)):
            assert evaluator.next_outcome().value == 1.0


def test_workers_are_counted_as_they_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this package's executor and by Dask's own; what is known stays while nobody answers."""
    monkeypatch.setattr("bo_stream.executors.engine.SECONDS_BETWEEN_LOOKS", 0.0)
    port = free_port()
    with (
        dask(*scheduler(port)) as only,
        opened(port) as executor,
        Client(executor.address, set_as_default=False) as client,
    ):
        own, theirs = WorkerCount(executor), WorkerCount(client.get_executor())
        assert (own.now(), theirs.now()) == (1, 1)
        with dask(*worker(port)) as first, dask(*worker(port)):
            until(lambda: (own.now(), theirs.now()) == (2, 2))
            first.kill()
            until(lambda: (own.now(), theirs.now()) == (1, 1))
            with dask(*worker(port)):
                until(lambda: (own.now(), theirs.now()) == (2, 2))
                only.kill()
                only.wait(PATIENCE)
                until(lambda: client.status != "running")
                assert (own.now(), theirs.now()) == (2, 2)


def test_a_scheduler_that_stays_away_ends_the_run() -> None:
    port = free_port()
    with dask(*scheduler(port)) as only, opened(port) as executor:
        executor.patience = 0.5
        only.kill()
        only.wait(PATIENCE)
        with (
            pytest.warns(WaitingWarning, match=r"for 0\.5 s at most"),
            pytest.raises(UsageError, match=r"was lost, and has not been back for 0\.5 s"),
        ):
            until(lambda: executor.submit(double, 1.0) is None)


def test_a_worker_of_another_version_is_named(tmp_path: Path) -> None:
    port = free_port()
    other = other_version(tmp_path)
    with (
        dask(*scheduler(port)),
        dask(*worker(port), environment=other),
        opened(port) as executor,
    ):
        until(lambda: len(executor.on_workers(process)) == 1)
        with pytest.raises(
            UsageError, match=r"worker tcp://127\S+ has bo_stream 0\.0\.1, and here"
        ):
            evaluator_of("bowl", executor)


def test_a_driver_that_is_killed_is_resumed_and_each_result_is_there_once(
    cluster: DaskExecutor, tmp_path: Path
) -> None:
    run, spec = str(tmp_path / "run"), f"dask:{cluster.address}"
    named = ["optimize", "tests.loops.functions:slow", "--out", run]
    told = ["--bounds", "1.01,1.1", "--initial", "4", "-q", "2", "--steps", "1"]
    program = [sys.executable, "-c", "from bo_stream.cli import app; app()"]
    killed = subprocess.Popen([*program, *named, *told, "--executor", spec])
    try:
        until(lambda: killed.poll() is None and len(outcomes_in(tmp_path / "run")) >= 1)
    finally:
        killed.kill()
        killed.wait(PATIENCE)
    before = outcomes_in(tmp_path / "run")
    without = CliRunner().invoke(app, [*named, "--resume"])
    assert (without.exit_code, "--executor" in without.output) == (2, True)
    done = CliRunner().invoke(app, [*named, "--resume", "--executor", spec])
    assert done.exit_code == 0, done.output
    history = pd.read_csv(tmp_path / "run" / "history.csv")
    assert history["status"].tolist() == ["told"] * 6
    assert history["y"].tolist() == history["x0"].tolist()
    assert before.items() <= outcomes_in(tmp_path / "run").items()


def outcomes_in(folder: Path) -> dict[int, float]:
    """Outcomes that a checkpoint holds; none before there is one."""
    if not (folder / OPTIMIZATION.name).exists():
        return {}
    with OPTIMIZATION.opened(folder) as content:
        return {trial["key"]: trial["Y"] for trial in content["trials"] if trial["Y"] is not None}
