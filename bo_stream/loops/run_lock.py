"""One process at a time in a run's folder."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from bo_stream.loops.errors import UsageError

LOCK = ".lock"
"""Stays where it is: a lock whose file is removed can be held twice."""

HOLDER = ".lock-holder.json"


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder while the block runs.

    The system releases the lock when the process ends, however that comes about.

    Args:
        folder: Where there is none, there is nothing to hold.

    Raises:
        UsageError: Another process holds it.
    """
    if not folder.is_dir():
        yield
        return
    try:
        with FileLock(folder / LOCK, timeout=0):
            (folder / HOLDER).write_text(json.dumps([os.getpid(), platform.node()]))
            try:
                yield
            finally:
                (folder / HOLDER).unlink(missing_ok=True)
    except Timeout as error:
        raise UsageError(
            f"{folder} is in use by {_holder(folder)}. Wait until that run ends, stop it, or give "
            "another --out."
        ) from error


def _holder(folder: Path) -> str:
    try:
        number, host = json.loads((folder / HOLDER).read_text())
    except (OSError, ValueError, TypeError):
        return "another process"
    return f"process {number} on {host}"
