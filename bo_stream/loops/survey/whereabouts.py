"""Where a list of sites lies: its box, its extent, and the countries or the sea, in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from bo_stream.loops.survey.cells import Array
from bo_stream.loops.survey.coordinates import Coordinates

_COUNTRIES = Path(__file__).with_name("countries.txt")

CELL = 0.5
"""Degrees of a cell of the table of countries."""

MOST_NAMED = 3
"""Countries that are named."""

ON_LAND, BETTER = 0.5, 0.1
"""Share of the sites that are on land from which a place is plausible; share by which there are
more the other way round from which that is likelier, where not nearly all are on land as given."""

NEARLY_ALL, SCATTERED = 0.9, 0.7
"""Share of the sites in one country, or on land, that is nearly all; below which they are in many:
where they would nearly all be in one country the other way round, that is likelier."""

_SEAS = (
    ("the Arctic Ocean", -180.0, 70.0, 180.0, 90.0),
    ("the Southern Ocean", -180.0, -90.0, 180.0, -60.0),
    ("the Mediterranean Sea", -5.5, 30.0, 36.5, 46.0),
    ("the Indian Ocean", 20.0, -60.0, 100.0, 31.0),
    ("the Indian Ocean", 100.0, -60.0, 130.0, -8.0),
    ("the Atlantic Ocean", -70.0, -60.0, 20.0, 70.0),
    ("the Atlantic Ocean", -98.0, 9.0, -70.0, 70.0),
)
"""Boxes of seas, as west, south, east, north, of which the first counts; else the Pacific."""


@dataclass(frozen=True)
class Whereabouts:
    """Where sites are, for the coordinator to recognise.

    Attributes:
        box: Ranges of both coordinates, in words.
        extent: Width and height in kilometres, in words.
        place: Countries or sea, in words; empty on a map projection, which does not tell.
        doubt: Why this is unlikely to be where the sites are, and what to do; empty if it is not.
    """

    box: str
    extent: str
    place: str
    doubt: str

    @classmethod
    def of(cls, places: Array, coordinates: Coordinates) -> Whereabouts:
        """Look up where sites are, without a network.

        Args:
            places: Longitude and latitude, or east and north, ``N x 2``.
            coordinates: Their units.
        """
        places = np.ascontiguousarray(places)
        low, high = places.min(axis=0), places.max(axis=0)
        spans = [
            f"{name} {coordinates.text(start)} to {coordinates.text(end)}"
            for name, start, end in zip(coordinates.names, low, high, strict=True)
        ]
        plane = coordinates.plane(torch.from_numpy(places)).transform(torch.from_numpy(places))
        width, height = np.ptp(plane[:, :2].numpy(), axis=0)
        extent = f"{width:,.3g} km from west to east, {height:,.3g} km from south to north"
        if not coordinates.are_degrees:
            return cls(", ".join(spans), extent, "", "")
        found = _looked_up(places)
        return cls(", ".join(spans), extent, found.in_words(), _doubt(places, found))

    def in_words(self) -> str:
        """Say all of it in a sentence."""
        where = f"; {self.place}" if self.place else ""
        return f"{self.box}: {self.extent}{where}"


@dataclass(frozen=True)
class _Found:
    """Number of sites in each country, and in each sea."""

    countries: Counter[str]
    seas: Counter[str]

    @property
    def land(self) -> float:
        """Share of the sites that are on land."""
        on_land, at_sea = self.countries.total(), self.seas.total()
        return on_land / (on_land + at_sea)

    @property
    def largest(self) -> float:
        """Share of the sites that are in one country, that with most."""
        total = self.countries.total() + self.seas.total()
        return max(self.countries.values(), default=0) / total

    @property
    def is_scattered(self) -> bool:
        """Whether the sites are in more countries than lists of neighbouring ones mostly are."""
        return self.largest < SCATTERED and len(self.countries) > MOST_NAMED

    def in_words(self) -> str:
        """Name the countries, or the sea, with most sites."""
        total = self.countries.total() + self.seas.total()
        both = (self.countries + self.seas).most_common()
        texts = [
            f"{name} ({100.0 * count / total:.0f} %)" if len(both) > 1 else name
            for name, count in both[:MOST_NAMED]
        ]
        more = f" and {len(both) - MOST_NAMED} more" if len(both) > MOST_NAMED else ""
        return f"roughly in {', '.join(texts)}{more}"


def _looked_up(places: Array) -> _Found:
    """Count the sites in countries; one at sea beside a coast counts as on it."""
    turned = places.copy()
    turned[:, 0] = (turned[:, 0] + 180.0) % 360.0 - 180.0
    cells = np.floor(turned / CELL).astype(int)
    table = _table()
    countries: Counter[str] = Counter()
    seas: Counter[str] = Counter()
    for (column, row), (longitude, latitude) in zip(cells.tolist(), turned.tolist(), strict=True):
        around = (table.get((row + up, column + right)) for up, right in ((0, 0), *_NEIGHBOURS))
        name = next((one for one in around if one is not None), None)
        if name is None:
            seas[_sea(longitude, latitude)] += 1
        else:
            countries[name] += 1
    return _Found(countries, seas)


_NEIGHBOURS = tuple(
    (up, right) for up in (-1, 0, 1) for right in (-1, 0, 1) if (up, right) != (0, 0)
)


def _sea(longitude: float, latitude: float) -> str:
    for name, west, south, east, north in _SEAS:
        if west <= longitude <= east and south <= latitude <= north:
            return name
    return "the Pacific Ocean"


def _doubt(places: Array, found: _Found) -> str:
    """Say why the sites are unlikely to be there, and whether they are so the other way round."""
    other = None
    if bool((np.abs(places[:, 0]) <= 90.0).all()):
        other = _looked_up(places[:, ::-1])
    likelier = other is not None and (
        (found.land < NEARLY_ALL and other.land >= found.land + BETTER)
        or (found.is_scattered and other.largest >= NEARLY_ALL)
    )
    if found.land >= ON_LAND and not likelier:
        return ""
    text = f"{100.0 * (1.0 - found.land):.0f} % of the sites are at sea"
    if found.land >= NEARLY_ALL:
        text = f"The sites are in {len(found.countries):,} countries"
    if other is not None and likelier:
        text += f"; with longitude and latitude the other way round, {other.in_words()}"
    return text


@lru_cache(maxsize=1)
def _table() -> dict[tuple[int, int], str]:
    """Read the country of each cell on land, by row and column."""
    table = {}
    for line in _COUNTRIES.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, rows = line.split("|")
        for text in rows.split():
            row, runs = text.split(":")
            for run in runs.split(","):
                start, _, end = run.partition("..")
                for column in range(int(start), int(end or start) + 1):
                    table[int(row), column] = name
    return table
