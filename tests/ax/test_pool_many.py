"""Pools of many candidates: screening, and what is kept from trial to trial."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ax.core.observation import ObservationFeatures
from botorch.acquisition.analytic import LogExpectedImprovement
from botorch.acquisition.max_value_entropy_search import qMaxValueEntropy

from bo_stream.acquisition import FeatureNIPV
from bo_stream.ax import pool_acquisition as screening
from bo_stream.ax.pool_acquisition import best_of, values
from tests.ax.experiments import NEARLY_WITHOUT_NOISE, run, started
from tests.ax.pools import (
    acquisition_of,
    adapter_of,
    names_of,
    rarely,
    sites,
    table_of,
)

pytestmark = NEARLY_WITHOUT_NOISE


@pytest.mark.parametrize("acquisition", ["qUCB", *rarely(["qLogEI"], ["qLogNEI"])])
def test_screening_finds_the_best_of_many(
    acquisition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = sites(3000)
    client = started(pool=pool, acquisition=acquisition)
    run(client, 5)
    client.get_next_trials(1)
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


@pytest.mark.parametrize("acquisition", ["qUCB", *rarely(["qLogEI"], ["qLogNEI"])])
def test_screening_with_running_trials(acquisition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pending ones count when the finalists are evaluated, of which half are random."""
    monkeypatch.setattr(screening, "FINALISTS", 500)
    pool = sites(3000)
    client = started(pool=pool, acquisition=acquisition)
    run(client, 5)
    client.get_next_trials(2)
    ((_, chosen),) = client.get_next_trials(1).items()
    acquired = acquisition_of(client)
    each = values(acquired.acqf, table_of(client, pool).X)
    mine = each[pool.rows([chosen])[0]]
    assert mine > each.max() - 0.05 * (each.max() - each.median())


def test_a_screened_pool_is_not_evaluated_with_all_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = started(pool=sites(200), acquisition="qUCB")
    run(client, 4)
    client.get_next_trials(1)
    acquired = acquisition_of(client)
    monkeypatch.setattr(screening, "FINALISTS", 20)
    seen: list[int] = []
    forward = acquired.acqf.forward
    monkeypatch.setattr(acquired.acqf, "forward", lambda X: seen.append(len(X)) or forward(X))
    best_of(acquired.acqf, table_of(client, sites(200)).X, 1, acquired._screening)
    assert seen == [20]


@pytest.mark.parametrize("acquisition", [LogExpectedImprovement, *rarely([qMaxValueEntropy])])
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
    client = started(pool=pool, acquisition="FeatureNIPV", refit=0.0)
    run(client, 4)
    client.get_next_trials(1)
    acquired = acquisition_of(client)
    first, selector = table_of(client, pool), acquired.options["choices"].selector
    kept = selector.get(acquired.acqf.model, first.X, acquired.options["mc_points"])
    run(client, 2)
    client.complete_trial(4, {"loss": 1.0})
    run(client, 1)
    acquired = acquisition_of(client)
    assert table_of(client, pool) is first
    assert isinstance(acquired.acqf, FeatureNIPV)
    again = selector.get(acquired.acqf.model, first.X, acquired.options["mc_points"])
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
