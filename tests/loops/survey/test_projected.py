"""Surveys whose positions are metres or kilometres of a map projection."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import Cells
from bo_stream.loops.survey.findings import in_words, next_files
from bo_stream.loops.survey.maps import draw_values
from bo_stream.loops.survey.places import check_places
from bo_stream.loops.survey.settings import COORDINATES, SurveySettings
from bo_stream.loops.survey.sites import SurveySites
from bo_stream.loops.survey.survey import Survey, load_survey, save_survey
from tests.loops.survey.villages import SETTINGS, results_of, villages

METRES = replace(SETTINGS, units="m", minimum_distance=3.0, base=(5e5, 9.45e6), cost_per_km=0.1)


def projected() -> pd.DataFrame:
    """The villages with eastings and northings in metres, on a plane."""
    table = villages()
    east = 5e5 + 110_500.0 * (table["Longitude (deg)"] - 35.0)
    north = 1e7 + 110_600.0 * table["Lat"]
    places = {"Easting (m)": east.round(), "Northing (m)": north.round()}
    return table.drop(columns=["Longitude (deg)", "Lat"]).assign(**places)


def in_kilometres(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(**{name: table[name] / 1e3 for name in ("Easting (m)", "Northing (m)")})


def read(table: pd.DataFrame, settings: SurveySettings = METRES) -> SurveySites:
    rows = table.set_index(pd.RangeIndex(2, len(table) + 2))
    return SurveySites.of(rows, settings, "villages.csv")


def test_metres_and_kilometres_are_the_same_survey() -> None:
    results = results_of([f"V{row:03d}" for row in range(12)])
    kilometres = replace(METRES, units="km", base=(500.0, 9450.0))
    surveys = [Survey(projected(), METRES), Survey(in_kilometres(projected()), kilometres)]
    asked, predicted = [], []
    for survey in surveys:
        survey.tell(results)
        asked.append(survey.ask(4))
        predicted.append(survey.predictions())
    assert asked[0]["id"].tolist() == asked[1]["id"].tolist()
    np.testing.assert_allclose(asked[0]["cost"], asked[1]["cost"])
    np.testing.assert_allclose(predicted[0]["exceedance"], predicted[1]["exceedance"], atol=1e-4)
    assert list(asked[0].columns[:3]) == list(predicted[0].columns[:3]) == ["id", "east", "north"]
    np.testing.assert_allclose(predicted[0]["east"], projected()["Easting (m)"])
    sites = read(projected())
    apart = sites.X[0, :2] - sites.X[7, :2]
    assert float((sites.kilometres[0] - sites.kilometres[7]).norm()) == pytest.approx(
        float(apart.norm()) / 1e3
    )


def test_a_folder_keeps_units_and_sites_outside_the_list(tmp_path: Path) -> None:
    survey = Survey(projected(), METRES)
    save_survey(tmp_path / "run", survey)
    place = {"x": 5.1e5, "y": 9.44e6, "rain": 600.0, "night_lights": 1.0}
    told = survey.tell(pd.DataFrame([{"village": "Zomba", "n": 30, "pos": 4, **place}]))
    assert told.outside == ("Zomba",)
    with pytest.raises(UsageError, match="needs its east, north and covariates"):
        survey.tell(pd.DataFrame([{"village": "Beira", "n": 30, "pos": 4}]))
    far = survey.tell(pd.DataFrame([{"village": "Beira", "n": 30, "pos": 4, **place, "x": 2e6}]))
    assert far.warnings == (
        "row 0 (id Beira) lies 1,494 km from the middle of the list: is its position right, and "
        "east not taken for north?",
    )
    survey.ask(2)
    loaded = load_survey(tmp_path / "run")
    assert loaded.settings == METRES
    for name in ("results", "pending"):
        pd.testing.assert_frame_equal(getattr(loaded, name), getattr(survey, name))
    assert loaded.results.set_index("id")["east"]["Zomba"] == 5.1e5
    assert "east 500000, north 9450000" in in_words(survey)["Rounds start from"]
    files = next_files(survey)
    assert list(files) == ["next.csv"]  # GeoJSON has longitude and latitude only
    assert files["next.csv"].startswith(b"round,id,rain,night_lights,east,north,reason")


def degrees(table: pd.DataFrame) -> pd.DataFrame:
    places = villages()[["Longitude (deg)", "Lat"]].set_axis(["x", "y"], axis=1)
    return pd.concat((table.iloc[:, :1], places, table[["rain", "night_lights"]]), axis=1)


def one_turned(table: pd.DataFrame) -> pd.DataFrame:
    table.loc[3, ["Easting (m)", "Northing (m)"]] = table.loc[
        3, ["Northing (m)", "Easting (m)"]
    ].to_numpy()
    return table


def without_a_fix(table: pd.DataFrame) -> pd.DataFrame:
    table.loc[3, ["Easting (m)", "Northing (m)"]] = 0.0
    return table


@pytest.mark.parametrize(
    ("change", "units", "message"),
    [
        (degrees, "m", r"row 2 \(id V000\), column 'x'.*look like degrees.*Leave out --units"),
        (lambda t: t, "km", r"row 2 \(id V000\), column 'Easting \(m\)'.*metres. Say --units m"),
        (one_turned, "m", r"row 5 \(id V003\).*Are east and north swapped\?"),
        (without_a_fix, "m", r"row 5 \(id V003\).*position 0, 0 is far from all other sites"),
        (lambda t: t, "degrees", "'Easting .*' looks like that of a map projection: say --units"),
        (lambda _: villages(), "m", "has no column of eastings"),
    ],
)
def test_units_and_columns_that_are_wrong(
    change: Callable[[pd.DataFrame], pd.DataFrame], units: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read(change(projected()), replace(SETTINGS, units=units))


def test_positions_beyond_any_country_are_refused() -> None:
    table = in_kilometres(projected())
    table.loc[3, "Easting (m)"] = 60_000.0
    with pytest.raises(UsageError, match=r"row 5 \(id V003\).*within 5,000 km.*Are the units"):
        read(table, replace(SETTINGS, units="km"))


def test_what_looks_odd_is_remarked_on() -> None:
    sites = read(in_kilometres(projected()))
    assert sites.notes == (
        "All sites lie within 219.5 m: are positions kilometres? Then begin again with --units km.",
    )
    east, north = projected()["Easting (m)"], projected()["Northing (m)"]
    swapped = projected().assign(**{"Easting (m)": north, "Northing (m)": east})
    (note,) = read(swapped).notes
    assert note.endswith("are the columns swapped?")
    (note,) = read(degrees(projected()), replace(SETTINGS, units="km")).notes
    assert note == (
        "All positions could be longitudes and latitudes: are they degrees? Then begin again "
        "without --units."
    )


def test_a_map_is_labelled_in_kilometres() -> None:
    table = projected().rename(columns={"Easting (m)": "east", "Northing (m)": "north"})
    table = table.assign(examined=np.nan)
    axes = draw_values(
        table, np.full(40, 0.1), "prevalence", "YlOrBr", coordinates=COORDINATES["m"]
    ).axes[0]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert "500 km" in labels
    dots = np.asarray(axes.collections[0].get_offsets())
    np.testing.assert_allclose(
        np.diff(dots, axis=0), np.diff(table[["east", "north"]], axis=0) / 1e3
    )


def test_units_are_checked() -> None:
    with pytest.raises(UsageError, match="units to be one of degrees, km, m, got 'feet'"):
        replace(SETTINGS, units="feet")
    with pytest.raises(UsageError, match=r"base to be longitude.*give units km or m"):
        replace(SETTINGS, base=(5e5, 9e6))
    with pytest.raises(UsageError, match="two finite numbers"):
        replace(METRES, base=(float("nan"), 0.0))


def test_numbers_of_a_position_are_written_to_a_metre() -> None:
    texts = [COORDINATES[units].text(value) for units, value in
             (("degrees", 35.1234567), ("km", 512.34567), ("m", 512345.67))]  # fmt: skip
    assert texts == ["35.12346", "512.346", "512346"]
    labels = [COORDINATES["degrees"].label(v, c) for v, c in ((-5.0, 1), (190.0, 0), (0.0, 0))]
    assert labels == ["5° S", "170° W", "0°"]


def test_a_few_new_sites_are_not_taken_for_others_units() -> None:
    cells = pd.DataFrame({"x": [5e5, 5e5 + 40.0], "y": [9e6, 9e6]})
    assert (
        check_places(Cells(cells, "t"), cells.to_numpy(copy=True), ("x", "y"), COORDINATES["m"])
        == []
    )
    assert torch.allclose(
        COORDINATES["m"].in_space(torch.ones(2, 3)), torch.full((2, 2), 1e-3).double()
    )


_NAMES = [("longitude", "latitude"), ("x", "y"), ("easting", "northing"), ("E W", "N S")]


@pytest.mark.parametrize("names", _NAMES)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-5])
@pytest.mark.parametrize("given", ["degrees", "m", "km"])
def test_advice_about_units_ends(names: tuple[str, str], scale: float, given: str) -> None:
    """Metres, kilometres and degrees under any name: what a message says to do is done."""
    random = np.random.default_rng(0)
    places = random.uniform((320_000.0, 6_000_000.0), (480_000.0, 6_300_000.0), (20, 2)) * scale
    table = pd.DataFrame(places, columns=list(names)).assign(id=[f"V{n}" for n in range(20)])
    settings = SurveySettings(threshold=0.1, units=given)  # type: ignore[arg-type]
    said: list[str] = []
    while True:
        try:
            SurveySites.of(table, settings)
            break
        except UsageError as error:
            said.append(str(error))
        assert len(said) <= 3, said
        text = said[-1]
        if units := re.search(r"--units (km|m)\b", text):
            settings = replace(settings, units=units[1])
        elif "Leave out --units" in text:
            settings = replace(settings, units="degrees")
        if columns := re.search(r'--x ("[^"]+"|\w+) ("[^"]+"|\w+)', text):
            settings = replace(settings, x=tuple(name.strip('"') for name in columns.groups()))
        elif "say which it is by --x" in text:
            settings = replace(settings, x=names)
