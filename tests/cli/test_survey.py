"""The commands of a survey: run as a coordinator runs them, on a small country."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import typer
from filelock import FileLock
from rich.table import Table
from scipy.special import expit
from typer.testing import CliRunner, Result

from bo_stream.cli import app
from bo_stream.cli.running import OUT, escape, say, warn
from bo_stream.cli.survey import parse_quotas, parse_share
from bo_stream.errors import UsageError
from bo_stream.loops.run import LOCK
from bo_stream.loops.survey import load_survey
from bo_stream.loops.survey.tables import read_table
from tests.cli.commands import assert_one_clear_error

OPTIONS = ["--threshold", "0.1", "--covariates", "rain", "--out", "run"]


def small_country(n: int = 40, surveyed: int = 12) -> pd.DataFrame:
    """Sites with a covariate, costs and districts; the first were surveyed before."""
    random = np.random.default_rng(3)
    table = pd.DataFrame({"village": [f"V{row:02d}" for row in range(n)]})
    table["lon"], table["lat"] = 30 + 2 * random.random(n), -3 + 2 * random.random(n)
    table["rain"] = random.random(n)
    table["days"] = np.where(table["lon"] < 31, 1, 2)
    table["district"] = np.where(table["lat"] < -2, "south", "north")
    counts = random.binomial(60, expit(3 * table["rain"] - 4)).astype(float)
    before = np.arange(n) < surveyed
    table["examined"] = np.where(before, 60.0, np.nan)
    table["positive"] = np.where(before, counts, np.nan)
    return table


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    small_country().to_csv("sites.csv", index=False)
    small_country().drop(columns=["examined", "positive"]).to_csv("bare.csv", index=False)


def survey(*args: str) -> Result:
    return CliRunner().invoke(app, ["survey", *args])


def done(*args: str) -> str:
    result = survey(*args)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def form() -> pd.DataFrame:
    return pd.read_csv("run/next.csv")


def fill_in(rows: int, positive: int = 6) -> list[str]:
    """Fill in the first rows of the form and return their ids."""
    table = form()
    table.loc[: rows - 1, ["examined", "positive"]] = [60.0, positive]
    table.to_csv("run/next.csv", index=False)
    return table["id"].tolist()[:rows]


def ledger() -> list[str]:
    return Path("run/results.jsonl").read_text().splitlines()


@pytest.mark.integration
@pytest.mark.smoke
@pytest.mark.usefixtures("small_pictures")
def test_the_commands_go_from_a_table_to_a_report() -> None:
    names = ("prevalence", "listed_prevalence")  # of an earlier predictions.csv
    former = dict.fromkeys(names, 0.5)
    small_country().assign(**former).to_csv("sites.csv", index=False)
    said = done("start", "sites.csv", *OPTIONS)
    assert "40, of which 12 surveyed" in said
    assert "(choose the next sites)" in said
    assert "bo-stream survey tell run run/next.csv" in done("next", "run", "-q", "3")
    fill_in(2)
    assert "2 results new" in done("tell", "run", "run/next.csv")
    assert "1 site pending" in done("status", "run")
    said = done("report", "run", "--rounds", "1", "-q", "3")
    assert "14 of 40 sites were surveyed" in said
    predictions = pd.read_csv("run/predictions.csv")
    assert len(predictions) == 40
    assert predictions["prevalence"].between(0.0, 1.0).all()
    assert predictions["exceedance"].between(0.0, 1.0).all()
    for name in ("predictions.csv", "called.csv"):
        columns = read_table(Path("run") / name).columns
        assert {"prevalence", *former, "listed_listed_prevalence"} < set(columns)
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert page.count("<img") == 5
    called = pd.read_csv("run/called.csv")
    assert sorted(called["id"]) == sorted(predictions["id"])
    assert {"district", "lon", "lat"} & set(called.columns) == {"district"}
    assert called["call"].isin(["above", "uncertain", "below"]).all()
    again = called.set_index("id").loc[predictions["id"], "probability"]
    np.testing.assert_allclose(again, predictions["exceedance"])


def test_a_first_round_is_spread_out_and_its_files_have_all_pending_sites() -> None:
    assert "0 surveyed" in done("start", "bare.csv", *OPTIONS)
    assert "first round" in done("next", "run", "-q", "3")
    said = done("next", "run", "-q", "2")
    assert "3 sites of earlier rounds still wait" in said
    table = form()
    assert table["round"].tolist() == [1, 1, 1, 2, 2]
    assert table["id"].is_unique
    assert table[["examined", "positive", "date"]].isna().all(axis=None)
    points = json.loads(Path("run/next.geojson").read_text())
    assert points["type"] == "FeatureCollection"
    places = [each["geometry"]["coordinates"] for each in points["features"]]
    assert places == table[["longitude", "latitude"]].to_numpy().tolist()
    assert [each["properties"]["id"] for each in points["features"]] == table["id"].tolist()
    assert points["features"][0]["properties"]["gain"] is None
    marks = ElementTree.parse("run/next.kml").iterfind(".//{*}coordinates")
    read = [[float(number) for number in str(mark.text).split(",")] for mark in marks]
    np.testing.assert_allclose(read, [[*place, 0.0] for place in places], atol=1e-6)
    marks = list(ElementTree.parse("run/next.gpx").iterfind("{*}wpt"))
    read = [[float(mark.attrib[name]) for name in ("lon", "lat")] for mark in marks]
    np.testing.assert_allclose(read, places, atol=1e-6)
    district = small_country().set_index("village")["district"][table["id"][0]]
    assert marks[0].findtext("{*}name") == f"1. {table['id'][0]}"
    assert str(marks[0].findtext("{*}desc")).startswith(f"district: {district}\n")


def test_results_in_part_again_and_withdrawn() -> None:
    assert "(choose the first sites)" in done("start", "bare.csv", *OPTIONS)
    done("next", "run", "-q", "3")
    first, second = fill_in(2)
    said = done("tell", "run", "run/next.csv")
    assert f"2 results new: {first}, {second}." in said
    assert "1 row without numbers passed over" in said
    fill_in(1, positive=9)
    said = done("tell", "run", "run/next.csv")
    assert f"1 result corrected: {first}." in said
    assert f"1 result known already: {second}." in said
    third = form()["id"][2]
    assert f"Withdrawn: {third}." in done("withdraw", "run", third)
    said = done("status", "run")
    assert "0 sites pending, 1 given up" in said
    assert "120 examined, 15 positive" in said
    assert done("withdraw", "run", first)
    assert "60 examined, 6 positive" in done("status", "run")


def test_a_form_that_is_filled_in_is_not_replaced_before_it_is_told() -> None:
    done("start", "bare.csv", *OPTIONS)
    done("next", "run", "-q", "2")
    first = fill_in(1)[0]
    before, lines = Path("run/next.csv").read_bytes(), ledger()
    assert_one_clear_error(survey("next", "run"), f"has numbers of site {first} that were not told")
    assert Path("run/next.csv").read_bytes() == before
    assert ledger() == lines
    done("tell", "run", "run/next.csv")
    done("next", "run", "-q", "2")
    assert first not in form()["id"].tolist()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["none.csv", *OPTIONS], "No such file: none.csv"),
        (["sites.csv", "--out", "run"], "Expected a threshold"),
        (
            ["sites.csv", "--threshold", "10", "--out", "run"],
            "Do you mean 10 %? Then say 10% or 0.1",
        ),
        (["sites.csv", *OPTIONS, "--goal", "hotspots"], "goal to be one of exceedance, map"),
        (["sites.csv", *OPTIONS, "--x", "lat", "height"], "has no column 'height', which --x"),
        (["sites.csv", *OPTIONS, "--covariates", "village"], "column 'village': expected a number"),
        (["sites.csv", *OPTIONS, "--cost", "hours"], "has no column 'hours', which --cost"),
        (["sites.csv", *OPTIONS, "--quota", "5"], "Expected --quota stratum=number"),
        (["sites.csv", *OPTIONS, "--quota", "south=2"], "name their column by stratum"),
        (["sites.csv", *OPTIONS, "--budget", "0.5"], "budget"),
        (["sites.csv", *OPTIONS, "--cost-per-km", "2"], "give base, too"),
    ],
)
def test_a_survey_that_cannot_begin_says_why(args: list[str], message: str) -> None:
    assert_one_clear_error(survey("start", *args), message)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id,examined,positive\nV20,60,61\n", "row 2 (id V20), column 'positive'"),
        ("id,examined,positive\nV20,60,6\nV99,60,6\n", "row 3 (id V99)"),
        ("id;examined;positive\nV20;60;6,5\n", "row 2 (id V20), column 'positive'"),
        ("id,examined,prevalence\nV20,60,0.1\n", "looks like a prevalence"),
    ],
)
def test_results_with_a_fault_change_nothing(content: str, message: str) -> None:
    done("start", "sites.csv", *OPTIONS)
    Path("results.csv").write_text(content)
    before = ledger()
    assert_one_clear_error(survey("tell", "run", "results.csv"), message)
    assert ledger() == before


def test_verbs_without_what_they_need() -> None:
    for verb in (["next"], ["status"], ["report"], ["tell"]):
        more = ["sites.csv"] if verb == ["tell"] else []
        assert_one_clear_error(survey(*verb, "nowhere", *more), "There is no survey")
    done("start", "bare.csv", *OPTIONS)
    assert_one_clear_error(survey("report", "run"), "There is no result yet")
    assert_one_clear_error(survey("withdraw", "run", "V01"), "nothing to withdraw")
    assert_one_clear_error(survey("start", "bare.csv", *OPTIONS), "run holds a survey already")


def test_two_people_at_once_are_told() -> None:
    done("start", "bare.csv", *OPTIONS)
    with FileLock(Path("run") / LOCK):
        assert_one_clear_error(survey("next", "run"), "run is in use by")
    assert not Path("run/next.csv").exists()
    done("next", "run")


def test_constraints_reach_the_choice() -> None:
    more = ["--cost", "days", "--budget", "3", "--stratum", "district", "--quota", "south=0"]
    more += ["--miss-cost", "3"]
    more += ["--minimum-distance", "5", "--base", "-1.5", "30", "--cost-per-km", "1e-6"]
    done("start", "bare.csv", *OPTIONS, *more)
    done("next", "run", "-q", "5")
    table = form()
    assert table["days"].sum() <= 3
    assert set(table["district"]) == {"north"}
    assert load_survey("run").settings.miss_cost == 3.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--goal", "map", "--miss-cost", "3"], "Miss cost is of calls above and below a thresh"),
        (["--goal", "map", "--certainty", "80%"], "Certainty is of calls above and below a thresh"),
        (["--threshold", "0.1", "--base", "30", "-3"], "that costs begins: give cost_per_km, too"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: list[str], message: str) -> None:
    assert_one_clear_error(survey("start", "bare.csv", *options, "--out", "run"), message)
    assert not Path("run").exists()


def test_positions_in_kilometres() -> None:
    table = small_country().assign(lon=lambda t: 110 * t["lon"], lat=lambda t: 110 * t["lat"])
    table = table.rename(columns={"lon": "east", "lat": "north"})
    table.drop(columns=["examined", "positive"]).to_csv("km.csv", index=False)
    assert_one_clear_error(survey("start", "km.csv", *OPTIONS), "say --units m, or km")
    base = ["--base", "3350", "-220", "--cost-per-km", "1"]
    done("start", "km.csv", *OPTIONS, "--units", "km", *base)
    said = done("next", "run", "-q", "2")
    assert "All pending sites are in run/next.csv." in said
    assert {"east", "north"} < set(form())
    assert not any(Path("run").glob("next.[gk]*"))


@pytest.mark.integration
def test_a_loss_of_one_s_own_is_named_again() -> None:
    Path("losses_of_test_survey.py").write_text("def missed(p):\n    return p * (1 - p)\n")
    loss = ["--loss", "losses_of_test_survey:missed"]
    said = done("start", "sites.csv", *OPTIONS, *loss)
    assert "survey next run -q 10 --loss losses_of_test_survey:missed" in said
    assert_one_clear_error(survey("next", "run"), "If you trust it, name it too")
    assert_one_clear_error(survey("report", "run"), "If you trust it, name it too")
    done("next", "run", "-q", "1", *loss)
    assert len(form()) == 1


def test_quotas_are_parsed() -> None:
    assert parse_quotas(["far north=5", "a=b=2"]) == {"far north": 5, "a=b": 2}
    assert parse_quotas(None) == {}
    with pytest.raises(UsageError, match="got 'north'"):
        parse_quotas(["north"])


def test_help_names_the_verbs() -> None:
    text = survey("--help").stdout
    for verb in ("start", "next", "tell", "withdraw", "status", "report", "replay"):
        assert verb in text
    text = survey("start", "--help").stdout
    for name in ("--threshold", "--covariates", "--budget", "--base", "--overdispersion"):
        assert name in text


@pytest.mark.integration
def test_a_report_where_every_site_was_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before release 15 of Rich a bar that is disabled ends with an empty line."""
    monkeypatch.setattr("rich.progress.Progress.stop", lambda bar: bar.console.print())
    small_country(14, 14).to_csv("all.csv", index=False)
    done("start", "all.csv", *OPTIONS)
    assert_one_clear_error(survey("next", "run"), "No site is left")
    report = survey("report", "run")
    assert (report.exit_code, report.stderr) == (0, "")
    assert "14 of 14 sites were surveyed" in " ".join(report.stdout.split())
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "are expected to take" not in page
    assert page.count("<img") == 4


def test_a_list_that_lies_in_the_sea_is_asked_about() -> None:
    table = small_country().assign(lon=lambda t: t["lon"] + 4, lat=lambda t: t["lat"] - 11)
    table.rename(columns={"lon": "lat", "lat": "lon"}).to_csv("swapped.csv", index=False)
    result = survey("start", "swapped.csv", *OPTIONS)
    assert_one_clear_error(result, "If longitude and latitude are swapped, say --x lat lon")
    assert "Malawi" in result.output
    assert not Path("run").exists()
    said = done("start", "swapped.csv", *OPTIONS, "--x", "lat", "lon")
    assert "Place: longitude 34." in said
    assert "km from west to east" in said
    assert "Malawi" in said
    assert "Atlantic" in done("start", "swapped.csv", *OPTIONS[:-1], "other", "--yes")


def test_shares_may_be_per_cent() -> None:
    done("start", "bare.csv", "--threshold", "10%", "--certainty", "80 %", "--out", "run")
    settings = load_survey("run").settings
    assert settings.threshold == pytest.approx(0.1)
    assert settings.certainty == pytest.approx(0.8)
    assert parse_share("--threshold", "0,25") == 0.25
    assert parse_share("--threshold", None) is None
    with pytest.raises(UsageError, match=r"--threshold as a share, such as 0\.1 or 10%, got 'ten'"):
        parse_share("--threshold", "ten")
    refused = survey("start", "bare.csv", "--threshold", "100%", "--out", "other")
    assert_one_clear_error(refused, "Expected --threshold below 100 %, got '100%'.")


def test_a_list_of_one_site_begins_without_warnings() -> None:
    small_country(1, 0).to_csv("one.csv", index=False)
    result = survey("start", "one.csv", "--threshold", "10%", "--yes", "--out", "run")
    assert (result.exit_code, result.stderr) == (0, "")


def test_a_covariate_may_have_the_name_of_a_position() -> None:
    table = small_country().assign(latitude=1.0)
    table.to_csv("more.csv", index=False)
    options = ["--threshold", "10%", "--x", "lon", "lat", "--covariates", "latitude"]
    assert "longitude 30" in done("start", "more.csv", *options, "--yes", "--out", "run")


def test_a_bare_number_of_per_cent_is_asked_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("bo_stream.cli.survey._asks", lambda: True)
    monkeypatch.setattr(typer, "confirm", lambda text, default: asked.append(text) or True)
    assert parse_share("--threshold", "10") == 0.1
    assert asked == ["--threshold 10: do you mean 10 %?"]
    assert parse_share("--threshold", "0.3") == 0.3
    assert len(asked) == 1


@pytest.mark.usefixtures("whole_fits")
def test_status_lists_calls_and_when_the_survey_may_end() -> None:
    small_country(40, 30).assign(name=[f"Bandé {row}" for row in range(40)]).to_csv(
        "named.csv", index=False
    )
    done("start", "named.csv", *OPTIONS, "--stop-when", "1%")
    said = done("status", "run")
    assert "sites above 10 %, 90 % sure or more" in said
    assert "sites below 10 %, 90 % sure or more" in said
    assert "sites uncertain" in said
    assert "Bandé" in said
    assert "south" in said
    assert "Stopping rule: at most 1 % of all calls are to be wrong" in said
    assert "more; bo-stream survey report writes all to called.csv" in said
    assert "Stopping rule reached" in done("status", "run", "--stop-when", "45%")
    refused = survey("status", "run", "--stop-when", "200%")
    assert_one_clear_error(refused, "Expected stop_when to be a share of wrong calls above 0")
    assert refused.stdout == ""
    said = done("next", "run", "-q", "2")
    assert "gain: the part of the uncertainty left, once earlier pending sites are surveyed" in said
    assert "Stopping rule" in said
    gains = form()["gain"]
    assert gains.between(0.0, 1.0).all()
    shown = load_survey("run").pending["gain"]
    assert gains.tolist() == pytest.approx(shown.tolist())


def test_labels_of_parquet_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bo_stream.loops.survey.survey.MANY", 1)  # which is kept as parquet
    table = small_country()
    zone = table["district"].where(table.index % 2 == 0, None)
    table = table.assign(zone=zone, district=pd.Categorical([None] * 40, ["north"]))
    table.to_parquet("typed.parquet")
    done("start", "typed.parquet", "--threshold", "12.5%", "--out", "run")
    done("next", "run", "-q", "2")
    said = done("status", "run")
    assert "sites above 12.5 %, 90 % sure or more" in said
    assert "nan" not in said
    assert "None" not in said


def french_list(n: int = 30) -> None:
    """Write a list with semicolons, decimal commas, a mark, and names that are formulas."""
    random = np.random.default_rng(3)
    lines = ["N° code;Nom du village;Région;Longitude (°);Latitude (°);Pluie;Nb testés;Nb positifs"]
    for row in range(n):
        lon, lat, rain = (f"{v:.4f}".replace(".", ",") for v in 30 + 2 * random.random(3))
        counts = f"60;{random.integers(1, 20)}" if row < 8 else ";-"
        name = "=SOMME(A1)" if row % 2 else "\x1b[31mSéguéla [red]"
        lines.append(f"{row:03d};{name};Nord;{lon};{lat};{rain};{counts}")
    Path("liste.csv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, ""]).encode())


def test_tables_go_through_a_spreadsheet_of_another_country_and_back() -> None:
    french_list()
    said = done("start", "liste.csv", "--threshold", "0.1", "--out", "run")
    assert "id: 'N° code'" in said
    assert "positive: 'Nb positifs', covariates: none" in said
    assert "Not used: 'Nom du village', 'Région', 'Pluie'" in said
    assert "30, of which 8 surveyed" in said
    done("withdraw", "run", *(f"{row:03d}" for row in range(8)), "--ask-again")  # a quick round
    done("next", "run", "-q", "4")
    content = Path("run/next.csv").read_bytes()
    assert content.startswith(b"\xef\xbb\xbfround;id;Nom du village;R")
    assert content.count(b"\r\n") == content.count(b"\n") == 5
    assert b"=SOMME" not in content.replace(b"'=SOMME", b"")
    head, *rows = content.decode("utf-8-sig").splitlines()
    cells = [row.split(";") for row in rows]
    assert all("," in row[head.split(";").index("longitude")] for row in cells)
    ids = [row[1] for row in cells]
    changed = ["round;id;examined;positive"] + [f"1;{int(row[1])};60;6" for row in cells[:2]]
    Path("run/next.csv").write_text("\n".join(changed))
    assert_one_clear_error(survey("next", "run"), f"has numbers of site {ids[0]} that were not t")
    result = survey("tell", "run", "run/next.csv")
    assert f"2 results new: {ids[0]}, {ids[1]}." in result.stdout
    assert f"'{int(ids[0])}' is '{ids[0]}'" in " ".join(result.stderr.split())
    points = json.loads(Path("run/next.geojson").read_text())["features"]
    assert points[0]["properties"]["Région"] == "Nord"
    assert "\x1b" not in done("status", "run")


def test_a_form_that_cannot_be_told_is_not_replaced() -> None:
    done("start", "bare.csv", *OPTIONS)
    done("next", "run", "-q", "2")
    Path("run/next.csv").write_text("id,examined,positive\nV01,60,61\n")
    assert_one_clear_error(survey("next", "run"), "61 positive, but only 60 examined")
    Path("run/next.csv").write_text("id,examined,positive\n")
    done("next", "run", "-q", "1")


def test_a_workbook_comes_back_as_a_workbook() -> None:
    small_country().drop(columns=["examined", "positive"]).to_excel("sites.xlsx", index=False)
    assert "0 surveyed" in done("start", "sites.xlsx", *OPTIONS)
    assert "run/next.xlsx, run/next.geojson, run/next.kml" in done("next", "run", "-q", "2")
    table = pd.read_excel("run/next.xlsx")
    assert {"district", "days"} < set(table)
    table["examined"], table["positive"] = 60, 6
    table.to_excel("run/next.xlsx", index=False)
    assert_one_clear_error(survey("next", "run"), "were not told")
    assert "2 results new" in done("tell", "run", "run/next.xlsx")


def test_people_are_added_up_to_villages() -> None:
    rows = ["id,lon,lat,RDT"]
    rows += [
        f"{row},{30 + row % 12 / 10},{-3 + row % 12 % 5 / 10},{row % 3 // 2}" for row in range(60)
    ]
    Path("people.csv").write_text("\n".join(rows))
    goal = ["--threshold", "0.1", "--out"]
    result = survey("start", "people.csv", *goal, "each")
    assert "60 of 60 rows share their position" in " ".join(result.stderr.split())
    said = done("start", "people.csv", *goal, "run", "--group")
    assert "60 rows were added up to 12 sites, one for each position." in said
    assert "'id' (in 12)" in said
    assert "12, of which 12 surveyed" in said
    assert "60 examined, 20 positive" in said


def test_results_that_are_not_understood_are_not_passed_over() -> None:
    small_country().rename(columns={"examined": "exam_2015", "positive": "pf15"}).to_csv(
        "a.csv", index=False
    )
    result = survey("start", "a.csv", *OPTIONS)
    assert "'exam_2015' may be numbers of people, but are not used" in " ".join(
        result.stderr.split()
    )


def test_texts_of_files_are_printed_without_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Table(title=":cat:")
    shown.add_column(escape(":key:"))
    shown.add_row(escape(":+1:"))
    OUT.print(shown)
    say("Not used: ':house:'.")
    warn("':key:' may be a column")
    printed = capsys.readouterr()
    for text in (":cat:", ":key:", ":+1:", "Not used: ':house:'."):
        assert text in printed.out
    assert "':key:' may be a column" in printed.err


def test_texts_of_files_are_printed_without_codes_for_the_terminal() -> None:
    assert escape("a\x1b[31m\x07\u202eb [red]é\u200d") == "a\\x1b[31m\\x07\\u202eb \\[red]é\u200d"
