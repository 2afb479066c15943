"""Closed loops with functions that are evaluated in other processes."""

from __future__ import annotations

import warnings
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from ax.api.client import Client
from ax.core.arm import Arm
from ax.core.base_trial import BaseTrial
from ax.core.data import Data
from ax.core.trial_status import TrialStatus
from ax.exceptions.core import DataRequiredError, UnsupportedError
from ax.orchestration.orchestrator import FailureRateExceededError, Orchestrator
from ax.orchestration.orchestrator_options import TrialType
from botorch.exceptions.warnings import InputDataWarning

from bo_stream.ax import (
    ProcessMetric,
    ProcessRunner,
    close_storage,
    orchestrator_options,
    run_trials,
    storage_config,
)
from bo_stream.errors import UsageError
from tests.ax.experiments import (
    NEARLY_WITHOUT_NOISE,
    assert_is_a_batch_of_the_data,
    model_of,
    run,
    started,
    surrogate_of,
)
from tests.ax.functions import bowl, half_a_bowl, misbehave, second_time
from tests.ax.reloads import from_database

pytestmark = NEARLY_WITHOUT_NOISE

ALL_MAY_FAIL = {"tolerated_trial_failure_rate": 0.99}


def begun(client: Client, runner: ProcessRunner, *points: dict[str, float]) -> list[BaseTrial]:
    """Begin trials as Ax's orchestrator does."""
    client._set_runner(runner)
    client._set_metrics([ProcessMetric("loss")])
    trials = []
    for point in points:
        trial = client._experiment.new_trial().add_arm(Arm(parameters=dict(point)))
        trial.update_run_metadata(runner.run(trial))
        trials.append(trial.mark_running(no_runner_required=True))
    return trials


def settled(runner: ProcessRunner, trials: list[BaseTrial]) -> dict[int, TrialStatus]:
    statuses: dict[int, TrialStatus] = {}
    while len(statuses) < len(trials):
        left = [trial for trial in trials if trial.index not in statuses]
        for status, indices in runner.poll_trial_status(left).items():
            if status != TrialStatus.RUNNING:
                statuses |= dict.fromkeys(indices, status)
    return statuses


@pytest.mark.integration
def test_a_function_that_misbehaves_fails_its_trial_with_the_reason() -> None:
    client = started()
    runner = ProcessRunner(misbehave, workers=2, timeout=4.0)
    points = [{"a": 0.1 * way, "b": 0.3} for way in range(8)]
    trials = begun(client, runner, *points)
    try:
        statuses = settled(runner, trials)
    finally:
        runner.close()
    assert statuses == {0: TrialStatus.COMPLETED} | dict.fromkeys(range(1, 8), TrialStatus.FAILED)
    assert [runner.poll_exception(trial) for trial in trials[1:]] == [
        "1_0: ValueError: no such point",
        "2_0: no outcome within 4 s: stopped",
        "3_0: the worker process died (exit code 7)",
        "4_0: the value is nan",
        "5_0: expected one number, got shape (3,)",
        "6_0: expected one number, got str 'much'",
        "7_0: no value of loss was returned, only values of losses: expected a dict with a number, "
        "or a tuple of mean and standard error, for each metric",
    ]
    first = client._experiment.metrics["loss"].fetch_trial_data(trials[0])
    assert first.unwrap().df["mean"].tolist() == [bowl(points[0])]
    second = client._experiment.metrics["loss"].fetch_trial_data(trials[1])
    assert "trial 1 has no value of loss for 1_0" in second.unwrap_err().message


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_failed_trials_do_not_reach_the_model_and_the_others_stream(tmp_path: Path) -> None:
    close_storage()
    storage = storage_config(tmp_path / "experiments.db")
    client = started(objective="-loss, -cost", storage=storage, acquisition=None, refit=2.0)
    run_trials(client, half_a_bowl, 12, workers=2, timeout=60.0, **ALL_MAY_FAIL)
    trials = client._experiment.trials
    failed = {i for i, t in trials.items() if t.arms[0].parameters["a"] < 0.4}
    assert 0 < len(failed) < len(trials) == 12
    assert {i for i, t in trials.items() if t.status == TrialStatus.FAILED} == failed
    client.get_next_trials(1)
    streams = surrogate_of(client)._streams
    assert {len(stream.rows) for stream in streams.values()} == {12 - len(failed)}
    assert_is_a_batch_of_the_data(client)
    other = from_database(tmp_path / "experiments.db")
    close_storage()
    assert other._experiment.runner == client._experiment.runner
    assert {type(metric) for metric in other._experiment.metrics.values()} == {ProcessMetric}
    for index in failed:
        trial = other._experiment.trials[index]
        (arm,) = trial.arms  # that of an earlier trial, where Ax is given the same point again
        assert trial.status_reason is not None
        assert trial.status_reason.startswith(f"{arm.name}: RuntimeError: nothing at 0.")
    data = other._experiment.lookup_data().df
    assert set(data[data["metric_name"] == "loss"]["sem"]) == {0.1}


@pytest.mark.integration
def test_several_arms_of_a_trial() -> None:
    client = started()
    client._set_metrics([ProcessMetric("loss")])
    runner = ProcessRunner("tests.ax.functions:bowl", workers=2)
    client._set_runner(runner)
    arms = {"trial_type": TrialType.BATCH_TRIAL, "batch_size": 3}
    options = orchestrator_options(1, **arms)
    try:
        Orchestrator(client._experiment, client._generation_strategy, options).run_n_trials(5)
    finally:
        runner.close()
    statuses = {trial.status for trial in client._experiment.trials.values()}
    assert statuses == {TrialStatus.COMPLETED}
    client.get_next_trials(1)
    assert model_of(client).num_observations == 15
    assert_is_a_batch_of_the_data(client)


@pytest.mark.integration
def test_what_a_former_process_has_begun_is_evaluated_again(tmp_path: Path) -> None:
    client = started()
    lost = ProcessRunner(bowl)
    begun(client, lost, {"a": 0.5, "b": 0.5})
    lost.close()
    path = str(tmp_path / "experiment.json")
    client.save_to_json_file(path)
    other = Client.load_from_json_file(path)
    assert isinstance(other._experiment.runner, ProcessRunner)
    assert other._experiment.runner == lost
    run_trials(other, bowl, 1)
    assert len(other._experiment.trials) == 2
    values = other._experiment.lookup_data().df["mean"].tolist()
    expected = [bowl(t.arms[0].parameters) for t in other._experiment.trials.values()]
    assert values == pytest.approx(expected)


@pytest.mark.integration
def test_a_failed_attempt_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_CALLED", str(tmp_path / "called"))
    client = started()
    run_trials(client, second_time, 1, retries=1)
    (trial,) = client._experiment.trials.values()
    assert trial.status == TrialStatus.COMPLETED
    monkeypatch.delenv("TESTS_CALLED")
    with pytest.raises(FailureRateExceededError):
        run_trials(client, second_time, 1, retries=1)
    assert client._experiment.trials[1].status_reason == "1_0: OSError: the machine is busy"


def test_a_metric_that_never_reports_is_named_before_anything_begins() -> None:
    client = started()
    client.configure_runner(ProcessRunner(bowl))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"configure_metrics\(\[ProcessMetric\('loss'\)\]\)"):
        client.run_trials(1)


@pytest.mark.parametrize("given", [{}, {"loss": 1.0}])
def test_a_metric_that_no_trial_has_reported_is_named(given: dict[str, float]) -> None:
    """Trials are completed by hand, and quasi-random ones go on."""
    client = started(objective="-loss, -cost", acquisition=None)
    for index in client.get_next_trials(3):
        client.complete_trial(index, given or None)
    silent = "cost" if given else "cost, loss"
    said = f"No completed trial has reported a finite {silent}, and"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", InputDataWarning)
        client.get_next_trials(1)
    assert any(said in str(each.message) for each in caught)


def test_deleted_outcomes_are_named() -> None:
    """Ax's own transforms need some data, and say only so."""
    client = started()
    run(client, 4)
    client._experiment.data = Data()
    with pytest.raises(DataRequiredError, match="No completed trial has reported loss, and"):
        client.get_next_trials(1)


def test_trials_that_something_else_must_complete_are_named() -> None:
    client = started()
    client.get_next_trials(2)
    with pytest.raises(UnsupportedError, match=r"Trials 0, 1 are running, but no ProcessRunner"):
        run_trials(client, bowl, 1)


@pytest.mark.integration
def test_a_stopped_trial_is_given_up() -> None:
    client = started()
    runner = ProcessRunner(bowl, workers=2)
    first, second = begun(client, runner, {"a": 0.5, "b": 0.5}, {"a": 0.6, "b": 0.5})
    assert runner.poll_available_capacity() == 0
    assert runner.stop(first) == {}
    assert runner.poll_available_capacity() == 1
    runner.stop(second)
    assert runner.poll_available_capacity() == 2
    runner.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": lambda p: 1.0}, "Expected function at the top level of a module"),
        ({"function": bowl, "workers": 0}, "Expected workers to be a whole number of at least 1"),
        ({"function": bowl, "timeout": 0.0}, "Expected timeout above 0"),
        ({"function": bowl, "retries": -1}, "Expected retries to be a whole number of at least 0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ProcessRunner(**settings)


def test_the_orchestrator_does_not_sleep() -> None:
    options = orchestrator_options(4, max_pending_trials=6)
    assert options.max_pending_trials == 6
    assert options.run_trials_in_batches
    assert (options.min_seconds_before_poll, options.init_seconds_between_polls) == (0.0, 0)


def test_trials_are_evaluated_on_an_executor() -> None:
    client = started()
    with ThreadPoolExecutor(2) as executor:
        run_trials(client, bowl, 3, workers=2, executor=executor)
        assert executor.submit(int).result() == 0  # it is left open
    run_trials(client, bowl, 1, executor="threads:1")
    assert {trial.status for trial in client._experiment.trials.values()} == {TrialStatus.COMPLETED}
    values = client._experiment.lookup_data().df["mean"].tolist()
    expected = [bowl(t.arms[0].parameters) for t in client._experiment.trials.values()]
    assert values == pytest.approx(expected)


_THREE = Barrier(3)


def meet(parameters: dict[str, Any]) -> float:
    """Return when three are evaluated at once."""
    _THREE.wait(timeout=60.0)
    return bowl(parameters)


@pytest.mark.parametrize("executor", ["threads:3", ThreadPoolExecutor(3)])
def test_an_executor_has_as_many_trials_at_once_as_places(executor: str | Executor) -> None:
    client = started()
    run_trials(client, meet, 3, executor=executor)
    assert {trial.status for trial in client._experiment.trials.values()} == {TrialStatus.COMPLETED}


def test_the_number_of_trials_at_once_is_one_or_as_given() -> None:
    assert ProcessRunner(bowl).poll_available_capacity() == 1
    runner = ProcessRunner(bowl, workers=2)
    runner.use("threads:3")
    assert runner.poll_available_capacity() == 2
    runner.close()


def test_an_executor_that_cannot_be_had_changes_nothing() -> None:
    client = started()
    before = client._experiment.runner
    with pytest.raises(UsageError, match="Expected executor to be one of"):
        run_trials(client, bowl, 1, executor="slurm")
    assert client._experiment.runner is before


@pytest.mark.integration
def test_trials_by_hand_and_by_both_loops_are_one_stream() -> None:
    client = started()
    run(client, 4)
    run_trials(client, bowl, 2)
    client.run_trials(1)
    client._experiment.runner.close()
    run(client, 1)
    client.get_next_trials(1)
    assert model_of(client).num_observations == 8
    assert_is_a_batch_of_the_data(client)
