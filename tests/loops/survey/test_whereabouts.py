"""Where a list of sites lies, in words."""

from __future__ import annotations

import numpy as np
import pytest

from bo_stream.loops.survey.places import whereabouts
from bo_stream.loops.survey.settings import COORDINATES, DEGREES

BOXES = {
    "Malawi": (33.5, -15.0, 34.5, -11.0),
    "Madagascar": (45.0, -24.0, 48.0, -15.0),
    "Haiti": (-73.5, 18.3, -72.0, 19.7),
    "Philippines": (120.5, 7.0, 125.0, 18.0),
    "Tanzania": (31.0, -9.0, 38.0, -2.5),
    "Comoros": (43.2, -12.4, 44.5, -11.4),
    "São Tomé and Príncipe": (6.5, 0.0, 7.4, 1.7),
    "Solomon Islands": (157.0, -11.0, 162.0, -7.0),
    "Vanuatu": (166.5, -20.0, 170.0, -13.5),
}
"""Countries by west, south, east and north of the middle of each."""


def within(box: tuple[float, float, float, float], n: int = 60) -> np.ndarray:
    random = np.random.default_rng(0)
    places: np.ndarray = random.uniform(box[:2], box[2:], (n, 2))
    return places


@pytest.mark.parametrize("country", BOXES)
def test_countries_are_named_and_not_doubted(country: str) -> None:
    text, doubt = whereabouts(within(BOXES[country]), DEGREES)
    assert country in text
    assert not doubt


@pytest.mark.parametrize("country", ["Malawi", "Madagascar", "Haiti", "Tanzania", "Comoros"])
def test_a_list_that_is_swapped_as_a_whole_is_doubted(country: str) -> None:
    _, doubt = whereabouts(within(BOXES[country])[:, ::-1], DEGREES)
    assert "the other way round" in doubt
    assert country in doubt


def test_swapped_ivory_coast_is_in_the_atlantic() -> None:
    text, doubt = whereabouts(within((4.5, -8.0, 10.0, -4.0)), DEGREES)
    assert "Atlantic" in text
    assert "Côte d'Ivoire" in doubt


def test_longitudes_beyond_180_are_turned() -> None:
    places = within((185.0, -21.0, 186.0, -16.0))
    assert "Tonga" in whereabouts(places, DEGREES)[0]


def test_a_projection_tells_its_extent_but_no_country() -> None:
    places = np.array([[300_000.0, 8_600_000.0], [500_000.0, 8_900_000.0]])
    text, doubt = whereabouts(places, COORDINATES["m"])
    assert "200 km from west to east, 300 km from south to north" in text
    assert text.endswith("south to north")
    assert not doubt
