"""What cannot be sent, and workers of other versions, are named before anything is submitted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from bo_stream.errors import UsageError
from bo_stream.executors import ProcessExecutor, check_picklable, check_workers
from bo_stream.executors.engine import EngineExecutor, EngineFuture, check_versions, versions


@dataclass(frozen=True)
class Holder:
    name: str
    part: Any


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda x: x, r"work, the function .*<lambda>, cannot be pickled"),
        (threading.Lock(), "work, a lock, cannot be pickled"),
        (Holder("a", [1, {"key": lambda: 0}]), r"work\.part\[1\]\['key'\], the function"),
        (partial(print, threading.Lock()), r"work\.args\[0\], a lock"),
        (Holder("a", (1, Holder("b", threading.Lock()))), r"work\.part\[1\]\.part, a lock"),
    ],
)
def test_the_innermost_part_that_cannot_be_pickled_is_named(value: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        check_picklable("work", value)


def test_what_can_be_pickled_passes_and_threads_need_nothing() -> None:
    check_picklable("work", Holder("a", {"b": [1.0, print]}))
    with ThreadPoolExecutor(1) as executor:
        check_picklable("work", threading.Lock(), executor)


class Elsewhere(EngineExecutor):
    """Workers of other versions."""

    def __init__(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        self.found = found

    @property
    def workers(self) -> None:
        return None

    @property
    def capacity(self) -> int:
        return 2

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> EngineFuture[Any]:
        raise NotImplementedError

    def dumps(self, value: Any) -> bytes:
        raise NotImplementedError

    def on_workers(self, fn: Callable[..., Any], *args: Any) -> Mapping[str, Any]:
        return self.found[args[0]]


def of(**changes: Any) -> Elsewhere:
    here = {package: {"one:1": found} for package, found in versions().items()}
    return Elsewhere({**here, **changes})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("1.0", r"The worker two:2 has torch 1\.0, and here is \S+: install torch"),
        (ModuleNotFoundError("no torch"), r"two:2 has torch no version of it \(ModuleNotFound"),
    ],
)
def test_a_worker_of_another_version_is_named(found: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_workers(of(torch={"one:1": versions()["torch"], "two:2": found}))


def test_the_same_version_passes_whatever_processor_it_was_built_for() -> None:
    check_workers(of(torch={"one:1": versions()["torch"].partition("+")[0] + "+cu130"}))
    executor = ProcessExecutor(1)
    check_workers(executor)  # of this interpreter: none is asked
    executor.kill()


def test_tasks_check_the_worker_that_they_are_on() -> None:
    check_versions(versions())
    with pytest.raises(UsageError, match=r"has bo_stream \S+, and here is 0\.0\.1"):
        check_versions({"bo-stream": "0.0.1"})
