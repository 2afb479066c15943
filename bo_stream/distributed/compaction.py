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
