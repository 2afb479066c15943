"""Observations of which each process holds some: drawn together as one process draws them all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TypeVar

import pytest
import torch

from bo_stream.collective import Collective
from bo_stream.models.stochastic.replay import Batch, StreamReplay, generator_at
from bo_stream.models.stochastic.training import ShardedReplay
from tests.distributed.threads import together

T = TypeVar("T")
SIZES = ((4, 3, 0), (0, 1, 5), (0, 0, 0), (2, 2, 2))
"""Rows that each of three processes adds, update by update."""
FIRST = 7


def rows(count: int, start: int) -> Batch:
    numbers = torch.arange(start, start + count, dtype=torch.float64)
    return Batch(numbers.unsqueeze(-1).repeat(1, 2), numbers.unsqueeze(-1))


def whole() -> StreamReplay:
    return StreamReplay.empty(rows(0, 0)).plus(rows(FIRST, 0))


def added(replay: StreamReplay | ShardedReplay, rank: int | None) -> StreamReplay | ShardedReplay:
    """After all updates: of one process's rows, or of all of them in order."""
    start = FIRST
    for sizes in SIZES:
        before = 0 if rank is None else sum(sizes[:rank])
        count = sum(sizes) if rank is None else sizes[rank]
        replay = replay.plus(rows(count, start + before))
        start += sum(sizes)
    return replay


def on_three(work: Callable[[ShardedReplay], T]) -> list[T]:
    def one(collective: Collective) -> T:
        shards = added(ShardedReplay.shared_out(whole(), collective), collective.rank)
        assert isinstance(shards, ShardedReplay)
        return work(shards)

    return together(3, one)


ALL = added(whole(), None)


def numbers(batch: Batch) -> list[float]:
    assert torch.equal(batch.X, batch.Y.repeat(1, 2))
    return batch.Y.flatten().tolist()


def test_rows_are_shared_out_in_equal_parts() -> None:
    shards = together(3, lambda c: ShardedReplay.shared_out(whole(), c))
    assert [numbers(one.own.draw(one.own.held)) for one in shards] == [[0, 1], [2, 3], [4, 5, 6]]


@pytest.mark.parametrize("size", [1, 5, 16, ALL.held])
def test_parts_of_a_draw_make_the_draw_of_one_that_holds_all(size: int) -> None:
    for seed in range(4):
        expected = numbers(ALL.draw(size, generator_at(seed, 0)))

        def work(shards: ShardedReplay, seed: int = seed) -> tuple[list[float], list[float]]:
            places = shards.places(size, generator_at(seed, 0))
            own = shards.at(places)
            return numbers(own), numbers(shards.completed(own, places))

        found = on_three(work)
        assert sorted(chain.from_iterable(own for own, _ in found)) == sorted(expected)
        assert [everyone for _, everyone in found] == [expected] * 3


def test_all_rows_are_visited_once_by_the_process_that_holds_them() -> None:
    visited = on_three(lambda shards: [numbers(batch) for batch in shards.chunks(3)])
    found = [number for batches in visited for batch in batches for number in batch]
    assert sorted(found) == numbers(ALL.draw(ALL.held))
    assert {(one.held, one.count) for one in on_three(lambda shards: shards)} == {(26, 26)}


def test_a_process_that_is_left_alone_has_rows_that_stand_for_all() -> None:
    for shards in on_three(lambda shards: shards):
        alone = shards.left_alone
        assert (alone.count, alone.held) == (26, shards.own.held)
        assert alone.weight == pytest.approx(26 / shards.own.held)


def test_outputs_and_devices_are_those_of_the_rows() -> None:
    for shards in on_three(lambda shards: shards.select([0]).to(torch.device("cpu"))):
        index = torch.arange(shards.held)
        assert numbers(shards.at(index)) == numbers(shards.own.draw(shards.own.held))
