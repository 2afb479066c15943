"""What a store has that a sum has not: each delta once, in any order, by way of snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from botorch.exceptions.errors import UnsupportedError

from bo_stream.distributed.clock import Dot, VectorClock, spelled
from bo_stream.distributed.deltas import Delta, most_bytes_of_sums
from bo_stream.distributed.records import (
    Listing,
    Store,
    UnusableError,
    VanishedError,
    opened,
    snapshot_of,
)
from bo_stream.models.base import StreamingGP


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
