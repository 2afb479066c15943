"""Results from the field: read row by row, and compared with what is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import Counts
from bo_stream.loops.survey.ledger import SiteResult
from bo_stream.loops.survey.results import ResultsTable, Told, grouped_by_id
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.loops.survey.sites import SurveySites
from tests.loops.survey.villages import SETTINGS, villages

SITES = SurveySites.of(villages(), SETTINGS)
KNOWN = {"V001": SiteResult(Counts(3, 50)), "V002": SiteResult(Counts(0, 50))}
ELSEWHERE = {"lon": 35.0, "lat": -5.0, "rain": 600.0, "night_lights": 1.0}


def results(**columns: object) -> pd.DataFrame:
    table = pd.DataFrame({"site": ["V001", "V005", "V006"], "n": 50, "pos": [3, 1, 2], **columns})
    return table.set_index(pd.RangeIndex(2, len(table) + 2, name="row"))


def read(table: pd.DataFrame, settings: SurveySettings = SETTINGS) -> ResultsTable:
    return ResultsTable.of(table, settings, SITES, KNOWN, "may.csv")


def told(table: pd.DataFrame, pending: Mapping[str, object] | None = None) -> Told:
    return read(table).compared(SITES, KNOWN, pending or {})


def test_results_are_compared_with_what_is_known() -> None:
    table = results(site=["V001", "V002", "V006"])
    found = told(table, {"V006": None})
    assert found == Told(("V006",), ("V002",), ("V001",), (), (), 0, ())
    assert told(table).unasked == ("V006",)
    records = read(table).records(SITES, KNOWN)
    assert records == [
        {"id": "V002", "positive": 1, "examined": 50},
        {"id": "V006", "positive": 2, "examined": 50},
    ]


def test_rows_without_numbers_are_passed_over() -> None:
    found = told(results(n=[50, np.nan, np.nan], pos=["3", "", None]))
    assert (found.unchanged, found.new, found.empty) == (("V001",), (), 2)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"pos": [3, 51, 2]}, r"may\.csv, row 3 \(id V005\), column 'pos': 51 positive, but only"),
        ({"n": [50, 0, 50]}, r"row 3 \(id V005\), column 'n': nobody was examined. Leave both cel"),
        ({"n": [50, 20.5, 50]}, "row 3 .*column 'n': expected a whole number of people from 1"),
        ({"n": [-50, 50, 50]}, r"row 2 \(id V001\), column 'n': expected a whole number of people"),
        ({"pos": [0, 0.06, 0.1]}, r"row 3 \(id V005\), column 'pos'.*got 0.06. It looks like a s"),
        ({"pos": [0, 0.06, 0.1]}, "who tested positive, here about 3 of 50"),
        ({"pos": [0, 6.5, 10]}, "row 3 .*looks like a prevalence in per cent.* here about 3 of 50"),
        ({"pos": ["0", "6,5", "10"]}, "row 3 .*looks like a prevalence in per cent"),
        ({"pos": ["0", "6 %", "10"]}, "row 3 .*got '6 %'. Write no per cent signs"),
        ({"pos": [0, -1, 10]}, "row 3 .*expected a count from 0, got -1"),
        ({"pos": [0, np.nan, 10]}, r"row 3 \(id V005\), column 'pos': it is empty, but there i"),
        ({"pos": ["0", "few", "10"]}, "row 3 .*expected a number of people, got 'few'"),
        ({"site": ["V001", "V005", "V005"]}, "rows 3 and 4 both have the id 'V005'. Keep one row"),
        ({"site": ["V001", "", "V005"]}, "row 3, column 'site': the id is missing. Which site is "),
        ({"site": ["V001", "v-5", "V006"]}, r"row 3 .*no site 'v-5' in the list. Is it 'V005'\?"),
        ({"site": ["V001", "V0x5", "V006"]}, r"no site 'V0x5' in the list. Is it 'V0\d5'\?"),
        ({"site": ["V001", "Zomba", "V006"]}, r"no site 'Zomba' in the list. A site outside the l"),
    ],
)  # fmt: skip
def test_faults_are_named_by_row_and_column(columns: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        read(results(**columns))
    assert "\n" not in str(error.value)


def test_tables_without_what_is_needed() -> None:
    with pytest.raises(UsageError, match="has no column of ids"):
        read(results().drop(columns="site"))
    with pytest.raises(UsageError, match="Column 'prevalence' looks like a prevalence: the number"):
        read(results().rename(columns={"pos": "prevalence"}))
    with pytest.raises(UsageError, match=r"may\.csv has no rows"):
        read(results().iloc[:0])


def test_columns_that_the_settings_name_need_not_be_those_of_every_table() -> None:
    settings = replace(SETTINGS, id="village", examined="Ex", positive="Pf")
    assert read(results(), settings).counts["V005"] == Counts(1, 50)
    both = results(Ex=40, Pf=[4, 5, 6])
    assert read(both, settings).counts["V005"] == Counts(5, 40)


def test_a_site_outside_the_list_brings_its_place() -> None:
    table = results(site=["V001", "Zomba", "V006"], **ELSEWHERE)
    found = told(table)
    assert (found.outside, found.new, found.unasked) == (("Zomba",), ("Zomba", "V006"), ("V006",))
    record = read(table).records(SITES, KNOWN)[0]
    assert record["longitude"] == 35.0
    assert record["covariates"] == {"rain": 600.0, "night_lights": 1.0}
    table.loc[3, "rain"] = np.nan
    assert read(table).records(SITES, KNOWN)[0]["covariates"]["rain"] is None
    with pytest.raises(UsageError, match=r"no column 'rain', a covariate, and row 3 \(id Zom"):
        read(table.drop(columns="rain"))
    table.loc[3, "lat"] = np.nan
    with pytest.raises(UsageError, match=r"row 3 \(id Zomba\).*A site outside the list needs"):
        read(table)
    table.loc[3, "lat"] = 5e5
    with pytest.raises(UsageError, match=r"row 3 \(id Zomba\), column 'lat': .*looks like metres"):
        read(table)


def test_a_known_site_outside_the_list_needs_no_place_again() -> None:
    known = {"Zomba": SiteResult(Counts(3, 50), place=(35.0, -5.0, 600.0, 1.0))}
    table = results(site=["V001", "Zomba", "V006"])
    reading = ResultsTable.of(table, SETTINGS, SITES, known, "may.csv")
    assert reading.compared(SITES, known, {}).corrected == ("Zomba",)
    moved = results(site=["V001", "Zomba", "V006"], pos=[1, 3, 1], **{**ELSEWHERE, "lon": 35.1})
    reading = ResultsTable.of(moved, SETTINGS, SITES, known, "may.csv")
    assert reading.compared(SITES, known, {}).corrected == ("Zomba",)
    assert reading.records(SITES, known)[1]["longitude"] == 35.1


def test_places_and_units_that_look_wrong_are_remarked_on() -> None:
    table = results(site=["V001", "Zomba", "V006"], **ELSEWHERE)
    place = SITES.X[[1, 5, 6], :2].numpy()
    table[["lon", "lat"]] = place + np.array([[0.0, 0.0], [0.01, 0.0], [0.0, 0.0]])
    assert told(table).warnings == ()
    table.loc[4, "lat"] += 0.5
    (moved,) = told(table).warnings
    assert moved.startswith("row 4 (id V006) lies 56 km from where the list has this site")
    table.loc[4, "lat"] -= 0.5
    table.loc[3, ["lon", "lat"]] = 15.0, 5.0
    (far,) = told(table).warnings
    assert far.startswith("row 3 (id Zomba) lies")
    assert "from the middle of the list: is its position right" in far


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            (-5.0, 35.0),
            "-5 and 35 are .* km from the middle of the list, and among its sites the other way",
        ),
        ((-100.0, 40.0), "-100 and 40 are over 5,000 km from the middle of the list, too far for"),
    ],
)
def test_a_new_site_that_no_map_of_the_list_shows_is_refused(
    place: tuple[float, float], message: str
) -> None:
    table = results(site=["V001", "Zomba", "Mzuzu"], **ELSEWHERE)
    table.loc[4, ["lon", "lat"]] = place
    with pytest.raises(UsageError, match=rf"row 4 \(id Mzuzu\), column 'lon': {message}"):
        read(table)


def test_one_swapped_site_of_many_is_named() -> None:
    one = villages().iloc[:1]
    sites = SurveySites.of(one, SETTINGS)
    table = results(site=["V1", "V2", "V3"], **ELSEWHERE)
    table["lon"], table["lat"] = one["Longitude (deg)"][0] + 0.01, one["Lat"][0]
    table.loc[3, ["lon", "lat"]] = table.loc[3, ["lat", "lon"]].to_numpy()
    with pytest.raises(UsageError, match=r"row 3 \(id V2\), .*longitude and latitude swapped\?"):
        ResultsTable.of(table, SETTINGS, sites, {}, "may.csv")


@pytest.mark.parametrize(
    ("listed", "new", "odd"),
    [
        ((20.0, 90.0), 0.5, True),
        ((0.2, 0.9), 50.0, True),
        ((2.0, 90.0), 0.5, True),
        ((20.0, 90.0), 95.0, False),
        ((20.0, 90.0), 12.0, False),
        ((0.0, 1.0), 1.2, False),
        ((-10.0, 30.0), 303.0, True),
    ],
)
def test_a_covariate_in_another_unit_is_remarked_on(
    listed: tuple[float, float], new: float, odd: bool
) -> None:
    sites = SurveySites.of(villages().assign(rain=np.linspace(*listed, 40)), SETTINGS)
    table = results(site=["V001", "Zomba", "V006"], **{**ELSEWHERE, "rain": new})
    reading = ResultsTable.of(table, SETTINGS, sites, KNOWN, "may.csv")
    assert any("in the same unit?" in text for text in reading.warnings) == odd


def zeros(ids: list[str], **columns: object) -> ResultsTable:
    listed = villages().assign(village=[f"{row:03d}" for row in range(39)] + ["7"])
    sites = SurveySites.of(listed, SETTINGS)
    table = pd.DataFrame({"id": ids, "examined": 50, "positive": 3, **columns})
    table = table.set_index(pd.RangeIndex(2, len(table) + 2, name="row"))
    return ResultsTable.of(table, SETTINGS, sites, {}, "may.csv")


def test_ids_without_their_zeros_are_those_of_the_list() -> None:
    read = zeros(["12", "3.0", "1e1", "038"])
    assert list(read.counts) == ["012", "003", "010", "038"]
    assert read.places == {}
    (remark,) = read.remarks
    assert "'12' is '012', '3' is '003', '1e1' is '010'" in remark
    place = SITES.X[[12], :2].tolist()[0]
    elsewhere = {"rain": 600.0, "night_lights": 1.0, "lon": place[0], "lat": place[1]}
    assert zeros(["12"], **elsewhere).places == {}  # no new site at its position


def test_an_id_that_could_be_two_is_asked_for() -> None:
    with pytest.raises(UsageError, match=r"row 3 .*id '7' could be '007' or '7' of the list"):
        zeros(["12", "7"])
    assert list(zeros(["012", "7"]).counts) == ["012", "7"]  # zeros are kept in this table
    assert list(zeros(["007"]).counts) == ["007"]
    for row, site in ((7, "007"), (39, "7")):
        place = SITES.X[[row], :2].tolist()[0]
        assert list(zeros(["7"], longitude=place[0], latitude=place[1]).counts) == [site]
    notes = SurveySites.of(villages().assign(village=["7", "07", *range(100, 138)]), SETTINGS).notes
    assert (
        "row 0 (id 7) and row 1 (id 07) have ids that are one number to a spreadsheet" in notes[0]
    )


def test_an_id_that_became_a_date_is_no_new_site() -> None:
    place = SITES.X[[6], :2].tolist()[0]
    table = results(site=["V001", "V005", "01-Feb"], **{**ELSEWHERE, "lon": place[0]})
    table["lat"] = place[1]
    table.loc[2, "site"], table.loc[3, "site"] = "V006", "V007"
    with pytest.raises(
        UsageError, match=r"row 4 \(id 01-Feb\).* not in the list, but is where 'V006'"
    ):
        read(table)


def test_a_table_with_ids_of_its_own_may_lie_where_the_list_does() -> None:
    places = SITES.X[[6, 7, 8], :2]
    table = results(site=["C1", "C2", "C3"], **ELSEWHERE)
    table["lon"], table["lat"] = places[:, 0].tolist(), places[:, 1].tolist()
    assert list(read(table).counts) == ["C1", "C2", "C3"]


@pytest.mark.parametrize(
    ("site", "hint"), [("99999", ""), ("V041", ""), ("v 005", "V005"), ("V0o5", "V005")]
)
def test_only_an_id_that_may_be_meant_is_suggested(site: str, hint: str) -> None:
    with pytest.raises(UsageError, match="there is no site") as error:
        read(results(site=["V001", site, "V006"]))
    assert ("Is it" in str(error.value)) == bool(hint)
    assert f"Is it {hint!r}?" in str(error.value) or not hint


def test_columns_that_are_not_used_are_said() -> None:
    found = told(results(teacher="Ada", rain=3))
    assert found.remarks == ("Columns not used: 'teacher'.",)
    assert told(results(Lat=SITES.X[1, 1].item())).remarks == ()


def test_columns_of_a_form_are_its_own_where_the_list_has_their_names() -> None:
    settings = replace(SETTINGS, id="village", stratum="id", covariates=("date", "night_lights"))
    listed = villages().rename(columns={"rain": "date"}).assign(id=["north", "south"] * 20)
    sites = SurveySites.of(listed, settings)
    form = pd.DataFrame({"id": ["V001", "Zomba"], "listed_id": ["south", "north"], "lon": 35.0})
    form = form.assign(lat=-5.0, listed_date=650.0, night_lights=1.0, examined=50, positive=3)
    form["date"] = "2026-05-31"
    reading = ResultsTable.of(form, settings, sites, {}, "next.csv")
    assert reading.dates == {"V001": "2026-05-31", "Zomba": "2026-05-31"}
    assert reading.places["Zomba"].tolist() == [35.0, -5.0, 650.0, 1.0]
    assert reading.remarks == ()
    added, _ = grouped_by_id(pd.concat((form, form)), settings, "next.csv")
    assert added["examined"].tolist() == [100, 100]
    short = form[["id", "examined", "positive"]][:1]
    assert list(ResultsTable.of(short, settings, sites, {}, "may.csv").counts) == ["V001"]
    assert grouped_by_id(short, settings, "may.csv")[0]["id"].tolist() == ["V001"]
    own = form.drop(columns=["listed_id", "listed_date"]).rename(columns={"id": "village"})
    own = own.assign(date=650.0, id="north")
    reading = ResultsTable.of(own, settings, sites, {}, "may.csv")
    assert (reading.dates, reading.places["Zomba"][2]) == ({}, 650.0)


@pytest.mark.parametrize("examined", ["1e9", str(2**60), "1e30", "1e300"])
def test_impossible_counts_are_refused(examined: str) -> None:
    with pytest.raises(
        UsageError, match=r"row 3 \(id V005\), column 'n': expected at most 10,000,000"
    ):
        read(results(n=["50", examined, "50"]))
