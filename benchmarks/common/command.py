"""``bo-stream`` as a user runs it: in a process of its own, with its time and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

COMMAND = "from bo_stream.cli import app; app()"
"""What ``bo-stream`` runs, whether or not its script is on the path."""


@dataclass(frozen=True)
class Run:
    """One run of the command.

    Attributes:
        seconds: Wall clock, start of Python included.
        gib: Largest resident memory.
        out: Folder with what it wrote.
        said: On the terminal.
    """

    seconds: float
    gib: float
    out: Path
    said: str


def bo_stream(arguments: list[str], out: Path) -> Run:
    """Run ``bo-stream`` with arguments and ``--out`` in a process of its own.

    Args:
        arguments: The subcommand and its options.
        out: A folder to be made, for the log and, in ``run``, for what the command writes.

    Raises:
        RuntimeError: It failed; the message ends with what it said.
    """
    command = [sys.executable, "-c", COMMAND, *arguments, "--out", str(out / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    out.mkdir(parents=True)
    begin = time.perf_counter()
    with (out / "log.txt").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        elapsed = time.perf_counter() - begin
        log.seek(0)
        said = log.read()
    if process.returncode != 0:
        raise RuntimeError(
            f"bo-stream {arguments[0]} ended with {process.returncode}:\n{said[-2000:]}"
        )
    return Run(elapsed, usage.ru_maxrss / 2**20, out / "run", said)
