"""A stored experiment goes on as if nothing had happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ax.api.client import Client

from bo_stream import OSGPR
from tests.ax.experiments import (
    NEARLY_WITHOUT_NOISE,
    loss,
    model_of,
    raw_data,
    reloaded,
    run,
    started,
    surrogate_of,
    watch,
)

pytestmark = NEARLY_WITHOUT_NOISE

SEARCH_ENDS = 1e-3
"""How far from a flat maximum L-BFGS ends, where rounding differs."""


def next_candidate(client: Client) -> dict[str, Any]:
    torch.manual_seed(7)
    ((_, parameters),) = client.get_next_trials(1).items()
    return dict(parameters)


@pytest.mark.parametrize(("noise", "rounding"), [(None, 1e-8), (0.0, 1e-5), (0.1, 1e-8)])
def test_the_next_candidate_is_that_of_an_uninterrupted_run(
    noise: float | None, rounding: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly without noise an update and a rebuild differ by what their systems magnify."""

    def measured(parameters: Any) -> Any:
        return raw_data(loss(parameters) if noise is None else (loss(parameters), noise))

    client = started(refit=1.5)
    run(client, 8, measured)
    other = reloaded(client, tmp_path)
    traffic = watch(monkeypatch)
    ours = next_candidate(client)
    assert (traffic.built, traffic.entered) == ([], [1])
    theirs = next_candidate(other)
    assert (traffic.built, traffic.entered) == ([8], [1])
    assert_equal_posteriors(client, other, rounding)
    assert theirs == pytest.approx(ours, abs=SEARCH_ENDS)
    for each in (client, other):
        each.complete_trial(8, measured(ours))
    assert next_candidate(other) == pytest.approx(next_candidate(client), abs=SEARCH_ENDS)
    assert (traffic.built, traffic.entered) == ([8], [1, 1, 1])


def assert_equal_posteriors(one: Client, other: Client, rounding: float) -> None:
    X = torch.rand(9, 2, dtype=torch.float64)
    ours, theirs = (model_of(client).posterior(X) for client in (one, other))
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=rounding, atol=rounding)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=rounding, atol=rounding)


def test_what_was_learned_is_stored_once_per_refit_and_comes_back(tmp_path: Path) -> None:
    client = started(refit=1.5)
    run(client, 8)
    client.get_next_trials(1)
    learned = surrogate_of(client).learned
    other = reloaded(client, tmp_path)
    next_candidate(other)
    assert surrogate_of(other).learned == learned
    assert surrogate_of(other)._streams[("loss",)].fitted_at == learned["loss"]["count"]


def test_a_model_of_points_comes_back_too(tmp_path: Path) -> None:
    client = started(model=OSGPR)
    run(client, 6)
    other = reloaded(client, tmp_path)
    next_candidate(other)
    assert type(surrogate_of(other).model) is OSGPR


SCRIPT = """
import json, sys
{first}
from ax.api.client import Client
client = Client.load_from_json_file(sys.argv[1])
print(json.dumps(len(client.get_next_trials(1))))
"""


def test_another_process_goes_on_once_the_plug_in_is_imported(tmp_path: Path) -> None:
    client = started()
    run(client, 5)
    path = str(tmp_path / "experiment.json")
    client.save_to_json_file(path)
    done = loaded_by_another(path, "import bo_stream.ax")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == 1
    without = loaded_by_another(path, "")
    assert without.returncode != 0


def loaded_by_another(path: str, first: str) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(first=first)
    command = [sys.executable, "-c", script, path]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
