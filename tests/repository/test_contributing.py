"""What CONTRIBUTING.md names is there, and the hooks run what CI runs first."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from bo_stream.testing import LAWS
from tests.support.selection import FAMILIES

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
    assert hooks() == first_steps()
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
