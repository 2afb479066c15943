"""Evaluations that sleep and leave a record, and what is done when so many of them have begun."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 0.4
BOX = ((0.0, 1.0), (0.0, 1.0))
FUNCTION = "benchmarks.common.naps:nap"
RECORD = "BENCHMARK_NAPS"
"""Variable of the environment with the path of the record, a process number for each evaluation."""

_SECONDS_BETWEEN_LOOKS = 0.01


def nap(x: list[float]) -> float:
    """A bowl, after a while."""
    with Path(os.environ[RECORD]).open("a") as record:
        record.write(f"{os.getpid()}\n")
    time.sleep(SECONDS)
    return (x[0] - 0.3) ** 2 + (x[1] - 0.6) ** 2


def begin_record(file: Path) -> None:
    """Keep the record in a new file, of this process and of those that it starts from now on."""
    file.write_text("")
    os.environ[RECORD] = str(file)


def clear_record() -> None:
    """Forget the evaluations so far."""
    Path(os.environ[RECORD]).write_text("")


def begun() -> list[int]:
    """Numbers of the processes of all evaluations that have begun, in their order."""
    return [int(line) for line in Path(os.environ[RECORD]).read_text().splitlines()]


def wait_for(evaluations: int, goes_on: Callable[[], bool]) -> None:
    """Wait until so many evaluations have begun.

    Raises:
        RuntimeError: ``goes_on`` says that no more will.
    """
    while len(begun()) < evaluations:
        if not goes_on():
            raise RuntimeError(f"The run ended after {len(begun())} evaluations of {evaluations}.")
        time.sleep(_SECONDS_BETWEEN_LOOKS)


@contextmanager
def at_evaluation(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Do something, from another thread, when so many evaluations of the block have begun."""
    ended = threading.Event()
    failures: list[BaseException] = []

    def watch() -> None:
        try:
            wait_for(number, lambda: not ended.is_set())
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if failures:
        raise failures[0]
