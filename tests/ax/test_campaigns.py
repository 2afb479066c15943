"""Campaigns with failures, infinite outcomes, outliers and penalties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ax.adapter.transforms.winsorize import Winsorize
from ax.api.client import Client
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig
from ax.core.trial_status import TrialStatus

from bo_stream import OSGPR, WISKI
from bo_stream.ax import generation_strategy, save_snapshot
from tests.ax.experiments import (
    NEARLY_WITHOUT_NOISE,
    adapter_of,
    after,
    assert_is_a_batch_of_the_data,
    loss,
    model_of,
    run,
    started,
    surrogate_of,
    warned,
    watch,
)
from tests.ax.reloads import from_json

pytestmark = [*NEARLY_WITHOUT_NOISE, pytest.mark.integration]


def nodes(client: Client) -> list[str]:
    """Return the node that proposed each trial."""
    trials = client._experiment.trials.values()
    return [str(trial.generator_runs[0]._generation_node_name) for trial in trials]


def points(client: Client) -> list[tuple[Any, ...]]:
    trials = client._experiment.trials.values()
    return [tuple(arm.parameters.values()) for trial in trials for arm in trial.arms]


def fail(client: Client, trials: int) -> None:
    for _ in range(trials):
        (index,) = client.get_next_trials(1)
        client.mark_trial_failed(index)


def test_quasi_random_points_go_on_until_there_are_data(tmp_path: Path) -> None:
    client = started()
    fail(client, 5)
    save_snapshot(client, tmp_path / "file.json")
    client = Client.load_from_json_file(str(tmp_path / "file.json"))
    run(client, 4)
    assert nodes(client) == ["Sobol"] * 8 + ["Stream"]
    assert len(set(points(client))) == 9


@pytest.mark.filterwarnings("ignore:No completed trial has reported")
def test_one_metric_of_two_is_no_start() -> None:
    client = started(constraints=["cost >= 1.0"])
    run(client, 4, lambda parameters: {"cost": parameters["a"]})
    assert nodes(client) == ["Sobol"] * 4


@pytest.mark.parametrize(("batch", "expected"), [(4, 5), (2, 5), (8, 8)])
def test_batches_end_the_initialization_where_it_was_asked_for(batch: int, expected: int) -> None:
    """A first batch has no outcomes and is quasi-random as a whole."""
    client = started(initialization=5, refit=0.0)
    while len(client._experiment.trials) < 6:
        for index, parameters in client.get_next_trials(batch).items():
            client.complete_trial(index, {"loss": loss(parameters)})
    assert nodes(client).count("Sobol") == expected


def test_failed_points_are_not_proposed_again() -> None:
    client = started()
    run(client, 4)
    fail(client, 4)
    tried = points(client)
    assert all(
        max(abs(one - other) for one, other in zip(a, b, strict=True)) > 1e-3
        for i, a in enumerate(tried)
        for b in tried[:i]
    )
    assert model_of(client).num_observations == 4


@pytest.mark.parametrize("search", ["box", "region"])
def test_a_failed_point_is_at_one_place_for_all_metrics(search: str) -> None:
    """Transforms change it in place: a logarithm once for each metric is of another point."""
    rate = RangeParameterConfig(
        name="rate", bounds=(1e-4, 1.0), parameter_type="float", scaling="log"
    )
    share = RangeParameterConfig(name="share", bounds=(0.0, 1.0), parameter_type="float")
    client = started([rate, share])
    client.configure_tracking_metrics(["seconds"])
    client.set_generation_strategy(generation_strategy(initialization=4, search=search, seed=0))
    for _ in range(4):
        for index, parameters in client.get_next_trials(1).items():
            client.complete_trial(index, {"loss": float(parameters["share"]), "seconds": 1.0})
    fail(client, 3)
    assert all(1e-4 <= rate <= 1.0 for rate, _ in points(client))


@pytest.mark.parametrize("first", [1, 3])
def test_failed_choices_are_not_proposed_again_even_where_few_are_left(first: int) -> None:
    """Neither by the model nor among quasi-random points."""
    choices = [
        ChoiceParameterConfig(name=name, values=[0, 1, 2], parameter_type="int", is_ordered=True)
        for name in "ab"
    ]
    client = started(choices, initialization=first)
    run(client, 1)
    fail(client, 7)
    assert len(set(points(client))) == 8


def test_a_point_that_failed_once_and_was_evaluated_then_is_not_avoided() -> None:
    client = started()
    run(client, 4)
    fail(client, 1)
    adapter = adapter_of(client)
    (arm,) = adapter.failed
    client.complete_trial(client.attach_trial(dict(arm.parameters)), {"loss": 1.0})
    assert adapter.failed == []


INFINITE = [float("inf"), -float("inf"), (0.5, float("inf")), (0.5, 1e200)]


@pytest.mark.parametrize("value", INFINITE)
def test_an_infinite_outcome_is_set_aside_with_a_warning(value: Any) -> None:
    client = started()
    run(client, 3)
    client.complete_trial(client.attach_trial({"a": 0.5, "b": 0.5}), {"loss": value})
    assert "set aside: loss of trial 3." in warned(client)
    (index,) = client._experiment.trial_indices_by_status[TrialStatus.RUNNING]
    assert model_of(client).num_observations == 3
    adapter = adapter_of(client)
    assert [arm.parameters for arm in adapter.failed] == [{"a": 0.5, "b": 0.5}]
    client.attach_data(3, {"loss": 0.25})
    client.complete_trial(index, {"loss": 0.5})
    client.get_next_trials(1)
    assert model_of(client).num_observations == 5


def test_an_infinite_tracking_metric_is_set_aside_by_itself() -> None:
    client = started()
    client.configure_tracking_metrics(["note"])
    for count in range(3):
        for index, p in client.get_next_trials(1).items():
            note = float("inf") if count == 1 else float(p["a"])
            client.complete_trial(index, {"loss": loss(p), "note": note})
    assert "set aside: note of trial 1." in warned(client)
    streams = surrogate_of(client)._streams
    assert [len(streams[(metric,)].rows) for metric in ("loss", "note")] == [3, 2]


@pytest.mark.filterwarnings("ignore:No completed trial has reported")
def test_infinite_first_outcomes_are_none() -> None:
    client = started()
    run(client, 4, lambda parameters: float("inf"))
    assert nodes(client) == ["Sobol"] * 4


@pytest.mark.filterwarnings("ignore:Parameterization .* is in out-of-design")
@pytest.mark.parametrize("kind", [WISKI, OSGPR])
def test_observations_outside_the_search_space_stay(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = after(4, model=kind, refit=0.0)
    traffic = watch(monkeypatch, kind)
    for a in (-0.5, 2.5):
        point = {"a": a, "b": 0.5}
        client.complete_trial(client.attach_trial(point), {"loss": loss(point)})
    ((_, parameters),) = client.get_next_trials(1).items()
    assert (traffic.built, traffic.entered) == ([], [2])
    assert model_of(client).num_observations == 6
    assert 0.0 <= float(parameters["a"]) <= 2.0
    if kind is WISKI:
        assert_is_a_batch_of_the_data(client)


@pytest.mark.filterwarnings("ignore:Parameterization .* is in out-of-design")
def test_observations_that_a_grid_cannot_reach_are_left_out_with_a_warning() -> None:
    client = started(model=WISKI, refit=0.0)
    run(client, 3)
    client.complete_trial(client.attach_trial({"a": 99.0, "b": 0.0}), {"loss": 9.0})
    assert "1 observations of loss are left out" in warned(client)
    assert model_of(client).num_observations == 3


@pytest.mark.filterwarnings("ignore:Parameterization .* is in out-of-design")
def test_the_stored_floor_of_known_noise_is_that_of_the_observations_taken() -> None:
    client = started(model=WISKI)
    run(client, 3, lambda parameters: {"loss": (loss(parameters), 0.0)})
    client.complete_trial(client.attach_trial({"a": 99.0, "b": 0.0}), {"loss": (1e3, 0.0)})
    assert "1 observations of loss are left out" in warned(client)
    surrogate = surrogate_of(client)
    floor = surrogate.learned["loss"]["floor"]
    assert bool((surrogate._streams[("loss",)].rows.Yvar == floor).all())


@pytest.mark.filterwarnings("ignore:Parameterization .* is in out-of-design")
def test_observations_that_no_grid_could_reach_stay_in_the_default_model() -> None:
    client = started(refit=0.0)
    run(client, 3)
    client.complete_trial(client.attach_trial({"a": 99.0, "b": 0.0}), {"loss": 9.0})
    assert "left out" not in warned(client)
    assert model_of(client).num_observations == 4


@pytest.mark.filterwarnings("ignore:Parameterization .* is in out-of-design")
def test_observations_that_no_model_takes_are_left_out_with_a_warning() -> None:
    rate = RangeParameterConfig("a", (1e-4, 1.0), parameter_type="float", scaling="log")
    client = started([rate], refit=0.0)
    run(client, 3, lambda parameters: float(parameters["a"]))
    for value in (-1.0, 2.0):
        client.complete_trial(client.attach_trial({"a": value}), {"loss": 1.0})
    assert "Trials 3 are left out of the model" in warned(client)
    assert model_of(client).num_observations == 4


@pytest.mark.parametrize("imprecise_first", [False, True])
def test_imprecise_outcomes_leave_the_features_that_precise_ones_tell_apart(
    imprecise_first: bool,
) -> None:
    client = started(refit=0.0)
    sems = sorted([1e-6, 1e3] * 6, reverse=imprecise_first)
    generator = torch.Generator().manual_seed(0)
    precise = []
    for sem in sems:
        a, b = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        point = {"a": 2.0 * a, "b": 2.0 * b - 1.0}
        client.complete_trial(client.attach_trial(point), {"loss": (loss(point), sem)})
        precise += [point] if sem < 1.0 else []
    client.get_next_trials(1)
    for point, predicted in zip(precise, client.predict(precise), strict=True):
        mean, sd = predicted["loss"]
        assert abs(float(mean) - loss(point)) < 3.0 * float(sd) < 0.1


def clipped(client: Client) -> float:
    """Return the worst outcome that the model has, in the user's unit."""
    surrogate = surrogate_of(client)
    return float(surrogate.training_data[0].Y.max()) * surrogate.units["loss"]


def with_a_penalty(client: Client) -> None:
    for count, (a, b) in enumerate([(0.1, 0.5), (1.9, 0.0), (1.0, 0.9), (0.6, -0.9), (1.4, 0.4)]):
        value = 1e4 if count == 2 else loss({"a": a, "b": b})
        client.complete_trial(client.attach_trial({"a": a, "b": b}), {"loss": value})


def test_penalties_are_clipped_as_in_axs_default(tmp_path: Path) -> None:
    client = started(refit=0.0, winsorize=True)
    with_a_penalty(client)
    client.get_next_trials(1)
    adapter = adapter_of(client)
    axs = Winsorize(experiment_data=adapter.get_training_data(), adapter=adapter)
    assert clipped(client) == pytest.approx(axs.cutoffs["loss"][1])
    assert clipped(client) < 10.0
    other = from_json(client, tmp_path)
    other.get_next_trials(1)
    assert clipped(other) == clipped(client)


@pytest.mark.parametrize(("value", "moves"), [(0.5, False), (-300.0, True)])
def test_cutoffs_move_when_they_are_off_by_far_and_clipped_rows_with_them(
    value: float, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = started(refit=0.0, winsorize=True)
    with_a_penalty(client)
    (index,) = client.get_next_trials(1)
    before = clipped(client)
    traffic = watch(monkeypatch)
    for other in range(2):
        point = client.attach_trial({"a": 0.3 + other, "b": -0.5})
        client.complete_trial(point, {"loss": value})
    client.complete_trial(index, {"loss": value})
    client.get_next_trials(1)
    assert (traffic.entered, traffic.left, traffic.built) == ([3 + moves], [1] * moves, [])
    assert (clipped(client) != before) == moves
    assert_is_a_batch_of_the_data(client)


def test_nothing_is_clipped_where_all_of_a_function_is_to_be_learned() -> None:
    client = started(refit=0.0, winsorize=True, acquisition="qNIPV")
    with_a_penalty(client)
    client.get_next_trials(1)
    assert clipped(client) == 1e4
