"""A stored experiment goes on as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ax.core.data
import pandas as pd
import pytest
from ax.api.client import Client
from ax.core.data import Data
from ax.generators.torch.botorch_modular.surrogate import ModelConfig
from ax.storage.json_store.decoder import object_from_json
from ax.storage.json_store.encoder import object_to_json

from bo_stream import OSGPR, QSGP, QSRVM, WISKI, DecoupledGP, ProductMatern, describe_file
from bo_stream.ax import load_snapshot, save_snapshot
from bo_stream.ax.storage import data_as_json, frame_as_json
from tests.ax.experiments import (
    NEARLY_WITHOUT_NOISE,
    after,
    loss,
    model_of,
    raw_data,
    run,
    started,
    surrogate_of,
    watch,
)
from tests.ax.reloads import (
    SEARCH_ENDS,
    assert_equal_posteriors,
    executed,
    from_json,
    next_candidate,
)

pytestmark = NEARLY_WITHOUT_NOISE


@pytest.mark.matrix
@pytest.mark.parametrize(("noise", "rounding"), [(None, 1e-8), (0.0, 1e-5), (0.1, 1e-8)])
def test_the_next_candidate_is_that_of_an_uninterrupted_run(
    noise: float | None, rounding: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly without noise an update and a rebuild differ by what their systems magnify."""

    def measured(parameters: Any) -> Any:
        return raw_data(loss(parameters) if noise is None else (loss(parameters), noise))

    client = started(refit=1.5)
    run(client, 5, measured)
    other = from_json(client, tmp_path)
    traffic = watch(monkeypatch)
    ours = next_candidate(client)
    assert (traffic.built, traffic.entered) == ([], [1])
    theirs = next_candidate(other)
    assert (traffic.built, traffic.entered) == ([5], [1])
    assert_equal_posteriors(client, other, rounding)
    assert theirs == pytest.approx(ours, abs=SEARCH_ENDS)
    for each in (client, other):
        each.complete_trial(5, measured(ours))
    assert next_candidate(other) == pytest.approx(next_candidate(client), abs=SEARCH_ENDS)
    assert (traffic.built, traffic.entered) == ([5], [1, 1, 1])


def test_what_was_learned_is_stored_once_per_refit_and_comes_back(tmp_path: Path) -> None:
    client = after(5, refit=1.5)
    learned = surrogate_of(client).learned
    other = from_json(client, tmp_path)
    next_candidate(other)
    assert surrogate_of(other).learned == learned
    assert surrogate_of(other)._streams[("loss",)].fitted_at == learned["loss"]["count"]


@pytest.mark.matrix
@pytest.mark.parametrize("model", [OSGPR, DecoupledGP, QSGP, QSRVM])
def test_other_models_come_back_too(model: Any, tmp_path: Path) -> None:
    client = started(model=model)
    run(client, 4)
    other = from_json(client, tmp_path)
    next_candidate(other)
    assert type(surrogate_of(other).model) is model


@pytest.mark.integration
def test_another_process_goes_on_once_the_plug_in_is_imported(tmp_path: Path) -> None:
    client = started()
    run(client, 5)
    path = str(tmp_path / "experiment.json")
    client.save_to_json_file(path)
    done = executed(
        """
import sys
import bo_stream.ax
from ax.api.client import Client
print(len(Client.load_from_json_file(sys.argv[1]).get_next_trials(1)))
""",
        path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1"


@pytest.mark.integration
def test_a_process_without_the_plug_in_is_told_to_import_it(tmp_path: Path) -> None:
    """Ax quotes the first name that it does not know."""
    paths = []
    for trials in (0, 5):
        client = started()
        run(client, trials)
        paths.append(str(tmp_path / f"{trials}.json"))
        client.save_to_json_file(paths[-1])
    done = executed(
        """
import sys
from ax.api.client import Client
for path in sys.argv[1:]:
    try:
        Client.load_from_json_file(path)
    except Exception as error:
        print(error)
""",
        *paths,
    )
    assert done.returncode == 0, done.stderr
    untried, tried = done.stdout.splitlines()[-2:]
    assert "StreamGenerators: import bo_stream.ax" in untried
    assert "'AutoGP: import bo_stream.ax'" in tried


def test_a_snapshot_is_whole_or_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "experiment.json"
    client = started()
    run(client, 2)
    save_snapshot(client, path)
    former = path.read_bytes()
    run(client, 1)

    def dies(self: Client, filepath: str) -> None:
        Path(filepath).write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Client, "save_to_json_file", dies)
        with pytest.raises(KeyboardInterrupt):
            save_snapshot(client, path)
    assert path.read_bytes() == former
    save_snapshot(client, path)
    for loaded in (load_snapshot(path), Client.load_from_json_file(str(path))):
        assert len(loaded._experiment.trials) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["experiment.json"]


def test_a_snapshot_that_is_damaged_or_another_s(tmp_path: Path) -> None:
    path, client = tmp_path / "experiment.json", started()
    save_snapshot(client, path)
    about = describe_file(path)
    assert (about["format"], about["version"]) == ("bo_stream Ax snapshot", 1)
    whole = path.read_text()
    plain = tmp_path / "plain.json"
    client.save_to_json_file(str(plain))
    for content, message in (
        (whole[:-9], "is damaged or no checkpoint"),
        ("", "is damaged or no checkpoint"),
        (plain.read_text(), "it does not say its format"),
        (whole.replace('"_type": "Client"', '"_type": "Clienu"'), "is damaged: its SHA-256 is"),
        (whole.replace('"version": 1', '"version": 2', 1), "was written by bo_stream"),
        (whole.replace("Ax snapshot", "something", 1), "expected a bo_stream Ax snapshot"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message) as error:
            load_snapshot(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "further",
    [{}, {"n": [3, 4]}, {"step": [1.0, 2.0]}, {"start_time": pd.to_datetime(["2026-01-01"] * 2)}],
)
def test_rows_are_written_as_axs_frame_of_them(further: dict[str, Any]) -> None:
    frame = pd.DataFrame(
        {
            "trial_index": [7, 7],
            "arm_name": ["7_0", "7_0"],
            "metric_name": ["cost", "loss"],
            "metric_signature": ["cost", "loss"],
            "mean": [1e-12, 2.0],
            "sem": [float("nan"), 0.1],
            **further,
        }
    )
    data = Data(df=frame)
    written = data_as_json(data)["df"]["value"]
    assert json.loads(written) == json.loads(frame_as_json(data.full_df))
    assert set(json.loads(written)) == {*data.full_df.columns}
    if "start_time" in further:
        assert json.loads(written)["start_time"] == {"0": 1767225600000, "1": 1767225600000}


def test_a_snapshot_makes_no_frame_of_each_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame of each would take most of the time."""
    client = started()
    run(client, 3)
    made: list[Any] = []
    sort = ax.core.data.sort_by_trial_index_and_arm_name
    monkeypatch.setattr(
        ax.core.data,
        "sort_by_trial_index_and_arm_name",
        lambda df: (made.append(df), sort(df=df))[1],
    )
    save_snapshot(client, tmp_path / "experiment.json")
    assert len(made) <= 1


@pytest.mark.filterwarnings("ignore:Parameterization .* is in out-of-design")
def test_a_model_that_had_bounds_hands_over_where_it_would_have(tmp_path: Path) -> None:
    """A trial far outside comes after the bounds were given: to the reloaded model both at once."""
    client = started(refit=1.5)
    run(client, 4)
    client.complete_trial(client.attach_trial({"a": 99.0, "b": 0.0}), {"loss": 9.0})
    next_candidate(client)
    other = from_json(client, tmp_path)
    next_candidate(other)
    ours, theirs = model_of(client), model_of(other)
    assert theirs.num_observations == ours.num_observations == 5
    assert (theirs.families, theirs.max_exact) == (ours.families, ours.max_exact)
    assert "WISKI" in ours.families


def test_a_product_kernel_is_stored_in_a_surrogate_of_ax_s_own() -> None:
    config = ModelConfig(botorch_model_class=WISKI, covar_module_class=ProductMatern)
    stored = json.loads(json.dumps(object_to_json(config)))
    assert object_from_json(stored).covar_module_class is ProductMatern
