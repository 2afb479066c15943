"""Columns by their usual names."""

from __future__ import annotations

import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.survey.columns import find_column, normalised, required_column


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


def test_missing_columns() -> None:
    assert find_column(["rain"], "id", None, "sites.csv") is None
    with pytest.raises(UsageError, match=r"has no column of latitudes. Its columns: lon, rain. "):
        required_column(["lon", "rain"], "latitude", None, "sites.csv")
    with pytest.raises(UsageError, match="no column 'utm_x', which --x names"):
        find_column(["lon"], "longitude", "utm_x", "sites.csv")
    for rate in ("PfPR2.10", "prevalence", "Malaria prevalence (%)", "PR"):
        with pytest.raises(UsageError, match="looks like a prevalence: the number of people who"):
            required_column(["id", "n", rate], "positive", None, "sites.csv")
