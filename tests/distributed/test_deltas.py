"""Deltas: best points in an order that all agree on, and arrays that are none."""

from __future__ import annotations

import tracemalloc
import zlib
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

from bo_stream import WISKI
from bo_stream.distributed import MemoryStore, accumulate, zero
from bo_stream.distributed import deltas as deltas_module
from bo_stream.distributed.deltas import BestPoints, Delta
from bo_stream.distributed.gathering import Gathering
from bo_stream.distributed.replica import template_of
from tests.distributed.replicas import settings

TEMPLATE = template_of(settings(), None)
MOST = Gathering(MemoryStore(), "search", TEMPLATE).most_bytes


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(count, 2, generator=generator, dtype=torch.float64)
    return X, (6.0 * X).sin().sum(-1, keepdim=True)


@pytest.mark.parametrize("seed", range(5))
def test_best_points_are_the_same_in_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas_module, "SHORTLIST", 6)
    generator = torch.Generator().manual_seed(seed)
    X = torch.randint(0, 3, (40, 2), generator=generator).double()
    Y = torch.randint(0, 3, (40,), generator=generator).double()
    pairs = zip(X.tolist(), Y.tolist(), strict=True)
    expected = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:6]
    for _ in range(3):
        order = torch.randperm(40, generator=generator)
        parts = [BestPoints.of(X[some], Y[some]) for some in order.split(7)]
        found = BestPoints.joined(parts)
        assert [*zip(found.X.tolist(), found.Y.tolist(), strict=True)] == expected


def test_sums_of_deltas_do_not_depend_on_how_they_are_grouped() -> None:
    parts = [Delta(*rows(5, seed)) for seed in range(4)]
    summed = parts[0]._summed(TEMPLATE), parts[1]._summed(TEMPLATE)
    a = summed[0].plus([parts[2], summed[1], parts[3]])
    b = parts[3].plus([summed[1]]).plus([parts[2].plus([summed[0]])])
    again = Delta.of_arrays(a.arrays(), TEMPLATE, MOST)
    X, _ = rows(9, 9)
    found = []
    for delta in (a, b, again, parts[0].plus(parts[1:])):
        assert delta.observations == 20
        model = template_of(settings(), None)
        delta.put_into(model, TEMPLATE)
        found.append((model.posterior(X).mean, delta.best().X))
    for mean, best in found[1:]:
        torch.testing.assert_close(mean, found[0][0])
        assert torch.equal(best, found[0][1])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no outcomes": ({"Y": None}, "it is no delta"),
    "width": ({"X": torch.zeros(5, 3).double()}, r"shapes \(n, 2\) and \(n, 1\), got \(5, 3\)"),
    "counts": ({"Y": torch.zeros(4, 1).double()}, r"and \(4, 1\)"),
    "whole numbers": ({"Y": torch.zeros(5, 1).long()}, "torch.int64"),
    "outside": ({"X": torch.full((5, 2), 1.1).double()}, "outside the unit cube"),
    "not a number": ({"Y": torch.full((5, 1), torch.nan).double()}, "not at most"),
    "too large": ({"Y": torch.full((5, 1), 1e80, dtype=torch.float64)}, "not at most"),
    "no best points": ({"best_X": None}, "it is no delta"),
    "best points": ({"best_Y": torch.zeros(3).double()}, "shapes"),
    "sums": ({"sums": torch.zeros(9, dtype=torch.uint8)}, "it is no delta"),
    "no sums": ({"sums": torch.zeros(0, dtype=torch.uint8)}, "its sums are cut short"),
}


def packed(zeros: int) -> Tensor:
    """So many zeros, compressed to a hundredth."""
    packing = zlib.compressobj(1)
    chunk = bytes(2**20)
    parts = [packing.compress(chunk) for _ in range(zeros // len(chunk))]
    return torch.frombuffer(bytearray(b"".join([*parts, packing.flush()])), dtype=torch.uint8)


@pytest.mark.parametrize("zeros", [2 * MOST, 20 * MOST])
def test_sums_are_not_unpacked_beyond_a_limit(zeros: int) -> None:
    """Nothing is held of what is beyond it: the memory of the process is traced."""
    arrays = Delta(*rows(7))._summed(TEMPLATE).arrays() | {"sums": packed(zeros)}
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"of more than {MOST:,} bytes"):
        Delta.of_arrays(arrays, TEMPLATE, MOST)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * MOST


@pytest.mark.parametrize("count", [1, 300, 301, 5_000])
def test_sums_of_a_search_are_within_the_limit(count: int) -> None:
    delta = Delta(*rows(count))._summed(TEMPLATE)
    assert delta.sums is not None
    assert len(delta.sums.to_bytes()) < MOST
    assert Delta.of_arrays(delta.arrays(), TEMPLATE, MOST).observations == count


@pytest.mark.parametrize("case", BAD)
def test_other_arrays_are_no_delta(case: str) -> None:
    changes, message = BAD[case]
    whole = Delta(*rows(7))._summed(TEMPLATE).plus([Delta(*rows(5))]).arrays()
    changed = {name: changes.get(name, value) for name, value in whole.items()}
    arrays = {name: value for name, value in changed.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        Delta.of_arrays(arrays, TEMPLATE, MOST)


def test_sums_of_another_model_are_refused() -> None:
    other = WISKI(*rows(0), grid_size=9)
    sums = accumulate(zero(other), *rows(3))
    arrays = Delta(*rows(0), sums, BestPoints.of(rows(0)[0], rows(0)[1].squeeze(-1))).arrays()
    with pytest.raises(UnsupportedError, match="Expected sums of one model"):
        Delta.of_arrays(arrays, TEMPLATE, MOST)
