"""The folder of a run: one process at a time, and files of its own alone."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bo_stream import WISKI
from bo_stream.errors import UsageError
from bo_stream.loops.run import ASKING, HOLDER, OPTIMIZATION, SURVEY, hold_folder

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


def test_a_checkpoint_replaces_the_models_of_its_own_format_alone(tmp_path: Path) -> None:
    X = torch.rand(5, 1, dtype=torch.float64)
    model = WISKI(X, X, grid_size=8)
    OPTIMIZATION.save(tmp_path, {}, {"surrogate": model})
    (first,) = tmp_path.glob("model-*")
    ASKING.save(tmp_path, {}, {"sampling": model})
    SURVEY.save(tmp_path, {}, {})
    assert first.exists()
    OPTIMIZATION.save(tmp_path, {}, {"surrogate": model})
    assert not first.exists()
    assert len(list(tmp_path.glob("model-*"))) == 2
    OPTIMIZATION.save(tmp_path, {}, {})
    assert [path.name.split("-")[1] for path in tmp_path.glob("model-*")] == ["sampling"]
