"""The picture of what a cover tree's resolution costs is of the measurements beside it."""

from __future__ import annotations

from docs.figures import resolution


def test_the_picture_is_of_the_present_measurements() -> None:
    text = resolution.PICTURE.read_text(encoding="utf-8")
    assert f">{resolution.digest()}<" in text, "run python docs/figures/resolution.py"


def test_it_can_be_drawn() -> None:
    assert len(resolution.draw().axes) == len(resolution.PANELS)
