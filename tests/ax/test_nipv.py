"""Integrated variance of one metric over points in the user's own parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from ax.api.client import Client
from ax.api.configs import RangeParameterConfig
from ax.core.observation import ObservationFeatures
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.acquisition.input_constructors import get_acqf_input_constructor
from botorch.exceptions.errors import UnsupportedError
from botorch.models import SingleTaskGP

from bo_stream import OSGPR
from bo_stream.acquisition import FeatureNIPV
from bo_stream.acquisition.feature_nipv import BoxMeasure
from bo_stream.ax import ACQUISITIONS, Pool, generation_strategy, register_pool
from bo_stream.ax.acquisition import NUM_MC_POINTS, integrated_variance
from bo_stream.ax.pool import handle
from tests.ax.experiments import (
    NEARLY_WITHOUT_NOISE,
    acquisition_of,
    adapter_of,
    after,
    model_of,
    run,
    started,
    surrogate_of,
    two,
)
from tests.ax.pools import (
    MIXED,
    forgetful,
    mixed_frame,
    mixed_loss,
    points_of,
    sites,
)
from tests.ax.reloads import from_json

pytestmark = NEARLY_WITHOUT_NOISE

KINDS = ["FeatureNIPV", "qNIPV"]
OFTEN = ["FeatureNIPV", pytest.param("qNIPV", marks=pytest.mark.integration)]

__all__ = ["forgetful"]


def test_points_come_in_many_forms(forgetful: dict[str, Pool]) -> None:
    table = sites(20)
    rows = [table.parameters_at(row) for row in range(20)]
    for given in (table, table.frame, rows, dict(enumerate(rows)), register_pool(table).name):
        found = forgetful[handle(given)].frame
        np.testing.assert_array_equal(found.to_numpy(), table.frame.to_numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_points_are_those_that_were_given(kind: str) -> None:
    table = sites(20)
    client = after(3, acquisition=kind, acquisition_options={"mc_points": table})
    expected = torch.tensor(table.frame.to_numpy())
    torch.testing.assert_close(points_of(client), expected, rtol=0.0, atol=0.0)
    assert isinstance(acquisition_of(client).acqf, ACQUISITIONS[kind])


@pytest.mark.parametrize("kind", OFTEN)
def test_points_are_brought_to_the_model(kind: str) -> None:
    """Also logarithms and one-hot columns."""
    frame = mixed_frame(12)
    client = after(3, mixed_loss, MIXED, acquisition=kind, acquisition_options={"mc_points": frame})
    columns = adapter_of(client).parameters
    points = dict(zip(columns, points_of(client).T, strict=True))
    np.testing.assert_allclose(points["rate"], np.log10(frame.rate), rtol=1e-15)
    np.testing.assert_allclose(points["width"], np.log10(frame.width), rtol=1e-15)
    np.testing.assert_array_equal(points["layers"], frame.layers)
    np.testing.assert_allclose(points["size"], np.log10(frame["size"]), rtol=1e-15)
    hot = [points[name] for name in columns if name.startswith("kind_")]
    np.testing.assert_array_equal(np.argmax(hot, 0), frame.kind.map({"p": 0, "q": 1, "r": 2}))
    assert "fixed" not in columns


@pytest.mark.usefixtures("in_features")  # of rows, only one kind truncates the kernel
def test_both_kinds_agree_and_with_a_dense_formula() -> None:
    """Pending points are observed in any case."""
    table, points = sites(20), sites(25)
    client = started(acquisition="FeatureNIPV", acquisition_options={"mc_points": points})
    run(client, 4)
    client.get_next_trials(2)
    first = acquisition_of(client).acqf
    X = torch.tensor(table.frame.to_numpy()).unsqueeze(-2)
    pending = torch.tensor([[0.3, 0.2]], dtype=torch.float64)
    first.set_X_pending(pending)
    other = qNegIntegratedPosteriorVariance(model_of(client), points_of(client), X_pending=pending)
    torch.testing.assert_close(first(X), other(X), rtol=1e-8, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_running_trials_are_pending(kind: str) -> None:
    client = started(acquisition=kind, acquisition_options={"num_mc_points": 16})
    run(client, 3)
    pending = list(client.get_next_trials(2).values())
    client.get_next_trials(1)
    expected = sorted((float(p["a"]), float(p["b"])) for p in pending)
    found = sorted(tuple(row) for row in acquisition_of(client).acqf.X_pending.tolist())
    assert found == expected


def test_the_variance_falls_where_the_points_are() -> None:
    corner = [{"a": 1.6 + 0.1 * i, "b": 0.6 + 0.1 * j} for i in range(5) for j in range(5)]
    client = started(acquisition="FeatureNIPV", acquisition_options={"mc_points": corner})
    run(client, 3)
    ((_, parameters),) = client.get_next_trials(1).items()
    assert parameters["a"] > 1.2
    assert parameters["b"] > 0.2


@pytest.mark.parametrize("kind", [*KINDS, qNegIntegratedPosteriorVariance])
def test_a_number_of_points(kind: Any) -> None:
    client = after(3, acquisition=kind, acquisition_options={"num_mc_points": 40})
    points = points_of(client)
    assert points.shape == (40, 2)
    assert bool(
        ((points >= torch.tensor([0.0, -1.0])) & (points <= torch.tensor([2.0, 1.0]))).all()
    )
    run(client, 1)
    client.get_next_trials(1)
    assert points_of(client) is points


def test_a_box_is_integrated_over_in_closed_form() -> None:
    client = after(3, acquisition="FeatureNIPV")
    assert points_of(client) is None
    assert isinstance(acquisition_of(client).acqf.measure, BoxMeasure)


@pytest.mark.integration
def test_points_of_a_space_that_is_no_box() -> None:
    client = after(3, mixed_loss, MIXED, acquisition="FeatureNIPV")
    columns = adapter_of(client).parameters
    points = dict(zip(columns, points_of(client).T, strict=True))
    assert len(points["rate"]) == NUM_MC_POINTS
    hot = torch.stack([points[name] for name in columns if name.startswith("kind_")])
    assert bool((hot.sum(0) == 1.0).all())
    assert set((10.0 ** points["size"]).round().tolist()) == {8.0, 16.0, 32.0}
    assert set(points["layers"].frac().tolist()) == {0.0}


@pytest.mark.integration
@pytest.mark.parametrize("kind", OFTEN)
def test_points_keep_to_parameter_constraints(kind: str) -> None:
    client = Client(random_seed=0)
    box = [RangeParameterConfig(n, (0.0, 1.0), parameter_type="float") for n in ("a", "b")]
    client.configure_experiment(box, parameter_constraints=["a + b <= 0.5"], name="part")
    client.configure_optimization("loss")
    client.set_generation_strategy(generation_strategy(acquisition=kind, initialization=3))
    run(client, 3)
    client.get_next_trials(1)
    points = points_of(client)
    assert points.shape == (NUM_MC_POINTS, 2)
    assert bool((points.sum(-1) <= 0.5 + 1e-9).all())


def test_points_of_a_pool_are_some_of_its_candidates() -> None:
    pool = sites(50)
    client = after(3, pool=pool, acquisition="FeatureNIPV")
    assert points_of(client).shape == (50, 2)
    client = after(
        3, pool=pool, acquisition="FeatureNIPV", acquisition_options={"num_mc_points": 7}
    )
    rows = pool.rows([{"a": a, "b": b} for a, b in points_of(client).tolist()])
    assert len(set(rows.tolist())) == 7
    assert rows.min() >= 0


def test_models_with_a_residual_get_the_general_form() -> None:
    client = after(3, acquisition="FeatureNIPV", model=OSGPR)
    assert type(acquisition_of(client).acqf) is qNegIntegratedPosteriorVariance
    assert acquisition_of(client).acqf.mc_points.shape == (NUM_MC_POINTS, 2)


@pytest.mark.parametrize("kind", OFTEN)
def test_the_only_objective_is_meant(kind: str) -> None:
    """Neither the metric of a constraint nor one that is only tracked is meant."""
    client = after(3, two, acquisition=kind, constraints=["cost >= 0.1"])
    model = acquisition_of(client).acqf.model
    assert model is surrogate_of(client)._submodels[("loss",)]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("kind", OFTEN)
def test_of_several_objectives_one_is_named(kind: str) -> None:
    settings = {"acquisition": kind, "objective": "-loss, -cost"}
    with pytest.raises(UnsupportedError, match=r"objectives are of .*\{'metric': "):
        after(3, two, **settings)
    client = after(3, two, **settings, acquisition_options={"metric": "cost"})
    assert acquisition_of(client).acqf.model is surrogate_of(client)._submodels[("cost",)]


def test_a_weighted_sum_of_metrics_is_none_of_them() -> None:
    with pytest.raises(UnsupportedError, match="is about the variance of one metric"):
        after(3, two, acquisition="FeatureNIPV", objective="-loss - 2 * cost")


def test_a_list_of_models_says_what_to_do() -> None:
    client = after(3, two, acquisition="qUCB", constraints=["cost >= 0.1"])
    construct = get_acqf_input_constructor(FeatureNIPV)
    with pytest.raises(UnsupportedError, match=r"one output.*model\.models"):
        FeatureNIPV(
            **construct(surrogate_of(client).model, training_data=None, bounds=[(0.0, 1.0)] * 2)
        )


@pytest.mark.parametrize("kind", OFTEN)
@pytest.mark.parametrize("options", [{"mc_points": sites(20).frame}, {"num_mc_points": 16}])
def test_a_reloaded_experiment_has_the_same_points(options: Any, kind: str, tmp_path: Path) -> None:
    client = started(acquisition=kind, acquisition_options=options)
    run(client, 3)
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
    run(client, 3)
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
        ({"num_mc_points": 0}, "num_mc_points to be a whole number of at least 1, got 0"),
    ],
)
def test_bad_options(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        after(3, acquisition="FeatureNIPV", acquisition_options=options)


def test_points_may_be_equal() -> None:
    twice = [{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}]
    client = after(3, acquisition="FeatureNIPV", acquisition_options={"mc_points": twice})
    assert points_of(client).shape == (2, 2)


def test_points_can_be_ranked() -> None:
    points = sites(20)
    client = after(3, acquisition="FeatureNIPV", acquisition_options={"mc_points": points})
    features = [ObservationFeatures(parameters={"a": a, "b": 0.0}) for a in (0.2, 1.7)]
    worth = adapter_of(client).evaluate_acquisition_function(features)
    X = torch.tensor([[[0.2, 0.0]], [[1.7, 0.0]]], dtype=torch.float64)
    expected = FeatureNIPV(model_of(client), points_of(client))(X)
    torch.testing.assert_close(torch.tensor(worth, dtype=torch.float64), expected)


def test_a_model_that_does_not_stream() -> None:
    X = torch.rand(6, 2, dtype=torch.float64)
    model = SingleTaskGP(X, X.sum(-1, keepdim=True))
    made = integrated_variance(FeatureNIPV, model, [(0.0, 1.0)] * 2, None, None)
    assert type(made) is qNegIntegratedPosteriorVariance
