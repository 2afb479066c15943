"""Inputs of few values, and linear constraints, in a search of the unit cube."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bo_stream.loops.optimization.region import CHANGED, TOLERANCE, Domain

D = 5
LEVELS = {1: torch.tensor([0.1, 0.5, 0.6]), 4: torch.tensor([0.25, 0.75])}
A = torch.tensor([[1.0, 1.0, 0.0, 0.0, 1.0], [0.0, -2.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
B = torch.tensor([1.2, 0.3], dtype=torch.float64)
INSIDE = torch.tensor([0.1, 0.5, 0.2, 0.3, 0.25], dtype=torch.float64)


def cube(n: int) -> Tensor:
    return torch.rand(n, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def values_of(j: int) -> list[float]:
    return LEVELS[j].double().tolist()


def test_inputs_take_the_nearest_of_their_values() -> None:
    X = cube(200)
    snapped = Domain(LEVELS).snap(X)
    for x, s in zip(X.tolist(), snapped.tolist(), strict=True):
        for j in range(D):
            known = values_of(j) if j in LEVELS else [x[j]]
            assert s[j] == min(known, key=lambda value: abs(value - x[j]))


def test_admitted_points_are_in_the_domain_and_those_inside_stay() -> None:
    domain, X = Domain(LEVELS, A, B), cube(500)
    admitted = domain.admit(X, INSIDE)
    assert bool((admitted @ A.mT <= B + TOLERANCE).all())
    assert bool((admitted >= 0.0).all() & (admitted <= 1.0).all())
    torch.testing.assert_close(domain.snap(admitted), admitted)
    torch.testing.assert_close(domain.admit(admitted, INSIDE), admitted)
    snapped = domain.snap(X)
    held = (snapped @ A.mT <= B).all(-1) & (X @ A.mT <= B).all(-1)
    assert bool(held.any())
    torch.testing.assert_close(admitted[held], snapped[held])


def test_without_levels_and_constraints_points_stay() -> None:
    X = cube(9)
    assert torch.equal(Domain().admit(X, INSIDE), X)


def test_a_box_reaches_the_next_values_on_both_sides() -> None:
    narrow = torch.stack((INSIDE - 0.01, INSIDE + 0.01))
    low, high = Domain(LEVELS).widened(narrow, INSIDE)
    assert (low[1].item(), high[1].item()) == (values_of(1)[0], values_of(1)[2])
    assert high[4].item() == values_of(4)[1]
    assert low[4].item() == narrow[0, 4].item()
    others = [0, 2, 3]
    assert torch.equal(torch.stack((low, high))[:, others], narrow[:, others])


def test_searches_leave_inputs_of_few_values_where_they_start() -> None:
    bounds = torch.stack((torch.zeros(D), torch.ones(D))).double()
    starts = Domain(LEVELS).snap(cube(3))
    low, high = Domain(LEVELS).pinned(bounds, starts)
    few = list(LEVELS)
    assert torch.equal(low[:, few], starts[:, few])
    assert torch.equal(high[:, few], starts[:, few])
    assert bool((low[:, [0, 2, 3]] == 0.0).all() & (high[:, [0, 2, 3]] == 1.0).all())


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_candidates_of_few_values_are_not_repeated() -> None:
    X = cube(300)
    X[:, [0, 2, 3]] = 0.5
    found = Domain(LEVELS).candidates(X, INSIDE, seeded())
    assert len(found) == len(values_of(1)) * len(values_of(4))
    assert torch.equal(Domain().candidates(X, INSIDE, seeded()), X)


def test_candidates_differ_from_the_centre_in_few_inputs_of_few_values() -> None:
    levels = {j: torch.tensor([0.0, 0.5, 1.0]) for j in range(20)}
    centre = torch.full((30,), 0.5, dtype=torch.float64)
    X = torch.where(torch.arange(30) < 20, 1.0, 0.25).double().repeat(500, 1)
    X[:, 20] = torch.linspace(0.0, 1.0, 500)
    found = Domain(levels).candidates(X, centre, seeded())
    changed = (found[:, :20] != centre[:20]).double().sum(-1)
    assert float(changed.mean()) == pytest.approx(CHANGED, abs=0.4)  # six standard errors
    assert torch.equal(found[:, 21:], X[:, 21:])
