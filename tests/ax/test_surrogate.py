"""Between trials a model takes what is new, and only that."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from ax.adapter.cross_validation import cross_validate
from ax.api.client import Client
from ax.core.data import Data

from bo_stream import OSGPR
from bo_stream.loops.models import OFTEN, REFIT, refit_is_due
from tests.ax.experiments import (
    NEARLY_WITHOUT_NOISE,
    Said,
    adapter_of,
    after,
    assert_is_a_batch_of_the_data,
    complete,
    loss,
    model_of,
    run,
    started,
    surrogate_of,
    watch,
)

pytestmark = NEARLY_WITHOUT_NOISE


def test_each_observation_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = watch(monkeypatch)
    client = started()
    run(client, 6)
    assert traffic.built == [3]
    assert traffic.entered == [1, 1]
    assert traffic.left == []
    client.get_next_trials(1)
    assert_is_a_batch_of_the_data(client)


def test_trials_completed_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    client = started()
    run(client, 4)
    traffic = watch(monkeypatch)
    pending = client.get_next_trials(3)
    assert traffic.entered == [1]
    late, *others = reversed(list(pending.items()))
    for index, parameters in others:
        client.complete_trial(index, {"loss": loss(parameters)})
        client.get_next_trials(1)
    client.complete_trial(late[0], {"loss": loss(late[1])})
    client.get_next_trials(1)
    assert traffic.entered == [1, 1, 1, 1]
    assert traffic.built == []
    assert_is_a_batch_of_the_data(client)


def test_a_value_reported_anew_replaces_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    client = after(4)
    traffic = watch(monkeypatch)
    client.attach_data(2, {"loss": 7.0})
    client.get_next_trials(1)
    assert (traffic.entered, traffic.left, traffic.built) == ([1], [1], [])
    assert model_of(client).num_observations == 4
    assert_is_a_batch_of_the_data(client)


def test_abandoned_and_failed_trials_leave_or_never_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    client = started()
    run(client, 6)
    traffic = watch(monkeypatch)
    (index,) = client.get_next_trials(1)
    client.mark_trial_failed(index)
    (index,) = client.get_next_trials(1)
    client.mark_trial_abandoned(index)
    client.get_next_trials(1)
    assert (traffic.entered, traffic.left, traffic.built) == ([1], [], [])
    assert_is_a_batch_of_the_data(client)


def test_deleted_data_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    client = after(4)
    traffic = watch(monkeypatch)
    experiment = client._experiment
    frame = experiment.lookup_data().full_df
    experiment.data = Data(df=frame[frame["trial_index"] != 1])
    client.get_next_trials(1)
    assert (traffic.entered, traffic.left, traffic.built) == ([], [1], [])
    assert model_of(client).num_observations == 3
    assert_is_a_batch_of_the_data(client)


def test_several_arms_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    client = after(4)
    traffic = watch(monkeypatch)
    attach_batch(client, 3)
    client.get_next_trials(1)
    assert (traffic.entered, traffic.built) == ([3], [])
    assert_is_a_batch_of_the_data(client)


def attach_batch(client: Client, arms: int) -> None:
    experiment, strategy = client._experiment, client._generation_strategy
    ((generator_run,),) = strategy.gen(experiment, n=arms, num_trials=1)
    complete(experiment.new_batch_trial(generator_runs=[generator_run]), loss, float("nan"))


@pytest.mark.parametrize("change", ["widened", "narrowed"])
def test_another_search_space_builds_the_model_anew(
    change: str, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    client = after(4)
    space = client._experiment.search_space.clone()
    upper = 3.0 if change == "widened" else 1.9999
    space.parameters["a"].update_range(upper=upper)
    client._experiment.search_space = space
    client.attach_data(2, {"loss": 7.0})
    traffic = watch(monkeypatch)
    client.get_next_trials(1)
    assert traffic.built == [4]
    assert "the search space has changed" in said.text
    assert_is_a_batch_of_the_data(client)


@pytest.mark.matrix
@pytest.mark.parametrize("sems", ["none", "all", "some", "zero", "late"])
def test_standard_errors(sems: str) -> None:
    given = {
        "none": lambda i: None,
        "all": lambda i: 0.1 + 0.01 * i,
        "some": lambda i: 0.1 if i % 2 else None,
        "zero": lambda i: 0.0,
        "late": lambda i: 0.1 if i > 4 else None,
    }[sems]
    client = started()
    for count in (3, *[1] * 4):
        for index, parameters in client.get_next_trials(count).items():
            sem = given(index)
            value = loss(parameters)
            client.complete_trial(index, {"loss": value if sem is None else (value, sem)})
    client.get_next_trials(1)
    assert model_of(client).num_observations == 7
    assert_is_a_batch_of_the_data(client)


def test_a_model_that_cannot_take_out_is_built_anew(
    monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    client = after(4, model=OSGPR)
    traffic = watch(monkeypatch, OSGPR)
    client.attach_data(2, {"loss": 7.0})
    client.get_next_trials(1)
    assert (traffic.built, traffic.left) == ([4], [])
    assert "OSGPR cannot take them out" in said.text


def test_hyperparameters_are_learned_when_the_data_have_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []

    def counted(model: Any, starts: Any = ()) -> None:
        counts.append(int(model.num_observations))

    monkeypatch.setattr("bo_stream.ax.surrogate.learn", counted)
    client = started(refit=2.0, initialization=2)
    run(client, 9)
    assert counts == [2, 4, 8]


def test_hyperparameters_are_learned_at_every_trial_as_long_as_they_are_few() -> None:
    assert refit_is_due(1, 0, None)
    fits = [0]
    for count in range(1, 1001):
        if refit_is_due(count, fits[-1], None):
            fits.append(count)
    assert fits[1 : OFTEN + 1] == list(range(1, OFTEN + 1))
    later = [count - OFTEN for count in fits if count > OFTEN + 20]
    growths = [after / before for before, after in pairwise(later)]
    assert len(growths) > 5
    assert all(REFIT <= growth < REFIT + 0.05 for growth in growths)
    assert not refit_is_due(50, 50, None)


@pytest.mark.integration
def test_cross_validation_does_not_leak() -> None:
    """Where there is only noise, left-out predictions do not follow it."""
    noise = iter(torch.randn(40, generator=torch.Generator().manual_seed(3)).tolist())
    client = started(refit=0.0)
    run(client, 25, lambda parameters: next(noise))
    results = cross_validate(adapter_of(client))
    observed = torch.tensor([r.observed.data.means[0] for r in results])
    predicted = torch.tensor([r.predicted.means[0] for r in results])
    assert float(torch.corrcoef(torch.stack((observed, predicted)))[0, 1]) < 0.4
    assert surrogate_of(client).model.num_observations in (24, 25)


@pytest.mark.matrix
@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e9])
def test_outcomes_of_any_unit_are_searched_alike(scale: float) -> None:
    """Units are powers of two: the searches differ by their own tolerance only."""
    factor = float(2.0 ** round(math.log2(scale)))
    client = started(acquisition="qLogEI")
    torch.manual_seed(5)
    run(client, 5, lambda p: factor * loss(p))
    plain = started(acquisition="qLogEI")
    torch.manual_seed(5)
    run(plain, 5)
    last, other = (c._experiment.trials[4].arms[0].parameters for c in (client, plain))
    assert last == pytest.approx(other, abs=1e-3)


def test_another_order_of_outcomes_is_another_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    client = after(3)
    unit = surrogate_of(client).units["loss"]
    client.complete_trial(client.attach_trial({"a": 1.0, "b": 0.0}), {"loss": -1e9})
    traffic = watch(monkeypatch)
    client.get_next_trials(1)
    assert surrogate_of(client).units["loss"] > 1e6 * unit
    assert traffic.built == [4]
    assert_is_a_batch_of_the_data(client)
