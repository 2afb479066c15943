"""A run of a command: checkpoints, progress, and how many cores it may take."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from uuid import uuid4

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from bo_stream.errors import UsageError
from bo_stream.storage.archive import (
    FileFormat,
    OtherVersionError,
    describe_file,
    read_index,
    write_index,
)
from bo_stream.warnings import users_stack_level

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP


_LEAST_SECONDS = 1.0
"""Seconds of work before anything is concluded."""

_LEAST_SHARE = 0.8
"""Least share of a core that a thread which computes has where the cores are its own."""

_PREEMPTIONS_A_SECOND = 20.0
"""Most preemptions per second on a core of its own; on a shared one there are hundreds."""


class CrowdedCoresWarning(UserWarning):
    """A warning that other processes use the same cores, and threads of this one spin."""


def usage_of_this_thread() -> NDArray[np.float64]:
    """Return the thread's wall time, processor time, preemptions and sleeps since some time.

    Times are in seconds, preemptions and sleeps are context switches, involuntary and voluntary.
    All are zero on systems other than Linux.
    """
    if sys.platform != "linux":
        return np.zeros(4)
    import resource

    used = resource.getrusage(resource.RUSAGE_THREAD)
    at_work = used.ru_utime + used.ru_stime
    return np.array([time.monotonic(), at_work, used.ru_nivcsw, used.ru_nvcsw])


class CoreWatch:
    """A context that warns once if the work within it is slowed down by threads that spin.

    Threads of one process wait for each other many times in an update. One that spins keeps the
    core that another one needs until the system takes it away: two are then far slower than one.
    """

    def __init__(self, usage: Callable[[], NDArray[np.float64]] = usage_of_this_thread) -> None:
        """Measure by ``usage``, which returns the use so far by the thread that works."""
        self._usage = usage
        self._sum = self._before = np.zeros(4)
        passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        sleeping = passive or os.environ.get("GOMP_SPINCOUNT") == "0"
        self._warned = torch.get_num_threads() == 1 or sleeping

    def __enter__(self) -> Self:
        self._before = self._usage()
        return self

    def __exit__(self, *_: Any) -> None:
        self._sum = self._sum + self._usage() - self._before
        seconds, core_seconds, preempted, slept = self._sum
        if seconds < _LEAST_SECONDS:
            return
        self._sum = np.zeros(4)
        # the thread wanted a core, never slept, and often had none
        often = preempted > max(slept, _PREEMPTIONS_A_SECOND * core_seconds)
        if often and core_seconds < _LEAST_SHARE * seconds and not self._warned:
            self._warned = True
            warnings.warn(
                f"Other processes use the same cores: this one had "
                f"{100 * core_seconds / seconds:.0f} % of a core, and its "
                f"{torch.get_num_threads()} threads spin while they wait for each other. "
                "Set OMP_WAIT_POLICY=PASSIVE in the environment before Python starts, or "
                "OMP_NUM_THREADS=1.",
                CrowdedCoresWarning,
                stacklevel=users_stack_level(),
            )


# --- a run in a folder: a lock, checkpoints of index and models ----------------------------------


T = TypeVar("T")
Event = TypeVar("Event")

SECONDS_BETWEEN_CHECKPOINTS = 15.0

LOCK = ".lock"
"""Name of the lock file, which is never removed: two processes could hold a removed one."""

HOLDER = ".lock-holder.json"

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MODELS = "model-*.safetensors"
_DAMAGE = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
_CURE = "Restore the folder from a copy, or start anew in another folder."


@dataclass(frozen=True)
class CheckpointFormat:
    """A format of checkpoints: an index in JSON, and files of the models that it names.

    Attributes:
        name: File name of the index.
        run: Name of the saved object, for messages.
        format: Format of the index.
    """

    name: str
    run: str
    format: FileFormat

    def save(
        self, folder: Path, content: Mapping[str, Any], models: Mapping[str, StreamingGP]
    ) -> None:
        """Write models and index so that a complete checkpoint, old or new, exists at any time.

        The models go to new files, then the index is replaced in one move, then the previous models
        are removed. The folder is created if necessary.

        Args:
            folder: Folder of the run.
            content: Plain values; the entry ``models`` is added here.
            models: Models by key.

        Raises:
            OSError: The folder cannot be written, or the disk is full; the old checkpoint stands.
        """
        folder.mkdir(parents=True, exist_ok=True)
        previous = set(folder.glob(_MODELS))
        try:
            files = {key: ModelFile.write(folder, key, model) for key, model in models.items()}
            records = {key: asdict(file) for key, file in files.items()}
            write_index(folder / self.name, self.format, {"models": records, **content})
        except BaseException:
            _remove(set(folder.glob(_MODELS)) - previous)
            raise
        _remove(previous)

    @contextmanager
    def opened(self, folder: Path) -> Iterator[dict[str, Any]]:
        """Read the index; an error of the block that parses it is reported as damage.

        Raises:
            UsageError: There is none, it is damaged or was changed, or another version wrote it.
        """
        path = folder / self.name
        if not path.is_file():
            raise UsageError(
                f"There is no {self.run} to resume in {folder}: it has no {self.name}."
            )
        try:
            content = read_index(path, self.format)
        except OtherVersionError as error:
            raise UsageError(f"{error} Or start anew in another folder.") from error
        except (OSError, ValueError) as error:
            raise UsageError(f"{error} {_CURE}") from error
        try:
            yield content
        except UsageError:
            raise
        except _DAMAGE as error:
            raise UsageError(f"{path} is damaged or no checkpoint ({error!r}). {_CURE}") from error


SAMPLING = CheckpointFormat(
    "checkpoint.json", "run", FileFormat("bo_stream sampling checkpoint", 9, True)
)
ASKING = CheckpointFormat(
    "sampling.json", "sampling", FileFormat("bo_stream active sampling", 2, True)
)
OPTIMIZATION = CheckpointFormat(
    "optimization.json", "optimization", FileFormat("bo_stream optimization checkpoint", 9, True)
)
REPLAY = CheckpointFormat("replay.json", "replay", FileFormat("bo_stream survey replay", 1, True))


@dataclass(frozen=True)
class ModelFile:
    """A model's file as an index names it.

    Attributes:
        name: File name, in the folder of the index.
        sha256: Digest that the file names in its header, in hexadecimal digits.
        observations: Number of observations in the model.
    """

    name: str
    sha256: str
    observations: int

    @classmethod
    def write(cls, folder: Path, key: str, model: StreamingGP) -> Self:
        """Write a model to a new file."""
        observations = round(model.num_observations)
        path = folder / f"model-{key}-{observations:07d}-{uuid4().hex[:8]}.safetensors"
        model.save(path)
        return cls(path.name, describe_file(path)["sha256"], observations)

    def read(self, folder: Path, kind: type[StreamingGP], device: str) -> StreamingGP:
        """Load the model; nothing in the file is executed (see :meth:`StreamingGP.load`).

        A file that lies elsewhere, is damaged or was replaced is a ``UsageError``.
        """
        path = folder / self.name
        if Path(self.name).name != self.name:
            raise UsageError(
                f"The checkpoint in {folder} names the model {self.name!r}: expected the name of a "
                f"file in that folder. {_CURE}"
            )
        try:
            digest = describe_file(path)["sha256"]  # as its header says; loading checks that
            if digest != self.sha256:
                raise ValueError(
                    f"{path} is not the file that was written (SHA-256 {self.sha256[:12]}..., got "
                    f"{digest[:12]}...)."
                )
            model = kind.load(path, map_location=device)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"The checkpoint in {folder} cannot be read: {error} {_CURE}"
            ) from error
        observations = round(model.num_observations)
        if observations != self.observations:
            raise UsageError(
                f"{path} holds a model of {observations:,} observations, the checkpoint says "
                f"{self.observations:,}. {_CURE}"
            )
        return model


def from_record(kind: type[T], record: Mapping[str, Any]) -> T:
    """Build a dataclass from all of its fields as JSON returns them; lists become tuples."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    return kind(**{name: _as_tuples(record[name]) for name in names})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


@contextmanager
def hold_folder(
    folder: Path, advice: str = "Wait until that run ends, stop it, or give another --out."
) -> Iterator[None]:
    """Lock a folder against other processes while the block runs.

    The lock ends with the process, in any way. A missing folder is not locked.

    Args:
        folder: The folder.
        advice: What to do if another process holds the lock, for the message.

    Raises:
        UsageError: Another process holds the lock.
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
        try:
            number, host = json.loads((folder / HOLDER).read_text())
            holder = f"process {number} on {host}"
        except (OSError, ValueError, TypeError):
            holder = "another process"
        raise UsageError(f"{folder} is in use by {holder}. {advice}") from error


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def run_with_checkpoints(
    events: Iterator[Event],
    save: Callable[[], None],
    stop: StopRequest,
    on_event: Callable[[Event], None],
    *,
    ends_step: Callable[[Event], bool] = lambda _: True,
    is_costly: Callable[[Event], bool] = lambda _: False,
    seconds_between_checkpoints: float = SECONDS_BETWEEN_CHECKPOINTS,
) -> None:
    """Carry out a run; a checkpoint is also written at the end, even after an error.

    Events, which are steps or parts of steps, are done as they are drawn. The run may be stopped
    after one that ends a step. A costly one is saved at once, others after the seconds between
    checkpoints.
    """
    last = -float("inf")
    try:
        for event in events:
            on_event(event)
            if stop.made and ends_step(event):
                return
            if is_costly(event) or time.monotonic() - last > seconds_between_checkpoints:
                save()
                last = time.monotonic()
    finally:
        save()


def check_not_shorter(done: int, asked: int) -> None:
    """Raise a ``UsageError`` if fewer steps are asked for than are done."""
    if done > asked:
        raise UsageError(
            f"The run has done {done:,} steps already: expected steps of at least that, got "
            f"{asked:,}."
        )


class StopRequest:
    """A context in which a first Ctrl-C (or SIGTERM) asks to stop, and a second one interrupts.

    Attributes:
        made: Whether a stop was asked for.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        """Prepare a request, at which ``on_request`` is called."""
        self.made = False
        self._on_request = on_request
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        self._restore_handlers()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.made = True
        self._restore_handlers()
        self._on_request()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
