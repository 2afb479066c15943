"""The table and the picture of docs/scale/devices.md are what was measured."""

from __future__ import annotations

import re

from docs.figures import device
from docs.figures.shared import is_of, with_part


def test_the_page_has_the_table_that_the_script_makes() -> None:
    text = device.PAGE.read_text(encoding="utf-8")
    assert with_part(text, "verbs", device.table()) == text, "run python docs/figures/device.py"
    assert len(device.measured()) > 30


def test_the_picture_is_of_the_present_measurements() -> None:
    assert is_of(device.PICTURE, device.NUMBERS), "run python docs/figures/device.py"


def test_what_the_page_says_first_is_what_was_measured() -> None:
    def ratios(what: str, model: str = "") -> str:
        found = [
            verb["host"] / verb["there"]
            for verb in device.measured()
            if verb["verb"].startswith(what) and verb["model"].startswith(model)
        ]
        low, high = f"{min(found):.0f}", f"{max(found):.0f}"
        return low if low == high else f"{low} to {high}"

    said = re.sub(r"\s+", " ", device.PAGE.read_text(encoding="utf-8"))
    for phrase in (
        f"10,000 points is {ratios('posterior of 10,000')} times",
        f"100,000 points {ratios('10 of a pool')} times",
        f"10,000 functions {ratios('10 steps', 'QSGP')} times",
        f"with its gradient {ratios('evidence', 'AutoGP')} times",
    ):
        assert phrase in said, phrase
