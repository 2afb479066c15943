"""One grid's memory against the dense statistics of each noise group."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from bo_stream.bases.grid.interpolation import GridBasis, grid_basis
from bo_stream.bases.grid.kernel import kernel_factors
from bo_stream.models.memory import Observations, WhitenedMemory, staying
from bo_stream.models.wiski.memory import GridMemory
from bo_stream.testing.streams import assert_close
from bo_stream.weights import SufficientStatistics
from tests.support.problems import kernel
from tests.support.problems.grids import mesh_over

OUTPUTS, N = 2, 9
GRID = mesh_over(torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double(), (6, 7))
NAMES = [field.name for field in fields(SufficientStatistics)]


def batch(known: str = "some", sign: float = 1.0) -> Observations:
    noise = 0.5 + torch.rand(OUTPUTS, N).double()
    mask = {"none": torch.zeros(N), "some": torch.arange(N) % 2, "all": torch.ones(N)}[known]
    mask = mask.bool().unsqueeze(0)
    noise = torch.where(mask, noise, torch.ones_like(noise))
    return Observations(
        torch.rand(N, 2).double(), torch.randn(OUTPUTS, N).double(), noise, mask, sign
    )


@pytest.fixture
def basis() -> GridBasis:
    factors = kernel_factors(kernel("product", 2, (OUTPUTS,)), 2)
    return grid_basis(GRID, factors, torch.Size([OUTPUTS]), 0.0, 1000)


def remembered(*batches: Observations) -> GridMemory:
    memory = GridMemory.empty(GRID, torch.Size(), OUTPUTS, torch.device("cpu"))
    for data in batches:
        memory = memory.observe(data)
    return memory


def expected(basis: GridBasis, data: Observations, known: bool) -> dict[str, Tensor]:
    """Statistics of one noise group, row by row of the dense features."""
    rows = data.known[0] if known else ~data.known[0]
    Phi = basis.features(data.X[rows])
    y, noise = data.targets[:, rows], data.noise[:, rows]
    columns = torch.stack((y, torch.ones_like(y)), -1)
    return {
        "gram": Phi.mT @ (Phi / noise.unsqueeze(-1)),
        "moment": Phi.mT @ (columns / noise.unsqueeze(-1)),
        "energy": columns.mT @ (columns / noise.unsqueeze(-1)),
        "totals": columns.mT @ columns,
        "log_noise": noise.log().sum(-1),
        "noise_sum": noise.sum(-1),
    }


def assert_group(
    actual: SufficientStatistics[Tensor], *groups: dict[str, Tensor], factor: float = 10
) -> None:
    for name in NAMES:
        total = sum(group[name] for group in groups)
        assert isinstance(total, Tensor)
        assert_close(getattr(actual, name), total, factor)


def assert_memory(memory: WhitenedMemory, basis: GridBasis, *data: Observations) -> None:
    assert_group(memory.learned, *(expected(basis, d, known=False) for d in data))
    assert memory.known is not None
    assert_group(memory.known, *(expected(basis, d, known=True) for d in data))


def test_groups_hold_their_own_observations(basis: GridBasis) -> None:
    first, second = batch("some"), batch("all")
    memory = remembered(first, second)
    assert_memory(memory.whitened(basis), basis, first, second)
    assert_close(memory.totals[:, 1, 1], torch.full((OUTPUTS,), 2.0 * N))


def test_no_group_is_made_for_noise_that_is_never_known(basis: GridBasis) -> None:
    data = batch("none")
    memory = remembered(data)
    assert memory.known is None
    assert memory.whitened(basis).known is None
    assert_group(memory.whitened(basis).learned, expected(basis, data, known=False))


@pytest.mark.parametrize("known", ["none", "some", "all"])
def test_whitened_memory_is_carried_along(basis: GridBasis, known: str) -> None:
    first, second = batch("none"), batch(known)
    carried = remembered(first).whitened(basis).observed(basis.features(second.X), second)
    anew = remembered(first, second).whitened(basis)
    for ours, theirs in ((carried.learned, anew.learned), (carried.known, anew.known)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert_group(ours, {name: getattr(theirs, name) for name in NAMES})


def test_batches_are_joined(basis: GridBasis) -> None:
    batches = [batch("some"), batch("none"), batch("all")]
    one = Observations.joined(batches)
    assert_memory(remembered(one).whitened(basis), basis, *batches)


def test_a_negative_sign_takes_out(basis: GridBasis) -> None:
    first, wrong = batch("some"), batch("some")
    memory = remembered(first, wrong, replace(wrong, sign=-1.0))
    assert_memory(memory.whitened(basis), basis, first)


@pytest.mark.parametrize("kinds", [("some", "some"), ("none", "all"), ("all", "none")])
def test_memories_add(basis: GridBasis, kinds: tuple[str, str]) -> None:
    first, second = (batch(kind) for kind in kinds)
    total = remembered(first) + remembered(second)
    assert_memory(total.whitened(basis), basis, first, second)
    whitened = remembered(first).whitened(basis) + remembered(second).whitened(basis)
    assert_memory(whitened, basis, first, second)


def test_pulls_back_to_a_larger_grid() -> None:
    data = batch("some")
    larger = GRID.grown_to(torch.tensor([[-0.3, 1.2]]).double())
    factors = kernel_factors(kernel("product", 2, (OUTPUTS,)), 2)
    basis = grid_basis(larger, factors, torch.Size([OUTPUTS]), 0.0, 1000)
    assert_memory(remembered(data).on(larger).whitened(basis), basis, data)
    memory = remembered(data)
    assert memory.on(GRID) is memory


def test_selecting_outputs_copies(basis: GridBasis) -> None:
    data = batch("some")
    memory = remembered(data)
    part = memory.select([1])
    (own,) = basis.parts
    last = replace(
        own,
        eigenvalues=tuple(v[1:] for v in own.eigenvalues),
        eigenvectors=tuple(v[1:] for v in own.eigenvectors),
        scale=own.scale[1:],
    )
    factor = replace(basis, parts=(last,), scale=basis.scale[1:])
    one = replace(data, targets=data.targets[1:], noise=data.noise[1:])
    memory.observe(data)
    assert_memory(part.whitened(factor), factor, one)


def rows_with_an_outlier(dtype: torch.dtype) -> Observations:
    """Replicates at few places, with outcomes and inputs far from all others among them."""
    X = torch.linspace(0.0, 1.0, 40).round(decimals=1).unsqueeze(-1)
    Y = torch.linspace(-1.0, 1.0, 40).repeat(OUTPUTS, 1)
    X[0], Y[:, 1] = 1e5, 1e5
    noise, known = torch.ones(OUTPUTS, 40).double(), torch.zeros(1, 40).bool()
    return Observations(X.to(dtype).double(), Y.to(dtype).double(), noise, known, 1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_are_found_among_replicates_and_outliers(dtype: torch.dtype) -> None:
    rows, given = rows_with_an_outlier(torch.float64), rows_with_an_outlier(dtype)
    every = torch.ones(len(rows), dtype=torch.bool)
    for i in range(len(rows)):
        found = rows.like(given.rows(slice(i, i + 1)), every)
        assert found.nonzero().flatten().tolist() == [i]
    other = replace(given, targets=given.targets + 0.001).rows(slice(5, 6))
    assert not rows.like(other, every).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_that_are_nearly_alike_are_each_taken_out(dtype: torch.dtype) -> None:
    first = batch("none")
    again = replace(first, targets=first.targets + 3e-9)
    given = replace(first, X=first.X.to(dtype).double(), targets=first.targets.to(dtype).double())
    stay = staying(Observations.joined([first, again]), Observations.joined([given, given]))
    assert not stay.any()


def test_places_with_a_large_offset_are_told_apart() -> None:
    rows = batch("none")
    rows = replace(rows, X=torch.tensor([5e5, 4.5e6]).double() + 200.0 * rows.X)
    other = replace(rows, X=rows.X + 3.5).rows(slice(2, 3))
    assert not rows.like(other, torch.ones(N, dtype=torch.bool)).any()
