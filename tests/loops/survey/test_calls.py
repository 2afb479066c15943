"""The table of calls: above, uncertain, below, with the labels of the list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bo_stream.loops.survey import Survey, SurveySettings
from bo_stream.loops.survey.findings import next_files
from bo_stream.loops.survey.model import calls_table
from bo_stream.loops.survey.tables import TableFormat, read_table
from tests.loops.survey.surveys import findings
from tests.loops.survey.villages import SETTINGS, results_of, villages


def test_the_surest_calls_come_first_and_all_sites_are_there_once() -> None:
    predictions = findings().predictions
    table = calls_table(predictions, pd.DataFrame(index=predictions["id"]))
    assert sorted(table["id"]) == sorted(predictions["id"])
    kinds = table["call"].map({"above": 0, "uncertain": 1, "below": 2}).to_numpy()
    assert (np.diff(kinds) >= 0).all()
    chance = {name: part["probability"].to_numpy() for name, part in table.groupby("call")}
    assert (np.diff(chance["above"]) <= 0).all()
    assert (np.diff(chance["uncertain"]) <= 0).all()
    assert (np.diff(chance["below"]) >= 0).all()
    one = predictions.set_index("id").loc[table["id"].iloc[0]]
    first = table.iloc[0]
    assert (first["probability"], first["lower"]) == (one["exceedance"], one["lower"])


def test_a_survey_gives_names_and_districts_as_they_were_listed() -> None:
    listed = villages().assign(
        district=np.where(np.arange(40) < 20, "Nord", "Süd"), name="Bandé", call=range(40)
    )
    survey = Survey(listed, SETTINGS)
    ids = [f"V{row:03d}" for row in range(12)]
    survey.tell(results_of(ids))
    table = survey.calls()
    assert list(table.columns[:4]) == ["id", "district", "name", "listed_call"]
    rows = table["id"].str[1:].astype(int)
    assert (table["district"] == np.where(rows < 20, "Nord", "Süd")).all()
    assert (table["listed_call"] == rows).all()
    assert table["examined"].notna().sum() == 12


def test_a_list_that_was_written_by_a_survey_gives_tables_that_can_be_read(tmp_path: Path) -> None:
    names = ("call", "listed_call", "gain", "listed_gain")
    survey = Survey(villages().assign(**dict.fromkeys(names, "a")), SETTINGS)
    survey.ask(3)
    (form, *_) = next_files(survey).items()
    predictions = findings().predictions
    written = {
        form[0]: form[1],
        "calls.csv": TableFormat().write(calls_table(predictions, survey.labels)),
    }
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
        assert {"listed_call", "listed_gain"} < set(read_table(tmp_path / name).columns)
    told = survey.tell(read_table(tmp_path / form[0]).assign(examined="9", positive="1"))
    assert told.remarks == ()


def test_without_a_threshold_there_are_no_calls() -> None:
    survey = Survey(villages(), SurveySettings(goal="map"))
    survey.tell(results_of(["V000", "V001"]))
    assert survey.calls().empty
    with pytest.raises(ValueError, match="threshold"):
        calls_table(survey.predictions(), survey.labels)
