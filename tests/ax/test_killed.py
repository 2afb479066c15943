"""A process that is killed between trials loses nothing that was completed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ax.api.client import Client
from ax.core.trial_status import TrialStatus

from bo_stream.ax import close_storage, run_trials
from tests.ax.experiments import (
    NEARLY_WITHOUT_NOISE,
    assert_is_a_batch_of_the_data,
    loss,
    run,
    started,
    watch,
)
from tests.ax.functions import bowl
from tests.ax.reloads import SEARCH_ENDS, from_database, next_candidate

pytestmark = [*NEARLY_WITHOUT_NOISE, pytest.mark.integration]

TRIALS = 30
SCRIPT = """
import os, signal, sys
from bo_stream.ax import save_snapshot, storage_config
from tests.ax.experiments import loss, run, started

path = sys.argv[1]
is_database = path.endswith(".db")
client = started(storage=storage_config(path) if is_database else None, refit=1.5)
for _ in range(int(sys.argv[2])):
    run(client, 1)
    if not is_database:
        save_snapshot(client, path)
if is_database:
    client.get_next_trials(1)  # is being evaluated when the process is killed
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module", params=["experiment.db", "experiment.json"])
def left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that a killed process has left."""
    path: Path = tmp_path_factory.mktemp("killed") / request.param
    command = [sys.executable, "-c", SCRIPT, str(path), str(TRIALS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return path


@pytest.fixture
def resumed(left: Path) -> Iterator[Client]:
    close_storage()
    if left.suffix == ".db":
        yield from_database(left)
    else:
        client = Client.load_from_json_file(str(left))
        client._random_seed = 0
        yield client
    close_storage()


def test_the_resumed_run_goes_on_as_the_uninterrupted_one(
    resumed: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = started(refit=1.5)
    run(whole, TRIALS)
    completed = resumed._experiment.trials_by_status[TrialStatus.COMPLETED]
    assert len(completed) == TRIALS
    for trial in completed:
        (arm,) = whole._experiment.trials[trial.index].arms
        assert trial.arms[0].parameters == pytest.approx(arm.parameters, abs=SEARCH_ENDS)
    traffic = watch(monkeypatch)
    for trial in list(resumed._experiment.trials_by_status[TrialStatus.RUNNING]):
        resumed.complete_trial(trial.index, {"loss": loss(trial.arms[0].parameters)})
        run(whole, 1)
    count = len(resumed._experiment.trials)
    traffic.built.clear()
    traffic.entered.clear()
    ours, theirs = next_candidate(resumed), next_candidate(whole)
    assert ours == pytest.approx(theirs, abs=SEARCH_ENDS)
    assert (traffic.built, traffic.entered) == ([count], [1])
    resumed.complete_trial(count, {"loss": loss(ours)})
    next_candidate(resumed)
    assert (traffic.built, traffic.entered) == ([count], [1, 1])


LOOP = """
import sys
from bo_stream.ax import run_trials, storage_config
from tests.ax.experiments import started
from tests.ax.functions import kills_its_parent

if __name__ == "__main__":
    run_trials(started(storage=storage_config(sys.argv[1])), kills_its_parent, 9)
"""


def test_a_closed_loop_goes_on_with_the_trial_that_it_was_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_CALLED", str(tmp_path / "calls"))
    (tmp_path / "loop.py").write_text(LOOP)
    path = tmp_path / "experiments.db"
    command = [sys.executable, str(tmp_path / "loop.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    close_storage()
    client = from_database(path)
    trials = client._experiment.trials_by_status
    assert [trial.index for trial in trials[TrialStatus.COMPLETED]] == [0, 1, 2, 3]
    assert [trial.index for trial in trials[TrialStatus.RUNNING]] == [4]
    run_trials(client, bowl, 2)
    assert len(client._experiment.trials_by_status[TrialStatus.COMPLETED]) == 7
    assert len(client._experiment.lookup_data().df) == 7
    client.get_next_trials(1)
    assert_is_a_batch_of_the_data(client)
    close_storage()
