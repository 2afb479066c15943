"""Sums over rows of the same cell, by blocks, against the dense statistics of the same rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bo_stream.bases.grid.mesh import Mesh
from bo_stream.bases.grid.statistics import (
    ROWS_A_CELL,
    NodeGram,
    accumulate,
    blocks,
    cell_sums,
    zero_statistics,
)
from bo_stream.testing.streams import assert_close
from bo_stream.weights import SufficientStatistics, weighted_statistics
from tests.bases.grid.test_cell_gram import SIZES, assert_same
from tests.oracles.interpolation import interpolation_weights
from tests.support.problems.grids import mesh_over

ROWS = 150
CPU = torch.device("cpu")


def drawn(dim: int, crowded: bool) -> tuple[Mesh, Tensor]:
    """A grid and rows all over its box, or most of them in one cell."""
    grid = mesh_over(torch.tensor([[0.0] * dim, [1.0] * dim]), SIZES[dim])
    X = torch.rand(ROWS, dim, dtype=torch.float64)
    X[0], X[1] = 0.0, 1.0
    if crowded:
        X[10:] *= 0.1
    return grid, X


def data(groups: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Targets, noise, and weights of every kind."""
    noise = 0.5 + torch.rand(groups, ROWS, dtype=torch.float64)
    weight = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)[torch.randint(3, noise.shape)]
    return torch.randn(outputs, ROWS, dtype=torch.float64), noise, weight


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of blocks of every call."""
    calls: list[int] = []

    def spy(*args: Tensor) -> list[object]:
        found = list(cell_sums(*args))  # type: ignore[arg-type]
        calls.append(sum(len(each.cells) for each in found))
        return list(found)

    monkeypatch.setattr("bo_stream.bases.grid.statistics.cell_sums", spy)
    return calls


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize(("groups", "outputs"), [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("dim", SIZES)
def test_many_rows_are_summed_by_cell_to_the_dense_statistics(
    monkeypatch: pytest.MonkeyPatch, dim: int, groups: int, outputs: int, crowded: bool
) -> None:
    grid, X = drawn(dim, crowded)
    targets, noise, weight = data(groups, outputs)
    calls = counted(monkeypatch)
    found = zero_statistics(grid, torch.Size(), groups, outputs, CPU)
    found = accumulate(found, grid, X, targets, noise, weight)
    assert len(calls) == 1
    assert calls[0] <= ROWS / 4 + math.prod(grid.parts[0].cells)
    W = interpolation_weights(X, grid.bounds, grid.size)
    assert_same(found, weighted_statistics(W.unsqueeze(0), targets, noise, weight))


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, X = drawn(2, False)
    values = data(1, 1)

    def made() -> SufficientStatistics[NodeGram]:
        found = zero_statistics(grid, torch.Size(), 1, 1, CPU)
        return accumulate(found, grid, X, *values)

    whole = made()
    monkeypatch.setattr("bo_stream.bases.grid.statistics._NUMBERS_BY_CELL", 1)
    by_block = made()
    assert_close(by_block.gram.blocks[0].moments, whole.gram.blocks[0].moments)
    assert_close(by_block.moment, whole.moment)


def test_few_rows_are_added_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, X = drawn(2, False)
    few = ROWS_A_CELL * math.prod(grid.parts[0].cells) - 1
    calls = counted(monkeypatch)
    found = zero_statistics(grid, torch.Size(), 1, 1, CPU)
    accumulate(found, grid, X[:few], *(value[:, :few] for value in data(1, 1)))
    assert calls == []


def test_float32_inputs_are_summed_in_double() -> None:
    grid, X = drawn(2, False)
    values = data(1, 1)
    found = zero_statistics(grid, torch.Size(), 1, 1, CPU)
    found = accumulate(found, grid, X.float(), *values)
    W = interpolation_weights(X.float().double(), grid.bounds, grid.size)
    dense = weighted_statistics(W.unsqueeze(0), *values)
    assert_close(found.moment, dense.moment, factor=1e4)


def test_blocks_hold_every_row_once_and_rows_of_one_cell() -> None:
    cells = torch.tensor([3, 1, 3, 3, 0, 3, 3, 1, 3])
    rows, held = blocks(cells, 4)
    assert sorted(rows[held].tolist()) == list(range(len(cells)))
    assert bool(held[:, 0].all())
    for some, here in zip(rows, held, strict=True):
        assert len(set(cells[some[here]].tolist())) == 1
    assert len(rows) == 4  # one each of cells 0 and 1, two of cell 3
