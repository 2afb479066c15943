"""Functions that workers do, found by their names."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any


def double(x: float) -> float:
    return 2.0 * x


def fail(text: str) -> None:
    raise ValueError(text)


def fork_and_double(x: float) -> float:
    """Double in two processes, of which this one knows the first alone."""
    os.fork()
    return 2.0 * x


def leave(code: int) -> None:
    os._exit(code)


def hang() -> None:
    time.sleep(600.0)


def process() -> int:
    return os.getpid()


def wait_for(path: str) -> str:
    """Touch ``path``.begun, and wait until there is a file at the path."""
    Path(f"{path}.begun").touch()
    while not Path(path).exists():
        time.sleep(0.01)
    return path


class Odd(Exception):
    """Cannot be built from its own arguments, so it cannot be unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def oddly() -> None:
    raise Odd(1, 2)


class Wordless(Exception):
    """Has neither a text nor a pickle."""

    def __str__(self) -> str:
        raise ValueError("no words")

    def __reduce__(self) -> Any:
        raise TypeError("no pickle")


def wordlessly() -> None:
    raise Wordless


def cancel() -> None:
    raise asyncio.CancelledError("withdrawn")


class Unreadable:
    """Can be pickled, but not be unpickled."""

    def __reduce__(self) -> Any:
        return be_absent, ()


def be_absent() -> None:
    raise OSError("the value's file is not here")


def unreadable() -> Unreadable:
    return Unreadable()
