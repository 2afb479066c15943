"""What former versions wrote is read, and goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ax.api.client import Client
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner, Result

import bo_stream
from bo_stream import WISKI
from bo_stream.ax import close_storage, storage_config
from bo_stream.cli import app
from bo_stream.distributed import FolderStore, Replica, ingest
from bo_stream.loops.survey import load_survey
from bo_stream.testing.streams import moments
from tests.ax.experiments import model_of
from tests.repository.former_files import REPLICAS, unpacked

TOLERANCE = 1e-6
"""Relative to the largest value: processors round differently, and systems magnify it."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:Yvar holds"),
    pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short"),
]


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("former"))


def assert_near(value: Tensor, expected: Tensor, single: bool) -> None:
    scale = float(expected.abs().max())
    atol = (1e-3 if single else TOLERANCE) * scale
    torch.testing.assert_close(value, expected, rtol=0.0, atol=atol)


def test_models_are_read_and_updated(former: Path) -> None:
    folder = former / "models"
    expected = load_file(folder / "expected")
    classes = json.loads((folder / "models.json").read_text())
    assert len(classes) > 80
    for name, kind in classes.items():
        at = {
            key.partition("/")[2]: value
            for key, value in expected.items()
            if key.startswith(f"{name}/")
        }
        model = getattr(bo_stream, kind).load(folder / f"{name}.safetensors")
        single = "single" in name
        for value, key in zip(moments(model, at["points"]), ("mean", "variance"), strict=True):
            assert_near(value, at[key], single)
        model.update(at["X"], at["Y"], at.get("Yvar"))
        if "learning" in name or kind in ("QSGP", "QSRVM", "DecoupledGP"):
            continue  # their updates draw minibatches by torch's generator
        after = zip(moments(model, at["points"]), ("mean after", "variance after"), strict=True)
        for value, key in after:
            assert_near(value, at[key], single)


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.integration
def test_commands_go_on(former: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(former / "commands")
    for run in (("sample", "map.npz", "--out", "sample"), ("optimize", "--out", "optimize")):
        assert "Going on after step 2" in invoke(*run, "--resume", "--steps", "3").output


def test_a_survey_goes_on(former: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(former / "commands")
    survey = load_survey("survey")
    assert (len(survey.results), len(survey.pending)) == (20, 3)
    assert survey.predictions()["exceedance"].between(0.0, 1.0).all()


def test_an_ingest_goes_on(former: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(former / "records")
    model = WISKI.load("ingested.safetensors")
    done = ingest(model, "day-*.csv", x=["lon", "lat"], y="heat", record="record")
    assert (done.rows, done.fragments, done.resumed) == (100, 1, 1)
    assert model.num_observations == 200


def test_replicas_go_on(former: Path) -> None:
    store = FolderStore(former / "records" / "shared")
    reader = Replica(REPLICAS, store, "reader")
    assert reader.observations == 14
    anna = Replica(REPLICAS, store, "anna")
    anna.tell([[0.5, 0.5]], [1.0])
    anna.exchange()
    reader.exchange()
    assert reader.observations == 15


@pytest.mark.integration
def test_experiments_of_ax_go_on(former: Path) -> None:
    folder = former / "experiments"
    client = Client.load_from_json_file(str(folder / "experiment.json"))
    close_storage()
    other = Client.load_from_database("small", storage_config(folder / "experiments.db"))
    for each in (client, other):
        ((index, _),) = each.get_next_trials(1).items()
        assert model_of(each).num_observations == 6
        each.complete_trial(index, {"loss": 0.5})
    close_storage()
