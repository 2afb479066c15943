"""Draws of a few of many: fair, distinct and weighted."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from bo_stream.models.quadruply_stochastic.steps import draw


@pytest.mark.parametrize(("count", "of"), [(1, 7), (3, 7), (5, 7), (4, 12), (6, 7)])
def test_sums_over_draws_are_unbiased(count: int, of: int) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [draw(count, of, generator) for _ in range(4000)]
    index, weight = (pad_sequence(part, batch_first=True) for part in zip(*draws, strict=True))
    none = torch.zeros(4000, of, dtype=torch.float64)
    times = none.scatter_add(1, index, (weight > 0.0).double())
    assert float(times.max()) == 1.0  # they are distinct
    shares = none.scatter_add(1, index, weight)
    torch.testing.assert_close(shares.sum(1), torch.full((4000,), float(of)).double())
    error = 5.0 * shares.std(0) / 4000**0.5
    assert bool(((shares.mean(0) - 1.0).abs() <= error + 1e-9).all())


def test_as_many_as_there_are_is_all() -> None:
    index, weight = draw(5, 5, torch.Generator())
    assert torch.equal(index, torch.arange(5))
    assert torch.equal(weight, torch.ones(5, dtype=torch.float64))


def test_a_few_of_very_many() -> None:
    index, _ = draw(1000, 10**9, torch.Generator().manual_seed(0))
    assert len(index) == 1000
    assert int(index.max()) > 0.99 * 10**9
