"""Draws of a few of many: fair, distinct and weighted."""

from __future__ import annotations

import pytest
import torch

from bo_stream.models.quadruply_stochastic.steps import draw

CPU = torch.device("cpu")


@pytest.mark.parametrize(("count", "of"), [(1, 7), (3, 7), (5, 7), (4, 12), (6, 7)])
def test_sums_over_draws_are_unbiased(count: int, of: int) -> None:
    generator = torch.Generator().manual_seed(0)
    totals = torch.zeros(of, dtype=torch.float64)
    squares = torch.zeros_like(totals)
    for _ in range(4000):
        index, weight = draw(count, of, generator, CPU)
        assert len(index.unique()) == len(index)
        share = torch.zeros_like(totals).index_add_(0, index, weight)
        assert float(share.sum()) == pytest.approx(of)
        totals, squares = totals + share / 4000, squares + share.square() / 4000
    error = 5.0 * ((squares - totals.square()) / 4000).clamp_min(0.0).sqrt()
    assert bool(((totals - 1.0).abs() <= error + 1e-9).all())


def test_as_many_as_there_are_is_all() -> None:
    index, weight = draw(5, 5, torch.Generator(), CPU)
    assert torch.equal(index, torch.arange(5))
    assert torch.equal(weight, torch.ones(5, dtype=torch.float64))


def test_a_few_of_very_many() -> None:
    index, _ = draw(1000, 10**9, torch.Generator().manual_seed(0), CPU)
    assert len(index) == 1000
    assert int(index.max()) > 0.99 * 10**9
