"""Tables of candidates, and experiments on them in storage, which has only their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from ax.adapter.cross_validation import cross_validate
from ax.api.client import Client
from ax.api.configs import RangeParameterConfig

from bo_stream.ax import Pool, generation_strategy, register_pool
from bo_stream.ax.pool import pool_named
from tests.ax.experiments import NEARLY_WITHOUT_NOISE, adapter_of, run, started
from tests.ax.pools import MIXED, forgetful, mixed_frame, names_of, rarely, sites
from tests.ax.reloads import from_json

pytestmark = NEARLY_WITHOUT_NOISE

__all__ = ["forgetful"]


def test_tables_of_all_forms() -> None:
    frame = sites(3).frame
    by_name = {f"site {i}": dict(frame.iloc[i]) for i in range(3)}
    assert Pool.of(by_name).name == Pool.of(frame).name == sites(3).name
    listed = Pool.of(list(by_name.values()))
    assert listed.name_of(by_name["site 1"]) == 1
    assert listed.parameters_of(2) == by_name["site 2"]
    assert listed.name != Pool.of(frame).name


def test_names_and_parameters_are_found() -> None:
    pool = Pool.of(mixed_frame(), name="mixed")
    for row in (0, 7, 29):
        assert pool.name_of({**pool.parameters_at(row), "other": 1}) == row
    assert pool.rows([]).tolist() == []
    near = {**pool.parameters_of(3), "rate": pool.parameters_of(3)["rate"] * (1.0 + 1e-15)}
    with pytest.raises(ValueError, match="No candidate of pool 'mixed' has the parameters"):
        pool.name_of(near)
    with pytest.raises(ValueError, match="No candidate"):
        pool.name_of({"rate": 0.1})


def test_leaving_candidates_out() -> None:
    pool = sites(5, name="five")
    rest = pool.without(["site 1", "site 4"])
    assert list(rest.frame.index) == ["site 0", "site 2", "site 3"]
    assert rest.name != "five"
    assert pool.without(["site 1"], name="four").name == "four"
    with pytest.raises(ValueError, match=r"'five' has no candidate 'site 7', 'site 8'.*'site 0'"):
        pool.without(["site 1", "site 7", "site 8"])
    with pytest.raises(ValueError, match="has no candidate 'nowhere'"):
        pool.parameters_of("nowhere")


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ([], "Expected candidates and their parameters"),
        ({"x": {}}, "Expected candidates and their parameters"),
        ({"x": {"a": 1.0}, "y": {"b": 1.0}}, "got none of 'b' for 'x'"),
        (pd.DataFrame({"a": [1.0, 2.0]}, index=["x", "x"]), "distinct, got twice: 'x'"),
        (pd.DataFrame({"a": [1.0]}, index=[0.5]), "strings or whole numbers"),
    ],
)
def test_tables_that_are_none(candidates: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pool.of(candidates)


def test_equal_candidates_cannot_be_told_apart() -> None:
    point = {"a": 1.0, "b": 0.0}
    with pytest.raises(ValueError, match=r"'x' and 'z' .* have the same parameters"):
        generation_strategy(pool={"x": point, "y": {"a": 0.0, "b": 0.0}, "z": {"a": 1, "b": -0.0}})


def test_a_name_stands_for_one_table(forgetful: dict[str, Pool]) -> None:
    first = register_pool(sites(3, name="one"))
    assert register_pool(sites(3, name="one")) is first
    with pytest.raises(ValueError, match="Another pool is registered as 'one', of 3 candidates"):
        register_pool(sites(4, name="one"))
    assert len(register_pool(sites(4, name="one"), replace=True)) == len(pool_named("one")) == 4
    with pytest.raises(ValueError, match="No pool is registered as 'none'"):
        generation_strategy(pool="none")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns=["rate"]), "no column for the parameter 'rate'"),
        (lambda f: f.assign(place="x"), "column 'place', which is no parameter"),
        (lambda f: f.assign(rate=2.0), r"30 of the 30 .* have rate outside .*such as 0 with 2\.0"),
        (lambda f: f.assign(layers=f.layers + 0.5), "have layers outside"),
        (lambda f: f.assign(kind="z"), "have kind outside"),
        (lambda f: f.assign(size=9), "have size outside"),
        (lambda f: f.assign(fixed=0.7), "have fixed outside"),
        (lambda f: f.assign(rate="much"), "have rate outside"),
    ],
)
def test_tables_of_another_search_space(change: Any, message: str) -> None:
    client = started(MIXED, pool=Pool.of(change(mixed_frame())))
    with pytest.raises(ValueError, match=message):
        client.get_next_trials(1)


def test_candidates_that_break_a_parameter_constraint() -> None:
    client = Client(random_seed=0)
    box = [RangeParameterConfig(n, (0.0, 1.0), parameter_type="float") for n in ("a", "b")]
    client.configure_experiment(box, parameter_constraints=["a + b <= 1"], name="half")
    client.configure_optimization("loss")
    names = {"in": {"a": 0.5, "b": 0.5}, "out": {"a": 0.9, "b": 0.9}, "too": {"a": 0.9, "b": 0.2}}
    client.set_generation_strategy(generation_strategy(pool=names))
    with pytest.raises(ValueError, match=r"2 of the 3 .*that break .*such as 'out'"):
        client.get_next_trials(1)
    pool = Pool.of(names).without(["out", "too"])
    client.set_generation_strategy(generation_strategy(pool=pool))
    assert client.get_next_trials(1)


@pytest.mark.parametrize(
    ("acquisition", "done"),
    [("qUCB", 1), ("FeatureNIPV", 5), *rarely(("qUCB", 5), ("FeatureNIPV", 1))],
)
def test_a_reloaded_experiment_goes_on_with_the_same_candidates(
    acquisition: str, done: int, tmp_path: Path
) -> None:
    pool = sites()
    client = started(pool=pool, acquisition=acquisition)
    run(client, done)
    other = from_json(client, tmp_path)
    for _ in range(2):
        for each in (client, other):
            torch.manual_seed(1)
            run(each, 1)
    assert names_of(client, pool) == names_of(other, pool)


@pytest.mark.parametrize("done", [1, 4])
def test_another_process_must_register_the_table(
    done: int, forgetful: dict[str, Pool], tmp_path: Path
) -> None:
    pool = sites(name="malaria")
    client = started(pool=pool)
    run(client, done)
    other = from_json(client, tmp_path)
    forgetful.clear()
    with pytest.raises(ValueError, match=r"register_pool\(Pool\.of\(candidates, name='malaria'\)"):
        other.get_next_trials(1)
    register_pool(sites(name="malaria"))
    assert other.get_next_trials(1)


def test_ax_stores_the_name_only() -> None:
    client = started(pool=sites(name="short"), acquisition="FeatureNIPV")
    run(client, 5)
    run_ = client._experiment.trials[4].generator_runs[0]
    assert run_._generator_kwargs["acquisition_options"] == {"pool": "short"}
    assert len(repr(run_._generator_kwargs)) < 4000


def test_past_trials_are_predicted_without_the_table(
    forgetful: dict[str, Pool], tmp_path: Path
) -> None:
    client = started(pool=sites(), acquisition="qUCB")
    run(client, 6)
    other = from_json(client, tmp_path)
    forgetful.clear()
    parameters, *_ = other.get_best_parameterization()
    assert sites().name_of(parameters) in names_of(client, sites())
    assert client.predict([parameters])
    assert len(cross_validate(adapter_of(client), folds=3)) == 5


def test_a_proposal_says_which_candidate_it_is() -> None:
    pool = sites(name="told")
    client = started(pool=pool)
    run(client, 4)
    (run_,) = client._experiment.trials[3].generator_runs
    (metadata,) = run_.candidate_metadata_by_arm_signature.values()
    assert metadata == {"pool": "told", "candidate": names_of(client, pool)[3]}


def test_a_table_that_has_grown(forgetful: dict[str, Pool]) -> None:
    later = sites(8, name="growing")
    client = started(pool=later.without(["site 1", "site 5", "site 6"], name="growing"))
    run(client, 5)
    register_pool(later, replace=True)
    run(client, 3)
    assert set(names_of(client, later)[5:]) == {"site 1", "site 5", "site 6"}


def test_a_search_space_that_shrinks_is_looked_at_again() -> None:
    pool = sites()
    client = started(pool=pool)
    run(client, 4)
    client._experiment.search_space.parameters["a"].update_range(upper=1.0)
    with pytest.raises(ValueError, match=r"of the 40 candidates .* have a outside"):
        client.get_next_trials(1)
