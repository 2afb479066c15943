"""Moments per cell against the dense gram of interpolation weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bo_stream.bases.grid.contraction import Contraction
from bo_stream.bases.grid.mesh import Mesh, outer_product, ravel
from bo_stream.bases.grid.statistics import (
    CellGram,
    NodeGram,
    accumulate,
    embed,
    zero_statistics,
)
from bo_stream.tensors import map_tensors
from bo_stream.testing.streams import assert_close
from bo_stream.weights import SufficientStatistics, weighted_statistics
from tests.oracles.interpolation import interpolation_weights
from tests.support.problems.grids import mesh_over

SIZES = {1: (9,), 2: (6, 5), 3: (5, 4, 6)}
BATCH, GROUPS, OUTPUTS, N = (2,), 2, 2, 12
FIELDS = ("moment", "energy", "totals", "log_noise", "noise_sum")


class Stream:
    """Random observations on a grid of some dimension, batched, with two outputs."""

    def __init__(self, dim: int) -> None:
        low, high = torch.linspace(-1.0, 0.5, dim), torch.linspace(0.7, 3.0, dim)
        self.bounds = torch.stack((low, high)).double()
        self.grid = mesh_over(self.bounds, SIZES[dim])
        unit = torch.rand(*BATCH, N, dim, dtype=torch.float64)
        unit[..., 0, :], unit[..., 1, :] = 0.0, 1.0
        self.X = self.bounds[0] + (self.bounds[1] - self.bounds[0]) * unit
        self.targets = torch.randn(*BATCH, OUTPUTS, N).double()
        self.noise = 0.5 + torch.rand(*BATCH, GROUPS, N).double()
        self.weight = torch.tensor([1.0, 0.0, -1.0]).double()[torch.randint(3, self.noise.shape)]

    def statistics(self, rows: slice = slice(None)) -> SufficientStatistics[NodeGram]:
        result = zero_statistics(self.grid, torch.Size(BATCH), GROUPS, OUTPUTS, torch.device("cpu"))
        return self.added_to(result, rows)

    def added_to(
        self, statistics: SufficientStatistics[NodeGram], rows: slice
    ) -> SufficientStatistics[NodeGram]:
        data = (self.targets[..., rows], self.noise[..., rows], self.weight[..., rows])
        return accumulate(statistics, self.grid, self.X[..., rows, :], *data)

    def dense(self, grid: Mesh | None = None) -> SufficientStatistics[Tensor]:
        grid = grid or self.grid
        W = interpolation_weights(self.X, grid.bounds, grid.size)
        return weighted_statistics(W.unsqueeze(-3), self.targets, self.noise, self.weight)


def dense_gram(nodes: NodeGram) -> Tensor:
    """Every entry, as products of indicator functions of the nodes."""
    (gram,) = nodes.blocks
    sizes = [cells + 3 for cells in gram.cells]
    identity = [torch.eye(size, dtype=torch.float64) for size in sizes]
    every = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).view(-1, len(sizes))
    flat = CellGram(gram.moments.flatten(0, -3), gram.cells).by_dimension()
    entries = torch.stack([Contraction.of(identity, every).gram(moments) for moments in flat])
    return entries.unflatten(0, gram.moments.shape[:-2])


def assert_same(
    actual: SufficientStatistics[NodeGram], dense: SufficientStatistics[Tensor]
) -> None:
    assert_close(dense_gram(actual.gram), dense.gram)
    for name in FIELDS:
        assert_close(getattr(actual, name), getattr(dense, name))


@pytest.mark.parametrize("dim", SIZES)
def test_accumulated_statistics_are_the_dense_ones(dim: int) -> None:
    stream = Stream(dim)
    assert_same(stream.statistics(), stream.dense())


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(2)
    monkeypatch.setattr("bo_stream.bases.grid.statistics._NUMBERS_BY_ROW", 7**2 * GROUPS * 5)
    assert_same(stream.statistics(), stream.dense())


def test_accumulating_is_adding() -> None:
    stream = Stream(2)
    first = stream.statistics(slice(5))
    total = first + stream.statistics(slice(5, N))
    in_place = stream.added_to(first, slice(5, N))
    assert_same(total, stream.dense())
    assert_same(in_place, stream.dense())
    assert in_place.moment is first.moment
    assert not torch.equal(in_place.totals, first.totals)


def test_scaling_the_gram() -> None:
    gram = Stream(2).statistics().gram
    assert_close(dense_gram(map_tensors(gram, lambda values: values * 0.3)), 0.3 * dense_gram(gram))


@pytest.mark.parametrize("dim", SIZES)
def test_embedding_in_a_larger_grid_is_accumulating_there(dim: int) -> None:
    stream = Stream(dim)
    width = stream.bounds[1] - stream.bounds[0]
    corners = torch.stack((stream.bounds[0] - 0.3 * width, stream.bounds[1] + 0.1 * width))
    larger = stream.grid.grown_to(corners)
    assert_same(embed(stream.statistics(), stream.grid, larger), stream.dense(larger))


def test_embedding_needs_the_same_nodes() -> None:
    stream = Stream(2)
    other = mesh_over(stream.bounds, (7, 5))
    with pytest.raises(ValueError, match="shares this grid's nodes"):
        embed(stream.statistics(), stream.grid, other)


@pytest.mark.parametrize("shared", [True, False])
def test_selecting_outputs_copies(shared: bool) -> None:
    statistics = Stream(2).statistics()
    gram = statistics.gram
    (block,) = gram.blocks
    if shared:
        gram = NodeGram((CellGram(block.moments[:, :1], block.cells),), ())
    chosen = replace(statistics, gram=gram).select([1]).gram
    before = dense_gram(chosen)
    assert_close(before, dense_gram(gram)[:, [0 if shared else 1]])
    block.moments.zero_()
    assert_close(dense_gram(chosen), before)


def test_a_grid_too_large_is_refused_with_its_size() -> None:
    grid = mesh_over(torch.tensor([[0.0] * 4, [1.0] * 4]), (100,) * 4)
    with pytest.raises(ValueError, match=r"100 x 100 x 100 x 100 nodes would need [\d,.]+ GiB"):
        zero_statistics(grid, torch.Size(), 1, 1, torch.device("cpu"))


def test_products_and_indices_are_row_major() -> None:
    factors = torch.randn(5, 3, 4, dtype=torch.float64)
    expected = torch.einsum("na,nb,nc->nabc", *factors.unbind(1)).flatten(1)
    assert_close(outer_product(factors), expected)
    index = torch.cartesian_prod(torch.arange(2), torch.arange(5), torch.arange(3))
    assert torch.equal(ravel(index, (2, 5, 3)), torch.arange(30))
