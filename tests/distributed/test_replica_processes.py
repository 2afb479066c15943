"""Replicas in processes of their own, in a shared folder; one is killed and comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bo_stream.distributed import FolderStore, Replica
from bo_stream.testing.streams import assert_close
from tests.distributed.working import SEARCH, posterior_of

ENOUGH = 24
RUNS = 4
"""Of replicas: A, B and C, and C once more."""


@contextmanager
def process(folder: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.distributed.working", str(folder), name]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [*command, str(ENOUGH), str(RUNS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=quiet,
        cwd=Path(__file__).parents[2],
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def line(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


def answers(running: Sequence[subprocess.Popen[str]], order: str) -> list[Any]:
    """Give all an order, and wait for all answers."""
    for each in running:
        assert each.stdin is not None
        each.stdin.write(f"{order}\n")
        each.stdin.flush()
    return [json.loads(line(each)) for each in running]


@pytest.mark.integration
def test_processes_end_with_one_posterior_though_one_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with process(folder, "A") as a, process(folder, "B") as b:
        with process(folder, "C") as killed:
            assert line(killed) == "sent"
            os.kill(killed.pid, signal.SIGKILL)  # while it evaluates, sends or takes
            assert killed.wait() == -signal.SIGKILL
        with process(folder, "C") as again:
            running = (a, b, again)
            for each in running:
                while (said := line(each)) != "enough":
                    assert said == "sent"
            while any(answers(running, "exchange")):
                pass
            found = answers(running, "posterior")
    late = Replica(SEARCH, FolderStore(folder), "late")
    assert late.observations >= ENOUGH
    expected = posterior_of(late)
    for each in found:
        assert each["observations"] == late.observations
        for name, values in expected.items():
            assert_close(torch.tensor(each[name]).double(), torch.tensor(values).double())
