"""Positions of a table's sites: their columns, and slips that show in the values."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import Array, Cells, Mask, first
from bo_stream.loops.survey.columns import find_column, given_column, required_column
from bo_stream.loops.survey.coordinates import DEGREES, Coordinates, PositionUnits
from bo_stream.loops.survey.settings import SurveySettings

FAR = 5.0
"""Distance from the middle, in nine-tenths quantiles of such distances, from which it is odd."""

NEAR = 2.0
"""Such a distance up to which a position that was turned round is among the others."""

ENOUGH = 10
"""Number of sites from which they show where the others are."""

NO_DEGREES = 1000.0
"""Number of a position from which it is a length on a projection, and no slip in a degree."""

_WORDS: dict[PositionUnits, str] = {"km": "kilometres", "m": "metres"}

METRES = 100_000.0
"""Number of a position from which it is no kilometre of any projection."""

SMALL = 1000.0
"""Extent of all sites, in metres, below which they may be kilometres."""

EASTING = (100_000.0, 900_000.0)
"""Eastings of UTM, in metres, within its zones."""


def position_columns(
    names: Sequence[str], settings: SurveySettings, source: str
) -> tuple[str, str]:
    """Find the columns of longitude and latitude, or of east and north.

    Raises:
        UsageError: There are none, or several that could be meant.
    """
    if settings.x is not None:
        first_column, second = (given_column(names, name, source, "--x") for name in settings.x)
        return first_column, second
    free = settings.unclaimed(names)
    first_column, second = (
        required_column(free, role, None, source) for role in settings.coordinates.names
    )
    return first_column, second


def position_columns_if_any(cells: Cells, settings: SurveySettings) -> tuple[str, str] | None:
    """Find the columns of positions, None unless both are there.

    The settings' names need not be those of every table.

    Raises:
        UsageError: Several could be meant.
    """
    names = settings.unclaimed(cells.names)
    if settings.x is not None and set(settings.x) <= set(names):
        return settings.x
    first_column, second = (
        find_column(names, role, None, cells.source) for role in settings.coordinates.names
    )
    return None if first_column is None or second is None else (first_column, second)


def check_places(
    cells: Cells, places: Array, columns: tuple[str, str], coordinates: Coordinates = DEGREES
) -> list[str]:
    """Check that positions are there, in their units, the right way round, and of one region.

    Args:
        cells: The table, n rows.
        places: Longitude and latitude, or east and north, NaN where missing, ``n x 2``.
        columns: Names of their columns.
        coordinates: Their units.

    Returns:
        Remarks on positions that are odd but may be right.

    Raises:
        UsageError: A position is missing, in other units, swapped, or too far from the others.
    """
    gap = first(np.isnan(places).any(axis=1))
    if gap is not None:
        column = columns[int(np.isnan(places[gap]).argmax())]
        raise cells.fault(gap, column, "it is empty. Every site needs a position.")
    if coordinates.are_degrees:
        _check_degrees(cells, places, columns)
    else:
        _check_lengths(cells, places, columns, coordinates)
    far = _far_away(places, coordinates)
    _check_slips(cells, places, columns, far, coordinates)
    try:
        coordinates.plane(torch.from_numpy(places))
    except InputDataError as error:
        row = int(_steps(places, coordinates).max(axis=1).argmax())
        text = f"{_said(places[row])}: {error}"
        raise cells.fault(row, columns[0], text) from error
    remarks = [] if coordinates.are_degrees else _odd_lengths(cells, places, coordinates)
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
    lengths: Mask = np.asarray((np.abs(places) > NO_DEGREES).any(axis=1))
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
    roles = Coordinates(units).names
    own = tuple(_usual_column(cells.names, role) for role in roles)
    options = [] if units == "degrees" else [f"--units {units}"]
    if own != columns:
        options.append("--x " + " ".join(quoted(name) for name in columns))
    return " ".join(options)


def _usual_column(names: Sequence[str], role: str) -> str | None:
    """Find the column with a meaning by its usual names, None if there is none or several."""
    try:
        return find_column(names, role, None, "")
    except UsageError:
        return None


def quoted(name: str) -> str:
    """Write the name of a column as a shell takes it."""
    return f'"{name}"' if re.search(r"[^\w.-]", name) else name


def _as_degrees(places: Array) -> Mask:
    """Tell of each number whether it could be a longitude, or a latitude, ``... x 2``."""
    inside: Mask = (np.array([-180.0, -90.0]) <= places) & (places <= np.array([360.0, 90.0]))
    return inside


def _check_lengths(
    cells: Cells, places: Array, columns: tuple[str, str], coordinates: Coordinates
) -> None:
    """Check that positions on a projection are neither degrees nor metres given as kilometres."""
    if coordinates.units == "m":
        if bool(_as_degrees(places).all()):
            advice = _in_units(cells, columns, "degrees")
            raise cells.fault(
                0,
                columns[0],
                f"{_said(places[0])}, and all other positions, look like degrees, not metres of a "
                f"projection. Leave out --units{f', and say {advice}' if advice else ''}.",
            )
        return
    row = first((np.abs(places) > METRES).any(axis=1))
    if row is not None:
        which = int((np.abs(places[row]) > METRES).argmax())
        text = (
            f"{places[row, which]:.10g} km: it looks like metres. Say "
            f"{_in_units(cells, columns, 'm')}."
        )
        raise cells.fault(row, columns[which], text)


def _odd_lengths(cells: Cells, places: Array, coordinates: Coordinates) -> list[str]:
    """Remark on units and columns of a projection that may be wrong, though they may be right."""
    if len(cells) < ENOUGH:
        return []
    east, north = places.T
    span = float(np.ptp(places, axis=0).max())
    remarks = []
    if coordinates.units == "m" and span < SMALL:
        remarks.append(
            f"All sites lie within {span:.4g} m: are positions kilometres? Then begin anew with "
            "--units km."
        )
    if coordinates.units == "km" and bool(_as_degrees(places).all()):
        remarks.append(
            "All positions could be longitudes and latitudes: are they degrees? Then begin anew "
            "without --units."
        )
    metres = places * (1000.0 if coordinates.units == "km" else 1.0)
    is_easting = (metres >= EASTING[0]) & (metres <= EASTING[1])
    if bool(is_easting[:, 1].all() & (metres[:, 0] > EASTING[1]).all()):
        remarks.append(
            f"North is from {north.min():.10g} to {north.max():.10g}, as eastings of UTM are, and "
            f"east from {east.min():.10g} to {east.max():.10g}: are the columns swapped?"
        )
    return remarks


def _check_slips(
    cells: Cells, places: Array, columns: tuple[str, str], far: Mask, coordinates: Coordinates
) -> None:
    """Check for two usual reasons of a position far from all others."""
    turned = first(far & (_steps(places, coordinates, places[:, ::-1]) <= NEAR).all(axis=1))
    if turned is not None:
        raise cells.fault(
            turned,
            columns[0],
            f"{_said(places[turned])} are far from all other sites, and among them the other way "
            f"round. Are {' and '.join(coordinates.names)} swapped?",
        )
    nowhere = first(far & (places == 0.0).all(axis=1))
    if nowhere is not None:
        raise cells.fault(
            nowhere,
            columns[0],
            "position 0, 0 is far from all other sites: a receiver without a fix? Correct it, or "
            "drop the row.",
        )


def _far_away(places: Array, coordinates: Coordinates) -> Mask:
    if len(places) < ENOUGH:
        return np.zeros(len(places), dtype=bool)
    return np.asarray((_steps(places, coordinates) > FAR).any(axis=1))


def _steps(places: Array, coordinates: Coordinates, of: Array | None = None) -> Array:
    """Compute distances of positions from the median, in nine-tenths quantiles of all, ``n x 2``.

    Of all positions, or of others in the same units.
    """
    middle = np.median(places, axis=0)
    apart = _apart(places, middle, coordinates)
    scale = np.maximum(np.quantile(apart, 0.9, axis=0), coordinates.near)
    steps: Array = _apart(places if of is None else of, middle, coordinates) / scale
    return steps


def _apart(places: Array, middle: Array, coordinates: Coordinates) -> Array:
    """Compute differences from a position, of longitudes the short way round, ``n x 2``."""
    apart: Array = np.abs(places - middle)
    if coordinates.are_degrees:
        apart[:, 0] = np.minimum(apart[:, 0] % 360.0, -apart[:, 0] % 360.0)
    return apart


def _said(place: Array) -> str:
    return f"{place[0]:.10g} and {place[1]:.10g}"
