"""Whose variance is integrated, options of it, and storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from ax.core.observation import ObservationFeatures
from botorch.acquisition.input_constructors import get_acqf_input_constructor
from botorch.exceptions.errors import UnsupportedError

from bo_stream import WISKI
from bo_stream.acquisition import FeatureNIPV
from bo_stream.ax import Pool, register_pool
from bo_stream.ax.nipv import StreamNIPV, integrated_variance
from tests.ax.experiments import (
    NEARLY_WITHOUT_NOISE,
    loss,
    model_of,
    run,
    started,
    surrogate_of,
)
from tests.ax.pools import (
    acquisition_of,
    adapter_of,
    after,
    forgetful,
    points_of,
    sites,
)
from tests.ax.reloads import from_json

pytestmark = NEARLY_WITHOUT_NOISE

OFTEN = ["FeatureNIPV", pytest.param("qNIPV", marks=pytest.mark.integration)]

__all__ = ["forgetful"]


def two(parameters: Any) -> dict[str, float]:
    return {"loss": loss(parameters), "cost": float(parameters["a"]) ** 2}


@pytest.mark.parametrize("kind", OFTEN)
def test_the_only_objective_is_meant(kind: str) -> None:
    """Not the constraint's metric, nor one that is tracked only."""
    client = after(4, two, acquisition=kind, constraints=["cost >= 0.1"])
    model = acquisition_of(client).acqf.model
    assert model is surrogate_of(client)._submodels[("loss",)]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("kind", OFTEN)
def test_of_several_objectives_one_is_named(kind: str) -> None:
    settings = {"acquisition": kind, "objective": "-loss, -cost"}
    with pytest.raises(UnsupportedError, match=r"objectives are of .*\{'metric': "):
        after(4, two, **settings)
    client = after(4, two, **settings, acquisition_options={"metric": "cost"})
    assert acquisition_of(client).acqf.model is surrogate_of(client)._submodels[("cost",)]


def test_a_weighted_sum_of_metrics_is_none_of_them() -> None:
    with pytest.raises(UnsupportedError, match="is about the variance of one metric"):
        after(4, two, acquisition="FeatureNIPV", objective="-loss - 2 * cost")


@pytest.mark.parametrize("kind", [FeatureNIPV, StreamNIPV])
def test_a_list_of_models_says_what_to_do(kind: Any) -> None:
    client = after(4, two, acquisition="qUCB", constraints=["cost >= 0.1"])
    construct = get_acqf_input_constructor(kind)
    with pytest.raises(UnsupportedError, match=r"one output.*model\.models"):
        construct(surrogate_of(client).model, training_data=None, bounds=[(0.0, 1.0)] * 2)


@pytest.mark.parametrize("kind", OFTEN)
@pytest.mark.parametrize("options", [{"mc_points": sites(20).frame}, {"num_mc_points": 16}])
def test_a_reloaded_experiment_has_the_same_points(options: Any, kind: str, tmp_path: Path) -> None:
    client = started(acquisition=kind, acquisition_options=options)
    run(client, 4)
    other = from_json(client, tmp_path)
    for each in (client, other):
        torch.manual_seed(1)
        each.get_next_trials(1)
    torch.testing.assert_close(points_of(client), points_of(other), rtol=0.0, atol=0.0)
    X = torch.rand(5, 1, 2, dtype=torch.float64)
    ours, theirs = (acquisition_of(each).acqf(X) for each in (client, other))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)


def test_another_process_must_register_the_points(
    forgetful: dict[str, Pool], tmp_path: Path
) -> None:
    client = started(acquisition="FeatureNIPV", acquisition_options={"mc_points": sites(9)})
    run(client, 4)
    other = from_json(client, tmp_path)
    forgetful.clear()
    with pytest.raises(ValueError, match=f"No pool is registered as '{sites(9).name}'"):
        other.get_next_trials(1)
    register_pool(sites(9))
    assert other.get_next_trials(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"points": 3},
            "options of FeatureNIPV among mc_points, num_mc_points, metric, got points",
        ),
        ({"mc_points": "none", "num_mc_points": 3}, "one of mc_points and num_mc_points"),
        ({"metric": "cost"}, "metric to be one of loss, got 'cost'"),
        ({"mc_points": "nowhere"}, "No pool is registered as 'nowhere'"),
        ({"mc_points": pd.DataFrame({"a": [1.0]})}, "no column for the parameter 'b'"),
        ({"mc_points": [{"a": 9.0, "b": 0.0}]}, "have a outside"),
        ({"num_mc_points": 0}, "num_mc_points of at least 1, got 0"),
    ],
)
def test_bad_options(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        after(3, acquisition="FeatureNIPV", acquisition_options=options)


def test_points_may_be_equal() -> None:
    twice = [{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}]
    client = after(3, acquisition="FeatureNIPV", acquisition_options={"mc_points": twice})
    assert points_of(client).shape == (2, 2)


def test_candidates_can_be_ranked() -> None:
    points = sites(20)
    client = after(4, acquisition="FeatureNIPV", acquisition_options={"mc_points": points})
    features = [ObservationFeatures(parameters={"a": a, "b": 0.0}) for a in (0.2, 1.7)]
    worth = adapter_of(client).evaluate_acquisition_function(features)
    X = torch.tensor([[[0.2, 0.0]], [[1.7, 0.0]]], dtype=torch.float64)
    expected = FeatureNIPV(model_of(client), points_of(client))(X)
    torch.testing.assert_close(torch.tensor(worth, dtype=torch.float64), expected)


def test_botorchs_input_constructor() -> None:
    X = torch.rand(6, 2, dtype=torch.float64)
    model = WISKI(X, X.sum(-1, keepdim=True))
    construct = get_acqf_input_constructor(StreamNIPV)
    assert construct(model, training_data=None, mc_points=X)["mc_points"] is X
    drawn = construct(model, training_data=None, bounds=[(0.0, 1.0)] * 2, num_mc_points=5)
    assert drawn["mc_points"].shape == (5, 2)
    with pytest.raises(ValueError, match="got neither"):
        construct(model, training_data=None)


def test_a_model_that_does_not_stream() -> None:
    from botorch.models import SingleTaskGP

    X = torch.rand(6, 2, dtype=torch.float64)
    model = SingleTaskGP(X, X.sum(-1, keepdim=True))
    made = integrated_variance(FeatureNIPV, model, [(0.0, 1.0)] * 2, None, None)
    assert type(made) is StreamNIPV
