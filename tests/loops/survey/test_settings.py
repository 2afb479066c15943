"""Settings of a survey, and what is out of range."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from bo_stream.errors import UsageError
from bo_stream.loops.survey.settings import SurveySettings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": "10%"}, "Expected threshold to be a number, got '10%'"),
        ({"certainty": None}, "Expected certainty to be a number, got None"),
        ({"overdispersion": "no"}, "Expected overdispersion to be one of True, False, got 'no'"),
        ({"threshold": None}, "Expected a threshold, the prevalence that a decision hangs on"),
        ({"threshold": 10}, r"between 0 and 1, got 10. Do you mean 10 %\? Then say 10% or 0\.1"),
        ({"threshold": 1.0}, r"between 0 and 1, got 1. Do you mean 1 %\? Then say 1% or 0\.01"),
        ({"threshold": 0.0}, "between 0 and 1, got 0"),
        ({"threshold": -0.1}, r"between 0 and 1, got -0\.1"),
        ({"goal": "hotspots"}, "Expected goal to be one of exceedance, map"),
        ({"criterion": "guess"}, "Expected criterion to be one of"),
        ({"loss": "missed"}, "Expected loss as package.module:function, got 'missed'"),
        ({"loss": "a:b", "criterion": "entropy"}, "takes the place of a criterion"),
        ({"loss": "a:b", "threshold": None, "goal": "map"}, "give threshold, too"),
        ({"certainty": 90}, "Expected certainty to be a probability from 0.5, below 1, got 90"),
        ({"miss_cost": 0.0}, "Expected miss_cost above 0 and finite, got 0"),
        ({"stop_when": 5.0}, "share of wrong calls above 0, below 0.5, such as 0.05"),
        ({"stop_when": 0.05, "threshold": None, "goal": "map"}, "stopping rule is about calls"),
        ({"trials": 0}, "Expected trials to be a whole number of at least 1"),
        ({"budget": 0.0}, "Expected budget above 0"),
        ({"minimum_distance": -1.0}, "Expected minimum_distance of at least 0"),
        ({"cost_per_km": 2.0}, "Cost per km is of travel from a base: give base, too"),
        ({"base": (-5.0, 135.0)}, "Expected base to be longitude .* got -5 and 135"),
        ({"quotas": {"A": 1}}, "Quotas are for strata: name their column"),
        (
            {"quotas": {"A": -1}, "stratum": "district"},
            "quota of stratum 'A' to be a whole number of at least 0",
        ),
        ({"x": ("lon",)}, "Expected x to be two columns"),
        ({"x": ("lon", "lat"), "covariates": ["lat"]}, "Column 'lat' is named twice"),
        ({"id": "ward", "stratum": "ward"}, "Column 'ward' is named twice"),
    ],
)
def test_what_is_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SurveySettings(**{"threshold": 0.1, **changes})


def test_numbers_of_numpy_and_torch_are_stored_as_python_s() -> None:
    given = {"threshold": np.float32(0.25), "budget": np.int64(50), "miss_cost": torch.tensor(3.0)}
    given |= {"base": np.array([30.0, -2.0]).tolist(), "overdispersion": np.bool_(True)}
    given |= {"quotas": {"A": np.int64(2)}, "stratum": "district", "trials": torch.tensor(60)}
    settings = SurveySettings(**given)
    record = json.loads(json.dumps(asdict(settings)))
    assert SurveySettings(**record) == settings
    assert (settings.threshold, settings.budget, settings.quotas) == (0.25, 50, {"A": 2})


def test_a_map_needs_no_threshold() -> None:
    assert SurveySettings(goal="map").chosen_criterion == "variance"
    with pytest.raises(UsageError, match="Or choose the goal map"):
        SurveySettings(goal="map", criterion="misclassification")
