"""The report of a survey: its words, that it stands alone, and how a browser shows it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from datetime import date
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from bo_stream.loops.survey.findings import SurveyFindings, chance_in_words
from bo_stream.loops.survey.maps import zoomable_map
from bo_stream.loops.survey.model import Stopping, as_set, calls_table, per_cent
from bo_stream.loops.survey.report import (
    MOST_LISTED,
    advice,
    calibration,
    dates_in_words,
    headline,
    outlook,
    survey_page,
)
from bo_stream.loops.survey.settings import SurveySettings
from tests.loops.survey.surveys import findings
from tests.support.browser import browser_tab
from tests.support.drafts import save_small

TODAY = date(2026, 1, 31)
MAP = SurveySettings(goal="map")
HOSTILE = "<script>alert(1)</script>\"'><img src=http://example.org/x onerror=alert(2)>&amp; $x_{"


class Seen(HTMLParser):
    """Tags, attributes, texts and scripts of a page."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        (self.scripts if self.cdata_elem == "script" else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split()).replace("\N{NO-BREAK SPACE}", " ")


def hostile() -> SurveyFindings:
    """Findings whose every text wants to be more than text."""
    plain = findings()
    predictions, chosen = plain.predictions.copy(), plain.chosen.copy()
    predictions["id"] = predictions["id"] + HOSTILE
    chosen["id"], chosen["reason"] = chosen["id"] + HOSTILE, HOSTILE
    labels = plain.labels.set_axis(pd.Index(predictions["id"], name="id"))
    return findings(
        name=HOSTILE,
        predictions=predictions,
        chosen=chosen,
        texts={HOSTILE: HOSTILE},
        labels=labels.assign(Village=HOSTILE, District=HOSTILE),
        calls_made=calls_table(predictions, labels.assign(Village=HOSTILE, District=HOSTILE)),
    )


def country(kind: str, n: int = 60) -> SurveyFindings:
    """Findings of a country of 10 by 3 degrees, or of five islands, with all sites near others."""
    plain = findings(n=n, q=12)
    places = plain.predictions[["longitude", "latitude"]].to_numpy()
    across, along = ((places - places.min(0)) / np.ptp(places, axis=0)).T
    longitude, latitude = 33.0 + 3.0 * across, -17.0 + 10.0 * along
    if kind == "islands":
        island = np.floor(5.0 * along)
        longitude, latitude = 165.0 + 0.9 * island + 0.3 * across, -20.0 + island + 0.4 * along
    table = plain.predictions.assign(longitude=longitude, latitude=latitude)
    chosen = plain.chosen.assign(
        longitude=longitude[-12:].mean() + np.linspace(0.0, 0.01, 12),  # all in one valley
        latitude=latitude[-12:].mean(),
    )
    return findings(n=n, q=12, predictions=table, chosen=chosen)


@cache
def plain_page() -> bytes:
    """The page of the findings as they are, with their pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save_small)
        return survey_page(findings(), TODAY)


def small_table(**columns: list[object]) -> pd.DataFrame:
    return pd.DataFrame(columns)


def four_sites() -> SurveyFindings:
    table = small_table(
        id=["a", "b", "c", "d"],
        prevalence=[0.05, 0.2, 0.11, 0.09],
        lower=[0.04, 0.1, 0.02, 0.03],
        upper=[0.06, 0.3, 0.22, 0.19],
        exceedance=[0.02, 0.97, 0.6, 0.45],
        examined=[100.0, 50.0, None, None],
        positive=[5.0, 10.0, None, None],
        date=["2026-02-01", "", "", ""],
        longitude=[30.0, 30.5, 31.0, 31.5],
        latitude=[-3.0, -3.5, -2.5, -2.0],
    )
    table["class"] = ["below", "above", "uncertain", "uncertain"]
    return findings(predictions=table)


def test_what_looks_odd_is_on_the_page() -> None:
    seen = Seen(survey_page(findings(notes=("row 7 is <far> away",)), TODAY))
    assert "What looks odd in the tables row 7 is <far> away" in seen.text
    assert "looks odd" not in Seen(plain_page()).text


# --- words --------------------------------------------------------------------------------------


def test_the_headline_counts_sites_people_and_classes() -> None:
    text = headline(four_sites())
    assert "2 of 4 sites were surveyed: 150 people examined, 15 positive (10 %)" in text
    assert "90 % sure or more: above 10 % 1 site (25 %), below it 1 site (25 %)" in text
    assert "uncertain: 2 sites (50 %)" in text


def test_the_headline_and_the_map_say_what_a_missed_site_costs() -> None:
    costly = SurveySettings(threshold=0.1, certainty=0.87, miss_cost=3.0)
    dear = findings(predictions=four_sites().predictions, settings=costly)
    assert "had to be called today (a missed site counts as 3 false alarms)" in headline(dear)
    assert "a missed site" not in headline(four_sites())
    page = Seen(survey_page(findings(settings=costly), TODAY)).text
    assert "with a probability of 87 % or more. Below: of 13 % or less" in page


def test_the_page_says_when_the_survey_may_end() -> None:
    rule = Stopping(0.05, 0.1, results=120, pending=0, left=500)
    page = Seen(survey_page(findings(stopping=rule), TODAY)).text
    assert rule.in_words() in page
    assert "Stopping rule" not in Seen(plain_page()).text
    assert "surely" not in page
    assert "above 10 %, 90 % sure" in page


def test_expected_errors_are_those_of_the_cheaper_call() -> None:
    assert four_sites().expected_errors() == pytest.approx(0.02 + 0.03 + 0.4 + 0.45)


def test_without_a_threshold_the_headline_is_of_the_interval() -> None:
    text = headline(findings(settings=MAP, predictions=four_sites().predictions))
    assert "11 % on average" in text
    assert "18 percentage points" in text
    assert "above" not in text


def test_what_to_do_next() -> None:
    assert "3 sites numbered" in advice(findings())
    nobody = findings().chosen[:0]
    assert "survey next" in advice(findings(chosen=nobody))
    table = four_sites().predictions.assign(**{"class": "below"})
    assert "may end" in advice(findings(chosen=nobody, predictions=table))


@pytest.mark.parametrize(("inside", "verdict"), [(39, "agrees"), (30, "surer than it should be")])
def test_calibration_in_words(inside: int, verdict: str) -> None:
    held_out = small_table(
        positive=[5.0] * inside + [20.0] * (40 - inside),
        low_50=[0.0] * 40, high_50=[10.0] * 40, chance_50=[0.55] * 40,
        low_95=[0.0] * 40, high_95=[10.0] * 40, chance_95=[0.96] * 40,
    )  # fmt: skip
    text = calibration(held_out)
    assert verdict in text
    assert f"{per_cent(inside / 40)} fell inside their 95 % intervals (96 % expected)" in text


def test_outlook_in_words() -> None:
    said = outlook(findings().forecast)
    assert "next 3 sites are expected to take 10 % off the uncertainty left once all" in said
    assert "6 sites in 2 rounds, 15 %" in said


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.1, "10 %"), (0.0996, "10 %"), (0.052, "5.2 %"), (0.0004, "0.04 %")],
)
def test_per_cent(share: float, text: str) -> None:
    assert per_cent(share) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.1, "10 %"),
        (0.125, "12.5 %"),
        (0.995, "99.5 %"),
        (1.0 - 0.995, "0.5 %"),
        (1e-6, "0.0001 %"),
    ],
)
def test_shares_of_settings_have_all_their_digits(share: float, text: str) -> None:
    assert as_set(share) == text


def test_the_page_has_all_digits_of_threshold_and_certainty() -> None:
    fine = SurveySettings(threshold=0.125, certainty=0.995)
    page = Seen(survey_page(findings(settings=fine), TODAY))
    for text in (
        "99.5 % sure or more: above 12.5 % ",
        "of sites above 12.5 %, 99.5 % sure",
        "with a probability of 99.5 % or more. Below: of 0.5 % or less",
        "Sites above, uncertain and below 12.5 %",
    ):
        assert text in page.text
    assert json.loads(page.scripts[0])["above"] == "Above 12.5\N{NO-BREAK SPACE}%"


def test_the_card_of_a_site_has_the_digits_of_the_lists() -> None:
    rare = findings().predictions.assign(prevalence=0.0007, lower=0.00031, upper=0.002)
    values = zoomable_map(findings(predictions=rare))
    assert [values[name][0] for name in ("mean", "low", "high")] == ["0.07", "0.03", "0.2"]


@pytest.mark.parametrize(
    ("chance", "text"),
    [(0.9999, "over 99 %"), (0.97, "97 %"), (0.021, "2.1 %"), (1e-9, "under 1 %")],
)
def test_chances_in_words(chance: float, text: str) -> None:
    assert chance_in_words(chance) == text


# --- the page -----------------------------------------------------------------------------------


def test_the_page_says_all_parts_and_needs_nothing_outside() -> None:
    content = plain_page()
    seen = Seen(content)
    for text in ("Kagera", "V59", "near the threshold", "2026-01-31", "sites above 10 %"):
        assert text in seen.text
    assert seen.tags.count("img") == 5
    sources = [str(value) for name, value in seen.attributes if name in ("src", "href")]
    pictures = [source for source in sources if not source.startswith("geo:")]
    assert len(sources) == 5 + 60 + 3  # pictures, a place in the lists each, the next sites
    assert all(source.startswith("data:image/png;base64,") for source in pictures)
    alternatives = [str(value) for name, value in seen.attributes if name == "alt"]
    assert len(alternatives) == 5
    assert all(len(text) > 20 for text in alternatives)
    assert b"http" not in re.sub(rb"base64,[^\"]*|http-equiv", b"", content)


def test_text_of_tables_stays_text() -> None:
    seen = Seen(survey_page(hostile(), TODAY))
    plain = Seen(plain_page())
    assert seen.tags == plain.tags
    assert {name for name, _ in seen.attributes} == {name for name, _ in plain.attributes}
    assert seen.texts.count(HOSTILE) == 3 + 2 + 2 * (3 + 60)  # reasons, a setting, labels
    assert f" V59{HOSTILE}" in seen.texts
    values = json.loads(seen.scripts[0])
    assert values["names"] == [HOSTILE] * 60
    assert len(seen.scripts) == 2  # none has ended early


def test_of_few_sites_and_no_plans() -> None:
    few = findings(settings=MAP, surveyed=4, chosen=findings().chosen[:0])
    few = findings(
        settings=MAP, chosen=few.chosen, held_out=few.held_out[:4], forecast=few.forecast[:0]
    )
    seen = Seen(survey_page(few, TODAY))
    assert seen.tags.count("img") == 2
    assert "from 10 surveyed sites on" in seen.text


def test_a_browser_may_run_the_script_of_the_map_alone() -> None:
    seen = Seen(plain_page())
    values, script = seen.scripts
    (policy,) = (str(value) for name, value in seen.attributes if "default-src" in str(value))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.endswith(f"; script-src 'sha256-{digest}'")
    assert "innerHTML" not in script
    assert json.loads(values)["names"][0] == "V0 town"


def test_a_page_of_too_many_sites_for_the_map_has_pictures_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bo_stream.loops.survey.report.MOST_ZOOMED", 59)
    seen = Seen(survey_page(findings(), TODAY))
    assert "script" not in seen.tags
    assert seen.tags.count("img") == 5


def test_all_sites_are_listed_by_call_with_name_district_numbers_and_place() -> None:
    plain, seen = findings(), Seen(plain_page())
    for name, text in (
        ("above", "Above 10 %"),
        ("uncertain", "Uncertain"),
        ("below", "Below 10 %"),
    ):
        assert f"{text}: {plain.class_counts()[name]:,} sites" in seen.text
    row = plain.predictions.iloc[0]
    chance, mean = chance_in_words(row["exceedance"]), per_cent(row["prevalence"])
    between = f"{per_cent(row['lower'])} to {per_cent(row['upper'])}"
    result = f"{row['positive']:.0f} of 50 positive, 2026-01-17"
    place = f"{row['latitude']:.5f}, {row['longitude']:.5f}"
    cells = ("V0 town", "V0", "Ngara", mean, between, chance, result, place)
    assert " ".join(cells) in seen.text
    address = f"geo:{row['latitude']:.6f},{row['longitude']:.6f}"
    assert ("href", address) in seen.attributes
    assert seen.text.count("2026-01-17") == 10 + 1  # a line of the lists each, and the headline


def test_long_lists_end_with_where_the_others_are() -> None:
    few = findings(n=MOST_LISTED + 90, surveyed=20)
    few.predictions["class"] = "below"
    many = findings(predictions=few.predictions, labels=few.labels)
    seen = Seen(survey_page(many, TODAY))
    assert "Below 10 %: 290 sites" in seen.text
    assert "And 90 more, in called.csv." in seen.text
    assert seen.text.count(" town ") == MOST_LISTED + 3


def test_without_a_threshold_no_site_is_called() -> None:
    assert "called.csv" not in Seen(survey_page(findings(settings=MAP), TODAY)).text


def test_dates_of_results_in_words() -> None:
    assert dates_in_words(findings().surveyed) == (
        "Dates of the results: 2026-01-17; 10 of 20 have no date."
    )
    assert dates_in_words(pd.DataFrame({"date": ["", "2026-02-10", "2026-01-03"]})) == (
        "Dates of the results: 2026-01-03 to 2026-02-10; 1 of 3 have no date."
    )
    assert dates_in_words(four_sites().surveyed.assign(date="")) == ""


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["hostile", "long", "islands"])
def test_a_browser_shows_it_on_a_phone_on_a_desk_and_on_paper(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(survey_page(hostile() if kind == "hostile" else country(kind), TODAY))
    with browser_tab(tmp_path / "profile") as tab:
        for width in (360, 390, 1280):
            tab.open(path, width)
            tab.ask("document.querySelectorAll('details').forEach(d => { d.open = true; })")
            assert tab.ask("document.scrollingElement.scrollWidth <= innerWidth")
            wide = (
                "e.getBoundingClientRect().right > innerWidth || e.scrollWidth > e.clientWidth + 1"
            )
            for tag in ("table", "td", "p", "figure"):
                assert (
                    tab.ask(f"[...document.querySelectorAll('{tag}')].filter(e => {wide}).length")
                    == 0
                )
            pictures = "[...document.images]"
            row = "[...document.querySelectorAll('tr')]"
            counts = tab.ask(
                f"{row}.map(r => r.children.length - r.closest('table').rows[0].children.length)"
            )
            assert set(counts) == {0}  # an empty cell keeps its column
            assert tab.ask(f"{pictures}.length") == 5
            assert tab.ask(f"{pictures}.every(i => i.complete && i.naturalWidth > 400)")
            assert tab.ask(f"{pictures}.filter(i => i.clientWidth >= 300).length") == 4
            stage = "document.querySelector('.stage').getBoundingClientRect()"
            assert tab.ask(f"{stage}.height <= innerHeight && {stage}.width >= 300")
            assert len(tab.screenshot()) > 10_000
        tab.open(path, 1280)  # its long lists are closed again
        printed = tab.printed()
    assert tab.problems == []
    assert {url.partition(":")[0] for url in tab.requests} == {"file", "data"}
    assert printed.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 6


@pytest.mark.integration
def test_fingers_zoom_the_map_and_ask_it_for_a_site(tmp_path: Path) -> None:
    shown = country("long")
    path = tmp_path / "report.html"
    path.write_bytes(survey_page(shown, TODAY))
    with browser_tab(tmp_path / "profile") as tab:
        tab.open(path, 390, 844)
        tab.ask("document.querySelector('.stage').scrollIntoView({block: 'center'})")
        box = "document.querySelector('.canvas').getBoundingClientRect()"
        left, top, width, height = tab.ask(f"[{box}.left, {box}.top, {box}.width, {box}.height]")
        values = json.loads(Seen(path.read_bytes()).scripts[0])
        scale = min(width / values["width"], height / values["height"])
        site = int(np.argmin(np.hypot(np.array(values["x"]) - values["width"] / 2,
                                      np.array(values["y"]) - values["height"] / 2)))  # fmt: skip
        x = left + width / 2 + (values["x"][site] - values["width"] / 2) * scale
        y = top + height / 2 + (values["y"][site] - values["height"] / 2) * scale

        def touch(kind: str, *places: tuple[float, float]) -> None:
            points = [{"x": a, "y": b, "id": place} for place, (a, b) in enumerate(places)]
            tab.send("Input.dispatchTouchEvent", type=kind, touchPoints=points)

        action = "document.querySelector('.canvas').style.touchAction"
        assert tab.ask(action) == "pan-y"  # a finger scrolls the page
        touch("touchStart", (x - 30, y), (x + 30, y))
        for step in range(1, 10):
            touch("touchMove", (x - 30 - 5 * step, y), (x + 30 + 5 * step, y))
        touch("touchEnd")
        tab.ask("new Promise(requestAnimationFrame)")
        assert tab.ask(action) == "none"  # it is zoomed: a finger moves the map
        touch("touchStart", (x, y))
        touch("touchEnd")
        card = tab.ask("document.querySelector('.card').innerText").replace(
            "\N{NO-BREAK SPACE}", " "
        )
        row = shown.predictions.iloc[site]
        assert card.startswith(f"V{site} town\n")
        assert f"District: {shown.labels['District'].iloc[site]}" in card
        assert f"Prevalence {per_cent(row['prevalence'])} (" in card
        assert f"called {row['class']}".replace("called uncertain", "uncertain") in card
        link = tab.ask("document.querySelector('.card a').getAttribute('href')")
        assert link.startswith(f"geo:{row['latitude']:.3f}"[:9])
        assert tab.problems == []


@pytest.mark.integration
def test_without_a_script_the_map_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(plain_page())
    with browser_tab(tmp_path / "profile") as tab:
        tab.send("Emulation.setScriptExecutionDisabled", value=True)
        tab.open(path, 390)
        assert tab.ask("document.querySelector('.stage')") is None
        assert tab.ask("document.querySelector('#map img').clientWidth") >= 300
