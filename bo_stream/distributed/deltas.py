"""Records that replicas exchange through a store: deltas with vector clocks.

=============================  ======================================================
``replica/RUN``                a run of a replica, its name and random digits, and its search
``delta/RUN.NUMBER``           observations that it made, numbered from 1
``snapshot/COUNT.RUN``         the sum of many deltas, of COUNT observations
``clock/COUNT.RUN``            set of these deltas; a snapshot counts once this is written
``learned/COUNT.RUN``          hyperparameters that were learned from COUNT observations
=============================  ======================================================

A value is an archive of ``safetensors`` with a header and a digest; it is never changed. The header
has the key: a value that was copied or moved to another key is left out.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Self
from uuid import uuid4

import torch
from torch import Tensor

from bo_stream.distributed.sums import Sums, accumulate, finish, merge, rebased, zero
from bo_stream.errors import UsageError
from bo_stream.loops.optimization.optimizer import SHORTLIST
from bo_stream.loops.optimization.trials import LARGEST
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import FileFormat, archive_bytes, one_line, read_archive_bytes

Dot = tuple[str, int]
"""A delta's identity: its writer, and its number among that writer's, from 1."""


_MOST_NUMBER = 10**8 - 1
"""Largest number of a delta, by the length of numbers in keys."""


@dataclass(frozen=True)
class VectorClock:
    """A set of deltas: of each writer all up to a number, and some beyond it.

    Attributes:
        upto: Writer to the number up to which all of its deltas are in the set.
        beyond: Writer to the numbers of those in the set that follow a gap.
    """

    upto: Mapping[str, int] = field(default_factory=dict)
    beyond: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def __contains__(self, dot: Dot) -> bool:
        writer, number = dot
        below = number <= self.upto.get(writer, 0)
        return below or number in self.beyond.get(writer, frozenset())

    def plus(self, dots: Iterable[Dot]) -> VectorClock:
        """Return the set with further deltas."""
        beyond = {writer: set(numbers) for writer, numbers in self.beyond.items()}
        for writer, number in dots:
            beyond.setdefault(writer, set()).add(number)
        upto = dict(self.upto)
        for writer, numbers in beyond.items():
            last = upto.get(writer, 0)
            while last + 1 in numbers:
                last += 1
            upto[writer] = last
        left = {w: frozenset(n for n in numbers if n > upto[w]) for w, numbers in beyond.items()}
        return VectorClock(
            {writer: last for writer, last in upto.items() if last > 0},
            {writer: numbers for writer, numbers in left.items() if numbers},
        )

    def joined(self, other: VectorClock) -> VectorClock:
        """Return the union of two sets."""
        writers = {*self.upto, *other.upto}
        upto = {w: max(self.upto.get(w, 0), other.upto.get(w, 0)) for w in writers}
        return VectorClock(upto, self.beyond).plus(other._dots_beyond())

    def covers(self, other: VectorClock) -> bool:
        """Return whether the set contains another."""
        return not self.lacking(other)

    def lacking(self, other: VectorClock) -> list[Dot]:
        """List the deltas that another set has and this one lacks."""
        below = (
            (writer, number)
            for writer, last in sorted(other.upto.items())
            for number in range(self.upto.get(writer, 0) + 1, last + 1)
        )
        return [dot for dot in (*below, *other._dots_beyond()) if dot not in self]

    def _dots_beyond(self) -> list[Dot]:
        return [(w, n) for w, numbers in sorted(self.beyond.items()) for n in sorted(numbers)]

    def plain(self) -> dict[str, Any]:
        """Return plain values, from which :meth:`of_plain` builds the clock."""
        beyond = {writer: sorted(numbers) for writer, numbers in self.beyond.items()}
        return {"upto": dict(self.upto), "beyond": beyond}

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> Self:
        """Build a clock of plain values.

        Raises:
            ValueError: They are of another form.
        """
        try:
            upto = {str(writer): int(last) for writer, last in values["upto"].items()}
            beyond = {str(w): frozenset(map(int, n)) for w, n in values["beyond"].items()}
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"it has no vector clock ({error!r})") from error
        largest = max(
            (*upto.values(), *(n for numbers in beyond.values() for n in numbers)), default=0
        )
        if largest > _MOST_NUMBER:
            raise ValueError(
                f"it has a delta of the number {largest}, expected at most {_MOST_NUMBER}"
            )
        return cls(upto, beyond)


def spelled(dots: Iterable[Dot]) -> str:
    """Format deltas for a message, a few of each writer."""
    numbers: dict[str, list[int]] = {}
    for writer, number in dots:
        numbers.setdefault(writer, []).append(number)
    return "; ".join(
        f"{writer}: {', '.join(map(str, own[:5]))}{', ...' if len(own) > 5 else ''}"
        for writer, own in numbers.items()
    )


# --- records in a store: their keys, their bytes -------------------------------------------------


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
    """Return the name of the replica of a run."""
    return run.rpartition(".")[0]


def delta_key(dot: Dot) -> str:
    """Return the key in the store of the n-th delta that a run published."""
    run, number = dot
    return f"delta/{run}.{number:08d}"


def counted_key(kind: str, observations: int, run: str) -> str:
    """Return a key that sorts by the number of observations, then by the run."""
    return f"{kind}/{observations:012d}.{run}"


def count_of(key: str) -> int:
    """Return the number of observations in a key of :func:`counted_key`."""
    return int(key.partition("/")[2].partition(".")[0])


def snapshot_of(clock_key: str) -> str:
    """Return the key of the snapshot whose clock has a key."""
    return clock_key.replace("clock/", "snapshot/", 1)


@dataclass(frozen=True)
class Listing:
    """The keys in a store at one time, by kind, each in order.

    Attributes:
        runs: Runs of replicas.
        deltas: Keys of deltas by their identities.
        clocks: Keys of the clocks of snapshots.
        learned: Keys of hyperparameters; the last one counts.
        foreign: Keys of other kinds.
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


def sealed(key: str, search: str, about: Mapping[str, Any], arrays: dict[str, Tensor]) -> bytes:
    """Return the bytes of a record.

    Args:
        key: Key at which the record will be written.
        search: Digest of the search that the record belongs to.
        about: Plain values.
        arrays: Arrays as of :func:`archive_bytes`.
    """
    return archive_bytes({"key": key, "search": search, **about}, arrays, RECORD)


def opened(
    store: Store, key: str, search: str | None
) -> tuple[dict[str, Any], dict[str, Tensor], int]:
    """Read a record: its plain values, its arrays, and its number of bytes.

    Args:
        store: The store.
        key: Key of the record.
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


# --- deltas: observations or their sums, as replicas exchange them ----------------------------


MOST_ROWS = 1024
"""Most observations that are exchanged as rows: these are smaller than their statistics."""


@dataclass(frozen=True)
class BestPoints:
    """The ``SHORTLIST`` observations of the largest outcomes, in an order equal in all replicas.

    Attributes:
        X: Inputs in the unit cube, ``k x d``.
        Y: Outcomes, ``k``, the largest and best first; equal ones in the order of their inputs.
    """

    X: Tensor
    Y: Tensor

    @classmethod
    def of(cls, X: Tensor, Y: Tensor) -> Self:
        """Select the best of n observations, ``n x d`` and ``n``."""
        order = torch.arange(len(Y), device=Y.device)
        for column in (*X.T.flip(0), -Y):  # the last sort is of the first importance
            order = order[column[order].sort(stable=True).indices]
        first = order[:SHORTLIST]
        return cls(X[first], Y[first])

    @classmethod
    def joined(cls, parts: Sequence[BestPoints]) -> Self:
        """Select the best of several sets of best points."""
        return cls.of(torch.cat([part.X for part in parts]), torch.cat([part.Y for part in parts]))


@dataclass(frozen=True)
class Delta:
    """Observations to be added to a model: rows while they are few, else their sums.

    Any number of deltas add up, in any order. Large outcomes are good.

    Attributes:
        X: Inputs of observations that are not in ``sums``, in the unit cube, ``n x d``.
        Y: Outcomes of these observations, ``n x 1``.
        sums: Statistics of all other observations, at the first hyperparameters of the search;
            None if there are no others.
        best_summed: Best points of the observations in ``sums``.
    """

    X: Tensor
    Y: Tensor
    sums: Sums | None = None
    best_summed: BestPoints | None = None

    @property
    def observations(self) -> int:
        """Number of observations."""
        return len(self.X) + (0 if self.sums is None else round(self.sums.rows))

    def best(self) -> BestPoints:
        """Return the best points of all observations of the delta."""
        rows = BestPoints.of(self.X, self.Y.squeeze(-1))
        return rows if self.best_summed is None else BestPoints.joined((rows, self.best_summed))

    def plus(self, others: Iterable[Delta]) -> Delta:
        """Add further deltas.

        Raises:
            UnsupportedError: The sums of one are of another model.
        """
        deltas = (self, *others)
        X, Y = (torch.cat([getattr(delta, name) for delta in deltas]) for name in ("X", "Y"))
        sums = [delta.sums for delta in deltas if delta.sums is not None]
        best = [delta.best_summed for delta in deltas if delta.best_summed is not None]
        if not sums:
            return Delta(X, Y)
        return Delta(X, Y, reduce(merge, sums), BestPoints.joined(best))

    def settled(self, template: StreamingGP) -> Delta:
        """Return the delta with its rows in sums where they are more than ``MOST_ROWS``.

        Args:
            template: The model without observations that all replicas of a search begin with.
        """
        return self if len(self.X) <= MOST_ROWS else self._summed(template)

    def _summed(self, template: StreamingGP) -> Delta:
        rows = accumulate(zero(template), self.X, self.Y)
        sums = rows if self.sums is None else merge(self.sums, rows)
        return Delta(self.X[:0], self.Y[:0], sums, self.best())

    def put_into(self, model: StreamingGP, template: StreamingGP) -> None:
        """Add all observations to a model, whose hyperparameters may differ; all or none.

        Raises:
            UnsupportedError: The sums are of another model.
        """
        if self.sums is None:
            model.update(self.X, self.Y)
            return
        sums = self._summed(template).sums if len(self.X) > 0 else self.sums
        if sums is not None:
            finish(model, rebased(sums, model))

    # --- as arrays ------------------------------------------------------------------------------

    def arrays(self) -> dict[str, Tensor]:
        """Return the delta as arrays in main memory."""
        arrays = {"X": self.X, "Y": self.Y}
        if self.sums is not None and self.best_summed is not None:
            packed = zlib.compress(self.sums.to_bytes())
            arrays["sums"] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
            arrays |= {"best_X": self.best_summed.X, "best_Y": self.best_summed.Y}
        return {name: array.detach().cpu().clone() for name, array in arrays.items()}

    @classmethod
    def of_arrays(
        cls, arrays: Mapping[str, Tensor], template: StreamingGP, most_bytes: int
    ) -> Delta:
        """Build a delta from the arrays that :meth:`arrays` returned.

        Args:
            arrays: Arrays that were read: of any shapes and types.
            template: The model without observations that all replicas of a search begin with.
            most_bytes: Most bytes of the sums; no more are unpacked.

        Raises:
            ValueError: They are of other shapes, or not finite.
            UnsupportedError: The sums are of another model.
        """
        try:
            X, Y = _rows(arrays["X"], arrays["Y"], template)
            if "sums" not in arrays:
                return cls(X, Y)
            unpacking = zlib.decompressobj()
            content = unpacking.decompress(arrays["sums"].numpy().tobytes(), most_bytes)
            if not unpacking.eof:
                raise ValueError(
                    f"its sums are cut short, or of more than {most_bytes:,} bytes, which sums of "
                    "this search are not"
                )
            best_X, best_Y = _rows(arrays["best_X"], arrays["best_Y"].unsqueeze(-1), template)
        except (LookupError, zlib.error) as error:
            raise ValueError(f"it is no delta ({error!r})") from error
        sums = merge(zero(template), Sums.from_bytes(content))
        return cls(X, Y, sums, BestPoints(best_X, best_Y.squeeze(-1)))


def _rows(X: Tensor, Y: Tensor, template: StreamingGP) -> tuple[Tensor, Tensor]:
    """Check observations, and bring them to the model's dtype and device.

    Raises:
        ValueError: They are not ``n x d`` in the unit cube and ``n x 1``, or not finite.
    """
    fits = X.ndim == 2 and X.shape[-1] == template.input_dim and Y.shape == (len(X), 1)
    if not fits or not X.is_floating_point() or not Y.is_floating_point():
        raise ValueError(
            f"expected numbers of shapes (n, {template.input_dim}) and (n, 1), got "
            f"{tuple(X.shape)} of {X.dtype} and {tuple(Y.shape)} of {Y.dtype}"
        )
    if not bool(((X >= 0.0) & (X <= 1.0)).all() and (Y.abs() <= LARGEST).all()):
        raise ValueError(
            f"it has inputs outside the unit cube, or outcomes that are not at most {LARGEST:g}"
        )
    like = next(template.parameters())
    return X.to(like), Y.to(like)
