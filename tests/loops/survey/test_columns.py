"""Columns by their usual names."""

from __future__ import annotations

import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.survey.columns import (
    find_column,
    listed_as,
    look_like_counts,
    normalised,
    required_column,
)


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("longitude", "lon long lng x longitude Longitude LON Longitude_(deg) gps.longitude"),
        ("latitude", "lat y latitude Lat Latitude_[degrees]"),
        ("id", "id site village cluster cluster.number Site_ID ID"),
        ("examined", "examined n tested ex Ex number_examined N_tested"),
        ("positive", "positive positives pos pf Pf cases number_positive"),
    ],
)
def test_usual_names(role: str, names: str) -> None:
    for name in (name.replace("_", " ") for name in names.split()):
        assert find_column(["rain", name, "elevation"], role, None, "sites.csv") == name


def test_a_unit_and_signs_do_not_matter() -> None:
    assert normalised(" Longitude (deg) ") == "longitude"
    assert normalised("Cluster.Number") == normalised("cluster number") == "cluster_number"


def test_two_columns_that_could_be_meant() -> None:
    with pytest.raises(UsageError, match="'lon', 'x' could each be that of longitudes"):
        find_column(["lon", "x", "lat"], "longitude", None, "sites.csv")
    assert find_column(["lon", "x", "longitude"], "longitude", None, "sites.csv") == "longitude"
    assert find_column(["lon", "x"], "longitude", "x", "sites.csv") == "x"


def test_a_name_that_is_taken_gets_one_that_is_free() -> None:
    names = ["gain", "listed_gain", "cost", "listed_cost", "listed_listed_cost", "rain"]
    assert listed_as(names, ["gain", "cost", "listed_gain"]) == {
        "gain": "listed_listed_gain",
        "listed_gain": "listed_listed_listed_gain",
        "cost": "listed_listed_listed_cost",
        "listed_cost": "listed_cost",
        "listed_listed_cost": "listed_listed_cost",
        "rain": "rain",
    }


def test_missing_columns() -> None:
    assert find_column(["rain"], "id", None, "sites.csv") is None
    with pytest.raises(UsageError, match=r"has no column of latitudes. Its columns: lon, rain. "):
        required_column(["lon", "rain"], "latitude", None, "sites.csv")
    with pytest.raises(UsageError, match="no column 'utm_x', which --x names"):
        find_column(["lon"], "longitude", "utm_x", "sites.csv")
    for rate in ("PfPR2.10", "prevalence", "Malaria prevalence (%)", "PR"):
        with pytest.raises(UsageError, match="looks like a prevalence: the number of people who"):
            required_column(["id", "n", rate], "positive", None, "sites.csv")


EXAMINED = (
    "ntest|NO_EXAM|No. examined|Examinés|Nb examinés|N° examinés|Nombre de personnes examinées|"
    "personnes testées|examinados|Nº de examinados|Número de pessoas examinadas|testados|"
    "personas examinadas|Total tested|NumExamined|# tested|Niños examinados|crianças examinadas|"
    "dépistés|rdt_tested|tested_n|muestreados|tamizados|Nombre testés"
)
POSITIVE = (
    "npos|NO_INF|No positive|Positifs|Nb positifs|Nombre de cas positifs|casos positivos|"
    "positivos|Nº positivos|infectés|infectados|infetados|TDR positifs|rdt_pos|malaria_cases|"
    "n_inf|number of positives|pos_rdt|enfants positifs|pessoas positivas|Nb malades"
)


@pytest.mark.parametrize(("role", "names"), [("examined", EXAMINED), ("positive", POSITIVE)])
def test_names_of_counts_in_four_languages(role: str, names: str) -> None:
    other = {"examined": "positive", "positive": "examined"}[role]
    for name in names.split("|"):
        for variant in (name, name.upper(), name.replace(" ", "_"), f" {name} "):
            listed = ["district", variant, "prevalence"]
            assert find_column(listed, role, None, "sites.csv") == variant
            assert find_column(listed, other, None, "sites.csv") is None


@pytest.mark.parametrize(
    "name",
    ["test", "exam", "Test type", "population", "postcode", "position", "notes", "inf", "case",
     "number", "nights", "net_use", "pests", "nom", "nombre", "année"],
)  # fmt: skip
def test_names_that_are_no_counts(name: str) -> None:
    for role in ("examined", "positive", "id"):
        assert find_column([name], role, None, "sites.csv") is None


def test_a_code_goes_before_a_name() -> None:
    assert find_column(["Village", "Code"], "id", None, "sites.csv") == "Code"
    assert find_column(["Nom du village", "N° code"], "id", None, "sites.csv") == "N° code"
    assert find_column(["Code du village", "Localité"], "id", None, "s") == "Code du village"
    assert find_column(["Village", "District"], "id", None, "sites.csv") == "Village"
    with pytest.raises(UsageError, match="'Code', 'site_id' could each be that of ids"):
        find_column(["Code", "site_id", "Village"], "id", None, "sites.csv")


def test_names_that_look_like_counts() -> None:
    found = look_like_counts(["exam_2015", "neg", "Pos (RDT)", "elevation", "nets", "pop"])
    assert found == ["exam_2015", "neg", "Pos (RDT)"]


def test_a_column_that_differs_in_blanks_is_suggested() -> None:
    with pytest.raises(UsageError, match=r"no column 'rain mm', .* Is it 'Rain_MM'"):
        find_column(["Rain_MM", "lat"], "longitude", "rain mm", "sites.csv")
