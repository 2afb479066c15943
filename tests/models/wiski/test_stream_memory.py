"""A memory of several grids: what is joined, what is kept beside, and how far it grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from bo_stream.bases.grid import statistics
from bo_stream.bases.grid.interpolation import grid_basis
from bo_stream.bases.grid.kernel import kernel_factors
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.bases.grid.statistics import gram_numbers
from bo_stream.models.memory import Observations
from bo_stream.models.wiski.memory import MAX_GROWTH, WAITING, StreamMemory
from bo_stream.tensors import map_tensors
from bo_stream.testing.streams import assert_close
from tests.support.problems import kernel
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
    return memory.covering(data.X).observed(data).entered()


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


# --- small batches wait ----------------------------------------------------------------------


def waits(*sizes: int, known: bool = False) -> StreamMemory:
    """A memory of one batch in statistics, and of others that wait, every other one of another
    kind of noise."""
    memory = observed(empty(), batch(9, known=known))
    for i, n in enumerate(sizes):
        memory = memory.observed(batch(n, known=known != (i % 2 == 1)))
    return memory


def of_all(memory: StreamMemory) -> Tensor:
    """All numbers of a memory whose observations are all in statistics."""
    found: list[Tensor] = []
    map_tensors(memory, lambda tensor: found.append(tensor.double().flatten()) or tensor)  # type: ignore[func-returns-value]
    return torch.cat(found)


def test_small_batches_wait_and_enter_as_one() -> None:
    memory = waits()
    before = of_all(memory)
    for n in (3, 1, 5):
        memory = memory.observed(batch(n))
    assert [len(data) for data in memory.waiting] == [3, 1, 5]
    assert torch.equal(of_all(replace(memory, waiting=())), before)
    full = memory.observed(batch(WAITING - 8))
    assert full.waiting == ()
    assert_close(full.counts, torch.tensor([18.0 + WAITING - 8]))
    assert memory.observed(batch(WAITING - 9)).waiting != ()


def test_a_large_batch_does_not_wait() -> None:
    assert empty().observed(batch(WAITING + 1)).waiting == ()


def test_a_batch_that_is_taken_out_does_not_wait() -> None:
    memory = waits(3, 2)
    first, second = memory.waiting
    left = memory.without(replace(first, sign=-1.0))
    assert left.waiting == ()
    rest = replace(memory, waiting=(second,)).entered()
    assert_close(of_all(left), of_all(rest))


@pytest.mark.parametrize("known", [False, True])
def test_what_waits_counts_as_what_is_in_the_statistics(known: bool) -> None:
    memory = waits(3, 2, 4, known=known)
    whole = memory.entered()
    assert whole.waiting == ()
    assert len(memory.waiting) == 3
    basis = grid_basis(GRID, kernel_factors(kernel("RBF", 2, (1,)), 2), torch.Size((1,)), 0.0, 12)
    assert_close(memory.totals, whole.totals)
    sums, expected = memory.known_sums(), whole.known_sums()
    assert sums is not None
    assert expected is not None
    for own, other in zip(sums, expected, strict=True):
        assert_close(own, other)
    assert_close(of_all(memory.whitened(basis)), of_all(whole.whitened(basis)))
    assert_close(memory.learned_squares(basis), whole.learned_squares(basis))
    assert memory.all_on_current


@pytest.mark.parametrize(
    "change",
    [
        lambda memory: memory.scale(0.5),
        lambda memory: memory.scale(1.0),
        lambda memory: memory.map_targets(torch.tensor([[2.0, 0.0], [0.3, 1.0]]).double()),
        lambda memory: memory.select([0]),
        lambda memory: memory.refined(mesh_over(UNIT, (11, 12))),
        lambda memory: memory.absorb(observed(empty(), batch(4))),
        lambda memory: observed(empty(), batch(4)).absorb(memory),
        lambda memory: memory.covering(torch.tensor([[1.3, 0.5]]).double()),
        lambda memory: memory.aligned(GRID, 1e-12),
        lambda memory: memory.to(torch.device("cpu")),
    ],
    ids=["scale", "copy", "map", "select", "refined", "absorb", "absorbed", "cover", "align", "to"],
)
def test_what_is_done_to_a_memory_is_done_to_what_waits(
    change: Callable[[StreamMemory], StreamMemory],
) -> None:
    memory = waits(3, 2)
    with torch.random.fork_rng():  # beside the same other memory
        changed = change(memory)
    expected = change(memory.entered())
    assert_close(of_all(changed.entered()), of_all(expected.entered()))


def test_what_waits_is_a_copy_of_the_inputs_that_were_given() -> None:
    data = batch(3)
    memory = empty().observed(data)
    expected = of_all(memory.entered())
    data.X.zero_()
    assert_close(of_all(memory.entered()), expected)


def test_known_noise_that_a_grid_for_each_output_has_no_room_for_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, small = StreamMemory.empty(GRID, torch.Size(), 9, torch.device("cpu")), batch(3)
    targets, noise = small.targets.expand(9, -1), small.noise.expand(9, -1)
    data = replace(small, targets=targets, noise=noise)
    memory = memory.observed(data)
    told = replace(data, known=torch.ones_like(small.known))
    roomy = memory.observed(told)
    monkeypatch.setattr(statistics, "MEMORY_LIMIT_GIB", 5.0 * 8.0 * gram_numbers(GRID) / 2**30)
    with pytest.raises(ValueError, match="9 times"):
        memory.observed(told)
    with pytest.raises(ValueError, match="9 times"):
        roomy.covering(torch.tensor([[1.2, 0.5]]).double())
    many = batch(WAITING + 1)  # with what waits they would enter the statistics in place
    targets, noise = many.targets.expand(9, -1), many.noise.expand(9, -1)
    known, before = torch.ones_like(many.known), of_all(memory.entered())
    with pytest.raises(ValueError, match="9 times"):
        memory.observed(replace(many, targets=targets, noise=noise, known=known))
    assert_close(of_all(memory.entered()), before)
    assert_close(memory.observed(data).entered().counts, torch.full((9,), 6.0))


@pytest.mark.parametrize("n", [3, WAITING, WAITING + 1])
@pytest.mark.parametrize("waiting", [(), (3, 2)])
def test_a_memory_knows_of_which_observations_it_was(n: int, waiting: tuple[int, ...]) -> None:
    memory = waits(*waiting, known=True)
    before = [memory.totals.clone(), *(each.clone() for each in memory.known_sums() or ())]
    whole = memory.observed(batch(n, known=True))
    assert_close(whole.counts, torch.tensor([9.0 + sum(waiting) + n]))
    after = [memory.totals, *(memory.known_sums() or ())]
    assert all(map(torch.equal, after, before))
