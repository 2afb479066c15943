"""Which sites a round may have, and the first round without results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from bo_stream.acquisition import (
    ExceedanceEntropy,
    IntegratedVariance,
    Misclassification,
    TargetedVariance,
)
from bo_stream.acquisition.constraints import Round, SiteConstraints
from bo_stream.errors import UsageError
from bo_stream.loops.survey.choice import criterion_of, spread_coordinates, spread_out
from bo_stream.loops.survey.model import ModelCache
from bo_stream.loops.survey.settings import CRITERIA, SurveySettings
from bo_stream.loops.survey.survey import Survey
from bo_stream.mapping import kilometres
from tests.loops.survey.villages import SETTINGS, results_of, villages

TWELVE = [f"V{row:03d}" for row in range(12)]
CACHE = ModelCache()  # the model of these results is the same in all tests
EITHER = pytest.mark.parametrize("results", [(), TWELVE], ids=["first round", "later"])


def begin(results: Sequence[str] = (), **changes: Any) -> Survey:
    table = villages().assign(
        km=10.0 + np.arange(40.0), district=["A", "B"] * 20, open=[0, 1, 1, 1] * 10
    )
    survey = Survey(table, replace(SETTINGS, **changes), cache=CACHE)
    if results:
        survey.tell(results_of(results))
    return survey


def apart(table: pd.DataFrame) -> Tensor:
    """Distances between sites in kilometres, by the great circle."""
    place = torch.from_numpy(table[["longitude", "latitude"]].to_numpy(copy=True))
    at = torch.deg2rad(place)
    vectors = torch.stack(
        (at[:, 1].cos() * at[:, 0].cos(), at[:, 1].cos() * at[:, 0].sin(), at[:, 1].sin()), -1
    )
    return 6371.0088 * (vectors @ vectors.T).clamp(-1.0, 1.0).acos()


@EITHER
def test_sites_keep_a_distance_from_each_other_and_from_those_before(
    results: Sequence[str],
) -> None:
    survey = begin(results, minimum_distance=30.0)
    survey.ask(3)
    survey.ask(3)
    asked = survey.pending[["longitude", "latitude"]]
    known = survey.results[["longitude", "latitude"]]
    distance = apart(pd.concat((asked, known)))[: len(asked)]
    distance.fill_diagonal_(torch.inf)
    assert float(distance.min()) > 29.8
    survey.ask(40)
    with pytest.raises(UsageError, match=r"No site is left .* minimum distance"):
        survey.ask(1)


@EITHER
def test_a_round_stays_within_its_budget(results: Sequence[str]) -> None:
    survey = begin(results, cost="km", budget=60.0)
    asked = survey.ask(10)
    assert 1 <= len(asked) < 5
    assert asked["cost"].sum() <= 60.0
    costs = survey.sites.set_index("id")["cost"]
    assert asked["cost"].tolist() == costs[asked["id"]].tolist()


@EITHER
def test_travel_from_the_base_is_paid_for(results: Sequence[str]) -> None:
    base = (35.0, -5.0)
    survey = begin(results, base=base, cost_per_km=1.0, budget=400.0)
    asked = survey.ask(3)
    trip = [base, *zip(asked["longitude"], asked["latitude"], strict=True)]
    legs = apart(pd.DataFrame(trip, columns=["longitude", "latitude"]))
    first = 1.0 + 2.0 * float(legs[0, 1])
    assert asked["cost"][0] == pytest.approx(first, rel=2e-3)
    assert asked["cost"].sum() <= 400.0
    shortest = min(
        float(legs[0, a] + legs[a, b] + legs[b, c] + legs[c, 0])
        for a, b, c in ((1, 2, 3), (1, 3, 2), (2, 1, 3))
    )
    assert asked["cost"].sum() == pytest.approx(3.0 + shortest, rel=2e-3)


@EITHER
def test_strata_have_quotas_and_closed_sites_are_left_out(results: Sequence[str]) -> None:
    survey = begin(results, stratum="district", quotas={"A": 2}, reachable="open")
    rows = survey.ask(30)["id"].str[1:].astype(int)
    assert (rows % 2 == 0).sum() == 2
    assert (rows % 4 != 0).all()
    assert set(rows[rows % 2 == 1]) == set(range(1, 40, 2)) - set(range(len(results)))


def test_a_budget_that_pays_for_no_site() -> None:
    with pytest.raises(UsageError, match=r"budget of 9 pays for no site: the cheapest one, V000"):
        begin(cost="km", budget=9.0)
    with pytest.raises(UsageError, match=r"pays for no site.* travel included. Raise the budget"):
        begin(base=(30.0, -5.0), cost_per_km=1.0, budget=100.0)
    survey = begin(cost="km", budget=10.5)
    assert survey.ask(5)["id"].tolist() == ["V000"]
    with pytest.raises(UsageError, match="pays for no site: the cheapest one, V001, costs 11"):
        survey.ask(1)


def test_no_site_may_be_reached() -> None:
    table = villages().assign(open="no")
    with pytest.raises(UsageError, match=r"No site is left to ask for: of 40 sites, 40 not"):
        Survey(table, replace(SETTINGS, reachable="open"))


def test_each_name_has_its_criterion() -> None:
    kinds = (ExceedanceEntropy, Misclassification, TargetedVariance, IntegratedVariance)
    for name, kind in zip(CRITERIA, kinds, strict=True):
        criterion = criterion_of(SurveySettings(threshold=0.2, criterion=name))
        assert isinstance(criterion, kind)
        assert getattr(criterion, "threshold", 0.2) == 0.2
        assert criterion.scale == "prevalence"
    assert criterion_of(SurveySettings(goal="map")) == IntegratedVariance("prevalence")
    dear = criterion_of(SurveySettings(threshold=0.2, miss_cost=3.0))
    assert dear == Misclassification(0.2, "prevalence", miss_cost=3.0)


def test_first_sites_are_the_farthest_from_all_others() -> None:
    points = torch.rand(30, 3, generator=torch.Generator().manual_seed(0)).double()
    free = torch.ones(30, dtype=torch.bool)
    start = Round.begin(SiteConstraints(), free, torch.zeros(0, dtype=torch.long), points)
    picks = [place for place, _ in spread_out(points, 6, points[:0], start)]
    distances = torch.cdist(points, points)
    assert picks[0] == int((points - points.mean(0)).norm(dim=-1).argmin())
    for count in range(1, 6):
        assert picks[count] == int(distances[:, picks[:count]].amin(-1).argmax())
    later = [place for place, _ in spread_out(points, 3, points[picks[:3]], start)]
    assert later == picks[3:]


def test_position_and_covariates_weigh_the_same_in_a_first_round() -> None:
    table = villages().assign(night_lights=lambda t: t["night_lights"].where(t.index > 0, 1e6))
    sites = torch.from_numpy(table.iloc[:, 1:].to_numpy(float, copy=True))
    at = spread_coordinates(sites)
    places = kilometres(sites).transform(sites)[:, :2]
    ratio = torch.pdist(at[:, :2]) / torch.pdist(places)
    assert float(ratio.max() / ratio.min()) == pytest.approx(1.0)
    squares = at.square().mean(0)
    assert float(squares[:2].sum()) == pytest.approx(1.0)
    assert float(squares[2:].sum()) == pytest.approx(1.0, rel=1e-2)
    assert float(at[0, 3] - at[1:, 3].max()) == pytest.approx((12.0 / 2.0) ** 0.5 / 40)
