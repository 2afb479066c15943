"""Stores in which somebody has copied, renamed, cut, flipped or swapped what replicas wrote."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from bo_stream.distributed import FolderStore, MemoryStore, Replica
from bo_stream.distributed.deltas import Listing, VectorClock, sealed
from bo_stream.distributed.replica import ReplicaWarning
from tests.distributed.replicas import assert_same, expected, points, settings, told

UNLEARNED = settings(initial=10_000)
"""Of replicas that learn nothing."""


def some(count: int, seed: int = 0) -> list[tuple[float, ...]]:
    return points(count, random.Random(seed))


def copied(store: MemoryStore, key: str, to: str) -> None:
    store._values[to] = store._values[key]


def moved(store: MemoryStore, key: str, to: str) -> None:
    store._values[to] = store._values.pop(key)


def late(store: MemoryStore, *said: str) -> Replica:
    """One that joins now, and is told of each record in turn."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replica = Replica(UNLEARNED, store, "late")
    texts = [str(each.message) for each in caught if each.category is ReplicaWarning]
    assert len(texts) == len(said), texts
    for text, part in zip(texts, said, strict=True):
        assert part in text
    return replica


@pytest.mark.parametrize("number", [2, 3, 99_999_999])
def test_a_delta_under_another_number_is_not_counted_again(number: int) -> None:
    store = MemoryStore()
    a = Replica(UNLEARNED, store, "A")
    ledger = told(a, some(2))
    a.exchange()
    (key,) = Listing.of(store).deltas.values()
    again = f"{key[:-8]}{number:08d}"
    copied(store, key, again)
    b = late(store, f"{again} is left out: it was written as {key}, and copied or renamed since")
    assert_same(b.model, expected(b, ledger))
    ledger += told(a, some(1, 1))  # its number may be taken
    ledger += told(b, some(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicaWarning)
        for replica in (a, b, a):
            assert any(again in remark for remark in replica.exchange().remarks)
    for replica in (a, b, late(store, again)):
        assert_same(replica.model, expected(replica, ledger))
    assert a.compact() == 3
    assert_same(late(store, again).model, expected(b, ledger))


def test_a_delta_under_another_writer_is_not_counted() -> None:
    store = MemoryStore()
    a = Replica(UNLEARNED, store, "A")
    ledger = told(a, some(2))
    a.exchange()
    (key,) = Listing.of(store).deltas.values()
    moved(store, key, key.replace("A.", "B."))
    b = late(store, "copied or renamed")
    assert b.observations == 0
    moved(store, key.replace("A.", "B."), key)  # as the sentence says
    assert b.exchange().remarks == ()
    assert_same(b.model, expected(b, ledger))


def test_hyperparameters_under_another_count_are_not_adopted() -> None:
    store = MemoryStore()
    a = Replica(settings(initial=4, refit=1.5), store, "A")
    told(a, some(4))
    a.exchange()
    (first,) = Listing.of(store).learned
    huge = f"learned/999999999999.{first.partition('.')[2]}"
    copied(store, first, huge)
    told(a, some(8, 1))
    with pytest.warns(ReplicaWarning, match=f"{huge} is left out: it was written as {first}"):
        assert a.exchange().learned
    b = late(store, huge)
    assert b._learned == a._learned != huge
    assert_same(b.model, a.model)


@pytest.mark.parametrize("kind", ["snapshot", "clock"])
def test_snapshots_and_clocks_of_others_are_not_taken(kind: str) -> None:
    """One for another's would count what it has, and what it has not."""
    stores = MemoryStore(), MemoryStore()
    ledgers = []
    for store, count in zip(stores, (2, 3), strict=True):
        a = Replica(UNLEARNED, store, "A")
        ledgers.append(told(a, some(count)))
        a.exchange()
        a.compact()
    store, other = stores
    here, there = (next(k for k in s if k.startswith(kind)) for s in stores)
    store._values[here] = other._values[there]
    missing = ["their observations are missing here"] * (kind == "snapshot")
    b = late(store, f"{here} is left out: it was written as {there}", *missing)
    assert b.observations == 0


def test_a_clock_without_bounds_is_left_out() -> None:
    store = MemoryStore()
    a = Replica(UNLEARNED, store, "A")
    ledger = told(a, some(2))
    a.exchange()
    key = f"clock/{2:012d}.{a.run}"
    for last in (10**8, 10**18):
        clock = VectorClock({a.run: last}).plain()
        store._values[key] = sealed(key, a._search, {"clock": clock}, {})
        b = late(store, f"of the number {last}, expected at most 99999999")
        assert_same(b.model, expected(b, ledger))


def flipped(content: bytes, generator: random.Random) -> bytes:
    place = generator.randrange(len(content))
    return (
        content[:place]
        + bytes([content[place] ^ 1 << generator.randrange(8)])
        + content[place + 1 :]
    )


def cut(content: bytes, generator: random.Random) -> bytes:
    return content[: generator.randrange(len(content))]


def pickled(content: bytes, generator: random.Random) -> bytes:
    """What would end the process if it were loaded."""
    return b"cos\n_exit\n(I3\ntR."


@pytest.mark.integration
@pytest.mark.parametrize("attack", [flipped, cut, pickled])
def test_whatever_is_damaged_is_left_out(
    attack: Callable[[bytes, random.Random], bytes], tmp_path: Path
) -> None:
    """One record of each kind at a time, at random places, in a folder."""
    generator, folder = random.Random(0), FolderStore(tmp_path / "store")
    a = Replica(settings(initial=4), folder, "A")
    ledger = told(a, some(4))
    a.exchange()
    a.compact()
    more = told(a, some(2, 1))
    a.exchange()
    for key in [*folder]:
        whole = folder[key]
        (folder.path / key).write_bytes(attack(whole, generator))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReplicaWarning)
            b = Replica(UNLEARNED, folder, "B")
        kind = key.partition("/")[0]
        assert b.observations == 6 - {"snapshot": 4, "clock": 4, "delta": 2}.get(kind, 0)
        if kind not in ("replica", "learned"):  # of these those are read that count
            assert any(key in remark for remark in b.exchange().remarks)
        (folder.path / key).write_bytes(whole)
        b.exchange()
        assert_same(b.model, expected(b, ledger + more))
