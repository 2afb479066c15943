"""Stores through which replicas exchange: deltas are sent, gathered and compacted, runs listed.

Any ``MutableMapping[str, bytes]`` will do, such as those of ``zarr``, ``zict`` or ``fsspec``: a
value is written whole, and a key that was written can be listed and read by all from then on.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from botorch.exceptions.errors import UnsupportedError

from bo_stream.distributed.deltas import (
    MOST_ROWS,
    Delta,
    Dot,
    Listing,
    Store,
    UnusableError,
    VanishedError,
    VectorClock,
    counted_key,
    delta_key,
    name_of,
    opened,
    sealed,
    snapshot_of,
    spelled,
)
from bo_stream.distributed.sums import accumulate, zero
from bo_stream.errors import UsageError
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import atomic_write


class MemoryStore(MutableMapping[str, bytes]):
    """A store in the memory of this process, for replicas in threads and for tests."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def __getitem__(self, key: str) -> bytes:
        return self._values[key]

    def __setitem__(self, key: str, value: bytes) -> None:
        _check_same(key, self._values.setdefault(key, value), value)

    def __delitem__(self, key: str) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted([*self._values]))

    def __len__(self) -> int:
        return len(self._values)


class FolderStore(MutableMapping[str, bytes]):
    """A store in a folder that all replicas can reach, on a disk or a network file system.

    A value is a file, which is written under another name in its folder and then renamed, so that
    others see it whole or not at all. Drafts of killed processes have names that begin with a dot,
    and are no keys. Nothing is locked.
    """

    def __init__(self, path: str | Path) -> None:
        """Use a folder, which is created if necessary.

        Raises:
            UsageError: It is a file, or cannot be created.
        """
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be used as a folder to exchange in: {error}"
            ) from error

    def __getitem__(self, key: str) -> bytes:
        try:
            return self._file(key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise KeyError(key) from error

    def __setitem__(self, key: str, value: bytes) -> None:
        file = self._file(key)
        if file.exists():
            _check_same(key, file.read_bytes(), value)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as draft:
            draft.write(value)

    def __delitem__(self, key: str) -> None:
        try:
            self._file(key).unlink()
        except FileNotFoundError as error:
            raise KeyError(key) from error

    def __iter__(self) -> Iterator[str]:
        keys = list[str]()
        for folder, folders, files in os.walk(self.path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            parent = Path(folder).relative_to(self.path)
            keys += [(parent / name).as_posix() for name in files if not name.startswith(".")]
        return iter(sorted(keys))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _file(self, key: str) -> Path:
        parts = key.split("/")
        if any(not part or part.startswith(".") or "\\" in part for part in parts):
            raise UsageError(
                f"Expected a key of names separated by /, none of which begins with a dot, got "
                f"{key!r}."
            )
        return self.path.joinpath(*parts)


class TakenError(UsageError):
    """A store has another value at a key."""


def _check_same(key: str, stored: bytes, value: bytes) -> None:
    if stored != value:
        raise TakenError(
            f"The store holds another value at {key}. What replicas have written there is never "
            "changed: give each store to one search, and each replica a name of its own."
        )


# --- observations that a replica has not sent yet -------------------------------------------------


class Outbox:
    """Packs observations into deltas; a delta that may have been written is not packed again.

    Attributes:
        run: The run that writes the deltas.
        search: Digest of the search.
        template: The model without observations that all replicas begin with.
    """

    def __init__(self, run: str, search: str, template: StreamingGP) -> None:
        """Begin with nothing to send, and the number 1."""
        self.run, self.search, self.template = run, search, template
        self._waiting: Delta | None = None
        self._packed: Delta | None = None  # the delta of the present number
        self._content: bytes | None = None  # its record, which has the number in its header
        self._number = 0

    def add(self, observed: Delta) -> None:
        """Add observations to the next delta."""
        total = observed if self._waiting is None else self._waiting.plus([observed])
        self._waiting = total.settled(self.template)

    def send(self, store: Store) -> Iterator[tuple[Dot, int, int]]:
        """Write all deltas, for others to read.

        A number at which the store has a value that this run never wrote, such as a copy, is left
        out. A call that raises has lost nothing, and the next one goes on.

        Yields:
            The identity of each delta when it is written, and its numbers of observations and of
            bytes.
        """
        while True:
            if self._packed is None:
                self._packed, self._waiting = self._waiting, None
            if self._packed is None:
                return
            count = self._packed.observations
            if self._content is None:
                self._number += 1
                key, arrays = delta_key((self.run, self._number)), self._packed.arrays()
                self._content = sealed(key, self.search, {"count": count}, arrays)
            dot, size = (self.run, self._number), len(self._content)
            try:
                store[delta_key(dot)] = self._content
            except TakenError:  # the next number may be free
                self._content = None
                continue
            self._content = self._packed = None
            yield dot, count, size


# --- reading the deltas of a store that a sum lacks: each once, in any order ----------------------


@dataclass(frozen=True)
class Gathered:
    """Deltas that were read and are to be added to a sum.

    Attributes:
        delta: The sum of all deltas that were read; None if none was.
        clock: Set of the deltas in the sum after the addition.
        restarts: Whether to begin again: then the delta, which includes a snapshot, is the whole
            sum.
        deltas: Number of deltas that were read.
        bytes: Number of bytes that were read.
        remarks: Records that were left out, with the reasons.
    """

    delta: Delta | None
    clock: VectorClock
    restarts: bool = False
    deltas: int = 0
    bytes: int = 0
    remarks: tuple[str, ...] = ()


@dataclass
class Gathering:
    """Reads the records of one search in a store.

    Attributes:
        store: The store.
        search: Digest of the search.
        template: The model without observations that all replicas begin with.
        clocks: Clocks of snapshots, by key, as far as they were read.
    """

    store: Store
    search: str
    template: StreamingGP
    clocks: dict[str, VectorClock] = field(default_factory=dict)

    def missing(self, present: VectorClock, listing: Listing) -> Gathered:
        """Read the deltas that are in the store but not in a sum.

        Deltas are read one by one while all of them are there. A delta that is not there has been
        put into a snapshot and removed: then the sum begins again from a snapshot that has it, and
        goes on with the deltas that are not in the snapshot, so that none is counted twice.

        Args:
            present: Set of the deltas in the sum.
            listing: Listing of the store.

        Raises:
            VanishedError: The store was compacted since it was listed.
        """
        remarks = self.read_clocks(listing)
        known = present.plus(listing.deltas)
        # clocks that the sum can reach, from itself (None) or from snapshots that lose no delta
        reachable: dict[str | None, VectorClock] = {None: known}
        for key in reversed(self.clocks):
            reached = self.clocks[key].plus(listing.deltas)
            if reached.covers(present):
                reachable[key] = reached
        for clock in self.clocks.values():
            known = known.joined(clock)
        for start_key in sorted(reachable, key=lambda key: len(reachable[key].lacking(known))):
            start, deltas, dots, size = present, list[Delta](), list[Dot](), 0
            if start_key is not None:
                start = self.clocks[start_key]
                try:
                    snapshot, size = self._delta(snapshot_of(start_key))
                except UnusableError as error:
                    remarks.append(str(error))
                    continue
                deltas.append(snapshot)
            left_out = list[str]()
            for dot, key in listing.deltas.items():
                if dot in start:
                    continue
                try:
                    delta, more = self._delta(key)
                except UnusableError as error:
                    left_out.append(str(error))
                    continue
                deltas.append(delta)
                dots.append(dot)
                size += more
            lost = reachable[start_key].lacking(known)
            if lost:
                remarks.append(
                    f"{len(lost)} deltas are neither in the store nor in a snapshot that can be "
                    f"read ({spelled(lost)}): their observations are missing here."
                )
            return Gathered(
                deltas[0].plus(deltas[1:]).settled(self.template) if deltas else None,
                start.plus(dots),
                start_key is not None,
                len(dots),
                size,
                (*remarks, *left_out),
            )
        raise AssertionError("the sum itself can always go on")

    def read_clocks(self, listing: Listing) -> list[str]:
        """Read the clocks of new snapshots, forget clocks of removed ones, and return remarks."""
        remarks = []
        self.clocks = {key: self.clocks[key] for key in listing.clocks if key in self.clocks}
        for key in listing.clocks:
            if key not in self.clocks:
                try:
                    about, _, _ = opened(self.store, key, self.search)
                    self.clocks[key] = VectorClock.of_plain(about.get("clock", {}))
                except VanishedError:
                    raise
                except ValueError as error:
                    remarks.append(str(error))
        return remarks

    @cached_property
    def most_bytes(self) -> int:
        """Number of bytes that no sums of the search exceed: twice the size of some of its sums.

        Statistics have the same size for any number of observations.
        """
        like = next(self.template.parameters())
        x = torch.linspace(0.0, 1.0, MOST_ROWS + 1).unsqueeze(-1).to(like)
        sums = accumulate(zero(self.template), x.repeat(1, self.template.input_dim), x)
        return 2 * len(sums.to_bytes()) + 2**20

    def _delta(self, key: str) -> tuple[Delta, int]:
        _, arrays, size = opened(self.store, key, self.search)
        try:
            return Delta.of_arrays(arrays, self.template, self.most_bytes), size
        except (ValueError, UnsupportedError) as error:
            raise UnusableError(f"{key} is left out: {error}") from error


# --- putting the deltas of a store into one snapshot, while others read and write the store -------


def compact(gathering: Gathering, run: str) -> int:
    """Write a snapshot of all deltas in the store, then remove the deltas that are in it.

    Deltas are removed only while no other snapshot has deltas that the new one lacks; else the new
    one is withdrawn. Other snapshots are removed only if they have less: of two that have the same
    both stay, for each of their writers may be about to remove the other's. Nobody removes a delta
    because of another's snapshot, which may be withdrawn. Two that compact at a time both write
    before they look, so that one of them at least sees the other. Hence there is at any time a
    snapshot that, with the deltas in the store, has all observations.

    Args:
        gathering: Reads the store.
        run: Run of the replica that compacts.

    Returns:
        Number of deltas that were removed; 0 also where another replica has compacted meanwhile.
    """
    store = gathering.store
    try:
        listing = Listing.of(store)
        gathered = gathering.missing(VectorClock(), listing)
        if (
            gathered.delta is None
            or not listing.deltas
            or not _covers_all(gathered.clock, gathering)
        ):
            return 0
        key = counted_key("clock", gathered.delta.observations, run)
        if key not in listing.clocks:  # else it is of this run, which could not remove all deltas
            whole = snapshot_of(key)
            store[whole] = sealed(whole, gathering.search, {}, gathered.delta.arrays())
            store[key] = sealed(key, gathering.search, {"clock": gathered.clock.plain()}, {})
        listing = Listing.of(store)
        unread = gathering.read_clocks(listing)
    except VanishedError:
        return 0
    if unread or not _covers_all(gathered.clock, gathering):
        _remove(store, key, snapshot_of(key))
        return 0
    for other, clock in gathering.clocks.items():
        if not clock.covers(gathered.clock):
            _remove(store, other, snapshot_of(other))
    _remove(store, *listing.learned[:-1])
    summed = [key for dot, key in listing.deltas.items() if dot in gathered.clock]
    _remove(store, *summed)
    return len(summed)


def _covers_all(clock: VectorClock, gathering: Gathering) -> bool:
    return all(clock.covers(other) for other in gathering.clocks.values())


def _remove(store: Store, *keys: str) -> None:
    for key in keys:
        with suppress(KeyError):  # another one has removed it
            del store[key]


# --- the runs that take part in a search ----------------------------------------------------------


class Membership:
    """A run among the runs in a store.

    A run that starts later takes over the name of an earlier one, as when a replica died and comes
    back. If the earlier run is alive, its next exchange raises an error, and the later run warns at
    the exchange in which it sees a delta that the earlier one has sent since.

    Attributes:
        run: The run.
    """

    def __init__(self, run: str, search: str, facts: Mapping[str, Any], store: Store) -> None:
        """Enter the list of runs.

        Args:
            run: The run.
            search: Digest of the facts.
            facts: The facts that decide whether statistics of replicas add up, by name.
            store: The store.

        Raises:
            UsageError: The store has another search.
        """
        self.run, self._store = run, store
        listing = Listing.of(store)
        for other in listing.runs:
            about = self._about(other)
            if about and about.get("search") != search:
                here, there = facts, about.get("facts", {})
                differences = (
                    f"{name}: here {here.get(name)!r}, there {there.get(name)!r}"
                    for name in (*here, *there)
                    if here.get(name) != there.get(name)
                )
                raise UsageError(
                    f"The store has another search, that of replica {name_of(other)!r}; they "
                    f"differ in {next(differences, 'nothing')}. Use the same settings and model, "
                    "or another store."
                )
        self._previous = [other for other in listing.runs if name_of(other) == name_of(run)]
        self._sent = {dot for dot in listing.deltas if dot[0] in self._previous}
        about = {
            "facts": dict(facts),
            "host": platform.node(),
            "process": os.getpid(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        key = f"replica/{run}"
        store[key] = sealed(key, search, about, {})

    def _about(self, run: str) -> dict[str, Any]:
        """Read the description of a run; return nothing where it cannot be read."""
        try:
            return opened(self._store, f"replica/{run}", None)[0]
        except (VanishedError, UnusableError):
            return {}

    def still_alive(self, listing: Listing) -> list[str]:
        """Return a remark on each previous run that has sent further deltas since the last call."""
        new = {dot for dot in listing.deltas if dot[0] in self._previous} - self._sent
        self._sent |= new
        return [
            f"Another replica of the name {name_of(run)!r}, {self._spelled(run)}, still sends "
            "deltas. Nothing is lost; give each replica a name of its own."
            for run in sorted({run for run, _ in new})
        ]

    def check_alone(self, listing: Listing) -> None:
        """Raise a ``UsageError`` if another replica has taken this name since."""
        name = name_of(self.run)
        for run in listing.runs:
            if name_of(run) == name and run not in (*self._previous, self.run):
                raise UsageError(
                    f"Another replica of the name {name!r} has started after this one: "
                    f"{self._spelled(run)}. Its outcomes and those of this one are all in the "
                    "store. Give each replica a name of its own."
                )

    def _spelled(self, run: str) -> str:
        about = self._about(run)
        where = (about.get(name, "?") for name in ("process", "host", "started"))
        return "process {} on {}, started {}".format(*where)
