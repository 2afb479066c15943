"""Rows of people that are added up to villages."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.survey.results import grouped_by_id, grouped_by_position
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.loops.survey.sites import SurveySites

SETTINGS = SurveySettings(threshold=0.1)


def people(**columns: object) -> pd.DataFrame:
    table = pd.DataFrame(
        {
            "village": ["A", "A", "B", "A", "B"],
            "lon": ["35.0", "35.0", "36.0", "35.00", "36.0"],
            "lat": ["-4.0", "-4.0", "-5.0", "-4.0", "-5.0"],
            "name": ["", "Ama", "Bo", "Ana", "Bo"],
            "RDT": ["1", "0", "0", "", "1"],
            **columns,
        }
    )
    return table.set_index(pd.RangeIndex(2, len(table) + 2, name="row"))


def test_results_of_people_are_added_up() -> None:
    table, said = grouped_by_position(people(), SETTINGS, "people.csv")
    assert table[["village", "name"]].to_numpy().tolist() == [["A", "Ama"], ["B", "Bo"]]
    assert table["examined"].tolist() == [2.0, 2.0]
    assert table["positive"].tolist() == [1.0, 1.0]
    assert table.index.tolist() == [2, 4]
    assert said == [
        "5 rows were added up to 2 sites, one for each position.",
        "Where rows of a site differ, the value of the first is kept: 'name' (in 1) of 2 sites.",
    ]
    sites = SurveySites.of(table, SETTINGS, "people.csv")
    assert {site: (c.positive, c.examined) for site, c in sites.earlier.items()} == {
        "A": (1, 2),
        "B": (1, 2),
    }


@pytest.mark.parametrize(
    ("texts", "sums"),
    [
        (["Positif", "négatif", "NEG", "-", "pos"], ([2, 2], [1, 1])),
        (["oui", "non", "n.a.", "sim", "não"], ([3, 1], [2, 0])),
        ([1.0, 0.0, np.nan, 1.0, 0.0], ([3, 1], [2, 0])),
    ],
)
def test_words_of_results(texts: list[object], sums: tuple[list[int], list[int]]) -> None:
    table, _ = grouped_by_position(people(RDT=texts), SETTINGS, "people.csv")
    assert (table["examined"].tolist(), table["positive"].tolist()) == sums


@pytest.mark.parametrize("dash", ["-", " - ", "--", "\N{MINUS SIGN}", "\N{EN DASH}"])
def test_a_dash_beside_plus_signs_is_negative(dash: str) -> None:
    marks = people(RDT=["+", dash, dash, "", dash])
    for table, _ in (
        grouped_by_position(marks, SETTINGS, "people.csv"),
        grouped_by_id(marks, SETTINGS, "people.csv"),
    ):
        assert table["examined"].tolist() == [2.0, 2.0]
        assert table["positive"].tolist() == [1.0, 0.0]
    with pytest.raises(UsageError, match=r"row 3 .*column 'RDT': does a dash mean negative, or no"):
        grouped_by_id(people(RDT=["", dash, dash, "", dash]), SETTINGS, "people.csv")
    with pytest.raises(UsageError, match="No cell of the column is negative otherwise"):
        grouped_by_id(people(RDT=["positive", dash, dash, "", dash]), SETTINGS, "people.csv")


def test_words_may_have_a_full_stop_and_a_remark_in_brackets() -> None:
    words = people(RDT=["Pos.", "NEG (RDT)", "Positif (ve)", "no.", "não"])
    table, _ = grouped_by_position(words, SETTINGS, "people.csv")
    assert (table["examined"].sum(), table["positive"].sum()) == (5.0, 2.0)


def test_counts_of_visits_are_added_up_and_empty_ones_stay_empty() -> None:
    visits = people(ntest=["10", "5", "", "1", "-"], npos=["3", "0", "", "1", ""]).drop(
        columns="RDT"
    )
    table, _ = grouped_by_position(visits, SETTINGS, "visits.csv")
    np.testing.assert_array_equal(table["ntest"], [16.0, np.nan])
    np.testing.assert_array_equal(table["npos"], [4.0, np.nan])
    by_id, said = grouped_by_id(visits, SETTINGS, "visits.csv")
    np.testing.assert_array_equal(by_id["ntest"], table["ntest"])
    assert said[0] == "5 rows were added up to 2 sites, one for each id."


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"RDT": ["1", "7", "0", "", "1"]}, "row 3, column 'RDT': expected a person's result, 0 o"),
        ({"RDT": ["1", "-1", "0", "", "1"]}, "row 3, column 'RDT': .* got '-1'"),
        ({"RDT": ["1", "0", "1?", "", "1"]}, r"row 4, column 'RDT': .* got '1\?'"),
        ({"RDT": ["pos", "neg", "", "pos?", ""]}, r"row 5, column 'RDT': .* got 'pos\?'"),
        ({"RDT": ["+", "(-)", "-", "", "+"]}, r"row 3, column 'RDT': .* got '\(-\)'"),
        ({"lat": ["1", "", "0", "0", "1"]}, "row 3, column 'lat': it is empty. Every row needs"),
        ({"PCR": 1}, "columns 'RDT', 'PCR' could each be that of results. Say which by --posit"),
        ({"ntest": 5, "npos": ["1", "2", "9", "0", "1"]}, "row 4, column 'npos': 9 positive, but"),
    ],
)
def test_faults_are_named_by_row_and_column(columns: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        grouped_by_position(people(**columns), SETTINGS, "people.csv")


def test_people_without_grouping_are_noticed() -> None:
    with pytest.raises(UsageError, match=r"rows 2 and 3 have the same id 'A'.*add them up: --gr"):
        SurveySites.of(people(), SETTINGS, "people.csv")
    sites = SurveySites.of(people().drop(columns="village"), SETTINGS, "people.csv")
    assert sites.notes[0] == (
        "5 of 5 rows share their position with another: there are 2 positions. If rows are people "
        "or visits of one village, add them up: --group."
    )


def test_one_id_at_two_positions_is_no_site() -> None:
    with pytest.raises(UsageError, match=r"row 2 and row 4 have the same id 'A' at different pos"):
        grouped_by_position(people(village=["A", "A", "A", "A", "A"]), SETTINGS, "people.csv")
