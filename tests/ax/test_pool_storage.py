"""A stored experiment on a pool, whose table is not stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ax.adapter.cross_validation import cross_validate

from bo_stream.ax import Pool, register_pool
from tests.ax.experiments import NEARLY_WITHOUT_NOISE, run, started
from tests.ax.pools import (
    adapter_of,
    forgetful,
    names_of,
    rarely,
    sites,
)
from tests.ax.reloads import from_json

pytestmark = NEARLY_WITHOUT_NOISE


__all__ = ["forgetful"]


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
