"""The table and the picture of all models on the same splits are what was measured."""

from __future__ import annotations

from docs.figures import same_time


def test_the_page_has_the_table_that_the_script_makes() -> None:
    text = same_time.PAGE.read_text(encoding="utf-8")
    assert same_time.with_tables(text) == text, "run python docs/figures/same_time.py"
    assert len(same_time.fits()) >= 42


def test_the_picture_is_of_the_present_measurements() -> None:
    text = same_time.PICTURE.read_text(encoding="utf-8")
    assert f">{same_time.digest()}<" in text, "run python docs/figures/same_time.py"
