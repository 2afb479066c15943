"""What runs on an accelerator, and the pretend one, each in a process of its own: it stays there.

The files are named so that pytest does not collect them: it is given them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.laws.devices import pretend

HERE = Path(__file__).parent

PARTS = {
    "the device itself": ["pretend_itself.py"],
    "laws": ["on_device.py", "-k", "test_law"],
    "moving, saving, loading, learning": ["on_device.py", "-k", "not test_law"],
}


@pytest.mark.integration
@pytest.mark.parametrize("part", PARTS)
def test_in_a_process_of_its_own(part: str, request: pytest.FixtureRequest) -> None:
    file, *chosen = PARTS[part]
    needs_pretend = file == "pretend_itself.py" or not torch.cuda.is_available()
    if needs_pretend and (reason := pretend.why_missing()):
        pytest.skip(reason)
    seed = str(request.config.getoption("--seed"))
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--seed", seed, *chosen]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(HERE / file), *options],
        cwd=HERE.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_another_torch_is_a_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.4.1")
    assert "not 2.4.1" in str(pretend.why_missing())
    with pytest.raises(RuntimeError, match=r"not 2\.4\.1"):
        pretend.install()
