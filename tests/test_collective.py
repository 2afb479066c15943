"""Sums over processes: of one, and of several that are threads."""

from __future__ import annotations

import pytest
import torch

from bo_stream.collective import ALONE, Collective
from tests.distributed.threads import together

CPU = torch.device("cpu")
PARTS = [torch.arange(6.0).view(3, 2), torch.zeros(0, 2), 10.0 + torch.arange(4.0).view(2, 2)]
WHOLE = torch.cat(PARTS)


def test_one_process_keeps_what_it_has() -> None:
    X = torch.rand(3, 2, requires_grad=True)
    assert ALONE.sum(X) is X
    assert ALONE.first(X, 1) is X
    assert torch.equal(ALONE.agreed(X), X)
    assert (ALONE.size, ALONE.rank, ALONE.share, ALONE.is_alone) == (1, 0, 1.0, True)
    assert (ALONE.total(7, CPU), ALONE.largest(0.5, CPU)) == (7, 0.5)


@pytest.mark.parametrize("most", [None, 0, 2, 4, 9])
def test_first_rows_are_in_the_order_of_ranks(most: int | None) -> None:
    found = together(3, lambda c: c.first(PARTS[c.rank], most))
    for rows in found:
        assert torch.equal(rows, WHOLE[:most])


def test_rows_are_put_where_they_belong_in_every_batch_element() -> None:
    places = [torch.tensor([4, 0, 2]), torch.tensor([], dtype=torch.int64), torch.tensor([3, 1])]

    def work(collective: Collective) -> torch.Tensor:
        rows = torch.stack((PARTS[collective.rank], -PARTS[collective.rank]))
        return collective.assembled(rows, places[collective.rank], 5)

    expected = torch.empty(5, 2)
    expected[torch.cat(places)] = WHOLE
    for rows in together(3, work):
        assert torch.equal(rows, torch.stack((expected, -expected)))


def test_numbers_are_the_same_everywhere() -> None:
    def work(c: Collective) -> tuple[object, ...]:
        value = torch.tensor([1.0 + c.rank, torch.nan if c.rank else 5.0])
        rows = len(PARTS[c.rank])
        return (
            c.agreed(value).tolist(),
            c.counts(rows, CPU),
            c.total(rows, CPU),
            c.largest(float(c.rank), CPU),
        )

    assert together(3, work) == [([1.0, 5.0], [3, 0, 2], 5, 2.0)] * 3


def test_several_tensors_are_summed_at_once() -> None:
    def work(c: Collective) -> list[torch.Tensor]:
        return c.sums([torch.full((2, 1), 1.0 + c.rank), torch.tensor(c.rank), torch.zeros(0)])

    for first, second, third in together(3, work):
        assert first.tolist() == [[6.0], [6.0]]
        assert (int(second), second.dtype, third.shape) == (3, torch.int64, (0,))


def test_shares_add_up() -> None:
    assert sum(together(4, lambda c: c.share)) == 1.0
