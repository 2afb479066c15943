"""Draws of a few of many: fair, distinct and weighted."""

from __future__ import annotations

import pytest
import torch

from bo_stream.bases.sampled import Draw, draw

CPU = torch.device("cpu")


@pytest.mark.parametrize(("count", "of"), [(1, 7), (3, 7), (5, 7), (4, 12), (6, 7)])
def test_sums_over_draws_are_unbiased(count: int, of: int) -> None:
    generator = torch.Generator().manual_seed(0)
    totals = torch.zeros(of, dtype=torch.float64)
    squares = torch.zeros_like(totals)
    for _ in range(4000):
        one = draw(count, of, generator, CPU)
        assert len(one.index.unique()) == len(one.index)
        share = torch.zeros_like(totals).index_add_(0, one.index, one.weight)
        assert float(share.sum()) == pytest.approx(of)
        totals, squares = totals + share / 4000, squares + share.square() / 4000
    error = 5.0 * ((squares - totals.square()) / 4000).clamp_min(0.0).sqrt()
    assert bool(((totals - 1.0).abs() <= error + 1e-9).all())


def test_as_many_as_there_are_is_all() -> None:
    one, whole = draw(5, 5, torch.Generator(), CPU), Draw.all(5, CPU)
    assert one.is_all
    assert torch.equal(one.index, whole.index)
    assert torch.equal(one.weight, torch.ones(5, dtype=torch.float64))
    assert not draw(4, 5, torch.Generator(), CPU).is_all


def test_a_few_of_very_many() -> None:
    one = draw(1000, 10**9, torch.Generator().manual_seed(0), CPU)
    assert len(one.index) == 1000
    assert int(one.index.max()) > 0.99 * 10**9
