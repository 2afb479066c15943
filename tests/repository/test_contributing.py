"""What CONTRIBUTING.md names is there, its steps add a model, the hooks run what CI runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bo_stream.testing import LAWS
from bo_stream.testing.streams import SETTINGS, Traits, applies
from tests.mutants.__main__ import copy_of_the_repository
from tests.support.selection import FAMILIES
from tests.testing.own import CODE

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def hooks() -> list[str]:
    """Commands of the pre-commit hooks, in order."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    return [hook["entry"] for hook in repository["hooks"]]


def first_steps() -> list[str]:
    """Commands of ``.ci/run`` between the installation and the tests."""
    steps = re.findall(r'^step "(.*)"$', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert steps[0] == "$install"
    return steps[1 : steps.index("$test")]


def test_hooks_are_the_first_steps_of_ci() -> None:
    assert hooks()
    steps = first_steps()
    linters = [step for step in steps if not step.startswith(("check-jsonschema ", ".ci/wheel "))]
    assert hooks() == linters == steps[: len(linters)]
    assert all(f"`{command}`" in TEXT for command in hooks())


def test_paths_exist() -> None:
    places = set(re.findall(r"(?:bo_stream|tests|benchmarks|docs)/[\w./-]*\w(?:\.\w+)?", TEXT))
    present = {place for place in places if "yours" not in place}
    assert present
    assert {place for place in present if not (ROOT / place).exists()} == set()


def test_commands_name_what_there_is() -> None:
    (family,) = re.findall(r"pytest -m 'matrix and (\w+)'  ", TEXT)
    assert family in FAMILIES
    (law,) = re.findall(r"-k (\w+)", TEXT)
    assert any(name.startswith(law) for name in LAWS)


# --- how to add a model -------------------------------------------------------------------------


def insert_after(path: Path, line: str, *new: str) -> None:
    """Add lines to a file after the first of its lines that is so."""
    lines = path.read_text(encoding="utf-8").splitlines()
    place = lines.index(line) + 1
    path.write_text("\n".join([*lines[:place], *new, *lines[place:], ""]), encoding="utf-8")


def pytest_in(copy: Path, *arguments: str) -> str:
    """Run tests in a copy of the repository; return what pytest said."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, *arguments],
        cwd=copy,
        env={**environment, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.integration
def test_a_model_in_one_folder_enters_by_its_name_and_one_line() -> None:
    """The steps of "How to add a model", with the model of the page on models of one's own."""
    with copy_of_the_repository() as copy:
        folder = copy / "bo_stream" / "models" / "cosine"
        folder.mkdir()
        (folder / "__init__.py").write_text('"""Regression on cosines."""\n', encoding="utf-8")
        (folder / "cosine.py").write_text(CODE, encoding="utf-8")
        public = copy / "bo_stream" / "__init__.pyi"
        other = "from .models.clustered.clustered import ClusteredGP as ClusteredGP"
        insert_after(public, other, "from .models.cosine.cosine import CosineGP as CosineGP")

        laws = "tests/laws/test_laws.py"
        missing = pytest_in(copy, f"{laws}::test_every_model_is_in_the_registry")
        assert "1 failed" in missing, missing

        cases = copy / "tests" / "laws" / "cases.py"
        insert_after(cases, "import torch", "import bo_stream")
        case = '    Case("CosineGP", lambda data: bo_stream.CosineGP(*data.astuple())),'
        insert_after(cases, "CASES: tuple[Case, ...] = (", case)
        found = pytest_in(copy, laws, "-m", "matrix and cosine or not matrix")
        number = sum(applies(law, Traits()) for law in LAWS.values()) * len(SETTINGS)
        number += 1  # that all models are in, too
        assert f"{number} passed" in found, found
        assert "failed" not in found, found
