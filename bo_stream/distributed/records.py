"""Records in a store: their keys, their bytes, and what is said of those that cannot be used.

=============================  ======================================================
``replica/RUN``                a run of a replica, its name and random digits, and its search
``delta/RUN.NUMBER``           observations that it made, numbered from 1
``snapshot/COUNT.RUN``         the sum of many deltas, of so many observations
``clock/COUNT.RUN``            which deltas these are; a snapshot counts once this is written
``learned/COUNT.RUN``          hyperparameters, and how many observations they were learned from
=============================  ======================================================

A value is an archive of ``safetensors`` with a header and a digest; it is never changed. The header
says the key: a value that was copied or moved to another key is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Self
from uuid import uuid4

from torch import Tensor

from bo_stream.distributed.clock import Dot
from bo_stream.errors import UsageError
from bo_stream.storage.archive import FileFormat, archive_bytes, one_line, read_archive_bytes

Store = MutableMapping[str, bytes]

RECORD = FileFormat("bo_stream replica record", 2)

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_RUN = rf"{_NAME}\.[0-9a-f]{{12}}"
_KEYS = {
    "replica": re.compile(rf"replica/(?P<run>{_RUN})"),
    "delta": re.compile(rf"delta/(?P<run>{_RUN})\.(?P<number>[0-9]{{8}})"),
    "snapshot": re.compile(rf"snapshot/[0-9]{{12}}\.(?P<run>{_RUN})"),
    "clock": re.compile(rf"clock/[0-9]{{12}}\.(?P<run>{_RUN})"),
    "learned": re.compile(rf"learned/[0-9]{{12}}\.(?P<run>{_RUN})"),
}


class UnusableError(ValueError):
    """A record that is damaged, of another version or search, or at another key than its own."""


class VanishedError(Exception):
    """A record that was listed is no longer there: the store was compacted meanwhile."""


def new_run(name: str) -> str:
    """Return the name of a new run of a replica; a bad name is a ``UsageError``."""
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise UsageError(
            "Expected the name of a replica to be letters, digits, dots, dashes and underscores, "
            f"at most 100 and no dot or dash first, got {name!r}."
        )
    return f"{name}.{uuid4().hex[:12]}"


def name_of(run: str) -> str:
    """Return the name of the replica that a run is of."""
    return run.rpartition(".")[0]


def delta_key(dot: Dot) -> str:
    """Return the key of a delta."""
    run, number = dot
    return f"delta/{run}.{number:08d}"


def counted_key(kind: str, observations: int, run: str) -> str:
    """Return a key that sorts by the number of observations, then by the run."""
    return f"{kind}/{observations:012d}.{run}"


def count_of(key: str) -> int:
    """Return the number of observations that is in a key of :func:`counted_key`."""
    return int(key.partition("/")[2].partition(".")[0])


def snapshot_of(clock_key: str) -> str:
    """Return the key of the snapshot that a clock is of."""
    return clock_key.replace("clock/", "snapshot/", 1)


@dataclass(frozen=True)
class Listing:
    """The keys in a store at one time, by kind, each in order.

    Attributes:
        runs: Runs of replicas.
        deltas: Keys of deltas by what they are.
        clocks: Keys of the clocks of snapshots.
        learned: Keys of hyperparameters; the last one counts.
        foreign: Keys of no such kind.
    """

    runs: tuple[str, ...]
    deltas: Mapping[Dot, str]
    clocks: tuple[str, ...]
    learned: tuple[str, ...]
    foreign: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, store: Store) -> Self:
        """List a store."""
        found: dict[str, list[re.Match[str]]] = {kind: [] for kind in _KEYS}
        foreign = []
        for key in sorted(store):
            kind = key.partition("/")[0]
            match = _KEYS[kind].fullmatch(key) if kind in _KEYS else None
            if match is None:
                foreign.append(key)
            else:
                found[kind].append(match)
        deltas = {(m["run"], int(m["number"])): m.string for m in found["delta"]}
        clocks, learned = (tuple(m.string for m in found[kind]) for kind in ("clock", "learned"))
        runs = tuple(m["run"] for m in found["replica"])
        return cls(runs, deltas, clocks, learned, tuple(foreign))

    @property
    def names(self) -> list[str]:
        """Names of replicas, sorted."""
        return sorted({name_of(run) for run in self.runs})


def sealed(key: str, search: str, about: Mapping[str, Any], arrays: dict[str, Tensor]) -> bytes:
    """Return the bytes of a record.

    Args:
        key: At which it will be written.
        search: Digest of the search that it belongs to.
        about: Plain values.
        arrays: As :func:`archive_bytes` takes them.
    """
    return archive_bytes({"key": key, "search": search, **about}, arrays, RECORD)


def opened(
    store: Store, key: str, search: str | None
) -> tuple[dict[str, Any], dict[str, Tensor], int]:
    """Read a record: its plain values, its arrays, and its number of bytes.

    Args:
        store: The store.
        key: Of the record.
        search: Digest of the search that it should belong to; None: any.

    Raises:
        VanishedError: It is not there any more.
        UnusableError: It is damaged, of another version, of another search, or was written at
            another key.
    """
    try:
        content = bytes(store[key])
    except KeyError as error:
        raise VanishedError(key) from error
    try:
        about, arrays = read_archive_bytes(content, key, RECORD)
    except ValueError as error:
        raise UnusableError(f"{key} is left out: {one_line(error)}.") from error
    if about.get("key") != key:
        raise UnusableError(
            f"{key} is left out: it was written as {str(about.get('key'))[:200]}, and copied or "
            "renamed since. Remove it."
        )
    if search is not None and about.get("search") != search:
        raise UnusableError(
            f"{key} is left out: it belongs to a search with other settings or another model than "
            f"this one ({about.get('search')}, expected {search})."
        )
    return about, arrays, len(content)
