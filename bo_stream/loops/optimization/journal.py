"""The journal of an asynchronous optimization: its trials since the last checkpoint.

A checkpoint holds a model and may take a second; hundreds of workers have several outcomes a
second. So each trial that was asked for, and each that has an outcome, is a line of a file that
only grows between two checkpoints. What is read from both is the state at the last line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import uuid4

from bo_stream.errors import UsageError
from bo_stream.loops.optimization.trials import Trial
from bo_stream.loops.run import from_record
from bo_stream.storage.archive import atomic_write, write_whole

JOURNAL = "trials.jsonl"
"""Name of the file, in the folder of the checkpoint."""


class Journal:
    """A file of trials, whose lines are on the disk before a method returns; of any thread.

    Its first line names the journal, and so does the checkpoint that it belongs to: a journal that
    another run has left in the folder is not read.

    Attributes:
        name: Name that the checkpoints give.
    """

    def __init__(self, folder: Path) -> None:
        """Prepare to write in a folder, from the first :meth:`begin` on."""
        self.name = uuid4().hex
        self._path = folder / JOURNAL
        self._lock = Lock()
        self._file: FileIO | None = None
        self._recent: list[Trial] = []

    def add(self, trials: Iterable[Trial]) -> None:
        """Write the present state of some trials.

        Raises:
            OSError: The disk is full or the file cannot be written; nothing is added to it.
        """
        with self._lock:
            new = list(trials)
            self._recent += new
            if self._file is not None:
                end = self._file.seek(0, os.SEEK_END)
                write_whole(self._file, b"".join(map(_line, new)), end)

    def mark(self) -> int:
        """Return the number of trials so far, for :meth:`begin`, before a checkpoint is written."""
        with self._lock:
            return len(self._recent)

    def begin(self, mark: int) -> None:
        """Leave out the trials before a mark: a checkpoint that holds them is on the disk.

        Whenever the process ends, a complete file is left, the old or the new one; the old one says
        nothing else than the checkpoint does, and what came since.

        Raises:
            OSError: The disk is full or the file cannot be written; the old one stays.
        """
        with self._lock:
            self._recent = self._recent[mark:]
            with atomic_write(self._path) as file:
                file.write(json.dumps({"journal": self.name}).encode() + b"\n")
                file.write(b"".join(map(_line, self._recent)))
            self._close()
            self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file, which stays."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def journaled_trials(folder: Path, name: str) -> Iterator[Trial]:
    """Read the trials of the journal of a name, in their order; none if the folder has another.

    Nothing is written. A last line that was cut short is left out: it was never confirmed.

    Raises:
        UsageError: Another line is damaged.
    """
    path = folder / JOURNAL
    if not path.is_file():
        return
    head, *lines = path.read_bytes().split(b"\n")
    if json.loads(head) != {"journal": name}:
        return
    for number, line in enumerate(lines[:-1], 2):  # after the last end of line is what was cut off
        try:
            yield from_record(Trial, json.loads(line))
        except (ValueError, TypeError, LookupError) as error:
            raise UsageError(
                f"{path} is damaged in line {number} ({error!r}). Restore the folder from a copy, "
                "or remove that line: its trial is evaluated again."
            ) from error


def _line(trial: Trial) -> bytes:
    values: dict[str, Any] = vars(trial)
    return json.dumps(values, allow_nan=False).encode() + b"\n"
