"""Proposals from a pool of named candidates, and what is kept of it from trial to trial."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ax.api.configs import DerivedParameterConfig, RangeParameterConfig
from ax.core.observation import ObservationFeatures
from ax.exceptions.core import SearchSpaceExhausted, UnsupportedError
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.acquisition.knowledge_gradient import qKnowledgeGradient
from botorch.acquisition.max_value_entropy_search import qMaxValueEntropy
from torch import Tensor

from bo_stream import OSGPR
from bo_stream.acquisition import FeatureNIPV
from bo_stream.ax import ACQUISITIONS, Pool
from bo_stream.ax import acquisition as screening
from bo_stream.ax.acquisition import best_of, values
from tests.ax.experiments import (
    NEARLY_WITHOUT_NOISE,
    acquisition_of,
    adapter_of,
    after,
    loss,
    model_of,
    run,
    started,
    surrogate_of,
)
from tests.ax.pools import (
    MIXED,
    USUAL,
    integrated_variances,
    mixed_frame,
    mixed_loss,
    names_of,
    parameters_of,
    sites,
    table_of,
)

pytestmark = [*NEARLY_WITHOUT_NOISE, pytest.mark.integration]

OTHERS = [name for name in ACQUISITIONS if name not in (*USUAL, "qLogNEHVI")]


@pytest.mark.parametrize("acquisition", [*USUAL, None, *OTHERS])
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


@pytest.mark.parametrize("acquisition", [*USUAL, "qLogEI"])
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
        ("qNIPV", None, 0),
        ("qNIPV", None, 2),
        ("FeatureNIPV", OSGPR, 0),
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


@pytest.mark.parametrize("acquisition", ["qUCB", "qLogEI", "qLogNEI"])
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
    client = after(6, mixed_loss, parameters=MIXED, pool=pool)
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
    """Attached, failed, abandoned and running trials all count."""
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


def test_outcome_constraints() -> None:
    pool = sites(30)
    client = started(pool=pool, acquisition=None, constraints=["cost >= 1.0"])
    run(client, 6, lambda p: {"loss": loss(p), "cost": float(p["a"])})
    assert len(set(names_of(client, pool))) == 6


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_two_objectives() -> None:
    pool = sites(30)
    client = started(pool=pool, acquisition="qLogNEHVI", objective="-loss, -cost")
    run(client, 5, lambda p: {"loss": loss(p), "cost": float(p["a"])})
    client.get_next_trials(2)
    assert len(set(names_of(client, pool))) == 7


def test_other_ways_to_choose_do_not_go_with_a_pool() -> None:
    client = after(4, pool=sites())
    adapter = adapter_of(client)
    with pytest.raises(UnsupportedError, match="a pool alone to choose from"):
        adapter.gen(1, model_gen_options={"in_sample": True})
    client = started(pool=sites(), acquisition=qKnowledgeGradient)
    run(client, 3)
    with pytest.raises(UnsupportedError, match="cannot be evaluated at single candidates"):
        client.get_next_trials(1)


@pytest.mark.parametrize("acquisition", ["qUCB", "qLogEI", "qLogNEI"])
def test_screening_finds_the_best_of_many(
    acquisition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = sites(3000)
    client = after(5, pool=pool, acquisition=acquisition)
    acquired = acquisition_of(client)
    X = table_of(client, pool).X
    monkeypatch.setattr(screening, "FINALISTS", 500)
    picks = best_of(acquired.acqf, X, 2, acquired._screening)
    assert acquired.acqf.X_pending is None
    first = values(acquired.acqf, X)
    assert int(picks[0]) == int(first.argmax())
    acquired.acqf.set_X_pending(X[picks[:1]])
    second = values(acquired.acqf, X)
    assert second[picks[1]] > second.max() - 0.05 * (second.max() - second.median())


@pytest.mark.parametrize("acquisition", ["qUCB", "qLogEI", "qLogNEI"])
def test_screening_with_running_trials(acquisition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pending ones count when the finalists are evaluated, of which half are random.

    250 random ones of 3,000 have one among the best fiftieth in all but 1 of 170 draws.
    """
    monkeypatch.setattr(screening, "FINALISTS", 500)
    pool = sites(3000)
    client = started(pool=pool, acquisition=acquisition)
    run(client, 5)
    client.get_next_trials(2)
    ((_, chosen),) = client.get_next_trials(1).items()
    acquired = acquisition_of(client)
    each = values(acquired.acqf, table_of(client, pool).X)
    mine = each[pool.rows([chosen])[0]]
    assert int((each > mine).sum()) < 3000 // 50


def test_an_interrupted_choice_leaves_the_pending_points(monkeypatch: pytest.MonkeyPatch) -> None:
    client = after(4, pool=sites(50), acquisition="qUCB")
    acqf = acquisition_of(client).acqf
    X = table_of(client, sites(50)).X
    waiting = X[:1]
    acqf.set_X_pending(waiting)

    def interrupted(value: Tensor) -> Tensor:
        if len(acqf.X_pending) > 1:
            raise KeyboardInterrupt
        return value.flatten(1).sum(-1)

    monkeypatch.setattr(acqf, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        best_of(acqf, X, 2, lambda: None)
    assert torch.equal(acqf.X_pending, waiting)


def test_a_screened_pool_is_not_evaluated_with_all_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = after(4, pool=sites(200), acquisition="qUCB")
    acquired = acquisition_of(client)
    monkeypatch.setattr(screening, "FINALISTS", 20)
    seen: list[int] = []
    forward = acquired.acqf.forward
    monkeypatch.setattr(acquired.acqf, "forward", lambda X: seen.append(len(X)) or forward(X))
    best_of(acquired.acqf, table_of(client, sites(200)).X, 1, acquired._screening)
    assert seen == [20]


@pytest.mark.parametrize("acquisition", [LogExpectedImprovement, qMaxValueEntropy])
def test_what_takes_no_sampler_is_not_screened(
    acquisition: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screening, "FINALISTS", 20)
    pool = sites()
    client = started(pool=pool, acquisition=acquisition)
    run(client, 5)
    assert len(set(names_of(client, pool))) == 5
    assert acquisition_of(client)._screening() is None


def test_a_table_is_transformed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = sites()
    client = after(4, pool=pool, acquisition="FeatureNIPV", refit=0.0)
    acquired = acquisition_of(client)
    first, selector = table_of(client, pool), acquired.options["choices"].selector
    kept = selector(acquired.acqf.model, first.X, acquired.options["mc_points"])
    run(client, 2)
    client.complete_trial(4, {"loss": 1.0})
    run(client, 1)
    acquired = acquisition_of(client)
    assert table_of(client, pool) is first
    assert isinstance(acquired.acqf, FeatureNIPV)
    again = selector(acquired.acqf.model, first.X, acquired.options["mc_points"])
    assert again is kept


def test_candidates_can_be_ranked() -> None:
    pool = sites()
    client = started(pool=pool, acquisition="FeatureNIPV")
    run(client, 4)
    ((_, chosen),) = client.get_next_trials(1).items()
    adapter = adapter_of(client)
    names = [name for name in pool.frame.index if name not in names_of(client, pool)[:-1]]
    features = [ObservationFeatures(parameters=pool.parameters_of(name)) for name in names]
    worth = adapter.evaluate_acquisition_function(features)
    assert names[int(torch.tensor(worth).argmax())] == pool.name_of(chosen)
