"""Sums over a grid, one dimension after another, against sums over dense features."""

from __future__ import annotations

import pytest
import torch

from bo_stream.bases.grid.contraction import Contraction
from bo_stream.bases.grid.statistics import accumulate, zero_statistics
from bo_stream.testing.streams import assert_close
from tests.oracles.interpolation import interpolation_weights
from tests.support.problems.grids import mesh_over


@pytest.mark.parametrize("sizes", [(7,), (6, 9), (5, 6, 4), (4, 5, 4, 4)])
@pytest.mark.parametrize("kept", ["some", "all"])
def test_contracts_any_set_of_products(sizes: tuple[int, ...], kept: str) -> None:
    dim, n = len(sizes), 15
    bounds = torch.tensor([[0.0] * dim, [1.0] * dim], dtype=torch.float64)
    grid = mesh_over(bounds, sizes)
    statistics = zero_statistics(grid, torch.Size(), 1, 1, torch.device("cpu"))
    X, one = torch.rand(n, dim, dtype=torch.float64), torch.ones(1, n, dtype=torch.float64)
    accumulate(statistics, grid, X, one, one, one)

    roots = [torch.randn(size, size - 1, dtype=torch.float64) for size in sizes]
    index = torch.cartesian_prod(*(torch.arange(size - 1) for size in sizes)).view(-1, dim)
    index = index[torch.randperm(len(index))]
    index = index[: len(index) // 3] if kept == "some" else index

    functions = torch.ones(len(index), 1, dtype=torch.float64)
    for i, root in enumerate(roots):
        line = root.mT[index[:, i]]
        functions = (functions.unsqueeze(-1) * line.unsqueeze(-2)).flatten(-2)
    features = interpolation_weights(X, bounds, sizes) @ functions.mT
    actual = Contraction.of(roots, index).gram(statistics.gram.blocks[0].by_dimension()[0])
    scale = features.square().sum(0).max()
    assert_close(actual / scale, features.mT @ features / scale)


@pytest.mark.parametrize("sizes", [(7,), (6, 9), (5, 6, 4), (4, 5, 4, 4)])
@pytest.mark.parametrize("fewest", [1, 64])
def test_the_adjoint_has_the_same_inner_products(
    sizes: tuple[int, ...], fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``⟨M, C(moments)⟩ = ⟨adjoint(M), moments⟩``, with rows in one bucket and in several."""
    monkeypatch.setattr("bo_stream.bases.grid.contraction._FEWEST", fewest)
    roots = [torch.randn(size, size - 1, dtype=torch.float64) for size in sizes]
    index = torch.cartesian_prod(*(torch.arange(size - 1) for size in sizes)).view(-1, len(sizes))
    index = index[torch.randperm(len(index))][: 2 * len(index) // 3]
    moments = torch.randn([7 * (size - 3) for size in sizes], dtype=torch.float64)
    half = torch.randn(len(index), len(index), dtype=torch.float64)
    matrix = half + half.mT

    contraction = Contraction.of(roots, index)
    inner = (matrix * contraction.gram(moments)).sum()
    coefficients = contraction.adjoint(matrix)
    assert coefficients.shape == moments.shape
    scale = (coefficients * moments).abs().sum()
    assert_close((coefficients * moments).sum() / scale, inner / scale)
