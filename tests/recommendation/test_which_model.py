"""README's rows and the picture of docs/models/which-model.md are what the table of costs says."""

from __future__ import annotations

import re

from docs.figures import which_model
from docs.figures.shared import is_of, with_part
from tests.support.documents import ROOT


def test_the_rows_of_the_readme_are_those_of_the_table() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_part(text, "which-model-when", which_model.rows()) == text, (
        "run python docs/figures/which_model.py"
    )
    assert which_model.rows().count("\n") == 7
    assert which_model.rows() in text


def test_the_picture_is_of_this_table() -> None:
    assert is_of(which_model.PICTURE, which_model.TABLE), "run python docs/figures/which_model.py"
    text = which_model.PICTURE.read_text(encoding="utf-8")
    assert set(re.findall(r"n = [\d,]+", text)) == {
        f"n = {which_model.last_exact(options['d']):,}"
        for options, _ in which_model.PANELS.values()
    }
