"""Vector clocks beside plain sets of deltas."""

from __future__ import annotations

import random

import pytest

from bo_stream.distributed.deltas import Dot, VectorClock, spelled

ALL: list[Dot] = [(writer, number) for writer in "ab" for number in range(1, 8)]


def some(generator: random.Random) -> set[Dot]:
    return {dot for dot in ALL if generator.random() < 0.6}


def dots_of(clock: VectorClock) -> set[Dot]:
    return {dot for dot in ALL if dot in clock}


@pytest.mark.parametrize("seed", range(20))
def test_clocks_are_sets_of_deltas(seed: int) -> None:
    generator = random.Random(seed)
    first, second = some(generator), some(generator)
    order = generator.sample(sorted(first), len(first))
    a, b = VectorClock().plus(order), VectorClock().plus(second)
    assert a == VectorClock().plus(first)
    assert dots_of(a) == first
    assert dots_of(a.joined(b)) == first | second == dots_of(b.joined(a))
    assert a.joined(b) == b.joined(a)
    assert set(a.lacking(b)) == second - first
    assert a.covers(b) == (second <= first)
    assert a.joined(b).covers(a)
    assert VectorClock.of_plain(a.plain()) == a


def test_a_stream_without_gaps_is_one_number() -> None:
    clock = VectorClock().plus([("a", 3), ("a", 1), ("a", 2), ("b", 2)])
    assert clock == VectorClock({"a": 3}, {"b": frozenset({2})})


@pytest.mark.parametrize("plain", [{}, {"upto": [], "beyond": {}}, {"upto": {"a": "x"}}])
def test_other_values_are_no_clock(plain: object) -> None:
    with pytest.raises(ValueError, match=r"vector clock|invalid literal"):
        VectorClock.of_plain(plain)  # type: ignore[arg-type]


def test_deltas_are_spelled_by_writer() -> None:
    assert spelled([("a", n) for n in range(1, 8)] + [("b", 2)]) == "a: 1, 2, 3, 4, 5, ...; b: 2"
