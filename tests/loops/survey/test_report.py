"""The report of a survey: its words, that it stands alone, and how a browser shows it."""

from __future__ import annotations

import re
from datetime import date
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from bo_stream.loops.survey.findings import SurveyFindings, per_cent
from bo_stream.loops.survey.report import (
    advice,
    calibration,
    headline,
    outlook,
    survey_page,
)
from bo_stream.loops.survey.stopping import Stopping
from tests.browser import browser_tab
from tests.loops.survey.surveys import findings

TODAY = date(2026, 1, 31)
HOSTILE = "<script>alert(1)</script>\"'><img src=http://example.org/x onerror=alert(2)>&amp; $x_{"


class Seen(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split()).replace("\N{NO-BREAK SPACE}", " ")


def hostile() -> SurveyFindings:
    """Findings whose every text wants to be more than text."""
    plain = findings()
    predictions, chosen = plain.predictions.copy(), plain.chosen.copy()
    predictions["id"] = predictions["id"] + HOSTILE
    chosen["id"], chosen["reason"] = chosen["id"] + HOSTILE, HOSTILE
    return findings(
        name=HOSTILE, predictions=predictions, chosen=chosen, settings={HOSTILE: HOSTILE}
    )


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
    )
    table["class"] = ["below", "above", "uncertain", "uncertain"]
    return findings(predictions=table)


def test_what_looks_odd_is_on_the_page() -> None:
    seen = Seen(survey_page(findings(notes=("row 7 is <far> away",)), TODAY))
    assert "What looks odd in the tables row 7 is <far> away" in seen.text
    assert "looks odd" not in Seen(survey_page(findings(), TODAY)).text


# --- words --------------------------------------------------------------------------------------


def test_the_headline_counts_sites_people_and_classes() -> None:
    text = headline(four_sites())
    assert "2 of 4 sites were surveyed: 150 people examined, 15 positive (10 %)" in text
    assert "90 % sure or more: above 10 % 1 site (25 %), below it 1 site (25 %)" in text
    assert "uncertain: 2 sites (50 %)" in text


def test_the_headline_and_the_map_say_what_a_missed_site_costs() -> None:
    dear = findings(predictions=four_sites().predictions, miss_cost=3.0, calls=(0.13, 0.44))
    assert "had to be called today (a missed site counts as 3 false alarms)" in headline(dear)
    assert "a missed site" not in headline(four_sites())
    page = Seen(survey_page(findings(miss_cost=3.0, calls=(0.13, 0.44)), TODAY)).text
    assert "with a probability of 44 % or more. Below: of 13 % or less" in page


def test_the_page_says_when_the_survey_may_end() -> None:
    rule = Stopping(0.05, (0.2, 0.1, 0.04), 0)
    page = Seen(survey_page(findings(stopping=rule), TODAY)).text
    assert rule.in_words() in page
    assert "Stopping rule" not in Seen(survey_page(findings(), TODAY)).text
    assert "surely" not in page
    assert "above 10 %, 90 % sure" in page


def test_expected_errors_are_those_of_the_cheaper_call() -> None:
    assert four_sites().expected_errors() == pytest.approx(0.02 + 0.03 + 0.4 + 0.45)


def test_without_a_threshold_the_headline_is_of_the_interval() -> None:
    text = headline(findings(threshold=None, predictions=four_sites().predictions))
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
    assert "next 3 sites are expected to take 10 % off" in outlook(findings().forecast)
    assert "6 sites in 2 rounds, 15 %" in outlook(findings().forecast)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0 %"), (0.1, "10 %"), (0.0996, "10 %"), (0.052, "5.2 %"), (0.0004, "0.04 %")],
)
def test_per_cent(share: float, text: str) -> None:
    assert per_cent(share) == text


# --- the page -----------------------------------------------------------------------------------


def test_the_page_says_all_parts_and_needs_nothing_outside() -> None:
    content = survey_page(findings(), TODAY)
    seen = Seen(content)
    for text in ("Kagera", "V59", "near the threshold", "2026-01-31", "sites above 10 %"):
        assert text in seen.text
    assert seen.tags.count("img") == 5
    assert "script" not in seen.tags
    sources = [value for name, value in seen.attributes if name in ("src", "href")]
    assert all(str(source).startswith("data:image/png;base64,") for source in sources)
    alternatives = [str(value) for name, value in seen.attributes if name == "alt"]
    assert len(alternatives) == 5
    assert all(len(text) > 20 for text in alternatives)
    assert b"http" not in re.sub(rb"base64,[^\"]*|http-equiv", b"", content)


def test_text_of_tables_stays_text() -> None:
    seen = Seen(survey_page(hostile(), TODAY))
    plain = Seen(survey_page(findings(), TODAY))
    assert seen.tags == plain.tags
    assert {name for name, _ in seen.attributes} == {name for name, _ in plain.attributes}
    assert seen.texts.count(HOSTILE) == 3 + 2  # reasons, and a setting with its name
    assert f"V59{HOSTILE}" in seen.texts


def test_of_few_sites_and_no_plans() -> None:
    few = findings(threshold=None, surveyed=4, chosen=findings().chosen[:0])
    few = findings(
        threshold=None, chosen=few.chosen, held_out=few.held_out[:4], forecast=few.forecast[:0]
    )
    seen = Seen(survey_page(few, TODAY))
    assert seen.tags.count("img") == 2
    assert "from 10 surveyed sites on" in seen.text


@pytest.mark.integration
def test_a_browser_shows_it_on_a_phone_on_a_desk_and_on_paper(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(survey_page(hostile(), TODAY))
    with browser_tab(tmp_path / "profile") as tab:
        for width in (360, 1200):
            tab.open(path, width)
            assert tab.ask("document.documentElement.scrollWidth") <= width
            pictures = "[...document.images]"
            assert tab.ask(f"{pictures}.length") == 5
            assert tab.ask(f"{pictures}.every(i => i.complete && i.naturalWidth > 400)")
            assert tab.ask(f"Math.min(...{pictures}.map(i => i.clientWidth))") >= 300
            assert tab.ask("document.scripts.length") == 0
            assert len(tab.screenshot()) > 10_000
        printed = tab.printed()
    assert tab.problems == []
    assert {url.partition(":")[0] for url in tab.requests} == {"file", "data"}
    assert printed.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 6
