"""Proposals from a pool of named candidates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ax.api.configs import DerivedParameterConfig, RangeParameterConfig
from ax.exceptions.core import SearchSpaceExhausted

from bo_stream import OSGPR
from bo_stream.ax import ACQUISITIONS, Pool
from tests.ax.experiments import NEARLY_WITHOUT_NOISE, loss, model_of, run, started, surrogate_of
from tests.ax.pools import (
    MIXED,
    USUAL,
    acquisition_of,
    integrated_variances,
    mixed_frame,
    mixed_loss,
    names_of,
    parameters_of,
    rarely,
    sites,
    table_of,
)

pytestmark = NEARLY_WITHOUT_NOISE

OTHERS = [name for name in ACQUISITIONS if name not in (*USUAL, "qLogNEHVI")]


@pytest.mark.parametrize("acquisition", [*USUAL, *rarely([None], *([each] for each in OTHERS))])
def test_each_proposal_is_another_candidate(acquisition: str | None) -> None:
    pool = sites()
    client = started(pool=pool, acquisition=acquisition)
    run(client, 6)
    client.get_next_trials(3)
    client.get_next_trials(1)
    names = names_of(client, pool)
    assert len(set(names)) == 10
    for name, parameters in zip(names, parameters_of(client), strict=True):
        assert parameters == pool.parameters_of(name)


@pytest.mark.parametrize("acquisition", [*USUAL, *rarely(["qLogEI"])])
def test_several_arms_of_one_trial(acquisition: str) -> None:
    pool = sites()
    client = started(pool=pool, acquisition=acquisition)
    run(client, 4)
    ((generated,),) = client._generation_strategy.gen(client._experiment, n=5)
    names = {pool.name_of(arm.parameters) for arm in generated.arms}
    assert len(names | set(names_of(client, pool))) == 9
    assert acquisition_of(client).acqf.X_pending is None


@pytest.mark.parametrize(
    ("acquisition", "model", "pending"),
    [
        ("FeatureNIPV", None, 0),
        ("FeatureNIPV", None, 2),
        ("qNIPV", OSGPR, 2),
        *rarely(("qNIPV", None, 0), ("qNIPV", None, 2), ("FeatureNIPV", OSGPR, 0)),
    ],
)
def test_the_least_integrated_variance_by_a_dense_formula(
    acquisition: str, model: Any, pending: int
) -> None:
    pool, points = sites(), sites(25).frame
    kind = {} if model is None else {"model": model}
    client = started(
        pool=pool, acquisition=acquisition, acquisition_options={"mc_points": points}, **kind
    )
    run(client, 5)
    waiting = list(client.get_next_trials(pending).values()) if pending else []
    ((_, chosen),) = client.get_next_trials(1).items()
    table = table_of(client, pool)
    left = integrated_variances(
        model_of(client),
        table.X,
        acquisition_of(client).options["mc_points"],
        table.X[pool.rows(waiting)],
    )
    tried = pool.rows(parameters_of(client)[:-1])
    left[tried] = torch.inf
    assert pool.name_of(chosen) == pool.name_at(int(left.argmin()))


@pytest.mark.parametrize("acquisition", ["qUCB", *rarely(["qLogEI"], ["qLogNEI"])])
def test_the_best_by_an_acquisition_function(acquisition: str) -> None:
    pool = sites()
    client = started(pool=pool, acquisition=acquisition)
    run(client, 5)
    ((_, chosen),) = client.get_next_trials(1).items()
    acqf = acquisition_of(client).acqf
    with torch.no_grad():
        each = torch.stack([acqf(x.unsqueeze(0)).squeeze() for x in table_of(client, pool).X])
    each[pool.rows(parameters_of(client)[:-1])] = -torch.inf
    assert pool.name_of(chosen) == pool.name_at(int(each.argmax()))


def test_parameters_of_all_kinds_keep_their_values() -> None:
    pool = Pool.of(mixed_frame())
    client = started(MIXED, pool=pool)
    run(client, 6, mixed_loss)
    client.get_next_trials(2)
    for name, parameters in zip(names_of(client, pool), parameters_of(client), strict=True):
        assert parameters == {**pool.parameters_of(name), "fixed": 0.5}
        assert type(parameters["layers"]) is int
        assert type(parameters["wide"]) is bool


@pytest.mark.parametrize("trials", [1, 5])
def test_derived_parameters_come_with_their_candidate(trials: int) -> None:
    derived = DerivedParameterConfig("total", "a + b", parameter_type="float")
    box = [RangeParameterConfig(n, (-1.0, 2.0), parameter_type="float") for n in ("a", "b")]
    client = started([*box, derived], pool=sites())
    run(client, trials)
    last = parameters_of(client)[-1]
    assert last == {**sites().parameters_of(names_of(client, sites())[-1]), "total": last["total"]}
    assert last["total"] == pytest.approx(last["a"] + last["b"])


def test_a_table_is_transformed_as_ax_transforms_trials() -> None:
    pool = Pool.of(mixed_frame())
    client = started(MIXED, pool=pool)
    run(client, 6, mixed_loss)
    client.get_next_trials(1)
    (data,) = surrogate_of(client).training_data
    rows = pool.rows(parameters_of(client)[:6])
    torch.testing.assert_close(table_of(client, pool).X[rows], data.X, rtol=1e-15, atol=0.0)


def test_the_first_trials_fill_the_pools_box() -> None:
    pool = sites(400)
    client = started(pool=pool, initialization=16)
    run(client, 16)
    corners = {(p["a"] > 1.0, p["b"] > 0.0) for p in parameters_of(client)}
    assert len(corners) == 4
    assert client._generation_strategy.current_node_name == "PoolStart"


def test_what_an_experiment_had_is_not_proposed_again() -> None:
    """Attached, failed, abandoned and running ones."""
    pool = sites(12)
    client = started(pool=pool)
    for name, value in {"site 3": 1.0, "site 4": 2.0}.items():
        client.complete_trial(client.attach_trial(pool.parameters_of(name)), {"loss": value})
    client.attach_trial(pool.parameters_of("site 5"))
    (failed,) = client.get_next_trials(1)
    client.mark_trial_failed(failed)
    (abandoned,) = client.get_next_trials(1)
    client.mark_trial_abandoned(abandoned)
    run(client, 7)
    names = names_of(client, pool)
    assert len(set(names)) == len(names) == 12
    with pytest.raises(SearchSpaceExhausted, match="0 of 12 are left"):
        client.get_next_trials(1)


def test_a_parameterization_outside_the_pool_takes_no_candidate_away() -> None:
    pool = sites(4)
    client = started(pool=pool)
    client.complete_trial(client.attach_trial({"a": 0.5, "b": 0.5}), {"loss": 1.0})
    run(client, 4)
    with pytest.raises(SearchSpaceExhausted):
        client.get_next_trials(1)


@pytest.mark.parametrize("acquisition", ["qUCB", "FeatureNIPV"])
def test_more_at_once_than_are_left(acquisition: str) -> None:
    pool = sites(6)
    client = started(pool=pool, acquisition=acquisition)
    run(client, 4)
    with pytest.raises(SearchSpaceExhausted, match=r"Asked for 3 .* and 2 of 6 are left"):
        client._generation_strategy.gen(client._experiment, n=3)
    with pytest.raises(SearchSpaceExhausted, match="0 of 6 are left"):
        client.get_next_trials(3)
    run(client, 2)
    assert len(set(names_of(client, pool))) == 6


@pytest.mark.parametrize("first", [0, 4])
def test_fixed_parameters(first: int) -> None:
    frame = sites(20).frame
    frame.loc[frame.index[:3], "b"] = 0.25
    pool = Pool.of(frame)
    client = started(pool=pool)
    run(client, first)
    left = {"site 0", "site 1", "site 2"} - set(names_of(client, pool))
    for _ in range(len(left)):
        ((index, parameters),) = client.get_next_trials(1, fixed_parameters={"b": 0.25}).items()
        left.remove(str(pool.name_of(parameters)))
        client.complete_trial(index, {"loss": loss(parameters)})
    with pytest.raises(SearchSpaceExhausted, match="have the fixed parameters"):
        client.get_next_trials(1, fixed_parameters={"b": 0.25})


@pytest.mark.integration
def test_outcome_constraints() -> None:
    pool = sites(30)
    client = started(pool=pool, acquisition=None, constraints=["cost >= 1.0"])
    run(client, 6, lambda p: {"loss": loss(p), "cost": float(p["a"])})
    assert len(set(names_of(client, pool))) == 6


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_two_objectives() -> None:
    pool = sites(30)
    client = started(pool=pool, acquisition="qLogNEHVI", objective="-loss, -cost")
    run(client, 5, lambda p: {"loss": loss(p), "cost": float(p["a"])})
    client.get_next_trials(2)
    assert len(set(names_of(client, pool))) == 7
