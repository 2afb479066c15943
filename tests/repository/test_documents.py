"""README.md and the pages of docs: code runs, links lead somewhere, what they name exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import bo_stream
from bo_stream.cli import app
from bo_stream.models.base import StreamingGP
from docs.figures import pictures, reference
from docs.figures.shared import is_of
from tests.support.documents import (
    OTHERS,
    PAGES,
    QUESTIONS,
    ROOT,
    Block,
    anchors,
    blocks,
    links,
    name_of,
    prose,
)

README, LANDING = ROOT / "README.md", ROOT / "docs" / "index.md"
MOST_LINES = 120
"""Of README.md: what is longer belongs on a page of its own."""
MOST_EXAMPLE_LINES = 12
"""Of each of its examples, imports and empty lines not counted."""
QUICK = {
    "docs/models/accuracy.md",
    "docs/choosing/botorch.md",
    "docs/models/corrections.md",
    "docs/choosing/pools.md",
    "docs/models/saving.md",
    "docs/models/which-model.md",
}
"""Pages whose examples together take some seconds; those of others are integration tests."""
GUARD = '\nif __name__ == "__main__":'
"""In a block that is a script of its own, since it starts processes."""
COMMAND = re.compile(r"`((?:bo-stream|python -m|pip|pytest) ?[^`]*)`")
pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


# --- code ---------------------------------------------------------------------------------------


def examples() -> Iterator[pytest.param]:
    """Blocks that are run together: a page's in order, but those of README.md each alone.

    Installing is left to CI, in README.md and on the site's first page.
    """
    for page in PAGES:
        code = [block for block in blocks(page) if block.language in ("python", "sh")]
        first = page in (README, LANDING)
        together = [[block] for block in code if is_python(block)] if first else [code]
        for group in filter(None, together):
            name, marks = name_of(page), []
            if name not in QUICK:
                marks = [pytest.mark.integration, *([pytest.mark.smoke] if page == README else [])]
            yield pytest.param(name, group, id=f"{name}:{group[0].line}", marks=marks)


def is_python(block: Block) -> bool:
    return block.language == "python"


@pytest.mark.filterwarnings("error::bo_stream.ShortTrainingWarning")  # a page trains far enough
@pytest.mark.parametrize(("name", "group"), list(examples()))
def test_examples_run(
    name: str, group: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in group:
        if GUARD in block.code:
            Path("script.py").write_text(block.code, encoding="utf-8")
            subprocess.run([sys.executable, "script.py"], check=True, timeout=300)
        elif is_python(block):
            exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
        else:
            for line in block.code.splitlines():
                run_command(shlex.split(line))


def run_command(words: list[str]) -> None:
    """Run a line of a page's shell block, of which only our own command is allowed."""
    assert words[0] == "bo-stream", words
    result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_the_readme_has_an_example_for_botorch_and_one_for_ax() -> None:
    first, second = filter(is_python, blocks(README))
    assert "botorch" in first.code
    assert "bo_stream.ax" in second.code
    for block in (first, second):
        lines = [line for line in block.code.splitlines() if line.strip()]
        assert sum(not re.match("import|from", line) for line in lines) <= MOST_EXAMPLE_LINES


# --- what is named ------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[list[str]]:
    """Commands of the shell blocks of a page and of its text, in words."""
    lines = [
        line for block in blocks(page) if block.language == "sh" for line in block.code.split("\n")
    ]
    for text in (*lines, *COMMAND.findall(prose(page).replace("\n", " "))):
        for part in text.split("&&"):
            if part.strip():
                yield shlex.split(part, comments=True)


@pages
def test_commands_and_options_exist(page: Path) -> None:
    for words in commands(page):
        if words[0] == "bo-stream" and len(words) > 1:
            assert {word for word in words if re.match("--?[a-z]", word)} <= options(words), words
        if words[:2] == ["python", "-m"]:
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").exists(), words


def options(words: list[str]) -> set[str]:
    """Options of the command of ours that a line begins with, such as ``bo-stream survey next``."""
    found = typer.main.get_command(app)
    for word in words[1:]:
        found = getattr(found, "commands", {}).get(word, found)
    names = {name for option in found.params for name in option.opts + option.secondary_opts}
    return {*names, "--help"}


@pages
def test_names_exist(page: Path) -> None:
    """Every path in backquotes exists, and every identifier is in the source or its tests."""
    quoted = set(re.findall(r"`([^`]+)`", COMMAND.sub("", prose(page))))
    paths = {name for name in quoted if (ROOT / name.partition("/")[0]).exists()}
    assert [name for name in paths if not (ROOT / name).exists()] == []
    code = " ".join(block.code for block in blocks(page))
    words = set(re.findall(r"\b[A-Za-z_]\w+", " ".join(quoted - paths)))
    assert words - set(re.findall(r"\w+", code)) - known_words() == set()


@cache
def known_words() -> set[str]:
    folders = ("bo_stream", "benchmarks", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    names = {part for path in files for part in path.relative_to(ROOT).with_suffix("").parts}
    return names.union(*(re.findall(r"\w+", path.read_text(encoding="utf-8")) for path in files))


# --- links --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_list_of_questions_once() -> None:
    targets = [(QUESTIONS.parent / link).resolve() for link in links(QUESTIONS)]
    listed = [each for each in targets if QUESTIONS.parent in each.parents]
    apart = (QUESTIONS, LANDING)
    own = [page for page in PAGES if QUESTIONS.parent in page.parents and page not in apart]
    assert sorted(listed) == sorted(own)


def test_the_reference_is_of_the_present_names() -> None:
    text = reference.PAGE.read_text(encoding="utf-8")
    assert text == reference.page(), "run python docs/figures/reference.py"
    assert text.count("\n| `") > 150


def test_every_model_is_in_the_table() -> None:
    table = (ROOT / "docs" / "models" / "which-model.md").read_text(encoding="utf-8")
    public = (getattr(bo_stream, name) for name in bo_stream.__all__)
    models = [each for each in public if isinstance(each, type) and issubclass(each, StreamingGP)]
    assert [each.__name__ for each in models if f"`{each.__name__}`" not in table] == []


@pytest.mark.integration
def test_the_picture_of_a_map_can_be_drawn() -> None:
    figure = pictures.sites(shown=1, steps=2)
    assert [len(axes.lines) for axes in figure.axes] == [0, 0, 3]


def test_the_picture_of_cost_is_of_the_measurements_beside_it() -> None:
    assert is_of(pictures.GROWTH, pictures.MEASURED), "run python docs/figures/pictures.py"


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
