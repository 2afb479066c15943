"""Stores that replicas exchange through: what is sent, gathered and compacted.

Any ``MutableMapping[str, bytes]`` will do, such as those of ``zarr``, ``zict`` or ``fsspec``: a
value is written whole, and a key that was written can be listed and read by all from then on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

from botorch.exceptions.errors import UnsupportedError

from bo_stream.distributed.records import (
    Delta,
    Dot,
    Listing,
    Store,
    UnusableError,
    VanishedError,
    VectorClock,
    counted_key,
    delta_key,
    most_bytes_of_sums,
    opened,
    sealed,
    snapshot_of,
    spelled,
)
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

    A value is a file, which is written beside its place and moved there, so that others see it
    whole or not at all; what a killed process leaves behind has a name that begins with a dot, and
    is no key. Nothing is locked.
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
        return iter(sorted(self._keys()))

    def __len__(self) -> int:
        return sum(1 for _ in self._keys())

    def _keys(self) -> Iterator[str]:
        for folder, folders, files in os.walk(self.path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                if not name.startswith("."):
                    yield (Path(folder) / name).relative_to(self.path).as_posix()

    def _file(self, key: str) -> Path:
        parts = key.split("/")
        if any(not part or part.startswith(".") or "\\" in part for part in parts):
            raise UsageError(
                f"Expected a key of names separated by /, none of which begins with a dot, got "
                f"{key!r}."
            )
        return self.path.joinpath(*parts)


class TakenError(UsageError):
    """A store holds another value at a key."""


def _check_same(key: str, held: bytes, value: bytes) -> None:
    if held != value:
        raise TakenError(
            f"The store holds another value at {key}. What replicas have written there is never "
            "changed: give each store to one search, and each replica a name of its own."
        )


# --- what a replica was told and has not sent yet ------------------------------------------------


@dataclass(frozen=True)
class Parcel:
    """A delta as it is written, once or several times.

    Attributes:
        dot: Which one it is.
        observations: Number of observations.
        content: Its bytes, which say which one it is.
    """

    dot: Dot
    observations: int
    content: bytes

    @classmethod
    def of(cls, dot: Dot, delta: Delta, search: str) -> Self:
        """Pack a delta."""
        count = delta.observations
        return cls(dot, count, sealed(delta_key(dot), search, {"count": count}, delta.arrays()))


class Outbox:
    """Packs what was told into deltas; one that may have been written is not packed anew.

    Attributes:
        run: The run whose deltas they are.
        search: Digest of the search.
        template: The model without observations that all replicas begin with.
    """

    def __init__(self, run: str, search: str, template: StreamingGP) -> None:
        """Begin with nothing, and the number 1."""
        self.run, self.search, self.template = run, search, template
        self._told: list[Delta] = []
        self._packed: Delta
        self._parcel: Parcel | None = None
        self._number = 0

    def add(self, told: Delta) -> None:
        """Add observations to the next delta."""
        total = told if not self._told else self._told[0].plus([told])
        self._told = [total.settled(self.template)]

    def parcel(self) -> Parcel | None:
        """Return the next delta to be written, None if there is nothing to send."""
        if self._parcel is None and self._told:
            (self._packed,), self._told = self._told, []
            self._parcel = self._numbered()
        return self._parcel

    def _numbered(self) -> Parcel:
        """Pack the delta under the next number."""
        self._number += 1
        return Parcel.of((self.run, self._number), self._packed, self.search)

    def send(self, store: Store) -> Iterator[Parcel]:
        """Write what there is; yield each delta when it is written, for others to take.

        A number at which the store has what this run never wrote, such as a copy, is left out. A
        call that raises has lost nothing, and the next one goes on.
        """
        while (parcel := self.parcel()) is not None:
            try:
                store[delta_key(parcel.dot)] = parcel.content
            except TakenError:
                self._parcel = self._numbered()
                continue
            self._parcel = None
            yield parcel


# --- what a store has that a sum has not: each delta once, in any order --------------------------


@dataclass(frozen=True)
class Gathered:
    """What is to be added to a sum.

    Attributes:
        delta: The sum of all that was read; None if nothing was.
        clock: Which deltas are in the sum then.
        anew: Whether to begin anew: the delta is the whole sum then, from a snapshot on.
        deltas: Number of deltas that were read.
        bytes: Number of bytes that were read.
        remarks: What was left out, and why.
    """

    delta: Delta | None
    clock: VectorClock
    anew: bool = False
    deltas: int = 0
    bytes: int = 0
    remarks: tuple[str, ...] = ()


@dataclass
class Gathering:
    """Reads what one search has in a store.

    Attributes:
        store: The store.
        search: Digest of the search.
        template: The model without observations that all replicas begin with.
        clocks: Those of snapshots, by key, as far as they were read.
    """

    store: Store
    search: str
    template: StreamingGP
    clocks: dict[str, VectorClock] = field(default_factory=dict)

    def missing(self, held: VectorClock, listing: Listing) -> Gathered:
        """Read what is in the store and not in a sum.

        Deltas are read one by one while all of them are there. One that is not has been put into a
        snapshot and removed: then the sum begins anew from a snapshot that has it, and goes on with
        the deltas that are not in that, so that none is counted twice.

        Args:
            held: Which deltas the sum has.
            listing: Of the store.

        Raises:
            VanishedError: The store was compacted since it was listed.
        """
        remarks = self.read_clocks(listing)
        known = held.plus(listing.deltas)
        for clock in self.clocks.values():
            known = known.joined(clock)
        for key in self._ways(held, known, listing):
            start = held if key is None else self.clocks[key]
            try:
                begun, size = (None, 0) if key is None else self._delta(snapshot_of(key))
            except UnusableError as error:
                remarks.append(str(error))
                continue
            found = self._sum(begun, size, start, listing)
            lost = start.plus(listing.deltas).lacking(known)
            if lost:
                remarks.append(
                    f"{len(lost)} deltas are neither in the store nor in a snapshot that can be "
                    f"read ({spelled(lost)}): their observations are missing here."
                )
            return Gathered(
                found.delta,
                found.clock,
                key is not None,
                found.deltas,
                found.bytes,
                (*remarks, *found.remarks),
            )
        raise AssertionError("the sum itself is always a way")

    def read_clocks(self, listing: Listing) -> list[str]:
        """Read the clocks of new snapshots, forget those of removed ones; return remarks."""
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

    def _ways(self, held: VectorClock, known: VectorClock, listing: Listing) -> list[str | None]:
        """List the sum itself (None) and snapshots, those first that lead to the most.

        A snapshot from which not all that the sum has can be reached is no way.
        """
        ways: dict[str | None, VectorClock] = {None: held.plus(listing.deltas)}
        for key in reversed(self.clocks):
            reached = self.clocks[key].plus(listing.deltas)
            if reached.covers(held):
                ways[key] = reached
        return sorted(ways, key=lambda key: len(ways[key].lacking(known)))

    def _sum(
        self, begun: Delta | None, size: int, start: VectorClock, listing: Listing
    ) -> Gathered:
        """Add the deltas that a sum lacks to what it begins with."""
        found, taken, remarks = [] if begun is None else [begun], list[Dot](), []
        for dot, key in listing.deltas.items():
            if dot in start:
                continue
            try:
                delta, more = self._delta(key)
            except UnusableError as error:
                remarks.append(str(error))
                continue
            found.append(delta)
            taken.append(dot)
            size += more
        total = found[0].plus(found[1:]).settled(self.template) if found else None
        return Gathered(total, start.plus(taken), False, len(taken), size, tuple(remarks))

    @cached_property
    def _most_bytes(self) -> int:
        return most_bytes_of_sums(self.template)

    def _delta(self, key: str) -> tuple[Delta, int]:
        _, arrays, size = opened(self.store, key, self.search)
        try:
            return Delta.of_arrays(arrays, self.template, self._most_bytes), size
        except (ValueError, UnsupportedError) as error:
            raise UnusableError(f"{key} is left out: {error}") from error


# --- putting the deltas in a store into one snapshot, while others read and write it -------------


def compact(gathering: Gathering, run: str) -> int:
    """Write a snapshot of all deltas in the store, then remove what is in it.

    Deltas are removed only while no other snapshot has what the new one lacks; else the new one is
    withdrawn. Other snapshots are removed only if they have less: of two that have the same both
    stay, for each of their writers may be about to remove the other's. Nobody removes a delta for
    the sake of another's snapshot, which may be withdrawn. Two that compact at a time both write
    before they look, so that one of them at least sees the other. Hence there is at any time a
    snapshot that, with the deltas beside it, holds everything.

    Args:
        gathering: Reads the store.
        run: Of the replica that does it.

    Returns:
        Number of deltas that were removed; 0 also where another one has compacted meanwhile.
    """
    store = gathering.store
    try:
        listing = Listing.of(store)
        found = gathering.missing(VectorClock(), listing)
        if found.delta is None or not listing.deltas or not _covers_all(found.clock, gathering):
            return 0
        key = counted_key("clock", found.delta.observations, run)
        if key not in listing.clocks:  # else it is of this run, which could not remove all deltas
            whole = snapshot_of(key)
            store[whole] = sealed(whole, gathering.search, {}, found.delta.arrays())
            store[key] = sealed(key, gathering.search, {"clock": found.clock.plain()}, {})
        listing = Listing.of(store)
        unread = gathering.read_clocks(listing)
    except VanishedError:
        return 0
    if unread or not _covers_all(found.clock, gathering):
        _remove(store, key, snapshot_of(key))
        return 0
    for other, clock in gathering.clocks.items():
        if not clock.covers(found.clock):
            _remove(store, other, snapshot_of(other))
    _remove(store, *listing.learned[:-1])
    return _remove_deltas(store, listing, found.clock)


def _remove_deltas(store: Store, listing: Listing, clock: VectorClock) -> int:
    """Remove the deltas that are in a snapshot of this clock; return their number."""
    held = [key for dot, key in listing.deltas.items() if dot in clock]
    _remove(store, *held)
    return len(held)


def _covers_all(clock: VectorClock, gathering: Gathering) -> bool:
    return all(clock.covers(other) for other in gathering.clocks.values())


def _remove(store: Store, *keys: str) -> None:
    for key in keys:
        with suppress(KeyError):  # another one has removed it
            del store[key]
