"""Constraints on a round: costs, budget, travel, distances, strata, and what is not possible."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from torch import Tensor

from bo_stream import OSGPR
from bo_stream.acquisition import (
    IntegratedVariance,
    SiteChoice,
    SiteConstraints,
    select_from_pool,
    select_sites,
)
from bo_stream.acquisition.constraints import Round
from bo_stream.acquisition.gains import best_of
from bo_stream.testing.streams import assert_close
from tests.support.problems.inducing import wave

N = 40


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def choose(pool: Tensor, q: int, limits: SiteConstraints, **options: Any) -> SiteChoice:
    return select_sites(
        _model(), pool, q, IntegratedVariance(), pool, constraints=limits, **options
    )


def _model() -> OSGPR:
    X, Y = wave(30, 2)
    return OSGPR(X, Y, inducing_points=X[:15])


def trip(base: Tensor, stops: Tensor) -> float:
    """Length of the round trip that cheapest insertion makes, stop by stop."""
    tour = [base.numpy(), base.numpy()]
    for stop in stops.numpy():
        detours = [
            np.linalg.norm(tour[i] - stop)
            + np.linalg.norm(stop - tour[i + 1])
            - np.linalg.norm(tour[i] - tour[i + 1])
            for i in range(len(tour) - 1)
        ]
        tour.insert(int(np.argmin(detours)) + 1, stop)
    return float(sum(np.linalg.norm(a - b) for a, b in itertools.pairwise(tour)))


def test_no_constraints_constrain_nothing() -> None:
    model, pool = _model(), rand(N, 2)
    plain = select_sites(model, pool, 5, IntegratedVariance(), pool)
    free = select_sites(model, pool, 5, IntegratedVariance(), pool, constraints=SiteConstraints())
    assert torch.equal(plain.indices, free.indices)


def test_picks_have_the_largest_gain_per_cost() -> None:
    model, pool, costs = _model(), rand(N, 2), 0.1 + rand(N)
    limits = SiteConstraints(costs=costs)
    choice = select_sites(model, pool, 5, IntegratedVariance(), pool, constraints=limits)
    assert torch.equal(choice.indices, select_from_pool(model, pool, 5, pool, costs=costs))
    assert_close(choice.costs, costs[choice.indices])


def test_a_budget_is_kept_and_used() -> None:
    pool, costs = rand(N, 2), 0.5 + rand(N)
    for budget in (1.6, 4.0, 20.0):
        choice = choose(pool, 8, SiteConstraints(costs=costs, budget=budget))
        spent = float(choice.costs.sum())
        assert spent <= budget * (1.0 + 1e-8)
        left = costs.clone()
        left[choice.indices] = torch.inf
        assert len(choice.indices) == 8 or budget - spent < float(left.min())


def test_a_budget_that_is_just_enough() -> None:
    """Sums of costs are rounded: 0.1 + 0.2 is more than 0.3."""
    costs = torch.tensor([0.1, 0.2], dtype=torch.float64)
    choice = choose(rand(2, 2), 2, SiteConstraints(costs=costs, budget=0.3))
    assert len(choice.indices) == 2


def test_under_a_budget_cheap_sites_do_not_keep_out_good_ones() -> None:
    """Where all that is asked for can be paid, the round without costs is the better one."""
    model, pool = _model(), rand(N, 2)
    costs = torch.linspace(0.01, 1.0, N, dtype=torch.float64)
    limits = SiteConstraints(costs=costs, budget=100.0)
    rich = select_sites(model, pool, 4, IntegratedVariance(), pool, constraints=limits)
    free = select_sites(model, pool, 4, IntegratedVariance(), pool)
    thrifty = select_sites(
        model, pool, 4, IntegratedVariance(), pool, constraints=SiteConstraints(costs=costs)
    )
    assert rich.after <= min(free.after, thrifty.after) + 1e-12
    assert_close(rich.costs, costs[rich.indices])


def test_the_trip_grows_by_cheapest_insertion() -> None:
    pool, base = 10.0 * rand(N, 2), torch.tensor([-2.0, 3.0], dtype=torch.float64)
    limits = SiteConstraints(positions=pool, base=base, cost_per_km=2.0, costs=rand(N))
    choice = choose(pool / 10.0, 7, limits)
    for k in range(8):
        some = choice.indices[:k]
        travel = 2.0 * trip(base, pool[some])
        assert limits.costs is not None
        assert float(choice.costs[:k].sum()) == pytest.approx(
            travel + float(limits.costs[some].sum()), rel=1e-9, abs=1e-9
        )


def test_a_budget_pays_for_travel() -> None:
    pool, base = 10.0 * rand(N, 2), torch.zeros(2).double()
    limits = SiteConstraints(positions=pool, base=base, cost_per_km=1.0, budget=25.0)
    choice = choose(pool / 10.0, N, limits)
    assert 1 <= len(choice.indices) < N
    assert trip(base, pool[choice.indices]) <= 25.0 + 1e-6
    nobody = torch.ones(N).bool()
    nobody[choice.indices] = False
    more = [trip(base, pool[[*choice.indices.tolist(), int(i)]]) for i in nobody.nonzero()]
    assert min(more) > 25.0


def test_a_site_on_the_way_costs_nothing_and_is_no_trouble() -> None:
    places = torch.tensor([[4.0, 0.0], [2.0, 0.0], [2.0, 0.0], [0.0, 9.0]], dtype=torch.float64)
    limits = SiteConstraints(positions=places, base=torch.zeros(2), cost_per_km=1.0)
    choice = choose(places / 10.0, 4, limits)
    assert bool(choice.gains.isfinite().all())
    assert float(choice.costs.min()) >= 0.0
    assert float(choice.costs.sum()) == pytest.approx(trip(torch.zeros(2), places[choice.indices]))


def test_two_candidates_at_each_place_are_each_chosen_once() -> None:
    """Once all places are visited, every candidate that is left is free."""
    places = rand(4, 2).repeat(2, 1)
    limits = SiteConstraints(positions=10.0 * places, base=torch.zeros(2), cost_per_km=1.0)
    assert sorted(choose(places, 8, limits).indices.tolist()) == list(range(8))


def test_excluded_sites_on_the_way_are_not_chosen() -> None:
    """After the first of three sites at the road's end all are free: gains decide."""
    pool, road = rand(6, 2), torch.tensor([1.0, 2.0, 3.0, 9.0, 9.0, 9.0], dtype=torch.float64)
    places = torch.stack((road, torch.zeros(6).double()), -1)
    limits = SiteConstraints(positions=places, base=torch.zeros(2), cost_per_km=1.0)
    model, on_the_way = _model(), torch.arange(3)
    choice, plain = (
        select_sites(model, pool, 4, IntegratedVariance(), exclude=on_the_way, constraints=each)
        for each in (limits, None)
    )
    assert choice.costs.tolist() == [18.0, 0.0, 0.0]
    assert torch.equal(choice.indices, plain.indices)


def test_costs_of_sites_that_cannot_be_chosen_do_not_count() -> None:
    """A millionth of the largest cost is the least that gains are divided by."""
    gains, costs = torch.tensor([1.0, 1.5, 9.0]), torch.tensor([1.0, 2.0, 1e9])
    assert best_of(gains, torch.tensor([True, True, False]), costs) == (0, 1.0)


@pytest.mark.parametrize("distance", [0.1, 0.35])
def test_sites_keep_their_distance(distance: float) -> None:
    pool, earlier = rand(N, 2), rand(2, 2)
    limits = SiteConstraints(positions=pool, minimum_distance=distance, earlier=earlier)
    pending = torch.tensor([3])
    choice = choose(pool, N, limits, pending=pending)
    chosen = torch.cat((pool[choice.indices], pool[pending], earlier))
    gaps = torch.cdist(chosen, pool[choice.indices])
    apart = gaps + 9.0 * torch.eye(*gaps.shape)
    assert float(apart.min()) >= distance
    assert len(choice.indices) < N - 1  # and all others are too near to one that is there
    others = torch.ones(N).bool()
    others[choice.indices] = False
    assert float(torch.cdist(pool[others], chosen).amin(-1).max()) < distance


def test_quotas_hold_and_are_used() -> None:
    pool, strata = rand(N, 2), torch.arange(N) % 4
    limits = SiteConstraints(strata=strata, quotas={0: 2, 1: 0, 3: 1})
    taken = strata[choose(pool, 6, limits).indices].tolist()
    assert [taken.count(s) for s in range(4)] == [2, 0, 3, 1]
    limited = SiteConstraints(strata=strata, quotas=dict.fromkeys(range(4), 1))
    assert len(choose(pool, 6, limited).indices) == 4
    assert limits.quotas == {0: 2, 1: 0, 3: 1}


def test_what_cannot_be_reached_is_not_chosen() -> None:
    pool, unreachable = rand(N, 2), torch.arange(N) >= 3
    choice = choose(pool, 5, SiteConstraints(unreachable=unreachable))
    assert sorted(choice.indices.tolist()) == [0, 1, 2]


def test_all_together() -> None:
    pool, strata = rand(N, 2), torch.arange(N) % 3
    limits = SiteConstraints(
        costs=0.5 + rand(N).float(),
        budget=6,
        positions=(10.0 * pool).float(),
        minimum_distance=1.0,
        earlier=torch.ones(1, 2),
        strata=strata.int(),
        quotas={0: 1},
        unreachable=strata == 2,
        base=torch.zeros(2),
        cost_per_km=0.05,
    )
    choice = choose(pool, 10, limits)
    picks = choice.indices
    assert 1 <= len(picks) <= 10
    assert 2 not in strata[picks].tolist()
    assert strata[picks].tolist().count(0) <= 1
    assert float(choice.costs.sum()) <= 6.0 + 1e-6


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"costs": torch.arange(2.0, 7.0), "budget": 1.5}, r"budget that pays.*got 1\.5.*costs 2,"),
    (
        {"positions": torch.ones(5, 2), "base": torch.zeros(2), "cost_per_km": 1.0, "budget": 2.0},
        r"budget that pays.*costs 2\.82843, travel included",
    ),
    ({"unreachable": torch.ones(5).bool()}, "constraints allow, got 5"),
    ({"strata": torch.zeros(5).int(), "quotas": {0: 0}}, "quota is 0"),
    (
        {"positions": torch.zeros(5, 2), "earlier": torch.zeros(1, 2), "minimum_distance": 1.0},
        "too near",
    ),
]


@pytest.mark.parametrize(("limits", "message"), IMPOSSIBLE)
def test_constraints_that_leave_no_site(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(InputDataError, match=message):
        choose(rand(5, 2), 2, SiteConstraints(**limits))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"budget": 3.0}, ValueError, "costs, or base and cost_per_km, along with a budget"),
    ({"minimum_distance": 1.0}, ValueError, "positions along with minimum_distance"),
    ({"earlier": torch.zeros(1, 2)}, ValueError, "positions along with earlier"),
    ({"base": torch.zeros(2)}, ValueError, "positions along with base"),
    ({"cost_per_km": 1.0}, ValueError, "base along with cost_per_km"),
    ({"quotas": {0: 1}}, ValueError, "strata along with quotas"),
    ({"costs": torch.ones(5), "budget": 0.0}, InputDataError, "positive, finite budget, got 0"),
    ({"minimum_distance": -1.0, "positions": torch.ones(5, 2)}, InputDataError, "zero or more"),
    ({"costs": torch.tensor([1.0, 0.0])}, InputDataError, r"positive, got costs\[1\] = 0"),
    ({"costs": torch.tensor([1.0, torch.nan])}, InputDataError, "costs"),
    (
        {
            "costs": torch.tensor([0.0, -2.0]),
            "positions": torch.ones(2, 2),
            "base": torch.zeros(2),
            "cost_per_km": 1.0,
        },
        InputDataError,
        r"zero or more, got costs\[1\] = -2",
    ),
    (
        {"costs": torch.ones(5), "strata": torch.ones(4).int()},
        BotorchTensorDimensionError,
        "strata",
    ),
    ({"positions": torch.ones(5, 3)}, BotorchTensorDimensionError, r"positions of shape \(5, 2\)"),
    (
        {"positions": torch.ones(5, 2), "earlier": torch.ones(2)},
        BotorchTensorDimensionError,
        "k x 2",
    ),
    ({"positions": torch.ones(5, 2), "base": torch.ones(3)}, BotorchTensorDimensionError, "base"),
    ({"strata": torch.ones(5)}, InputDataError, "strata to hold integers"),
    ({"strata": torch.ones(5).int(), "quotas": {1: 2, 7: 1}}, InputDataError, r"\[1\], got \[7\]"),
    ({"strata": torch.ones(5).int(), "quotas": {1: -1}}, InputDataError, "got -1 of stratum 1"),
    ({"unreachable": torch.ones(5)}, InputDataError, "unreachable to hold bools"),
]


@pytest.mark.parametrize(("limits", "error", "message"), BAD)
def test_bad_constraints(limits: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SiteConstraints(**limits)


def test_constraints_of_another_pool() -> None:
    with pytest.raises(BotorchTensorDimensionError, match="5 candidates, those of pool, got 6"):
        choose(rand(5, 2), 2, SiteConstraints(costs=torch.ones(6)))


def test_a_round_is_a_value() -> None:
    limits = SiteConstraints(strata=torch.zeros(3).int(), quotas={0: 1})
    like = torch.zeros(0).double()
    start = Round.begin(limits, torch.ones(3).bool(), torch.zeros(0).long(), like)
    after = start.visiting(1, 2.0)
    assert start.allowed.all()
    assert not after.allowed.any()
    assert (start.spent, after.spent) == (0.0, 2.0)
