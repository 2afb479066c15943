"""The folder of a survey: each verb is on the disk, and only the model is a cache."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from bo_stream.acquisition import ExpectedLoss
from bo_stream.errors import UsageError
from bo_stream.loops.run import LOCK, OPTIMIZATION, SURVEY, hold_folder
from bo_stream.loops.survey import ledger
from bo_stream.loops.survey import survey as folders
from bo_stream.loops.survey.findings import in_words, next_files
from bo_stream.loops.survey.ledger import RESULTS
from bo_stream.loops.survey.model import MODEL
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.loops.survey.survey import Survey, load_survey, save_survey
from bo_stream.loops.survey.tables import read_table
from tests.loops.survey.villages import SETTINGS, results_of, villages

FULL = replace(
    SETTINGS,
    cost="km",
    stratum="district",
    quotas={"A": 3, "B": 9},
    base=(35.0, -5.0),
    cost_per_km=0.5,
    budget=900.0,
    x=("Longitude (deg)", "Lat"),
)

NUL = [f"V{row:03d}\0" for row in range(40)]


def table() -> pd.DataFrame:
    extra = {"km": np.arange(1.0, 41.0), "district": ["A", "B"] * 20, "note": "Séguéla, nord"}
    return villages().assign(**extra)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "campaign"


@pytest.fixture
def survey(folder: Path) -> Survey:
    begun = Survey(table(), FULL)
    save_survey(folder, begun)
    return begun


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def assert_same(first: Survey, second: Survey) -> None:
    assert first.settings == second.settings
    assert first.fingerprint == second.fingerprint
    assert first.status() == second.status()
    for name in ("sites", "pending", "results"):
        pd.testing.assert_frame_equal(getattr(first, name), getattr(second, name))


def test_every_verb_is_on_the_disk_when_it_returns(survey: Survey, folder: Path) -> None:
    assert_same(load_survey(folder), survey)
    asked = survey.ask(6)
    assert_same(load_survey(folder), survey)
    outside = {"Longitude (deg)": 35.1, "Lat": -5.2, "rain": np.nan, "night_lights": 1.0}
    stranger = pd.DataFrame([{"village": "Zomba", "tested": 30, "positives": 4, **outside}])
    survey.tell(pd.concat((results_of(asked["id"][:4]), stranger)))
    assert_same(load_survey(folder), survey)
    survey.withdraw([asked["id"][5]])
    survey.withdraw([asked["id"][0]], ask_again=True)
    assert_same(load_survey(folder), survey)
    assert survey.status().given_up == 1
    assert (len(survey.pending), len(survey.results)) == (1, 4)


def test_a_loaded_survey_goes_on_as_the_first(survey: Survey, folder: Path) -> None:
    survey.tell(results_of([f"V{row:03d}" for row in range(6)]))
    loaded = load_survey(folder)
    expected = survey.predictions()
    pd.testing.assert_frame_equal(loaded.predictions(), expected, rtol=1e-9)
    assert (folder / MODEL.name).exists()
    asked = survey.ask(4)
    assert_same(load_survey(folder), survey)
    elsewhere = Survey(table(), FULL)
    elsewhere.tell(results_of([f"V{row:03d}" for row in range(6)]))
    assert elsewhere.ask(4)["id"].tolist() == asked["id"].tolist()


def test_what_looked_odd_is_kept_until_it_is_corrected(survey: Survey, folder: Path) -> None:
    place = {"Longitude (deg)": 35.1, "Lat": -5.2, "rain": 0.6, "night_lights": 1.0}
    stranger = pd.DataFrame([{"village": "Zomba", "tested": 30, "positives": 4, **place}])
    both = pd.concat((stranger, results_of(["V001"])), ignore_index=True)
    (said,) = survey.tell(both, source="may.csv").warnings
    assert said.startswith("rain: the new sites have 0.6")
    assert survey.status().notes == (f"may.csv: {said}",)
    assert load_survey(folder).status().notes == survey.status().notes
    survey.tell(results_of(["V001"]).assign(positives=1))
    assert survey.notes == (f"may.csv: {said}",)
    survey.tell(stranger.assign(rain=600.0))
    assert load_survey(folder).notes == survey.notes == ()


LOSSES = """
import torch

def missed(chance):
    return torch.minimum(5.0 * chance, 1.0 - chance)

def summed(chance):
    return chance.sum()
"""


def test_a_loss_is_kept_by_name_and_imported_only_if_it_is_trusted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "our_losses.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    name = "our_losses:missed"
    begun = Survey(table(), replace(FULL, loss=name))
    save_survey(folder, begun)
    begun.tell(results_of([f"V{row:03d}" for row in range(6)]))
    strict = load_survey(folder)
    assert strict.status().surveyed == 6
    assert name in in_words(strict)["Sites are chosen to reduce"]
    for use in (lambda: strict.ask(1), lambda: strict.forecast(1, 1)):
        with pytest.raises(UsageError, match=f"names the loss {name}.*--loss {name}"):
            use()
    assert len(strict.pending) == 0
    trusting = load_survey(folder, trusted=[name])
    by_object = ExpectedLoss(lambda p: torch.minimum(5.0 * p, 1.0 - p), 0.1, "prevalence")
    same = Survey(table(), FULL, criterion=by_object, ledger=trusting.ledger, cache=trusting.cache)
    assert trusting.forecast(1, 2)["total"].tolist() == same.forecast(1, 2)["total"].tolist()
    assert len(trusting.ask(2)) == 2


def test_losses_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "our_losses.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="expected a function named 'other' in 'our_losses'"):
        Survey(table(), replace(FULL, loss="our_losses:other"))
    with pytest.raises(UsageError, match="our_losses:summed does not map probabilities to losses"):
        Survey(table(), replace(FULL, loss="our_losses:summed"))


def test_a_criterion_that_is_an_object_is_not_saved(folder: Path) -> None:
    begun = Survey(table(), FULL, criterion=ExpectedLoss(torch.square, 0.1, "prevalence"))
    with pytest.raises(UsageError, match=r"cannot keep ExpectedLoss\(\.\.\.\)"):
        save_survey(folder, begun)
    assert not folder.exists()


def test_loading_changes_nothing(survey: Survey, folder: Path) -> None:
    survey.tell(results_of(["V001", "V002"]))
    before = contents(folder)
    load_survey(folder).status()
    assert contents(folder) == before


def test_a_model_is_read_if_it_is_of_these_facts_and_else_built(
    survey: Survey, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey.tell(results_of([f"V{row:03d}" for row in range(5)]))
    expected = survey.predictions()
    built, model = [], survey.model

    def counted(self: Survey, *args: object) -> object:
        built.append(args)
        return model

    monkeypatch.setattr(Survey, "fit", counted)
    pd.testing.assert_frame_equal(load_survey(folder).predictions(), expected, rtol=1e-9)
    assert len(built) == 0
    (file,) = folder.glob("model-survey-*")
    whole = file.read_bytes()
    for damage in (whole[: len(whole) // 2], None):
        (file,) = folder.glob("model-survey-*")
        file.unlink()
        if damage is not None:
            file.write_bytes(damage)
        pd.testing.assert_frame_equal(load_survey(folder).predictions(), expected, rtol=1e-6)
    (folder / MODEL.name).write_text("{}")
    assert len(load_survey(folder).predictions()) == 40
    assert len(built) == 3
    load_survey(folder).tell(results_of(["V030"]))
    load_survey(folder).predictions()
    load_survey(folder).predictions()
    assert len(built) == 4


def test_a_folder_that_cannot_be_written_keeps_no_model(
    survey: Survey, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey.tell(results_of(["V001", "V002", "V003"]))

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("bo_stream.loops.run.CheckpointFormat.save", refuse)
    with pytest.warns(RuntimeWarning, match="could not be kept in .*Permission denied"):
        assert len(survey.predictions()) == 40


def test_a_folder_holds_one_survey(survey: Survey, folder: Path) -> None:
    before = contents(folder)
    with pytest.raises(UsageError, match="holds a survey already"):
        save_survey(folder, Survey(table(), FULL))
    assert contents(folder) == before


def test_the_folder_of_a_run_is_none_for_a_survey(folder: Path) -> None:
    OPTIMIZATION.save(folder, {}, {})
    before = contents(folder)
    with pytest.raises(UsageError, match=r"holds a run \(optimization.json\). Give another folder"):
        save_survey(folder, Survey(table(), FULL))
    assert contents(folder).keys() - before.keys() <= {".lock"}


def test_a_beginning_that_was_interrupted_is_begun_anew(survey: Survey, folder: Path) -> None:
    (folder / "survey.json").unlink()
    with pytest.raises(UsageError, match=r"no survey to resume in .*: it has no survey\.json"):
        load_survey(folder)
    again = Survey(table(), FULL)
    save_survey(folder, again)
    assert_same(load_survey(folder), again)


def test_results_whose_settings_are_lost_are_not_overwritten(survey: Survey, folder: Path) -> None:
    survey.tell(results_of(["V001"]))
    settings = (folder / "survey.json").read_bytes()
    (folder / "survey.json").unlink()
    before = contents(folder)
    with pytest.raises(UsageError, match=r"results\.jsonl. whose survey\.json is missing"):
        save_survey(folder, Survey(table(), FULL))
    assert contents(folder) == before
    (folder / "survey.json").write_bytes(settings)
    assert_same(load_survey(folder), survey)


def test_what_was_changed_by_hand_is_noticed(survey: Survey, folder: Path) -> None:
    whole = (folder / "sites.csv").read_text()
    (folder / "sites.csv").write_text(whole.replace("V007", "V7"))
    with pytest.raises(UsageError, match=r"sites\.csv is not the table that the survey began with"):
        load_survey(folder)
    (folder / "sites.csv").unlink()
    with pytest.raises(UsageError, match=r"has no sites\.csv. Restore it"):
        load_survey(folder)
    settings = (folder / "survey.json").read_text()
    (folder / "survey.json").write_text(settings.replace("0.1", "0.2"))
    with pytest.raises(UsageError, match=r"survey\.json is damaged"):
        load_survey(folder)


def test_a_campaign_survives_settings_that_came_later(survey: Survey, folder: Path) -> None:
    content = json.loads((folder / "survey.json").read_text())
    settings = {k: v for k, v in content["settings"].items() if k != "certainty"}
    SURVEY.save(folder, {"settings": settings, "sites": content["sites"]}, {})
    assert load_survey(folder).settings == FULL


def test_without_ids_the_rows_numbers_stay_the_ids(folder: Path) -> None:
    rows = table().drop(columns="village").set_axis(range(3, 43))
    begun = Survey(rows, replace(FULL, id=None))
    save_survey(folder, begun)
    assert_same(load_survey(folder), begun)
    assert begun.sites["id"].tolist()[:2] == ["3", "4"]


@pytest.mark.parametrize("labels", [np.arange(40.0), [f" v{row}" for row in range(40)]])
def test_labels_of_rows_are_read_as_ids_of_a_column_are(folder: Path, labels: Any) -> None:
    bare = villages().drop(columns="village").set_axis(pd.Index(labels))
    survey = Survey(bare, SETTINGS)
    save_survey(folder, survey)
    assert_same(load_survey(folder), survey)
    again = Survey(villages().assign(village=labels), SETTINGS)
    assert survey.sites["id"].tolist() == again.sites["id"].tolist()


def test_a_label_that_is_an_empty_cell_is_no_id() -> None:
    labels = ["-", *(f"v{row}" for row in range(39))]
    with pytest.raises(UsageError, match=r"row -: the id is missing\. Every site needs one"):
        Survey(villages().drop(columns="village").set_axis(pd.Index(labels)), SETTINGS)


def test_many_sites_are_kept_as_parquet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MANY", 30)
    begun = Survey(table(), FULL)
    save_survey(folder, begun)
    assert not (folder / "sites.csv").exists()
    assert_same(load_survey(folder), begun)


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        (
            villages().rename(columns={"rain": "rain  mm "}),
            replace(SETTINGS, covariates=("rain  mm ",)),
            "no column 'rain  mm ', which --covariates names. Is it 'rain mm'",
        ),
        (
            villages().rename(columns={"Lat": "Lat "}),
            replace(SETTINGS, x=("Longitude (deg)", "Lat ")),
            "no column 'Lat ', which --x names. Is it 'Lat'",
        ),
        (villages().assign(**{"rain ": 1.0}), SETTINGS, "two columns have the name 'rain'"),
        (villages().assign(**{"": 1.0}), SETTINGS, "a cell in column 6, which has no name"),
        (villages().assign(village=NUL), SETTINGS, "Column 'village' has cells that are read as"),
        (
            villages().assign(ward=NUL),
            replace(SETTINGS, stratum="ward"),
            "Column 'ward' has cells that are read as",
        ),
    ],
)
def test_a_table_that_would_be_read_otherwise_is_refused(
    folder: Path, changed: pd.DataFrame, settings: SurveySettings, message: str
) -> None:
    begun = Survey(changed, settings)
    for there in (False, True):
        if there:
            folder.mkdir()
        with pytest.raises(UsageError, match=f"cannot be kept in a folder.*{re.escape(message)}"):
            save_survey(folder, begun)
        assert folder.exists() == there
    assert {file.name for file in folder.iterdir()} <= {".lock"}


@pytest.mark.parametrize("many", [False, True], ids=["csv", "parquet"])
@pytest.mark.parametrize(
    "changes",
    [
        {"rain": np.arange(40) % 3 == 0},
        {"rain": pd.array([None, True, False, False] * 10, dtype="boolean")},
        {"village": pd.date_range("2026-01-31", periods=40)},
        {"note": "a\0b"},
        {"note": "1,2"},
        {"note": [["a", None]] * 40},
        {"ward": pd.to_datetime(["2026-01-31 06:30", "2026-02-01 12:00"] * 20)},
    ],
    ids=["flag", "flag with gaps", "dates as ids", "NUL", "a comma", "a list", "times as strata"],
)
def test_cells_of_many_kinds_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], many: bool
) -> None:
    monkeypatch.setattr(folders, "MANY", 30 if many else 50_000)
    stratum = "ward" if "ward" in changes else None
    begun = Survey(villages().assign(**changes), replace(SETTINGS, stratum=stratum))
    save_survey(folder, begun)
    assert_same(load_survey(folder), begun)
    begun.ask(2)
    assert next_files(load_survey(folder)).keys() == {"next.csv", "next.geojson"}


def test_a_number_of_a_workbook_may_be_a_text(folder: Path, tmp_path: Path) -> None:
    rain = ["650,5", *villages()["rain"].tolist()[1:]]
    villages().assign(rain=rain).to_excel(tmp_path / "list.xlsx", index=False)
    begun = Survey(read_table(tmp_path / "list.xlsx"), SETTINGS)
    assert float(begun.sites["rain"].iloc[0]) == 650.5
    save_survey(folder, begun)
    assert_same(load_survey(folder), begun)


def test_an_id_is_no_covariate(folder: Path) -> None:
    settings = replace(SETTINGS, covariates=("id",))
    begun = Survey(villages().assign(id=np.arange(40.0)), settings)
    with pytest.raises(UsageError, match="Column 'id' cannot be a covariate"):
        save_survey(folder, begun)


def test_a_folder_that_another_process_holds_keeps_its_lock(
    survey: Survey, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has made the folder, and holds it, while this one was about to."""

    @contextmanager
    def held(path: Path, advice: str) -> Iterator[None]:
        (path / LOCK).touch()
        raise UsageError(f"{path} is in use. {advice}")
        yield

    monkeypatch.setattr(ledger, "hold_folder", held)
    with pytest.raises(UsageError, match="in use"):
        save_survey(folder, survey)
    assert (folder / LOCK).exists()


def test_a_column_that_parquet_cannot_hold_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MANY", 30)
    begun = Survey(villages().assign(note=["none", 3] * 20), SETTINGS)
    with pytest.raises(UsageError, match=r"40 sites are kept as parquet, .* column note "):
        save_survey(folder, begun)
    assert not folder.exists()


def test_two_at_once_are_told_and_take_in_each_other_s_verbs(survey: Survey, folder: Path) -> None:
    other = load_survey(folder)
    with hold_folder(folder), pytest.raises(UsageError, match="is in use by"):
        survey.ask(3)
    mine, theirs = survey.ask(3), other.ask(3)
    assert not set(mine["id"]) & set(theirs["id"])
    survey.tell(results_of(theirs["id"]))
    assert set(survey.pending["id"]) == set(mine["id"])
    assert_same(load_survey(folder), survey)
    assert len((folder / RESULTS).read_text().splitlines()) == 3
