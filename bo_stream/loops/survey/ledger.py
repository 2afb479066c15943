"""The ledger of a survey: what was asked, told and withdrawn, in a file that only grows.

A line of ``results.jsonl`` is one verb, as one object in JSON with a number, the time, the values
and a digest. It is on the disk before the verb returns. A process that is killed leaves whole lines
and at most one that is cut short, which was never confirmed to anyone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from bo_stream.errors import UsageError
from bo_stream.loops.run import hold_folder
from bo_stream.storage.archive import atomic_write, write_whole

Verb = Literal["ask", "tell", "withdraw"]

VERBS: tuple[Verb, ...] = ("ask", "tell", "withdraw")

RESULTS = "results.jsonl"
"""Name of the file."""

TORN = "results.torn"
"""Name of the file to which lines go that were cut short."""


@dataclass(frozen=True)
class Event:
    """A verb and its values.

    Attributes:
        sequence: Number, from 1.
        time: In UTC, as in ``2026-01-31T09:30:00Z``.
        verb: The verb.
        values: Plain values of JSON.
    """

    sequence: int
    time: str
    verb: Verb
    values: Mapping[str, Any]

    def line(self) -> str:
        """Return the line of the file, with a digest of all else in it."""
        content = asdict(self)
        return json.dumps({**content, "sha256": _digest(content)}, allow_nan=False) + "\n"

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """Read a line.

        Raises:
            ValueError: It is damaged.
        """
        content = json.loads(line)
        if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
            raise ValueError("its digest is another")
        if content.get("verb") not in VERBS:
            raise ValueError(f"unknown verb {content.get('verb')!r}")
        return cls(**content)


class Ledger:
    """All events of a survey, in memory and, once it has a folder, in a file.

    Attributes:
        events: In their order.
        folder: Of the file; None: there is none yet.
        torn: Text of a last line that was cut short, empty if there is none.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.folder: Path | None = None
        self.torn = ""
        self._end = 0

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the file of a folder; nothing is written.

        Raises:
            UsageError: A line other than the last is damaged.
        """
        ledger = cls()
        ledger.folder = folder
        ledger._read_new()
        return ledger

    @property
    def notes(self) -> tuple[str, ...]:
        """Texts for the coordinator: of a last line that was cut short."""
        if not self.torn:
            return ()
        return (
            f"The last entry of {RESULTS} was cut short when a run was interrupted, and is left "
            f"out: {self.torn[:100]!r}. Tell those results again, or ask again.",
        )

    def move_to(self, folder: Path) -> None:
        """Write all events to a file of a folder that is locked, to which later ones go, too.

        Raises:
            UsageError: The folder has such a file.
            OSError: It cannot be written.
        """
        if (folder / RESULTS).exists():
            raise UsageError(f"{folder} holds a survey already.")
        content = "".join(event.line() for event in self.events).encode()
        with atomic_write(folder / RESULTS) as file:
            file.write(content)
        _sync_folder(folder)
        self.folder, self._end = folder, len(content)

    @contextmanager
    def writing(self) -> Iterator[list[Event]]:
        """Keep other processes out while the block runs, and return what they have written before.

        Raises:
            UsageError: Another process is writing.
        """
        if self.folder is None:
            yield []
            return
        with hold_folder(self.folder, "Wait until it has finished, then try again."):
            yield self._read_new()

    def append(self, verb: Verb, values: Mapping[str, Any]) -> Event:
        """Add an event within :meth:`writing`; it is on the disk when this returns.

        Raises:
            OSError: The disk is full or the file cannot be written; nothing is added.
        """
        time = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        event = Event(len(self.events) + 1, time, verb, values)
        if self.folder is not None:
            self._put(self.folder / RESULTS, event.line().encode())
        self.events.append(event)
        return event

    def _put(self, path: Path, line: bytes) -> None:
        """Write a line behind the whole ones; of one that cannot be written whole nothing stays."""
        with path.open("r+b", buffering=0) as file:
            file.seek(self._end)
            self._set_torn_aside(file.readall())
            file.truncate(self._end)
            write_whole(file, line, self._end)
        self._end += len(line)

    def _set_torn_aside(self, tail: bytes) -> None:
        """Keep what will be overwritten: it was never confirmed, but somebody may miss it."""
        if tail and self.folder is not None:
            with (self.folder / TORN).open("ab") as file:
                file.write(tail + b"\n")
                file.flush()
                os.fsync(file.fileno())
        self.torn = ""

    def _read_new(self) -> list[Event]:
        """Read the events behind those that are known."""
        if self.folder is None:
            return []
        path = self.folder / RESULTS
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(self._end)
                tail = file.read()
        except FileNotFoundError as error:
            raise UsageError(
                f"{self.folder} has no {RESULTS}, which holds all results of a survey. Restore it "
                "from a copy."
            ) from error
        if size < self._end:
            raise UsageError(f"{path} has become shorter. Restore it from a copy.")
        *lines, rest = tail.split(b"\n")
        new: list[Event] = []
        for line in lines:
            new.append(self._parsed(path, line, len(self.events) + len(new) + 1))
            self._end += len(line) + 1
        self.torn = rest.decode(errors="replace")
        self.events += new
        return new

    @staticmethod
    def _parsed(path: Path, line: bytes, number: int) -> Event:
        try:
            event = Event.parse(line)
            if event.sequence != number:
                raise ValueError(f"it has the number {event.sequence}")
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{path}, line {number}, is damaged ({error}). Restore the file from a copy: the "
                "lines before are whole."
            ) from error
        return event


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
