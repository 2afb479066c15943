"""Dates of results: read where they mean one day, else asked back; kept, and old folders load."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.survey import Survey, load_survey, save_survey
from bo_stream.loops.survey.cells import Cells, read_dates
from bo_stream.loops.survey.columns import find_column
from bo_stream.loops.survey.ledger import RESULTS, Event
from tests.loops.survey.villages import SETTINGS, results_of, villages

IDS = ["V001", "V002", "V003"]


def cells(*dates: object, column: str = "date") -> Cells:
    table = pd.DataFrame({"id": [f"V{row}" for row in range(len(dates))], column: list(dates)})
    table = table.set_index(pd.RangeIndex(2, len(table) + 2, name="row"))
    return Cells(table, "may.csv", "id")


@pytest.mark.parametrize(
    ("text", "day"),
    [
        ("2026-01-31", "2026-01-31"),
        ("2026/1/9", "2026-01-09"),
        ("2026-01-31 00:00:00", "2026-01-31"),
        ("2026-01-31T09:30Z", "2026-01-31"),
        ("2026-01", "2026-01"),
        ("2026", "2026"),
        ("31/01/2026", "2026-01-31"),
        ("31.1.2026", "2026-01-31"),
        ("7-7-2026", "2026-07-07"),
        ("", ""),
        ("n/a", ""),
        (pd.Timestamp("2026-01-31"), "2026-01-31"),
    ],
)
def test_dates_that_mean_one_day(text: object, day: str) -> None:
    assert read_dates(cells(text), "date") == [day]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("03/04/2026", "could be 2026-04-03 or 2026-03-04"),
        ("01/31/2026", "month first. Write it as in 2026-01-31"),
        ("31/01/26", "no date that is understood"),
        ("46053", "no date that is understood"),
        ("31 janvier", "no date that is understood"),
        ("2026-02-30", "no day of the calendar"),
        ("32/01/2026", "no day of the calendar"),
        ("0226-01-31", "has the year 226"),
    ],
)
def test_other_dates_are_asked_back_with_row_and_column(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=rf"may\.csv, row 3 \(id V1\), column 'date': .*{message}"):
        read_dates(cells("2026-01-31", text), "date")


def test_a_clear_date_of_the_column_tells_the_order_of_the_others() -> None:
    assert read_dates(cells("03/04/2026", "31/01/2026"), "date") == ["2026-04-03", "2026-01-31"]


@pytest.mark.parametrize("name", ["Date", "Survey date", "date_of_visit", "Date d'enquete"])
def test_usual_names_of_the_column(name: str) -> None:
    assert find_column([name], "date", None, "may.csv") == name


def test_of_two_columns_of_dates_the_one_is_asked_for() -> None:
    names = ["id", "visit date", "survey_date"]
    both = "'visit date', 'survey_date' could each be that of dates of results. Rename one 'date'"
    with pytest.raises(UsageError, match=both):
        find_column(names, "date", None, "may.csv")
    assert find_column([*names, "date"], "date", None, "may.csv") == "date"


def dated(survey: Survey) -> dict[str, str]:
    return dict(zip(survey.results["id"], survey.results["date"], strict=True))


def test_dates_are_kept_by_the_ledger_and_shown_with_results_and_predictions(
    tmp_path: Path,
) -> None:
    survey = Survey(villages(), SETTINGS)
    save_survey(tmp_path, survey)
    told = survey.tell(results_of(IDS).assign(date=["31/01/2026", "", "2026-02"]))
    assert told.remarks == ()  # no column was left unused
    again = load_survey(tmp_path)
    assert dated(again) == {"V001": "2026-01-31", "V002": "", "V003": "2026-02"}
    shown = again.predictions().set_index("id")["date"]
    assert shown[["V001", "V002", "V003", "V010"]].tolist() == ["2026-01-31", "", "2026-02", ""]
    called = again.calls().set_index("id")["date"]
    assert called["V001"] == "2026-01-31"


def test_a_date_alone_is_news_but_no_correction_of_numbers() -> None:
    survey, plain = Survey(villages(), SETTINGS), results_of(IDS)
    survey.tell(plain)
    before = survey.fingerprint
    assert survey.tell(plain.assign(date="2026-01-31")).corrected == tuple(IDS)
    assert set(dated(survey).values()) == {"2026-01-31"}
    assert survey.results["corrected"].tolist() == [0, 0, 0]
    assert survey.fingerprint == before  # the model is the same
    assert survey.tell(plain).unchanged == tuple(IDS)  # without dates they stay
    other = plain.assign(positives=plain["positives"] + 1)
    assert survey.tell(other).corrected == tuple(IDS)
    assert survey.results["corrected"].tolist() == [1, 1, 1]
    assert set(dated(survey).values()) == {"2026-01-31"}


def test_a_date_that_is_not_understood_changes_nothing() -> None:
    survey = Survey(villages(), SETTINGS)
    with pytest.raises(UsageError, match=r"column 'date': '03/04/2026' could be"):
        survey.tell(results_of(IDS).assign(date="03/04/2026"))
    assert survey.results.empty


def test_a_folder_from_before_dates_loads(tmp_path: Path) -> None:
    survey = Survey(villages(), SETTINGS)
    save_survey(tmp_path, survey)
    survey.tell(results_of(IDS).assign(date="2026-01-31"))
    (line,) = (tmp_path / RESULTS).read_text().splitlines()
    content = json.loads(line)
    content.pop("sha256")
    for result in content["values"]["results"]:
        assert result.pop("date") == "2026-01-31"
    (tmp_path / RESULTS).write_text(Event(**content).line())
    assert set(dated(load_survey(tmp_path)).values()) == {""}


def test_dates_that_came_with_the_list_and_those_that_are_not_understood() -> None:
    listed = villages().assign(examined=50.0, positive=3.0, visited="x", date="2025-11-30")
    survey = Survey(listed, SETTINGS)
    assert set(dated(survey).values()) == {"2025-11-30"}
    assert list(survey.labels.columns) == ["visited"]
    doubtful = Survey(listed.assign(date="03/04/2025"), SETTINGS)
    assert set(dated(doubtful).values()) == {""}
    assert "Dates of results are left out" in doubtful.notes[0]
    assert "'03/04/2025' could be 2025-04-03 or 2025-03-04" in doubtful.notes[0]
