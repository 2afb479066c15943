"""The site: built without a warning, no link of it is dead, and answers are two clicks away."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import snowballstemmer

from tests.support.documents import ROOT

pytestmark = pytest.mark.integration

LANDING = Path("docs", "index.html")
CLICKS = 2
QUESTIONS = {
    # of a reader of the papers
    "Which class is O-SVGP?": ("docs/papers/wiski.html", "O-SVGP"),
    "Which class is O-SGPR?": ("docs/papers/wiski.html", "O-SGPR"),
    "Is eq. 13 of WISKI right as printed?": ("docs/papers/wiski.html", "Errata"),
    "What does OIPS choose by ρ?": ("docs/papers/oips.html", "ρ"),
    "What does ε cost in a cover tree?": ("docs/papers/cover-tree.html", "ε"),
    "Does Algorithm 9 keep points apart?": ("docs/papers/cover-tree.html", "Algorithm 9"),
    "Which arguments are M_α and M_β?": ("docs/papers/decoupled.html", "M_β"),
    "What RMSE has QSGP on kin40k?": ("docs/papers/qsgp.html", "0.163"),
    "How many relevance vectors are left?": ("docs/papers/qsgp.html", "relevance vectors"),
    "Who has to be cited?": ("docs/papers/README.html", "references.bib"),
    # of a practitioner
    "How do I run it with Ax?": ("docs/choosing/ax.html", "generation_strategy"),
    "I have sixty inputs: what do I do?": ("docs/choosing/many-inputs.html", "region"),
    "Which villages next?": ("docs/choosing/surveys.html", "bo-stream survey"),
    "How do I choose from a pool?": ("docs/choosing/pools.html", "select_from_pool"),
    "Which model do I take?": ("docs/models/which-model.html", "OSGPR"),
    "Is it worth a GPU?": ("docs/scale/devices.html", "H200"),
    "An observation was wrong": ("docs/models/corrections.html", "retract"),
    "Can I trust this model?": ("docs/models/trust.html", "report"),
    "How do I save a model?": ("docs/models/saving.html", "load"),
    "What does AutoGP take?": ("docs/reference.html", "max_exact"),
}
"""The page that answers each, and a phrase on it."""

TERMS = (
    "kronecker",
    "structured kernel interpolation",
    "svgp",
    "sgpr",
    "relevance vector",
    "spectral mixture",
    "tempered",
    "hutchinson",
    "control variate",
)


class _Page(HTMLParser):
    """Addresses and anchors of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.sources: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag in ("a", "link") and "href" in given:
            self.links.append(given["href"])
        if tag in ("img", "script", "source") and "src" in given:
            self.sources.append(given["src"])

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    asked = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", "."]
    settings = ["-d", str(folder / "doctrees"), str(folder / "html")]
    done = subprocess.run(
        [*asked, *settings], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "html"


@cache
def page_of(file: Path) -> _Page:
    return _Page(file.read_text(encoding="utf-8"))


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def target(page: Path, address: str) -> tuple[Path, str] | None:
    """File and anchor that an address of a page leads to; None: another site."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None
    file = page if not parts.path else (page.parent / unquote(parts.path)).resolve()
    return file, unquote(parts.fragment)


def test_no_link_is_dead_and_no_picture_missing(site: Path) -> None:
    dead = []
    for page in pages(site):
        for address in (*page_of(page).links, *page_of(page).sources):
            leads = target(page, address)
            if leads is None:
                continue
            file, anchor = leads
            anchored = file.suffix != ".html" or not anchor or anchor in page_of(file).anchors
            if not file.is_file() or not anchored:
                dead.append((str(page.relative_to(site)), address))
    assert dead == []
    assert len(pages(site)) > 50


def test_the_folder_leads_to_the_landing_page_with_two_pictures(site: Path) -> None:
    assert target(site / "index.html", page_of(site / "index.html").links[0]) == (
        site / LANDING,
        "",
    )
    landing = page_of(site / LANDING)
    pictures = [source for source in landing.sources if "_images" in source]
    assert len(pictures) == 2
    assert "pip install ." in landing.text
    assert "bo-stream sample" in landing.text


def test_answers_are_two_clicks_away(site: Path) -> None:
    reached = {site / LANDING}
    for _ in range(CLICKS):
        for page in list(reached):
            leads = [target(page, address) for address in page_of(page).links]
            reached |= {lead[0] for lead in leads if lead is not None and lead[0].suffix == ".html"}
    for question, (answer, phrase) in QUESTIONS.items():
        assert site / answer in reached, question
        assert phrase in page_of(site / answer).text, question


@pytest.mark.parametrize("term", TERMS)
def test_the_search_finds(site: Path, term: str) -> None:
    """The stem of every word is in the index."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    known = set(re.findall(r'"(\w+)":', index.partition('"terms":')[2]))
    stem = snowballstemmer.stemmer("english").stemWord
    assert {stem(word) for word in term.split()} <= known
