"""Data-parallel training on real processes, over gloo: equal to one, refused, killed, silent."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.distributed.test_training import CASES, SAME, assert_same, trained
from tests.support.documents import ROOT, blocks

pytestmark = pytest.mark.integration

LONG = 300.0
"""Seconds that a busy machine may take for what takes some."""
KINDS = ["few functions drawn", "spectral", "online labels"]

BEGIN = """
import os
import signal
import sys
import time
from pathlib import Path

import torch

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
from bo_stream.collective import ALONE
from bo_stream.distributed import LostProcessError, data_parallel, training
from bo_stream.errors import UsageError
from tests.distributed.test_training import CASES, small, trained
"""

TOGETHER = """
torch.distributed.init_process_group("gloo")
group = training.ProcessGroup(torch.device("cpu"))
try:
    with data_parallel(small(seed=rank)):
        raise SystemExit("it was taken")
except UsageError as error:
    print(error, flush=True)
for name in sys.argv[1:]:
    torch.save(trained(CASES[name], rank, group), f"{name}-{rank}.pt")
model = small()
try:
    with data_parallel(model) as processes:
        processes.fit(60, progress=False)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        processes.fit(10**9, progress=False)
except LostProcessError as error:
    print(error, flush=True)
    assert model.num_steps >= 60 and model.num_observations == 12
    assert bool(model.posterior(torch.rand(3, 2).double()).mean.isfinite().all())
    os._exit(3)
"""

SILENT = """
Path(f"ready{rank}").touch()  # the time-out counts from here on, where nothing is to be imported
while len(list(Path().glob("ready*"))) < 2:
    time.sleep(0.01)
with data_parallel(small()):
    pass
model = small()
try:
    with data_parallel(model, timeout=20.0) as processes:
        if rank == 1:
            time.sleep(1000.0)
        processes.fit(10**9, progress=False)
except LostProcessError as error:
    print(error, flush=True)
    os._exit(3)
"""


SEVERAL = """
for _ in range(3):
    if rank == 0:
        time.sleep(1.0)  # while the other finds what is left of the block before
    with data_parallel(small(), timeout=60.0) as processes:
        processes.fit(3, progress=False)
"""

ABSENT = """
try:
    with data_parallel(small(), timeout=2.0):
        pass
except LostProcessError as error:
    print(error, flush=True)
    os._exit(3)
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def some(
    folder: Path, program: str, *arguments: str, count: int = 2
) -> Iterator[list[subprocess.Popen[str]]]:
    """The first processes of a group of two, which are ended with the block."""
    (folder / "program.py").write_text(BEGIN + program)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, "program.py", *arguments],
            cwd=folder,
            env={**os.environ, **common, "RANK": str(rank), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_equal_to_one_process_until_one_is_killed(tmp_path: Path) -> None:
    """One pair of processes: refused with other seeds, trained, then left by one of them."""
    with some(tmp_path, TOGETHER, *KINDS) as (first, second):
        said, wrong = first.communicate(timeout=LONG)
        second.wait(LONG)
    assert first.returncode == 3, wrong
    assert second.returncode == -9
    refused, lost = said.splitlines()
    assert "Process 1 has option.schedule.seed 1, process 0 has 0" in refused
    assert lost.startswith("Process 0 of 2 waits for one that has ended or is silent")
    for name in KINDS:
        one = trained(CASES[name], None)
        for rank in range(2):
            assert_same(torch.load(tmp_path / f"{name}-{rank}.pt"), one, **SAME)


def test_a_silent_process_is_not_waited_for_beyond_the_time_out(tmp_path: Path) -> None:
    """In the second block of a script."""
    with some(tmp_path, SILENT) as (first, second):
        said, wrong = first.communicate(timeout=LONG)
        assert second.poll() is None  # it sleeps
    assert first.returncode == 3, wrong
    (line,) = said.splitlines()
    assert line.startswith("Process 0 of 2 waits for one that has ended or is silent")


def test_a_process_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    with some(tmp_path, ABSENT, count=1) as (first,):
        said, wrong = first.communicate(timeout=LONG)
    assert first.returncode == 3, wrong
    (line,) = said.splitlines()
    assert line.startswith("Expected 2 processes within 2 s at 127.0.0.1:")


def under_torchrun(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", "2", "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )


def test_a_script_under_torchrun_has_several_blocks(tmp_path: Path) -> None:
    done = under_torchrun(tmp_path, BEGIN + SEVERAL)
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_page_under_torchrun(tmp_path: Path) -> None:
    (example,) = [
        block.code
        for block in blocks(ROOT / "docs" / "scale" / "training.md")
        if block.language == "python" and "data_parallel(" in block.code
    ]
    done = under_torchrun(tmp_path, textwrap.dedent(example))
    assert done.returncode == 0, done.stderr
    # Both processes write to one pipe, the end of a line apart from its text: texts may share one.
    said = re.findall(r"process (\d) of 2: (-?\d+\.\d{6})", done.stdout)
    assert sorted(rank for rank, _ in said) == ["0", "1"], done.stdout
    assert len({bound for _, bound in said}) == 1
    assert (tmp_path / "model.safetensors").exists()
