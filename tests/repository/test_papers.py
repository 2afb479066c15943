"""The pages of the papers: what they cite, name, link and quote is there."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import gpytorch
import pytest

from tests.support.documents import ROOT, links, name_of

FOLDER = ROOT / "docs" / "papers"
PAPERS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
SECTIONS = ("Names", "Equations", "Errata", "Tables and figures", "Left out")
FIELDS = frozenset(("author", "title", "year"))
"""Of every work; what else there is depends on what is known for certain."""
ACCENTS = {"'": "\u0301", "`": "\u0300", '"': "\u0308", "~": "\u0303"}

NAME = r"(?:van der |van )?[A-Z\u00c0-\u017d][\w-]+"
SEVERAL = rf"(?:, {NAME})*,? and {NAME}| et al\.?"
CITED = re.compile(rf"(?:\b({NAME})(?:{SEVERAL}),? [\[(]?|[\[(]({NAME}), |\b({NAME}) \()$")
"""What is before a year: "Evans and Nair (", "Stanton et al., ", "(Titsias, ", "Keys ("."""
YEAR = re.compile(r"\b(?:19|20)\d\d\b")
LONGEST = 150
"""Letters before a year in which its authors are looked for."""
NO_AUTHORS = frozenset(("Years",))
KEY = re.compile(r"\b[A-Z][A-Za-z-]+(?:19|20)\d\d\b")

papers = pytest.mark.parametrize("page", PAPERS, ids=name_of)
pages = pytest.mark.parametrize("page", [FOLDER / "README.md", *PAPERS], ids=name_of)


# --- the bibliography ----------------------------------------------------------------------------


@cache
def bibliography() -> list[tuple[str, dict[str, str]]]:
    """Keys and fields of all entries; what is not an entry, a comment or empty raises."""
    text = (FOLDER / "references.bib").read_text(encoding="utf-8")
    entry = re.compile(r"^@[a-z]+\{([\w-]+),\n((?:  [a-z]+ = \{.*\},\n)+)\}\n", re.MULTILINE)
    rest = re.sub(r"^%.*\n|^\n", "", entry.sub("", text), flags=re.MULTILINE)
    if rest:
        raise ValueError(f"Expected entries of one line a field, got:\n{rest}")
    field = re.compile(r"  ([a-z]+) = \{(.*)\},")
    return [(key, dict(field.findall(body))) for key, body in entry.findall(text)]


def plain(name: str) -> str:
    """A name of LaTeX or a text in small letters without accents."""
    name = re.sub(r"\\(['`\"~])\{?(\w)\}?", lambda m: m[2] + ACCENTS[m[1]], name)
    name = name.replace(r"\l", "l").replace("ł", "l")
    letters = unicodedata.normalize("NFD", name)
    return "".join(c for c in letters if c.isalpha() or c in " -").lower()


def first_author(fields: dict[str, str]) -> str:
    return plain(fields["author"].split(",")[0])


def test_every_entry_has_what_is_known_of_any_work() -> None:
    for key, fields in bibliography():
        assert fields.keys() >= FIELDS, key
        assert key.endswith(fields["year"]), key
        assert all(text.count("{") == text.count("}") for text in fields.values()), key
        own = plain(key[:-4]).replace("-", "")
        assert own.startswith(first_author(fields).replace("-", "").split(" ")[-1]), key
    keys = [key for key, _ in bibliography()]
    assert [key for key, number in Counter(keys).items() if number > 1] == []
    assert keys == sorted(keys, key=str.lower)


def test_papers_are_found_in_arxiv() -> None:
    numbers = {key: fields.get("eprint", "") for key, fields in bibliography()}
    for page in PAPERS:
        found = re.findall(r"arxiv\.org/abs/([\d.]+)", page.read_text(encoding="utf-8"))
        assert found, page
        assert set(found) <= set(numbers.values()), page


# --- what is cited -------------------------------------------------------------------------------


@cache
def texts() -> dict[Path, str]:
    """Sources and pages, each on one line, without the marks of comments."""
    patterns = ("bo_stream/**/*.py", "benchmarks/**/*.py", "tests/**/*.py", "tutorials/*.py")
    paths = [path for each in patterns for path in ROOT.glob(each) if path != Path(__file__)]
    paths += [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]
    lines = {path: path.read_text(encoding="utf-8") for path in paths}
    return {path: re.sub(r"\s*\n\s*(?:# )?", " ", text) for path, text in lines.items()}


def test_every_key_has_an_entry() -> None:
    known = {key for key, _ in bibliography()}
    for path, text in texts().items():
        for bracket in re.findall(r"\[([^\[\]]*)\]", text):
            assert set(KEY.findall(bracket)) <= known, path


def works(text: str) -> Iterator[tuple[str, str]]:
    """First authors and years of the works that a text names."""
    for year in YEAR.finditer(text):
        found = CITED.search(text[max(0, year.start() - LONGEST) : year.start()])
        if found is not None:
            name = next(part for part in found.groups() if part is not None)
            if name not in NO_AUTHORS:
                yield plain(name), year[0]


def test_every_work_that_a_text_names_has_an_entry() -> None:
    known = {(first_author(fields), fields["year"]) for _, fields in bibliography()}
    missing = {name_of(path): set(works(text)) - known for path, text in texts().items()}
    assert {path: each for path, each in missing.items() if each} == {}


# --- the pages -----------------------------------------------------------------------------------


def section(page: Path, title: str) -> str:
    """The text below a heading, up to the next one of its level."""
    found = re.search(
        rf"^## {title}\n(.*?)(?=^## |\Z)",
        page.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    if found is None:
        raise ValueError(f"Expected a section {title} in {name_of(page)}.")
    return found[1]


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of all tables of a text, but for their heads."""
    lines = [line.strip().strip("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]
    rules = [i for i, row in enumerate(cells) if set("".join(row)) <= set("-: ")]
    heads = {*rules, *(i - 1 for i in rules)}
    return [row for i, row in enumerate(cells) if i not in heads]


def quoted(cell: str) -> set[str]:
    """Words of Python in the backquotes of a cell."""
    return set(re.findall(r"\b[A-Za-z_]\w+", " ".join(re.findall(r"`([^`]+)`", cell))))


@cache
def defined(kind: str) -> frozenset[str]:
    """Names of all classes, or all functions and methods, of the package and its tests."""
    found: set[str] = set()
    for path, text in texts().items():
        if path.suffix == ".py":
            found.update(re.findall(rf"\b{kind} (\w+)", text))
    return frozenset(found)


@papers
def test_a_page_has_its_sections_in_order(page: Path) -> None:
    titles = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert tuple(titles) == SECTIONS


@pages
def test_links_lead_to_files(page: Path) -> None:
    targets = [link.partition("#")[0] for link in links(page)]
    assert targets
    assert [each for each in targets if not (page.parent / each).exists()] == []


@papers
@pytest.mark.parametrize("title", ["Names", "Equations"])
def test_what_a_table_names_is_in_the_file_beside_it(page: Path, title: str) -> None:
    """Each row of code has a link, and every word of its backquotes stands in a file linked."""
    for row in rows(section(page, title)):
        code = [(page.parent / link) for link in re.findall(r"\]\(([^)#]+)\)", " ".join(row))]
        words = set[str]().union(*map(quoted, row[1:]))
        assert code or not words, row
        found = " ".join(path.read_text(encoding="utf-8") for path in code if path.is_file())
        assert words <= set(re.findall(r"\w+", found)), row


@papers
def test_files_with_an_equation_carry_the_key_of_the_paper(page: Path) -> None:
    """One of a row's, at least: functions of others may serve the equation, too."""
    number = re.search(r"arxiv\.org/abs/([\d.]+)", page.read_text(encoding="utf-8"))
    assert number is not None
    (key,) = (key for key, fields in bibliography() if fields.get("eprint") == number[1])
    for row in rows(section(page, "Equations")):
        files = [page.parent / link for link in re.findall(r"\]\(([^)#]+\.py)\)", " ".join(row))]
        carried = [key in path.read_text(encoding="utf-8") for path in files]
        assert any(carried) or not files, row


@papers
def test_classes_of_the_names_exist(page: Path) -> None:
    table = rows(section(page, "Names"))
    classes = {name for row in table for name in quoted(row[1]) if re.match(r"[A-Z]\w*[a-z]", name)}
    assert classes
    known = {*defined("class"), *dir(gpytorch.kernels), *dir(gpytorch.likelihoods)}
    assert classes - {"None", "True"} <= known


@pages
def test_tests_that_a_page_quotes_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"\btest_\w+\b(?!\.py|/)", text)) <= defined("def")


@papers
def test_every_erratum_has_a_proof_or_a_test(page: Path) -> None:
    table = rows(section(page, "Errata"))
    assert table
    assert all(all(row) for row in table)


@pages
def test_numbers_of_ours_have_a_command_or_a_page(page: Path) -> None:
    """Every module that is run is a file; no path of one machine is on a page."""
    text = page.read_text(encoding="utf-8")
    modules = re.findall(r"python -m (benchmarks[\w.]+)", text)
    assert [
        m for m in modules if not (ROOT / m.replace(".", "/")).with_suffix(".py").exists()
    ] == []
    assert not re.search(r"/(?:work|tmp|home)/", text)


def test_the_index_has_every_page() -> None:
    assert {each.name for each in PAPERS} <= set(links(FOLDER / "README.md"))
