"""Schedulers and workers of Dask in processes of their own, which tests can kill."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.documents import ROOT

PATIENCE = 300.0
"""Seconds after which a test fails that waits for another process."""


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@contextmanager
def dask(
    program: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Dask's command ``scheduler`` or ``worker``, killed at the end of the block."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", f"distributed.cli.dask_{program}", *arguments],
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)


def scheduler(port: int) -> list[str]:
    return ["scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]


def worker(port: int) -> list[str]:
    """Without a nanny: it ends when it is killed, and when it loses its scheduler."""
    return ["worker", f"tcp://127.0.0.1:{port}", "--nthreads", "1", "--no-nanny", "--no-dashboard"]


def other_version(folder: Path) -> dict[str, str]:
    """The environment of a process that takes bo_stream for another version."""
    about = folder / "bo_stream-0.0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bo-stream\nVersion: 0.0.1\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {"PYTHONPATH": path}
