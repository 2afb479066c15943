"""One process at a time in a run's folder."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.run import HOLDER, hold_folder

HOLD = """
import sys
from pathlib import Path
from bo_stream.loops.run import hold_folder

with hold_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.integration
@pytest.mark.parametrize("end", ["killed", "finished"])
def test_another_process_keeps_this_one_out_until_it_ends(tmp_path: Path, end: str) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    message = f"is in use by process {other.pid} on {platform.node()}. Wait"
    for _ in range(2):  # who failed to take it has not freed it
        with pytest.raises(UsageError, match=message), hold_folder(tmp_path):
            pass
    if end == "killed":
        other.kill()
    other.communicate()
    with hold_folder(tmp_path):
        assert str(other.pid) not in (tmp_path / HOLDER).read_text()
    assert not (tmp_path / HOLDER).exists()


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with hold_folder(tmp_path / "none"):
        pass
    assert not (tmp_path / "none").exists()


def test_a_holder_of_whom_nothing_is_known(tmp_path: Path) -> None:
    with hold_folder(tmp_path):
        (tmp_path / HOLDER).write_text("{")
        with pytest.raises(UsageError, match="in use by another process"), hold_folder(tmp_path):
            pass
