"""Positions of a table's sites: their columns, and slips that show in the values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from botorch.exceptions.errors import InputDataError

from bo_stream.loops.survey.cells import Array, Cells, Mask, first
from bo_stream.loops.survey.columns import find_column, given_column, required_column
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.mapping import kilometres

FAR = 5.0
"""Distance from the middle, in nine-tenths quantiles of such distances, from which it is odd."""

NEAR = 2.0
"""Such a distance up to which a position that was turned round is among the others."""

ENOUGH = 10
"""Number of sites from which they show where the others are."""


def position_columns(
    names: Sequence[str], settings: SurveySettings, source: str
) -> tuple[str, str]:
    """Find the columns of longitude and latitude.

    Raises:
        UsageError: There are none, or several that could be meant.
    """
    if settings.x is not None:
        longitude, latitude = (given_column(names, name, source, "--x") for name in settings.x)
        return longitude, latitude
    free = settings.unclaimed(names)
    longitude, latitude = (
        required_column(free, role, None, source) for role in ("longitude", "latitude")
    )
    return longitude, latitude


def position_columns_if_any(cells: Cells, settings: SurveySettings) -> tuple[str, str] | None:
    """Find the columns of longitude and latitude, None unless both are there.

    The settings' names need not be those of every table.

    Raises:
        UsageError: Several could be meant.
    """
    names = settings.unclaimed(cells.names)
    if settings.x is not None and set(settings.x) <= set(names):
        return settings.x
    longitude, latitude = (
        find_column(names, role, None, cells.source) for role in ("longitude", "latitude")
    )
    return None if longitude is None or latitude is None else (longitude, latitude)


def check_places(cells: Cells, places: Array, columns: tuple[str, str]) -> list[str]:
    """Check that positions are there, in degrees, the right way round, and of one region.

    Args:
        cells: The table, n rows.
        places: Longitude and latitude, NaN where missing, ``n x 2``.
        columns: Names of their columns.

    Returns:
        Remarks on positions that are odd but may be right.

    Raises:
        UsageError: A position is missing, in metres, swapped, or too far from the others.
    """
    _check_degrees(cells, places, columns)
    far = _far_away(places)
    _check_slips(cells, places, columns, far)
    try:
        kilometres(torch.from_numpy(places))
    except InputDataError as error:
        row = int(_steps(places).max(axis=1).argmax())
        text = f"{_said(places[row])}: {error}"
        raise cells.fault(row, columns[0], text) from error
    return [
        f"{cells.row(row)} is far from all other sites: is its position right?"
        for row in np.flatnonzero(far).tolist()
    ]


def _check_degrees(cells: Cells, places: Array, columns: tuple[str, str]) -> None:
    gap = first(np.isnan(places).any(axis=1))
    if gap is not None:
        column = columns[int(np.isnan(places[gap]).argmax())]
        raise cells.fault(gap, column, "it is empty. Every site needs a position.")
    outside = np.column_stack(
        ((places[:, 0] < -180.0) | (places[:, 0] > 360.0), np.abs(places[:, 1]) > 90.0)
    )
    row = first(outside.any(axis=1))
    if row is None:
        return
    which = int(outside[row].argmax())
    longitude, latitude = places[row]
    if np.abs(places[row]).max() > 1000.0:
        advice = "It looks like metres of a projection (UTM): convert to degrees."
    elif abs(longitude) <= 90.0 and -180.0 <= latitude <= 360.0:
        advice = "Are longitude and latitude swapped?"
    else:
        advice = "Correct it, or drop the row."
    span = ("-180 to 360", "-90 to 90")[which]
    text = f"expected degrees from {span}, got {places[row, which]:.10g}. {advice}"
    raise cells.fault(row, columns[which], text)


def _check_slips(cells: Cells, places: Array, columns: tuple[str, str], far: Mask) -> None:
    """Check for two usual reasons of a position far from all others."""
    turned = first(far & (_steps(places, places[:, ::-1]) <= NEAR).all(axis=1))
    if turned is not None:
        raise cells.fault(
            turned,
            columns[0],
            f"{_said(places[turned])} are far from all other sites, and among them the other way "
            "round. Are longitude and latitude swapped?",
        )
    nowhere = first(far & (places == 0.0).all(axis=1))
    if nowhere is not None:
        raise cells.fault(
            nowhere,
            columns[0],
            "position 0, 0 is far from all other sites: a receiver without a fix? Correct it, or "
            "drop the row.",
        )


def _far_away(places: Array) -> Mask:
    if len(places) < ENOUGH:
        return np.zeros(len(places), dtype=bool)
    return np.asarray((_steps(places) > FAR).any(axis=1))


def _steps(places: Array, of: Array | None = None) -> Array:
    """Compute distances of positions from the median, in nine-tenths quantiles of all, ``n x 2``.

    Of all positions, or of others in the same units.
    """
    middle = np.median(places, axis=0)
    scale = np.maximum(np.quantile(_apart(places, middle), 0.9, axis=0), 0.05)
    steps: Array = _apart(places if of is None else of, middle) / scale
    return steps


def _apart(places: Array, middle: Array) -> Array:
    """Compute differences in degrees, of longitudes the short way round, ``n x 2``."""
    apart: Array = np.abs(places - middle)
    apart[:, 0] = np.minimum(apart[:, 0] % 360.0, -apart[:, 0] % 360.0)
    return apart


def _said(place: Array) -> str:
    return f"{place[0]:g} and {place[1]:g}"
