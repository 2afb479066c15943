"""Executors by their names."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bo_stream.errors import UsageError
from bo_stream.executors import ProcessExecutor, executor_of
from bo_stream.executors.processes import has_address, places
from tests.executors.functions import double, fail

PATIENCE = 300.0


@pytest.fixture
def deaf_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def test_an_executor_is_passed_through_and_left_open() -> None:
    with ThreadPoolExecutor(1) as mine:
        with executor_of(mine) as found:
            assert found is mine
        assert mine.submit(double, 1.0).result() == 2.0


def test_those_of_this_machine_are_ended() -> None:
    with executor_of("threads:2") as threads:
        assert threads.submit(double, 1.0).result() == 2.0
    with executor_of("processes:2") as processes:
        assert isinstance(processes, ProcessExecutor)
    for executor in (threads, processes):
        with pytest.raises(RuntimeError, match="shut"):
            executor.submit(double, 1.0)


def test_threads_do_their_tasks_and_leave_the_rest() -> None:
    began, go_on = threading.Event(), threading.Event()

    def wait() -> bool:
        began.set()
        return go_on.wait(PATIENCE)

    with executor_of("threads:1") as threads:
        with pytest.raises(ValueError, match="not this"):
            threads.submit(fail, "not this").result(PATIENCE)
        first, second = threads.submit(wait), threads.submit(double, 1.0)
        assert began.wait(PATIENCE)
    assert second.cancelled()
    assert not first.done()
    go_on.set()
    assert first.result(PATIENCE) is True


HANGS = """
import threading, time
from bo_stream.executors import executor_of

began = threading.Event()

def hang():
    began.set()
    time.sleep(3600)

with executor_of("threads:1") as threads:
    threads.submit(hang)
    began.wait()
print("over")
"""


def test_a_task_that_hangs_in_a_thread_does_not_keep_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ended.returncode, ended.stdout) == (0, "over\n")


def test_how_many_and_where() -> None:
    assert places("threads:3") == 3
    assert places("processes:3") is None
    assert [has_address(spec) for spec in ("dask:tcp://a:1", "ray:a:1", "dask:4", "ray")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("slurm:4", {}, "Expected executor to be one of processes, threads, dask, ray, got 'slurm"),
        ("processes:many", {}, "Expected processes:N with a number of workers, got"),
        ("processes:0", {}, "Expected workers to be a whole number of at least 1, got 0"),
        ("threads:2", {"resources": {"GPU": 1.0}}, "has no resources"),
        (ThreadPoolExecutor(1), {"resources": {"GPU": 1.0}}, "Give resources to the executor"),
        (Path(), {}, r"got a \w+Path. One of submitit: SubmititExecutor\(it\)"),
    ],
)
def test_what_is_not_understood_is_said(spec: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message), executor_of(spec, **options):
        pass


@pytest.mark.parametrize(("kind", "module"), [("dask", "distributed"), ("ray", "ray")])
def test_a_missing_package_is_named(
    kind: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"pip install 'bo-stream\[{kind}\]'"), executor_of(kind):
        pass


@pytest.mark.integration
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{}", "127.0.0.1:{}", "nothing://:{}"])
def test_a_dask_scheduler_that_does_not_answer_is_one_line(address: str, deaf_port: int) -> None:
    spec = "dask:" + address.format(deaf_port)
    with pytest.raises(UsageError, match="No Dask scheduler answers at ") as caught:
        executor_of(spec).__enter__()
    assert "\n" not in str(caught.value)


@pytest.mark.integration
@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_a_ray_cluster_that_does_not_answer_is_one_line(address: str, deaf_port: int) -> None:
    spec = "ray:" + address.format(deaf_port)
    with pytest.raises(UsageError, match="Nothing answers at ") as caught:
        executor_of(spec).__enter__()
    assert "\n" not in str(caught.value)
