"""Threads that wait leave their processor to others: a busy machine slows tests, but ends them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WHEN_TORCH_LOADS = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.exit(os.environ.get("OMP_WAIT_POLICY"))

sys.meta_path.insert(0, Watch())
import tests.conftest
import torch
"""


@pytest.mark.integration
def test_threads_of_the_tests_wait_passively() -> None:
    """Beside busy processes two threads that spin take up to a hundred times as long as one.

    Tests that take seconds then seem never to end. OpenMP reads its policy when it is loaded.
    """
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    command = [sys.executable, "-c", WHEN_TORCH_LOADS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "PASSIVE"
