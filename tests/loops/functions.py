"""Functions that the tests optimise, found by name in worker processes too."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path


def bowl(x: list[float]) -> float:
    return sum((value - 0.7) ** 2 for value in x)


def half_forbidden(x: list[float]) -> float:
    if x[0] < 1.0:
        raise ValueError("forbidden\nground")
    return bowl(x)


def never(x: list[float]) -> float:
    raise RuntimeError("no power")


def hang(x: list[float]) -> float:
    if x[0] < 1.0:
        time.sleep(600)
    return bowl(x)


def die(x: list[float]) -> float:
    if x[0] < 1.0:
        os._exit(7)
    return bowl(x)


def slow(x: list[float]) -> float:
    """Takes x seconds; a negative x waits until two are at it, in the working directory."""
    if x[0] < 0.0:
        Path(f"met{x[0]}").touch()
        while len(list(Path().glob("met*"))) < 2:
            time.sleep(0.01)
    time.sleep(max(0.0, x[0]))
    return x[0]


def nan(x: list[float]) -> float:
    return math.nan


def infinite(x: list[float]) -> float:
    return math.inf


def enormous(x: list[float]) -> float:
    return 1e300


class Mute(Exception):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


def mute(x: list[float]) -> float:
    raise Mute


def pair(x: list[float]) -> list[float]:
    return [1.0, 2.0]


def text(x: list[float]) -> str:
    return "1.0"


def ragged(x: list[float]) -> list[object]:
    return [1.0, [2.0]]


def nothing(x: list[float]) -> None:
    return None


def leave(x: list[float]) -> float:
    raise SystemExit(3)


def third_time(x: list[float]) -> float:
    """Fails twice for each point; counts in files of the working directory."""
    file = Path(f"calls-{x[0]:.12f}")
    calls = len(file.read_text()) if file.exists() else 0
    file.write_text("x" * (calls + 1))
    if calls < 2:
        raise OSError("not yet")
    return bowl(x)


NUMBER = 3.0
