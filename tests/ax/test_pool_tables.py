"""Tables of candidates, and what is none."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from ax.api.client import Client
from ax.api.configs import RangeParameterConfig
from ax.exceptions.core import UnsupportedError
from botorch.acquisition.knowledge_gradient import qKnowledgeGradient

from bo_stream.ax import Pool, generation_strategy, register_pool
from bo_stream.ax.pool import pool_named
from tests.ax.experiments import NEARLY_WITHOUT_NOISE, run, started
from tests.ax.pools import (
    MIXED,
    adapter_of,
    forgetful,
    mixed_frame,
    sites,
)

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


def test_other_ways_to_choose_do_not_go_with_a_pool() -> None:
    client = started(pool=sites())
    run(client, 4)
    client.get_next_trials(1)
    adapter = adapter_of(client)
    with pytest.raises(UnsupportedError, match="a pool alone to choose from"):
        adapter.gen(1, model_gen_options={"in_sample": True})
    client = started(pool=sites(), acquisition=qKnowledgeGradient)
    run(client, 3)
    with pytest.raises(UnsupportedError, match="cannot be evaluated at single candidates"):
        client.get_next_trials(1)
