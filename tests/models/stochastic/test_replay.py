"""What steps draw from: sums over draws are fair, values stay as they are, and n is said."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, TensorDataset

from bo_stream.models.stochastic.replay import (
    Batch,
    DatasetReplay,
    Replay,
    StreamReplay,
    generator_at,
)


def numbered(first: int, last: int, batch: tuple[int, ...] = (), outputs: int = 1) -> Batch:
    """Observations that tell which they are."""
    number = torch.arange(first, last, dtype=torch.float64).unsqueeze(-1)
    return Batch(
        torch.cat((number, -number), -1).expand(*batch, -1, -1).clone(),
        (number + 0.5 * torch.arange(outputs)).expand(*batch, -1, -1).clone(),
    )


def stream(*sizes: int, capacity: int | None = None, seed: int = 0) -> StreamReplay:
    replay, first = StreamReplay.empty(numbered(0, 1), capacity, seed), 0
    for size in sizes:
        replay, first = replay.plus(numbered(first, first + size)), first + size
    return replay


def rows_of(replay: Replay) -> Tensor:
    return torch.cat([chunk.Y[..., 0] for chunk in replay.chunks(4)], -1)


def dataset(n: int) -> Dataset:
    whole = numbered(0, n, outputs=2)
    return TensorDataset(whole.X, whole.Y)


def test_holds_all_of_a_stream_in_order() -> None:
    replay = stream(3, 0, 1, 10, 40)
    assert (replay.count, replay.held) == (54, 54)
    assert torch.equal(rows_of(replay), torch.arange(54, dtype=torch.float64))
    batch = replay.at(torch.tensor([50, 2]))
    assert torch.equal(batch.X[:, 1], torch.tensor([-50.0, -2.0], dtype=torch.float64))


def test_adding_changes_no_earlier_value() -> None:
    """Two streams that part from each other keep their own rows, in shared room or not."""
    base = stream(5, 2)
    left, right = base.plus(numbered(100, 103)), base.plus(numbered(200, 204))
    assert rows_of(base).tolist() == list(range(7))
    assert rows_of(left)[7:].tolist() == [100, 101, 102]
    assert rows_of(right)[7:].tolist() == [200, 201, 202, 203]
    full = stream(6, capacity=6)
    before = rows_of(full)
    full.plus(numbered(6, 600))
    assert torch.equal(rows_of(full), before)


def test_adding_moves_few_rows() -> None:
    """Room is made by doubling: most additions write into what is there."""
    replay, moved = stream(), 0
    for i in range(1000):
        longer = replay.plus(numbered(i, i + 1))
        moved += replay.held if longer.room is not replay.room else 0
        replay = longer
    assert moved < 2000


def test_a_sample_is_uniform_over_all_that_came() -> None:
    """Each of 40 in 5 places, by batches of 7: 1/8, within 4 standard errors of 400 samples."""
    trials, hits = 400, torch.zeros(40)
    for seed in range(trials):
        replay = stream(7, 7, 7, 7, 7, 5, capacity=5, seed=seed)
        assert (replay.count, replay.held) == (40, 5)
        kept = rows_of(replay).long()
        assert len(kept.unique()) == 5
        hits[kept] += 1
    error = (0.125 * 0.875 / trials) ** 0.5
    assert float((hits / trials - 0.125).abs().max()) < 4.0 * error


def test_memory_of_a_sample_stays() -> None:
    for sizes in ((50,), (3, 900, 7)):
        assert len(stream(*sizes, capacity=20).room.data) == 20


def test_draws_are_fair() -> None:
    replay = stream(11)
    draws = torch.stack([replay.draw(3, generator_at(1, i)).Y.sum() for i in range(1000)])
    estimate = draws * replay.count / 3
    error = float(estimate.std()) / 1000**0.5
    assert abs(float(estimate.mean()) - 55.0) < 4.0 * error


def test_a_draw_of_all_is_each_row_once() -> None:
    assert rows_of(stream(9)).tolist() == stream(9).draw(9).Y.flatten().tolist()


def test_draws_follow_their_generator() -> None:
    replay = stream(50)
    one, same, other = (replay.draw(8, generator_at(3, i)).Y for i in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("size", [0, 12])
def test_refuses_draws_of_none_and_of_more_than_there_are(size: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 11 observations.*got {size}.*batch_size"):
        stream(11).draw(size)
    with pytest.raises(ValueError, match="update with more data"):
        stream().draw(1)


def test_refuses_to_hold_nothing() -> None:
    with pytest.raises(ValueError, match="at least 1 observation"):
        stream(capacity=0)


def test_copies_go_on_alike() -> None:
    replay = stream(9, 30, capacity=10, seed=4)
    more = numbered(39, 90)
    for twin in (copy.deepcopy(replay), pickle.loads(pickle.dumps(replay))):
        assert torch.equal(rows_of(twin.plus(more)), rows_of(replay.plus(more)))


def test_batches_and_outputs() -> None:
    data = numbered(0, 6, (2, 3), outputs=3)
    replay = StreamReplay.empty(data).plus(data)
    assert replay.draw(4).X.shape == (2, 3, 4, 2)
    part = replay.select([2, 0])
    assert torch.equal(part.draw(6).Y, data.Y[..., [2, 0]])
    longer = part.plus(Batch(data.X, data.Y[..., :2]))
    assert (longer.held, replay.held, part.held) == (12, 6, 6)
    assert torch.equal(replay.draw(6).Y, data.Y)


def test_on_a_device(device: torch.device) -> None:
    for replay in (stream(9), DatasetReplay.of(dataset(9))):
        moved = replay.to(device).draw(3)
        assert moved.X.device.type == moved.Y.device.type == device.type


def test_reads_a_data_set() -> None:
    replay = DatasetReplay.of(dataset(10))
    assert (replay.count, replay.held) == (10, 10)
    assert rows_of(replay).tolist() == list(range(10))
    assert torch.equal(replay.select([1]).draw(10).Y, rows_of(replay).unsqueeze(-1) + 0.5)
    longer = DatasetReplay.of(ConcatDataset([dataset(10), dataset(3)]))
    assert longer.draw(4, generator_at(0, 0)).Y.shape == (4, 2)


def test_a_data_set_of_plain_numbers() -> None:
    class Numbers(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> tuple[list[float], float]:
            return [float(i), 1.0], 2.0 * i

    batch = DatasetReplay.of(Numbers()).draw(4)
    assert batch.Y.flatten().tolist() == [0.0, 2.0, 4.0, 6.0]
    assert batch.X.shape == (4, 2)


@pytest.mark.parametrize("widths", [(3, 2), (2, 1), (2, 3)])
def test_an_item_of_another_width_than_the_first_is_named(widths: tuple[int, int]) -> None:
    d, m = widths
    longer = ConcatDataset([dataset(10), TensorDataset(torch.rand(2, d), torch.rand(2, m))])
    message = rf"item 11 .* an input of 2 numbers and an outcome of 2, .* got {d} and {m}\."
    for replay in (DatasetReplay.of(longer), DatasetReplay.of(longer).select([1])):
        assert replay.at(torch.tensor([9])).X.shape == (1, 2)
        for places in ([9, 11], [11]):
            with pytest.raises(BotorchTensorDimensionError, match=message):
                replay.at(torch.tensor(places))


def test_refuses_data_sets_that_cannot_be_drawn_from() -> None:
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(())

    class Triples(Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, _: int) -> tuple[int, int, int]:
            return 1, 2, 3

    with pytest.raises(UnsupportedError, match="Endless"):
        DatasetReplay.of(Endless())
    with pytest.raises(InputDataError, match="at least one observation"):
        DatasetReplay.of(dataset(0))
    with pytest.raises(InputDataError, match=r"items \(x, y\)"):
        DatasetReplay.of(Triples())
    with pytest.raises(BotorchTensorDimensionError, match="item 0"):
        DatasetReplay.of(TensorDataset(torch.rand(3, 2, 2), torch.rand(3)))
    with pytest.raises(UnsupportedError, match="ConcatDataset"):
        DatasetReplay.of(dataset(3)).plus(numbered(3, 4, outputs=2))
