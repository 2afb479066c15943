"""What is checked before tasks are given to workers: their versions, and what is to be pickled."""

from __future__ import annotations

import pickle
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache, partial
from importlib.metadata import version
from typing import Any

from bo_stream.errors import UsageError
from bo_stream.executors.engine import EngineExecutor

PACKAGES = ("bo-stream", "torch")
"""Distributions of which workers must have the version that is here."""

Dumps = Callable[[Any], bytes]


def check_workers(executor: Executor) -> None:
    """Check that the workers that there are have the versions of bo_stream and torch that are here.

    Workers of Dask and Ray are asked. Those of this machine are of this interpreter, and those of
    an executor of another kind are not asked: see :func:`check_versions`.

    Raises:
        UsageError: One has another version, or lacks the package; it is named.
    """
    if not isinstance(executor, EngineExecutor):
        return
    for package in PACKAGES:
        for worker, found in executor.on_workers(version, package).items():
            if not isinstance(found, OSError):  # it is gone; its tasks look for themselves
                _check_version(worker, package, found)


def check_versions(expected: Mapping[str, str]) -> None:
    """Check, on a worker, that it has the versions that are expected, by distribution.

    Raises:
        UsageError: It has another one.
    """
    for package, wanted in expected.items():
        _check_version(platform.node(), package, versions()[package], wanted)


@cache
def versions() -> Mapping[str, str]:
    """Return the versions that are here, by distribution."""
    return {package: version(package) for package in PACKAGES}


def _check_version(worker: str, package: str, found: Any, wanted: str | None = None) -> None:
    wanted = versions()[package] if wanted is None else wanted
    name = package.replace("-", "_")
    if isinstance(found, Exception):
        found = f"no version of it ({type(found).__name__}: {found})"
    if _release(str(found)) != _release(wanted):
        raise UsageError(
            f"The worker {worker} has {name} {found}, and here is {wanted}: install {name} "
            f"{wanted} there, or start workers of this environment."
        )


def _release(text: str) -> str:
    """Return a version without its local part: builds for a processor or a GPU are alike."""
    return text.partition("+")[0]


def check_picklable(name: str, value: Any, executor: Executor | None = None) -> None:
    """Check that a value can be sent to the workers of an executor.

    Args:
        name: Name of the value, for the message.
        value: The value.
        executor: By its kind of pickle; None: by Python's. Threads need none.

    Raises:
        UsageError: It cannot; the innermost part that cannot is named.
    """
    dumps = _dumps_of(executor)
    if dumps is None:
        return
    error = _why_not(value, dumps)
    if error is None:
        return
    path, part = name, value
    while (inner := _culprit(part, dumps)) is not None:
        path, part = path + inner[0], inner[1]
    reason = " ".join(str(_why_not(part, dumps)).split())
    raise UsageError(
        f"{path}, {_described(part)}, cannot be pickled, as it must be to reach the workers "
        f"({reason}). Give a function at the top level of a module, and plain values."
    )


def _dumps_of(executor: Executor | None) -> Dumps | None:
    if isinstance(executor, ThreadPoolExecutor):
        return None
    if isinstance(executor, EngineExecutor):
        return executor.dumps
    cloudpickle = sys.modules.get(
        "cloudpickle"
    )  # Dask's, loky's and submitit's; they have loaded it
    if executor is None or isinstance(executor, ProcessPoolExecutor) or cloudpickle is None:
        return pickle.dumps
    return cloudpickle.dumps


def _why_not(value: Any, dumps: Dumps) -> Exception | None:
    try:
        dumps(value)
    except Exception as error:  # a class may raise anything when it is pickled
        return error
    return None


def _culprit(value: Any, dumps: Dumps) -> tuple[str, Any] | None:
    """Return the first part that cannot be pickled, with the words that follow the whole's name."""
    return next(((k, part) for k, part in _parts(value) if _why_not(part, dumps) is not None), None)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, partial):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, tuple | list | set | frozenset):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif not isinstance(value, type):
        state: Mapping[str, Any] = getattr(value, "__dict__", {})
        yield from ((f".{name}", part) for name, part in state.items())


def _described(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return f"the {type(value).__name__} {name}" if name else f"a {type(value).__name__}"
