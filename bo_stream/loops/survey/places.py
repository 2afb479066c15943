"""Where sites are: columns of coordinates, and the part of the world that they lie in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import Array, Cells, Mask, first
from bo_stream.loops.survey.columns import find_column, given_column, required_column
from bo_stream.loops.survey.settings import (
    COORDINATES,
    DEGREES,
    Coordinates,
    PositionUnits,
    SurveySettings,
)
from bo_stream.mapping import REACH, kilometres

FAR = 5.0
"""Distance from the middle, in nine-tenths quantiles of such distances, from which it is odd."""

_NEAR = 2.0
"""Such a distance up to which a position that was turned round is among the others."""

_ENOUGH = 10
"""Number of sites from which they show where the others are."""

_BESIDE = 10.0
"""Distance, in kilometres, from a list of sites up to which a position is beside it."""

_NO_DEGREES = 1000.0
"""Number of a position from which it is a length on a projection, and no slip in a degree."""

_WORDS: dict[PositionUnits, str] = {"km": "kilometres", "m": "metres"}

METRES = 100_000.0
"""Number of a position from which it is no kilometre of any projection."""

_SMALL = 1000.0
"""Extent of all sites, in metres, below which they may be kilometres."""

_EASTING = (100_000.0, 900_000.0)
"""Eastings of UTM, in metres, within its zones."""


def position_columns(
    names: Sequence[str], settings: SurveySettings, source: str
) -> tuple[str, str]:
    """Find the columns of longitude and latitude, or of east and north.

    Raises:
        UsageError: There are none, or several that could be meant.
    """
    if settings.x is not None:
        for name in settings.x:
            given_column(names, name, source, "--x")
        return settings.x
    free = settings.unclaimed(names)
    one, other = (required_column(free, role, None, source) for role in settings.coordinates.names)
    return one, other


def position_columns_if_any(cells: Cells, settings: SurveySettings) -> tuple[str, str] | None:
    """Find the columns of positions, None unless both are there.

    Columns that the settings name need not be in every table.

    Raises:
        UsageError: Several could be meant.
    """
    names = settings.unclaimed(cells.names)
    if settings.x is not None and set(settings.x) <= set(names):
        return settings.x
    roles = settings.coordinates.names
    one, other = (find_column(names, role, None, cells.source) for role in roles)
    return None if one is None or other is None else (one, other)


def check_places(
    cells: Cells,
    places: Array,
    columns: tuple[str, str],
    coordinates: Coordinates = DEGREES,
    listed: Tensor | None = None,
) -> list[str]:
    """Check that positions are there, in their units, the right way round, and of one region.

    Args:
        cells: The table, n rows.
        places: Longitude and latitude, or east and north, NaN where missing, ``n x 2``.
        columns: Names of their columns.
        coordinates: Their units.
        listed: Positions of the list that these sites are outside of, ``N x 2``; None: these are
            the list.

    Returns:
        Remarks on positions that are odd but may be right.

    Raises:
        UsageError: A position is missing, in other units, swapped, or too far from the others.
    """
    for column, values in zip(columns, places.T, strict=True):
        cells.refuse(np.isnan(values), column, "it is empty. Every site needs a position.")
    remarks: list[str] = []
    in_space, points = coordinates.in_space, torch.from_numpy(places)
    if coordinates.are_degrees:
        _check_degrees(cells, places, columns)
    else:
        remarks = _check_lengths(cells, places, columns, coordinates)
    if listed is not None:
        middle = in_space(listed).mean(0)
        reach = float((in_space(listed) - middle).norm(dim=-1).max())
        apart, turned = (
            (in_space(x) - middle).norm(dim=-1).numpy() for x in (points, points.flip(-1))
        )
        cells.refuse(
            (apart > 2.0 * reach + _BESIDE) & (turned <= reach + _BESIDE),
            columns[0],
            lambda row: (
                f"{_said(places[row])} are {apart[row]:,.0f} km from the middle of the list, and "
                "among its sites the other way round. Are "
                f"{' and '.join(coordinates.names)} swapped?"
            ),
        )
        plane = kilometres(listed, units=coordinates.mapping_units)
        try:
            plane.transform(points)
        except InputDataError as error:
            row = int(apart.argmax())
            raise cells.fault(
                row,
                columns[0],
                f"{_said(places[row])} are over {REACH:,.0f} km from the middle of the list, too "
                "far for one survey. Correct the position, or drop the row.",
            ) from error
    far: Mask = np.zeros(len(places), dtype=bool)
    if len(places) >= _ENOUGH:
        far = np.asarray((_steps(places, coordinates) > FAR).any(axis=1))
    cells.refuse(
        far & (_steps(places, coordinates, places[:, ::-1]) <= _NEAR).all(axis=1),
        columns[0],
        lambda row: (
            f"{_said(places[row])} are far from all other sites, and among them the other "
            f"way round. Are {' and '.join(coordinates.names)} swapped?"
        ),
    )
    cells.refuse(
        far & (places == 0.0).all(axis=1),
        columns[0],
        "position 0, 0 is far from all other sites: a receiver without a fix? Correct it, or drop "
        "the row.",
    )
    try:
        kilometres(points, units=coordinates.mapping_units)
    except InputDataError as error:
        middle = in_space(torch.from_numpy(_middle(places, coordinates)))
        row = int((in_space(points) - middle).norm(dim=-1).argmax())
        text = f"{_said(places[row])}: {error}"
        raise cells.fault(row, columns[0], text) from error
    return remarks + [
        f"{cells.row(row)} is far from all other sites: is its position right?"
        for row in np.flatnonzero(far).tolist()
    ]


def _check_degrees(cells: Cells, places: Array, columns: tuple[str, str]) -> None:
    """Check longitudes and latitudes for their ranges."""
    row = first((~_as_degrees(places)).any(axis=1))
    if row is None:
        return
    which = int((~_as_degrees(places[row])).argmax())
    longitude, latitude = places[row]
    lengths: Mask = np.asarray((np.abs(places) > _NO_DEGREES).any(axis=1))
    if lengths[row] and lengths.mean() >= 0.5:
        units: PositionUnits = "m" if np.abs(places).max() > METRES else "km"
        advice = (
            f"It looks like {_WORDS[units]} of a projection (UTM): say "
            f"{_in_units(cells, columns, units)}."
        )
    elif lengths[row]:
        advice = "It looks like a length on a projection, where other rows have degrees."
    elif abs(longitude) <= 90.0 and -180.0 <= latitude <= 360.0:
        advice = "Are longitude and latitude swapped?"
    else:
        advice = "Correct it, or drop the row."
    span = ("-180 to 360", "-90 to 90")[which]
    text = f"expected degrees from {span}, got {places[row, which]:.10g}. {advice}"
    raise cells.fault(row, columns[which], text)


def _in_units(cells: Cells, columns: tuple[str, str], units: PositionUnits) -> str:
    """Return the options by which these columns are read in other units, named where need be."""
    try:
        usual = [find_column(cells.names, role, None, "") for role in COORDINATES[units].names]
    except UsageError:  # several could be meant
        usual = []
    options = [] if units == "degrees" else [f"--units {units}"]
    if usual != list(columns):
        options.append("--x " + " ".join(quoted(name) for name in columns))
    return " ".join(options)


def quoted(name: str) -> str:
    """Write the name of a column as a shell takes it."""
    return f'"{name}"' if re.search(r"[^\w.-]", name) else name


def _as_degrees(places: Array) -> Mask:
    """Tell of each number whether it could be a longitude, or a latitude, ``... x 2``."""
    inside: Mask = (np.array([-180.0, -90.0]) <= places) & (places <= np.array([360.0, 90.0]))
    return inside


def _check_lengths(
    cells: Cells, places: Array, columns: tuple[str, str], coordinates: Coordinates
) -> list[str]:
    """Check that positions on a projection are neither degrees nor metres given as kilometres.

    Returns:
        Remarks on units and columns that may be wrong, though they may be right.
    """
    if coordinates.units == "m" and bool(_as_degrees(places).all()):
        advice = _in_units(cells, columns, "degrees")
        raise cells.fault(
            0,
            columns[0],
            f"{_said(places[0])}, and all other positions, look like degrees, not metres of a "
            f"projection. Leave out --units{f', and say {advice}' if advice else ''}.",
        )
    row = first((np.abs(places) > METRES).any(axis=1))
    if coordinates.units == "km" and row is not None:
        which = int((np.abs(places[row]) > METRES).argmax())
        text = (
            f"{places[row, which]:.10g} km: it looks like metres. Say "
            f"{_in_units(cells, columns, 'm')}."
        )
        raise cells.fault(row, columns[which], text)

    if len(cells) < _ENOUGH:
        return []
    east, north = places.T
    span = float(np.ptp(places, axis=0).max())
    remarks = []
    if coordinates.units == "m" and span < _SMALL:
        remarks.append(
            f"All sites lie within {span:.4g} m: are positions kilometres? Then begin again with "
            "--units km."
        )
    if coordinates.units == "km" and bool(_as_degrees(places).all()):
        remarks.append(
            "All positions could be longitudes and latitudes: are they degrees? Then begin again "
            "without --units."
        )
    metres = places * (1000.0 if coordinates.units == "km" else 1.0)
    is_easting = (metres >= _EASTING[0]) & (metres <= _EASTING[1])
    if bool(is_easting[:, 1].all() & (metres[:, 0] > _EASTING[1]).all()):
        remarks.append(
            f"North is from {north.min():.10g} to {north.max():.10g}, as eastings of UTM are, and "
            f"east from {east.min():.10g} to {east.max():.10g}: are the columns swapped?"
        )
    return remarks


def _steps(places: Array, coordinates: Coordinates, of: Array | None = None) -> Array:
    """Compute distances of positions from the median, in nine-tenths quantiles of all, ``n x 2``.

    Of all positions, or of others in the same units; of longitudes the short way round.
    """
    both = np.stack((places, places if of is None else of))
    apart = np.abs(both - _middle(places, coordinates))
    if coordinates.are_degrees:
        apart[..., 0] = np.minimum(apart[..., 0] % 360.0, -apart[..., 0] % 360.0)
    scale = np.maximum(np.quantile(apart[0], 0.9, axis=0), coordinates.near)
    steps: Array = apart[1] / scale
    return steps


def _middle(places: Array, coordinates: Coordinates) -> Array:
    """Compute the median of positions; of longitudes on both sides of the date line, too."""
    turned = places.copy()
    if coordinates.are_degrees:  # within 180 degrees of their mean direction
        east = np.angle(np.exp(1j * np.radians(places[:, 0])).mean(), deg=True)
        turned[:, 0] = east + (places[:, 0] - east + 180.0) % 360.0 - 180.0
    middle: Array = np.median(turned, axis=0)
    return middle


def _said(place: Array) -> str:
    return f"{place[0]:.10g} and {place[1]:.10g}"


# --- where a list of sites lies: its box, its extent, and the countries or the sea ---------------


_COUNTRIES = Path(__file__).with_name("countries.txt")

_CELL = 0.5
"""Degrees of a cell of the table of countries."""

_MOST_NAMED = 3
"""Countries that are named."""

_ON_LAND, _BETTER = 0.5, 0.1
"""Share of the sites that are on land from which a location is plausible; share by which there are
more the other way round from which that is likelier, where not nearly all are on land as given."""

_NEARLY_ALL, _SCATTERED = 0.9, 0.7
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


def whereabouts(places: Array, coordinates: Coordinates) -> tuple[str, str]:
    """Say where sites are, for the coordinator to recognise; no network is needed.

    Args:
        places: Longitude and latitude, or east and north, ``N x 2``.
        coordinates: Their units.

    Returns:
        Ranges of both coordinates, width and height in kilometres, and the countries or the sea,
        which a map projection does not tell; and why this is unlikely to be where the sites are,
        empty if it is not.
    """
    positions = torch.from_numpy(places.copy())
    low, high = places.min(axis=0), places.max(axis=0)
    box = ", ".join(
        f"{name} {coordinates.text(start)} to {coordinates.text(end)}"
        for name, start, end in zip(coordinates.names, low, high, strict=True)
    )
    plane = kilometres(positions, units=coordinates.mapping_units).transform(positions)
    width, height = np.ptp(plane.numpy(), axis=0)
    text = f"{box}: {width:,.3g} km from west to east, {height:,.3g} km from south to north"
    if not coordinates.are_degrees:
        return text, ""
    # Where they are, and whether they are likelier to be there the other way round.
    given = _looked_up(places)
    is_scattered = given.largest < _SCATTERED and given.countries > _MOST_NAMED
    may_be_turned = bool((np.abs(places[:, 0]) <= 90.0).all())
    other = _looked_up(places[:, ::-1]) if may_be_turned else None
    likelier = other is not None and (
        (given.land < _NEARLY_ALL and other.land >= given.land + _BETTER)
        or (is_scattered and other.largest >= _NEARLY_ALL)
    )
    doubt = ""
    if given.land < _ON_LAND or likelier:
        doubt = f"{100.0 * (1.0 - given.land):.0f} % of the sites are at sea"
        if given.land >= _NEARLY_ALL:
            doubt = f"The sites are in {given.countries:,} countries"
    if other is not None and likelier:
        doubt += f"; with longitude and latitude the other way round, {other.text}"
    return f"{text}; {given.text}", doubt


class _CountryCounts(NamedTuple):
    """Number of countries that sites are in, shares on land and in the largest, most in words."""

    countries: int
    land: float
    largest: float
    text: str


def _looked_up(places: Array) -> _CountryCounts:
    """Count the sites in countries; a site at sea next to a coast counts as on land."""
    turned = places.copy()
    turned[:, 0] = (turned[:, 0] + 180.0) % 360.0 - 180.0
    cells = np.floor(turned / _CELL).astype(int)
    table, steps = _table(), ((0, 0), *product((-1, 0, 1), repeat=2))  # its own cell first
    countries: Counter[str] = Counter()
    seas: Counter[str] = Counter()
    for (column, row), (longitude, latitude) in zip(cells.tolist(), turned.tolist(), strict=True):
        around = (table.get((row + up, column + right)) for up, right in steps)
        name = next((one for one in around if one is not None), None)
        if name is None:
            inside = (
                sea
                for sea, west, south, east, north in _SEAS
                if west <= longitude <= east and south <= latitude <= north
            )
            seas[next(inside, "the Pacific Ocean")] += 1
        else:
            countries[name] += 1
    both, total = (countries + seas).most_common(), len(places)
    named = ", ".join(
        f"{name} ({100.0 * count / total:.0f} %)" if len(both) > 1 else name
        for name, count in both[:_MOST_NAMED]
    )
    more = f" and {len(both) - _MOST_NAMED} more" if len(both) > _MOST_NAMED else ""
    largest = max(countries.values(), default=0)
    return _CountryCounts(
        len(countries), countries.total() / total, largest / total, f"roughly in {named}{more}"
    )


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
