"""Processes of this machine, each of which can be lost and killed alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from bo_stream.errors import UsageError
from bo_stream.executors import LostTaskError, ProcessExecutor
from tests.executors.functions import (
    cancel,
    double,
    fail,
    fork_and_double,
    hang,
    leave,
    oddly,
    process,
    unreadable,
    wait_for,
    wordlessly,
)

PATIENCE = 300.0

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def executor() -> Iterator[ProcessExecutor]:
    found = ProcessExecutor(2)
    yield found
    found.kill()


def wait_until_there(path: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_values_and_errors_come_back(executor: ProcessExecutor) -> None:
    assert list(executor.map(double, [1.0, 2.0, 3.0])) == [2.0, 4.0, 6.0]
    with pytest.raises(ValueError, match="not this"):
        executor.submit(fail, "not this").result(PATIENCE)
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
        executor.submit(oddly).result(PATIENCE)
    with pytest.raises(SystemExit):
        executor.submit(raise_exit).result(PATIENCE)


def test_a_child_that_a_function_forks_answers_nothing(executor: ProcessExecutor) -> None:
    xs = [float(i) for i in range(8)]
    assert list(executor.map(fork_and_double, xs)) == [2.0 * x for x in xs]


def raise_exit() -> None:
    raise SystemExit(3)


def test_no_error_ends_a_process() -> None:
    with ProcessExecutor(1) as executor:
        number = executor.submit(process).result(PATIENCE)
        with pytest.raises(RuntimeError, match="Wordless: an error without words"):
            executor.submit(wordlessly).result(PATIENCE)
        with pytest.raises(asyncio.CancelledError, match="withdrawn"):
            executor.submit(cancel).result(PATIENCE)
        assert executor.submit(process).result(PATIENCE) == number


def test_a_value_that_cannot_be_read_is_an_error_of_its_task_only(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with ProcessExecutor(1) as executor:
        number = executor.submit(process).result(PATIENCE)
        ended = executor.submit(unreadable)
        with pytest.raises(OSError, match="the value's file is not here"):
            ended.result(PATIENCE)
        waiting = executor.submit(wait_for, str(gate))
        wait_until_there(tmp_path / "gate.begun")
        ended.stop()  # which is over, and leaves the process to the other task
        gate.touch()
        assert waiting.result(PATIENCE) == str(gate)
        assert executor.submit(process).result(PATIENCE) == number


def test_a_process_that_dies_loses_its_own_task_only(
    executor: ProcessExecutor, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    waiting = executor.submit(wait_for, str(gate))
    wait_until_there(tmp_path / "gate.begun")
    with pytest.raises(LostTaskError, match=r"the worker process died \(exit code 7\)"):
        executor.submit(leave, 7).result(PATIENCE)
    assert executor.submit(double, 4.0).result(PATIENCE) == 8.0
    gate.touch()
    assert waiting.result(PATIENCE) == str(gate)


def test_a_process_that_is_killed_while_it_is_idle_is_replaced() -> None:
    with ProcessExecutor(1) as executor:
        number = executor.submit(process).result(PATIENCE)
        os.kill(number, signal.SIGKILL)
        end = time.monotonic() + PATIENCE
        while Path(f"/proc/{number}").exists() and time.monotonic() < end:
            try:  # a zombie until its parent looks
                other = executor.submit(process).result(PATIENCE)
            except LostTaskError:
                continue
            assert other != number
            break
        assert executor.submit(double, 1.0).result(PATIENCE) == 2.0


def test_tasks_are_stopped_begun_or_not() -> None:
    executor = ProcessExecutor(1)
    try:
        running, waiting = executor.submit(hang), executor.submit(double, 1.0)
        assert waiting.seconds_running() is None
        end = time.monotonic() + PATIENCE
        while running.seconds_running() is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        waiting.stop()
        assert waiting.cancelled()
        running.stop()
        with pytest.raises(LostTaskError):
            running.result(PATIENCE)
        assert executor.submit(double, 2.0).result(PATIENCE) == 4.0
        left = executor.submit(hang)
    finally:
        executor.kill()
    with pytest.raises((LostTaskError, UsageError, CancelledError)):  # as far as it came
        left.result(PATIENCE)
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(double, 1.0)


def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Of which other pools leave orphans."""
    inner = tmp_path / "inner"
    with ProcessExecutor(1) as outer:
        lost = outer.submit(with_a_process_of_its_own, str(inner))
        wait_until_there(inner)
        with pytest.raises(LostTaskError):
            lost.result(PATIENCE)
    number, end = int(inner.read_text()), time.monotonic() + PATIENCE
    while is_running(number):
        assert time.monotonic() < end
        time.sleep(0.01)


def with_a_process_of_its_own(path: str) -> None:
    """Write the number of a process of one's own, and be killed."""
    number = ProcessExecutor(1).submit(process).result(PATIENCE)
    Path(f"{path}.tmp").write_text(str(number))
    Path(f"{path}.tmp").rename(path)
    os.kill(os.getpid(), signal.SIGKILL)


def is_running(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except OSError:
        return False
