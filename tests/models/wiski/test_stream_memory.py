"""A memory of several grids: what is joined, what is kept beside, and how far it grows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from bo_stream.bases.grid.mesh import Mesh
from bo_stream.models.memory import Observations
from bo_stream.models.wiski.memory import MAX_GROWTH, StreamMemory
from bo_stream.testing.streams import assert_close
from tests.support.problems.grids import mesh_over

UNIT = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
GRID = mesh_over(UNIT, (6, 7))


def empty(grid: Mesh = GRID) -> StreamMemory:
    return StreamMemory.empty(grid, torch.Size(), 1, torch.device("cpu"))


def batch(n: int, low: float = 0.0, high: float = 1.0, known: bool = False) -> Observations:
    X = low + (high - low) * torch.rand(n, 2).double()
    mask = torch.full((1, n), known)
    noise = torch.where(mask, 0.1 + torch.rand(1, n).double(), torch.ones(1, n).double())
    return Observations(X, torch.randn(1, n).double(), noise, mask, 1.0)


def observed(memory: StreamMemory, data: Observations) -> StreamMemory:
    memory = memory.covering(data.X)
    return replace(memory, current=memory.current.observe(data))


def moments(memory: StreamMemory) -> list[tuple[tuple[int, ...], Tensor]]:
    """Grid sizes and the summed moments of each grid."""
    return [(part.grid.size, part.learned.moment.sum((-2, -3))) for part in memory]


def test_grows_only_as_far_as_it_must() -> None:
    memory, data = empty(), batch(5, -0.4, 1.1)
    grown = observed(memory, data)
    assert memory.covering(batch(5).X) is memory
    assert grown.grid == GRID.grown_to(data.X)
    assert grown.first == GRID
    assert_close(grown.counts, torch.tensor([5.0]))


def test_growth_ends_at_a_multiple_of_the_first_width() -> None:
    memory = empty()
    width = MAX_GROWTH - 1.0
    edge = torch.tensor([[1.0 + width, 0.5]]).double()
    assert memory.covering(edge).grid.parts[0].cells[0] == MAX_GROWTH * GRID.parts[0].cells[0]
    for x, y, dimension in ((1.01 + width, 0.5, 0), (0.5, -0.01 - width, 1)):
        with pytest.raises(InputDataError, match=rf"bounds \[0, 1\] of dimension {dimension}"):
            memory.covering(torch.tensor([[x, y]]).double())
    halfway = memory.covering(torch.tensor([[-1.0, 0.5]]).double())
    with pytest.raises(InputDataError, match="too far"):
        halfway.covering(edge)


def test_refining_keeps_what_was_observed_where_it_was() -> None:
    finer = mesh_over(UNIT, (11, 12))
    refined = empty().refined(finer)
    assert [size for size, _ in moments(refined)] == [finer.size]
    data, more = batch(4), batch(3)
    memory = observed(observed(empty(), data).refined(finer), more)
    assert [size for size, _ in moments(memory)] == [finer.size, GRID.size]
    expected = [observed(empty(finer), more), observed(empty(), data)]
    for (_, actual), part in zip(moments(memory), expected, strict=True):
        assert_close(actual, moments(part)[0][1])
    assert_close(memory.counts, torch.tensor([7.0]))


def test_absorbing_joins_grids_of_the_same_nodes() -> None:
    left, right = batch(4, -0.4, 0.9), batch(3, 0.1, 1.5, known=True)
    memory = observed(empty(), left).absorb(observed(empty(), right))
    both = observed(observed(empty(), left), right)
    assert memory.grid == both.grid
    assert not memory.earlier
    assert_close(memory.current.learned.moment, both.current.learned.moment)
    assert memory.current.known is not None
    assert both.current.known is not None
    assert_close(memory.current.known.moment, both.current.known.moment)
    assert_close(
        memory.current.known.gram.blocks[0].moments, both.current.known.gram.blocks[0].moments
    )
    noise = memory.mean_known_noise()
    assert noise is not None
    assert_close(noise, right.noise.mean(-1))


def test_absorbing_keeps_each_other_grid_once() -> None:
    other = mesh_over(UNIT, (9, 8))
    parts = [batch(3), batch(4), batch(5)]
    memory = observed(empty(), parts[0])
    for data in parts[1:]:
        memory = memory.absorb(observed(empty(other), data))
    assert [size for size, _ in moments(memory)] == [GRID.size, other.size]
    both = observed(observed(empty(other), parts[1]), parts[2])
    assert_close(moments(memory)[1][1], moments(both)[0][1])
    assert_close(memory.counts, torch.tensor([12.0]))


def test_no_noise_is_known_at_first() -> None:
    assert empty().mean_known_noise() is None
    assert observed(empty(), batch(3)).mean_known_noise() is None


def test_forgetting_keeps_the_mean_noise() -> None:
    data = batch(3, known=True)
    memory = observed(empty(), data).scale(0.1)
    noise = memory.mean_known_noise()
    assert noise is not None
    assert_close(noise, data.noise.mean(-1))
