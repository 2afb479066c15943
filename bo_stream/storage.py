"""Atomic writing of files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4


@contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside ``path`` that replaces it when the block ends without error.

    Raises:
        OSError: The disk is full or the folder cannot be written; the old file stays.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.{uuid4().hex}")
    try:
        with draft.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
