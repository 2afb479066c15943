"""The picture of what a cover tree's resolution costs is of the measurements beside it."""

from __future__ import annotations

from docs.figures import resolution
from docs.figures.shared import is_of


def test_the_picture_is_of_the_present_measurements() -> None:
    assert is_of(resolution.PICTURE, resolution.NUMBERS), "run python docs/figures/resolution.py"


def test_it_can_be_drawn() -> None:
    assert len(resolution.draw().axes) == len(resolution.PANELS)
