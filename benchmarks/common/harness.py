"""Measuring: interleaved timings, memory, and the command line that every benchmark shares."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from bo_stream.cli.benchmark import commit_of

T = TypeVar("T")

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
RESULTS = Path(__file__).parents[1] / "results"
_SHARED_TYPES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


@dataclass(frozen=True)
class Options:
    """What the command line asked for.

    Attributes:
        smoke: Tiny sizes, to see that the benchmark runs.
        out: Folder of the JSON results.
        load: Average number of running processes in the minute before, this one not counted.
        commit: Of the repository at the start; None where files differ from it, or without git.
        flags: Those of the benchmark's own flags that were given.
        values: Of the benchmark's own options, as they were given or by default.
    """

    smoke: bool
    out: Path
    load: float
    commit: str | None = None
    flags: frozenset[str] = frozenset()
    values: Mapping[str, str] = field(default_factory=dict)

    def pick(self, full: T, smoke: T) -> T:
        """``smoke`` in a smoke run, else ``full``."""
        return smoke if self.smoke else full


def start(
    description: str | None,
    seed: int = 0,
    flags: Mapping[str, str] | None = None,
    values: Mapping[str, tuple[str, str]] | None = None,
) -> Options:
    """Parse the command line and fix threads, dtype and seed.

    Args:
        description: Shown by ``--help``.
        seed: Of torch's global generator.
        flags: The benchmark's own, with their help.
        values: The benchmark's own options that take a value, with its default and their help.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, a few seconds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON results")
    for flag, text in (flags or {}).items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    for name, (default, text) in (values or {}).items():
        parser.add_argument(f"--{name}", default=default, help=f"{text} (default: {default})")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    torch.broadcast_shapes((1,))  # half a second of imports the first time: in no task's time
    given = frozenset(flag for flag in flags or {} if getattr(arguments, flag))
    chosen = {name: str(getattr(arguments, name)) for name in values or {}}
    load, commit = os.getloadavg()[0], commit_of(Path(__file__).parents[2])
    return Options(arguments.smoke, arguments.out, load, commit, given, chosen)


def names(given: str, known: Mapping[str, object], what: str) -> tuple[str, ...]:
    """Names separated by semicolons, as some hold commas; ``all`` are all of them."""
    chosen = tuple(known) if given == "all" else tuple(name.strip() for name in given.split(";"))
    unknown = [name for name in chosen if name not in known]
    if unknown:
        sys.exit(f"No {what} {', '.join(unknown)}. There are: {'; '.join(known)}.")
    return chosen


def seconds(task: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    begin = time.perf_counter()
    task()
    return time.perf_counter() - begin


def processor_seconds(task: Callable[[], object]) -> float:
    """Seconds that one call keeps processors busy: what others run does not count."""
    begin = time.process_time()
    task()
    return time.process_time() - begin


def interleave(
    tasks: dict[str, Callable[[], object]], repeats: int, warmup: int = 1
) -> dict[str, float]:
    """Median seconds of each task; see :func:`timings`."""
    found = timings(tasks, repeats, warmup)
    return {name: statistics.median(times) for name, times in found.items()}


def timings(
    tasks: dict[str, Callable[[], object]],
    repeats: int,
    warmup: int = 1,
    clock: Callable[[Callable[[], object]], float] = seconds,
    calls: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each task, the tasks taking turns so that a busy machine slows all alike.

    Args:
        tasks: By name.
        repeats: Turns that count.
        warmup: Turns before them that do not.
        clock: :func:`seconds` or :func:`processor_seconds`.
        calls: Times that a task is called in each of its turns, each timed; default: once.
    """
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(warmup + repeats):
        for name, task in tasks.items():
            elapsed = [clock(task) for _ in range((calls or {}).get(name, 1))]
            if turn >= warmup:
                times[name] += elapsed
    return times


def best_peer(medians: dict[str, float], names: Iterable[str]) -> tuple[str, float]:
    """The fastest of the named tasks and its median."""
    name = min(names, key=lambda candidate: medians[candidate])
    return name, medians[name]


def tensor_bytes(root: object) -> int:
    """Bytes of all tensor storages that can be reached from an object, each counted once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    pending = [root]
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, _SHARED_TYPES):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor) and item.layout == torch.strided:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        pending.extend(gc.get_referents(item))
    return sum(storages.values())


def peak_growth(task: Callable[[], object]) -> int:
    """Bytes by which resident memory rises, at its highest, while the task runs (Linux)."""
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    task()
    return max(_status("VmHWM") - before, 0)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"This system's /proc/self/status has no {field}.")
