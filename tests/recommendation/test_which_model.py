"""README's rows and the picture of docs/models/which-model.md are what the table of costs says."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from tests.support.documents import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "which_model", ROOT / "docs" / "figures" / "which_model.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rows_of_the_readme_are_those_of_the_table(script: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert script.with_rows(text) == text, "run python docs/figures/which_model.py"
    assert script.rows().count("\n") == 7
    assert script.rows() in text


def test_the_picture_is_of_this_table(script: ModuleType) -> None:
    text = script.PICTURE.read_text(encoding="utf-8")
    assert f">{script.digest()}<" in text, "run python docs/figures/which_model.py"
    assert set(re.findall(r"n = [\d,]+", text)) == {
        f"n = {script.last_exact(options['d']):,}" for options, _ in script.PANELS.values()
    }
