"""Putting the deltas in a store into one snapshot, while others read and write it."""

from __future__ import annotations

from contextlib import suppress

from bo_stream.distributed.clock import VectorClock
from bo_stream.distributed.gathering import Gathering
from bo_stream.distributed.records import (
    Listing,
    Store,
    VanishedError,
    counted_key,
    sealed,
    snapshot_of,
)


def compact(gathering: Gathering, run: str) -> int:
    """Write a snapshot of all deltas in the store, then remove what is in it.

    Deltas are removed only while there is no other snapshot that has more, or others, than the new
    one; else the new one is withdrawn. Two that compact at a time both write before they look, so
    that one of them at least sees the other. Hence there is at any time a snapshot that, with the
    deltas beside it, holds everything.

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
        if found.delta is None or not _covers_all(found.clock, gathering):
            return 0
        if found.deltas == 0:  # all is in a snapshot: some were not removed yet
            return _remove_deltas(store, listing, found.clock)
        key = counted_key("clock", found.delta.observations, run)
        store[snapshot_of(key)] = sealed(gathering.search, {}, found.delta.arrays())
        store[key] = sealed(gathering.search, {"clock": found.clock.plain()}, {})
        listing = Listing.of(store)
        unread = gathering.read_clocks(listing)
    except VanishedError:
        return 0
    if unread or not _covers_all(found.clock, gathering):
        _remove(store, key, snapshot_of(key))
        return 0
    for other in listing.clocks:
        if other != key:
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
