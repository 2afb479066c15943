"""README.md and pages show what the committed files of benchmarks hold."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.common.report import Claim
from benchmarks.optimization import few_inputs
from bo_stream.loops.optimization.trials import usual_search
from docs.figures import measured

FILES = sorted(measured.FOLDER.glob("*.json"))
ROWS = (*measured.README_ROWS, *measured.SPEED_ROWS)
MACHINE = {
    "date",
    "architecture",
    "processor",
    "cores",
    "python",
    "threads",
    "dtype",
    "torch",
    "gpytorch",
    "botorch",
    "load_at_start",
    "commit",
}
"""What is known of the machine of a run; nothing where only a table of it was kept."""

files = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


@pytest.mark.parametrize("page", measured.PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_a_page_has_the_numbers_that_the_script_writes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert page in measured.TABLES or "<!-- measured " in text
    assert measured.renewed(page) == text, "run python -m docs.figures.measured"


@pytest.mark.parametrize("page", measured.PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_no_line_begins_with_a_number(page: Path) -> None:
    """A line that begins with a comment begins a new paragraph."""
    begins = re.findall(r"^<!-- measured \S.*", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert begins == []


def test_numbers_stand_on_pages_that_the_script_renews() -> None:
    pages = {*measured.HERE.parent.rglob("*.md"), measured.README, measured.RESULTS}
    shown = {page for page in pages if "<!-- measured" in page.read_text(encoding="utf-8")}
    assert shown == set(measured.PAGES)


@pytest.mark.parametrize("benchmark", sorted({row.benchmark for row in ROWS}))
def test_a_benchmark_has_a_file_with_all_that_its_rows_show(benchmark: str) -> None:
    rows = [row for row in ROWS if row.benchmark == benchmark]
    assert rows[0].file.is_file(), "\n".join(measured.missing())
    record = json.loads(rows[0].file.read_text(encoding="utf-8"))
    assert record["benchmark"] == rows[0].file.stem
    names = {claim["name"] for claim in record["claims"]}
    assert names >= {shown for row in rows for shown in row.names(record["settings"])}


@files
def test_a_file_is_of_one_benchmark(file: Path) -> None:
    assert len(list(measured.BENCHMARKS.glob(f"*/{file.stem}.py"))) == 1
    assert json.loads(file.read_text(encoding="utf-8"))["benchmark"] == file.stem


@files
def test_a_file_is_of_a_whole_run_and_says_where(file: Path) -> None:
    record = json.loads(file.read_text(encoding="utf-8"))
    assert set(record) == {"benchmark", "smoke", "settings", "machine", "claims"}
    assert not record["smoke"]
    machine = record["machine"]
    if "recorded" in record["settings"]:
        assert machine == {}
        return
    assert set(machine) == MACHINE
    assert machine["commit"] is not None, "the benchmark ran where files differ from the commit"


@files
def test_a_file_has_claims_as_benchmarks_write_them(file: Path) -> None:
    claims = json.loads(file.read_text(encoding="utf-8"))["claims"]
    columns = [column.name for column in fields(Claim)]
    for claim in claims:
        assert list(claim) == [*columns, "verdict"]
        assert math.isfinite(claim["measured"])
        assert Claim(**{name: claim[name] for name in columns}).verdict == claim["verdict"]
    assert max(Counter(claim["name"] for claim in claims).values()) == 1


@pytest.mark.parametrize(
    ("measured_as", "unit", "decimals", "text"),
    [
        (0.00387, "s", None, "3.9 ms"),
        (0.459, "s", None, "460 ms"),
        (0.4996, "s", None, "500 ms"),
        (0.901, "s", None, "0.90 s"),
        (0.996, "s", None, "1.0 s"),
        (312.2, "s", None, "310 s"),
        (6.72, "ms", None, "6.7 ms"),
        (2_129.0, "ms", None, "2.1 s"),
        (949_123.0, "obs/s", None, "950,000"),
        (0.06, "", None, "0.060"),
        (9.96, "", None, "10"),
        (0.0, "", None, "0"),
        (1.0, "", 3, "1.000"),
    ],
)
def test_numbers_have_two_digits_or_so_many_decimals(
    measured_as: float, unit: str, decimals: int | None, text: str
) -> None:
    assert measured.shown({"measured": measured_as, "unit": unit}, decimals) == text


CLAIMS = {
    "slope": {"measured": 0.617, "unit": "", "detail": "10: 1 s"},
    "A: condition number": {"measured": 9.3e5, "unit": "", "detail": ""},
    "B: condition number": {"measured": 1e-3, "unit": "", "detail": ""},
    "time": {"measured": 0.0039, "unit": "s", "detail": ""},
    "share": {"measured": 0.895, "unit": "", "detail": ""},
}


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        ("some: slope", "0.62"),
        ("some[.1f]: slope", "0.6"),
        ("some[detail]: slope", "10: 1 s"),
        ("some[.0e]: A: condition number", "9e5"),
        ("some[.0e]: *: condition number", "1e-3 to 9e5"),
        ("some: time", "3.9 ms"),
        ("some[.1%]: share", "89.5 %"),
    ],
)
def test_a_mark_names_its_claim_and_format(
    mark: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = [{"name": name, **claim} for name, claim in CLAIMS.items()]
    (tmp_path / "some.json").write_text(json.dumps({"claims": claims}), encoding="utf-8")
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    assert measured.number(mark) == text


def test_a_mark_without_a_file_or_a_claim_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.json is missing: run no command"):
        measured.number("none: slope")
    with pytest.raises(KeyError, match="no such claim"):
        measured.number("update: no such claim")


def test_a_missing_file_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"run `python -m benchmarks\.speed\.update`"):
        measured.renewed(measured.README)
    with pytest.raises(SystemExit, match=r"update\.json is missing"):
        measured.main()


def test_both_searches_are_the_default_where_their_regrets_are_lower() -> None:
    record = json.loads((measured.FOLDER / "few_inputs.json").read_text(encoding="utf-8"))
    found = {claim["name"]: claim["measured"] for claim in record["claims"]}
    some = [
        name
        for name, problem in few_inputs.PROBLEMS.items()
        if usual_search(problem.function.dim) == "both"
    ]
    for q, marks in few_inputs.MARKS.items():
        when = f"{q} at a time, {marks[-1]} evaluations"
        lower = [f for f in some if found[f"{f}, {when}: both"] <= found[f"{f}, {when}: box"]]
        assert len(lower) >= 0.7 * len(some), lower
