"""The list of sites: checked row by row, missing covariates filled in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import Counts
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.loops.survey.sites import SurveySites
from bo_stream.mapping import fill_missing
from tests.loops.survey.villages import SETTINGS, villages

LON, LAT = "Longitude (deg)", "Lat"


def spreadsheet() -> pd.DataFrame:
    """The villages as read_table returns them."""
    table = villages()
    return table.set_index(pd.RangeIndex(2, len(table) + 2, name="row"))


def read(table: pd.DataFrame, settings: SurveySettings = SETTINGS) -> SurveySites:
    return SurveySites.of(table, settings, "villages.csv")


def test_columns_are_found_and_kept_in_order() -> None:
    table = spreadsheet()
    sites = read(table)
    assert sites.ids.tolist() == table["village"].tolist()
    assert sites.covariates == ("rain", "night_lights")
    np.testing.assert_array_equal(
        sites.X.numpy(), table[[LON, LAT, "rain", "night_lights"]].to_numpy()
    )
    assert sites.reachable.all()
    assert sites.costs.tolist() == [1.0] * 40
    assert sites.notes == ()
    assert sites.positions(["V003", "V000", "none"]).tolist() == [3, 0, -1]


def test_without_a_column_of_ids_the_rows_numbers_are_the_ids() -> None:
    sites = read(spreadsheet().drop(columns="village"))
    assert sites.ids.tolist() == [str(row) for row in range(2, 42)]
    assert sites.id_column is None


def test_two_columns_of_one_name_are_refused() -> None:
    table = pd.concat((villages(), villages()[["rain"]]), axis=1)
    with pytest.raises(UsageError, match=r"two columns have the name 'rain'\. Rename one"):
        SurveySites.of(table, replace(SETTINGS, covariates=("rain",)))


def test_a_column_id_that_is_something_else_is_refused() -> None:
    table = spreadsheet().drop(columns="village").assign(id=1.0)
    settings = replace(SETTINGS, stratum="id")
    with pytest.raises(UsageError, match="column 'id' is that of --stratum, and no other column h"):
        read(table, settings)
    assert read(table.assign(village=table.index), settings).id_column == "village"
    with pytest.raises(UsageError, match="column 'id' is that of --covariates, and no other col"):
        read(table, replace(SETTINGS, covariates=("id",)))


def test_a_base_far_from_the_sites_is_named() -> None:
    settings = replace(SETTINGS, base=(-100.0, 40.0), cost_per_km=1.0)
    with pytest.raises(UsageError, match="Expected base within 5,000 km of the middle of the sit"):
        read(spreadsheet(), settings)


def test_a_decimal_comma_in_a_column_of_texts_is_none_of_the_numbers() -> None:
    table = spreadsheet().astype(str).assign(remark="", note="a,b")
    table.loc[7, ["remark", "note"]] = "0,5"
    assert torch.equal(read(table).X, read(spreadsheet()).X)
    table.loc[7, "rain"] = "650,5"
    with pytest.raises(
        UsageError, match=r"row 2 .*has a point, while '650,5' \(row 7, column 'rain'\) has a dec"
    ):
        read(table)


@pytest.mark.parametrize("missing", [np.nan, -9999.0])
def test_missing_covariates_come_from_the_nearest_site_and_are_said(missing: float) -> None:
    table = spreadsheet()
    table.loc[[5, 9], "rain"] = missing
    sites = read(table)
    raw = torch.from_numpy(table[[LON, LAT, "rain", "night_lights"]].to_numpy(copy=True))
    assert torch.equal(sites.X, fill_missing(raw))
    assert sites.X[:, 2].isfinite().all()
    (note,) = sites.notes
    assert note == "rain: 2 of 40 sites have no value; that of the nearest site is used."


def test_earlier_results_come_along() -> None:
    table = spreadsheet().assign(Ex=np.nan, Pf=np.nan)
    table.loc[4, ["Ex", "Pf"]] = 30.0, 7.0
    assert dict(read(table).earlier) == {"V002": Counts(7, 30)}


def test_a_usual_name_is_no_count_on_its_own_or_if_it_is_something_else() -> None:
    sites = read(spreadsheet().assign(n=1200))
    assert sites.notes == (
        "Column 'n' is not taken for people examined: there is no column 'positive'. If another "
        "one is, say which: --positive NAME.",
    )
    with pytest.raises(UsageError, match="Column 'PfPR' looks like a prevalence"):
        read(spreadsheet().assign(n=50, PfPR=12.0))
    settings = replace(SETTINGS, covariates=("rain", "n", "cases"))
    others = read(spreadsheet().assign(n=np.arange(40), cases=np.arange(40)), settings)
    assert (dict(others.earlier), others.notes) == ({}, ())


def test_costs_strata_and_sites_out_of_reach() -> None:
    table = spreadsheet().assign(
        km=np.arange(1.0, 41.0), district=["A", "B"] * 20, open=["yes", "No"] * 20
    )
    settings = replace(SETTINGS, cost="km", stratum="district", reachable="open", quotas={"A": 2})
    sites = read(table, settings)
    assert sites.costs.tolist() == table["km"].tolist()
    assert sites.strata is not None
    assert sites.strata.tolist() == table["district"].tolist()
    assert sites.reachable.tolist() == [True, False] * 20
    with pytest.raises(UsageError, match="quota for stratum 'C', which no site is in"):
        read(table, replace(settings, quotas={"C": 1}))
    assert sites.notes == (
        "row 3 (id V001), column 'district': stratum 'B' has no quota, so that a round may have "
        "any number of its 20 sites.",
    )
    assert read(table, replace(settings, quotas={})).notes == ()


@pytest.mark.parametrize(
    ("row", "column", "value", "message"),
    [
        (8, "km", -1.0, r"row 8 \(id V006\), column 'km': expected a cost above 0, got -1"),
        (8, "km", 0.0, r"row 8 \(id V006\), column 'km': expected a cost above 0, got 0"),
        (8, "km", np.nan, r"row 8 \(id V006\), column 'km': the cost is missing"),
        (8, "km", "dear", r"row 8 \(id V006\), column 'km': expected a cost above 0, got 'dear'"),
        (9, "district", "", r"row 9 \(id V007\), column 'district': the stratum is missing"),
        (6, "open", "perhaps", r"row 6 \(id V004\), column 'open': expected yes or no, got 'per"),
        (6, "open", "", r"row 6 \(id V004\), column 'open': expected yes or no, it is empty"),
    ],
)
def test_faults_of_costs_strata_and_reach(
    row: int, column: str, value: object, message: str
) -> None:
    table = spreadsheet().assign(
        km=np.arange(1.0, 41.0), district=["A", "B"] * 20, open=["yes", "No"] * 20
    )
    settings = replace(SETTINGS, cost="km", stratum="district", reachable="open")
    with pytest.raises(UsageError, match=message):
        read(cell(row, column, value)(table), settings)


def cell(row: int, column: str, value: object) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Change a cell; the table may become one of text."""

    def change(table: pd.DataFrame) -> pd.DataFrame:
        changed = table.astype(object)
        changed.loc[row, column] = value
        return changed

    return change


def swapped(table: pd.DataFrame) -> pd.DataFrame:
    return table.rename(columns={LON: LAT, LAT: LON})


def one_swapped(table: pd.DataFrame) -> pd.DataFrame:
    changed = table.copy()
    changed.loc[5, [LON, LAT]] = table.loc[5, [LAT, LON]].to_numpy()
    return changed


def in_metres(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(**{LON: table[LON] * 23_000.0, LAT: table[LAT] * 1e6})


def two_longitudes(table: pd.DataFrame) -> pd.DataFrame:
    return table.rename(columns={LON: "lon"}).assign(x=1.0)


def twice(table: pd.DataFrame) -> pd.DataFrame:
    row = table.iloc[[3]].set_axis([42])
    return pd.concat((table, row))


def twice_with_other_covariates(table: pd.DataFrame) -> pd.DataFrame:
    row = table.iloc[[3]].set_axis([42]).assign(village="V99", rain=1.0)
    return pd.concat((table, row))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.iloc[:0], "villages.csv has no rows"),
        (twice, "rows 5 and 42 have the same id 'V003'. Keep one row for each site"),
        (
            twice_with_other_covariates,
            r"row 5 \(id V003\) and row 42 \(id V99\) are at the same place with different covari",
        ),
        (cell(7, "village", ""), "row 7, column 'village': the id is missing"),
        (cell(7, LON, np.nan), r"row 7 \(id V005\), column '.*': it is empty. Every site needs a"),
        (cell(7, LON, "35°"), r"row 7 \(id V005\), column 'Longitude \(deg\)': expected deci"),
        (cell(7, LAT, 95.0), r"row 7 \(id V005\), column 'Lat': expected degrees from -90 to 90"),
        (one_swapped, r"row 5 \(id V003\).*among them the other way round. Are longitude and lati"),
        (in_metres, r"row 2 \(id V000\).*It looks like metres of a projection \(UTM\)"),
        (cell(9, "rain", "much"), r"row 9 \(id V007\), column 'rain': expected a number, got 'muc"),
        (lambda table: table.assign(rain=np.nan), "column 'rain': every cell is empty. Leave it o"),
        (lambda table: table.drop(columns="rain"), "has no column 'rain', which --covariates nam"),
        (lambda table: table.drop(columns=LAT), "has no column of latitudes"),
        (two_longitudes, "'lon', 'x' could each be that of longitudes. Say which by --x"),
    ],
)  # fmt: skip
def test_faults_are_named_by_row_and_column(
    change: Callable[[pd.DataFrame], pd.DataFrame], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        read(change(spreadsheet()))
    assert "\n" not in str(error.value)


def test_columns_of_position_that_are_swapped_where_values_show_it() -> None:
    table = spreadsheet()
    table[LON], table["Lat"] = table["Lat"], table[LON] + 70.0
    with pytest.raises(UsageError, match=r"'Lat': expected degrees from -90 to 90.*swapped\?"):
        read(table)


def test_a_site_far_from_all_others_is_remarked_on() -> None:
    table = spreadsheet()
    table.loc[7, LON] = 0.0
    (note,) = read(table).notes
    assert note == "row 7 (id V005) is far from all other sites: is its position right?"


def test_sites_on_both_sides_of_the_date_line_are_near_each_other() -> None:
    table = spreadsheet()
    table[LON] = np.where(table.index < 5, -179.9, 179.0 + 0.01 * table.index)
    assert read(table).notes == ()


def test_a_site_far_from_others_on_both_sides_of_the_date_line_is_named() -> None:
    table = spreadsheet()
    table[LON] = np.where(table.index % 2, -179.9, 179.0) + 0.01 * table.index
    table.loc[7, LON] = -145.0
    (note,) = read(table).notes
    assert note == "row 7 (id V005) is far from all other sites: is its position right?"
    table.loc[7, LON] = 18.0
    with pytest.raises(UsageError, match=r"row 7 \(id V005\).*Expected sites within 5,000 km"):
        read(table)


def test_of_sites_too_far_apart_the_farthest_is_named() -> None:
    table = spreadsheet().assign(**{LON: np.linspace(10.0, 50.0, 40), LAT: 0.0})
    table.loc[5, LAT] = 3.0  # odd among latitudes, but near
    table.loc[9, LON] = 120.0
    with pytest.raises(UsageError, match=r"row 9 \(id V007\).*Expected sites within 5,000 km"):
        read(table)


def test_a_receiver_without_a_fix() -> None:
    table = spreadsheet()
    table.loc[9, [LON, LAT]] = 0.0
    with pytest.raises(UsageError, match=r"row 9 \(id V007\).*position 0, 0 is far from all other"):
        read(table)


def test_a_site_on_another_continent() -> None:
    table = spreadsheet()
    table.loc[9, [LON, LAT]] = -120.0, 60.0
    with pytest.raises(
        UsageError, match=r"row 9 \(id V007\).*-120 and 60: Expected sites within 5"
    ):
        read(table)


def test_sites_at_one_place_with_the_same_covariates_are_two_sites() -> None:
    table = spreadsheet()
    twin = table.iloc[[3]].assign(village="V99").set_axis([42])
    assert len(read(pd.concat((table, twin)))) == 41


def test_the_fingerprint_is_that_of_ids_places_and_covariates() -> None:
    table = spreadsheet()
    known = read(table).fingerprint
    assert read(table.assign(other=1)).fingerprint == known
    assert read(table.astype(str)).fingerprint == known
    assert read(table.assign(rain=table["rain"] + 1e-9)).fingerprint != known
