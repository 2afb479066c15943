"""``bo-stream benchmark``, in a repository of three small benchmarks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bo_stream.cli import app
from bo_stream.cli.benchmark import QUICK, benchmarks_in
from tests.support.documents import ROOT

README = """
| file | claim | peers |
|---|---|---|
| `speed/good.py` | as fast as it gets | none |
| `speed/late.py` | too late | none |
| `accuracy/dies.py` | never ends | none |
| `accuracy/good.py` | another of its name | none |
"""
MEASURES = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[2])
with open("calls", "a") as calls:
    calls.write("{name} ")
claim = {{"name": "a claim", "measured": {measured}, "target": 2.0, "sense": ">=", "unit": "times",
         "detail": "of two", "verdict": "pass"}}
record = {{"machine": {{"torch": "9"}}, "claims": [claim]}}
(out / "{name}.json").write_text(json.dumps(record))
sys.exit({code})
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for group in ("speed", "accuracy"):
        (tmp_path / "benchmarks" / group).mkdir(parents=True)
        (tmp_path / "benchmarks" / group / "__init__.py").touch()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "README.md").write_text(README)
    files = {
        "speed/good": MEASURES.format(name="good", measured=4.0, code=0),
        "speed/late": MEASURES.format(name="late", measured=1.0, code=1),
        "accuracy/dies": "print('to be or')\nraise SystemExit(7)\n",
    }
    for name, text in files.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def benchmark(*words: str) -> Result:
    return CliRunner().invoke(app, ["benchmark", *words])


def page(folder: str = "benchmark-results") -> str:
    return Path(folder, "results.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("repository")
def test_without_a_name_it_lists_what_there_is() -> None:
    result = benchmark()
    assert result.exit_code == 0
    assert "speed.good: as fast as it gets" in result.stdout
    assert not Path("benchmark-results").exists()


@pytest.mark.usefixtures("repository")
def test_results_are_on_one_page_and_one_that_dies_is_a_result() -> None:
    result = benchmark("speed.good", "dies", "late")
    assert result.exit_code == 1
    assert "accuracy.dies: died, exit code 7" in result.stdout
    text = page()
    assert "## speed.good: all targets met" in text
    assert "torch 9" in text
    assert "| a claim | 4 times | >= 2 | pass | of two |" in text
    assert "## speed.late: targets missed" in text
    assert "## accuracy.dies: died, exit code 7" in text
    assert "to be or" in text
    assert Path("benchmark-results", "results.png").stat().st_size > 0


def test_what_ended_on_this_commit_is_kept(repository: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "benchmarks"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    assert benchmark("speed.good").exit_code == 0
    assert "kept from before" in benchmark("speed.good").stdout
    assert Path("calls").read_text() == "good "
    assert benchmark("speed.good", "--again").exit_code == 0
    assert Path("calls").read_text() == "good good "
    (repository / "benchmarks" / "README.md").write_text(f"{README} ")  # no longer that commit
    assert benchmark("speed.good").exit_code == 0
    assert Path("calls").read_text() == "good good good "
    assert json.loads(Path("benchmark-results/speed.good/end.json").read_text())["commit"] is None


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "got 'nothing'"), ("good", "It may be speed.good or accuracy.good")],
)
def test_names_that_are_none(name: str, message: str) -> None:
    result = benchmark(name)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_outside_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = benchmark("--quick")
    assert result.exit_code == 2
    assert "benchmarks are not in the package" in " ".join(result.stderr.split())


def test_the_quick_ones_are_there() -> None:
    assert set(QUICK) <= benchmarks_in(ROOT).keys()


@pytest.mark.integration
def test_one_of_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = benchmark("ingest", "--out", str(tmp_path))
    assert result.exit_code in (0, 1), result.output  # a busy machine may miss a target
    assert "| claim | measured |" in page(str(tmp_path))
