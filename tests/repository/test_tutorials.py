"""Every tutorial runs from top to bottom at small sizes, and its notebook holds its cells."""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest

TUTORIALS = Path(__file__).parents[2] / "tutorials"
SCRIPTS = sorted(TUTORIALS.glob("[0-9][0-9]_*.py"))
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
LIMIT_SECONDS = 180
"""For each cell."""
MOST_BYTES = 1_500_000
"""A notebook with its pictures."""

scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
notebooks = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


def test_there_are_tutorials() -> None:
    assert SCRIPTS


@pytest.mark.integration
@scripts
def test_runs(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOKE_TEST", "1")
    monkeypatch.delenv("BO_STREAM_DATA", raising=False)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # pictures inline, as a reader has them
    notebook = jupytext.read(script)
    nbclient.NotebookClient(
        notebook,
        timeout=LIMIT_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    assert warnings_in(notebook) == []
    assert pictures_in(notebook) > 0
    assert list(tmp_path.iterdir()) == []


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def warnings_in(notebook: nbformat.NotebookNode) -> list[str]:
    return [output.text for output in outputs(notebook) if output.get("name") == "stderr"]


def pictures_in(notebook: nbformat.NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


@notebooks
def test_notebook_holds_the_cells_of_its_script(notebook: Path) -> None:
    assert cells(notebook) == cells(notebook.with_suffix(".py"))


@notebooks
def test_notebook_was_run_in_full_and_in_order(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    counts = [cell.execution_count for cell in content.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert pictures_in(content) > 0
    assert warnings_in(content) == []
    assert not any(output.output_type == "error" for output in outputs(content))
    assert notebook.stat().st_size < MOST_BYTES
