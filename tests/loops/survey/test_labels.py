"""Which columns of a list say which site it is."""

from __future__ import annotations

from datetime import date

import pandas as pd
import pytest

from bo_stream.loops.survey.findings import label_texts, shown_labels, waypoint_files
from bo_stream.loops.survey.maps import zoomable_map
from bo_stream.loops.survey.report import survey_page
from bo_stream.loops.survey.settings import DEGREES
from tests.loops.survey.surveys import findings


def labels(**columns: list[object]) -> pd.DataFrame:
    return pd.DataFrame(columns)


@pytest.mark.parametrize(
    ("name", "district"),
    [
        ("name", "District"),
        ("Village name", "ADM2_NAME"),
        ("Nom du village", "Département"),
        ("Nome", "Distrito"),
        ("Nombre", "Municipio"),
    ],
)
def test_names_and_districts_are_found_in_some_languages(name: str, district: str) -> None:
    table = pd.DataFrame({"note": ["a", "b"], district: ["1", "2"], name: ["x", "y"]})
    assert shown_labels(table) == (name, [district, "note"])


def test_numbers_empty_columns_and_those_of_one_text_are_not_shown() -> None:
    table = labels(
        population=["310", "290"], empty=["", ""], country=["Mali", "Mali"], team=["A", "B"],
        rate=[0.5, None],
    )  # fmt: skip
    assert shown_labels(table) == (None, ["team"])
    assert shown_labels(pd.DataFrame(index=["V0"])) == (None, [])


def test_at_most_three_are_shown_beside_the_name() -> None:
    table = pd.DataFrame({f"text{row}": ["a", "b"] for row in range(5)} | {"region": ["1", "2"]})
    assert shown_labels(table) == (None, ["region", "text0", "text1"])


def test_cells_of_columns_of_any_type_may_be_missing() -> None:
    table = pd.DataFrame(
        {
            "name": pd.Categorical(["A", None, "B"]),
            "zone": pd.array([7, None, 8], dtype="Int64"),
            "since": pd.to_datetime(["2026-01-31", None, "2026-02-01"]),
            "note": ["x", None, float("nan")],
        }
    )
    texts = label_texts(table)
    assert texts.to_numpy().tolist() == [
        ["A", "7", "2026-01-31", "x"], ["", "", "", ""], ["B", "8", "2026-02-01", ""],
    ]  # fmt: skip
    assert label_texts(table[[]]).shape == (3, 0)


@pytest.mark.usefixtures("small_pictures")
def test_missing_names_and_zones_are_empty_on_maps_and_pages() -> None:
    plain = findings()
    names, zones = [None, *plain.labels["Village"][1:]], [None, *range(1, 60)]
    typed = {"Village": pd.Categorical(names), "Zone": pd.array(zones, dtype="Int64")}
    shown = findings(labels=plain.labels.assign(**typed), chosen=plain.chosen.replace("V57", "V0"))
    values = zoomable_map(shown)
    assert values["names"][:2] == ["V0", "V1 town"]
    assert dict(values["labels"])["Zone"][:2] == ["", "1"]
    points = waypoint_files(shown.chosen, shown.labels, DEGREES)["next.gpx"].decode()
    assert "<name>1. V0</name>" in points
    assert "Zone: 58" in points
    page = survey_page(shown, date(2026, 1, 31)).decode()
    assert "V1 town" in page
    assert "NA&gt;" not in page
