"""Columns of a survey's tables by their usual names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bo_stream.errors import UsageError


@dataclass(frozen=True)
class Role:
    """A meaning that a column can have.

    Attributes:
        name: Name that a column with this meaning should have; it goes before the others.
        meaning: What its cells are, for messages.
        others: Further usual names, normalised.
        option: Option of the command that says which column it is.
    """

    name: str
    meaning: str
    others: tuple[str, ...]
    option: str


ROLES = {
    role.name: role
    for role in (
        Role(
            "id",
            "ids",
            (
                "site", "village", "cluster", "cluster_number", "cluster_id", "site_id",
                "village_id", "cluster_no", "site_no", "site_number", "code", "site_code",
                "village_code", "ea", "identifier", "uid",
            ),
            "--id",
        ),
        Role(
            "longitude",
            "longitudes",
            (
                "lon", "long", "lng", "x", "gps_longitude", "gps_lon", "lon_dd", "long_dd",
                "x_coord", "decimal_longitude", "longitud", "longnum",
            ),
            "--x",
        ),
        Role(
            "latitude",
            "latitudes",
            (
                "lat", "y", "gps_latitude", "gps_lat", "lat_dd", "y_coord", "decimal_latitude",
                "latitud", "latnum",
            ),
            "--x",
        ),
        Role(
            "east",
            "eastings",
            (
                "easting", "eastings", "x", "x_coord", "coord_x", "utm_e", "utm_x", "utm_east",
                "utm_easting", "x_utm", "east_m", "easting_m", "x_m", "east_km", "x_km",
            ),
            "--x",
        ),
        Role(
            "north",
            "northings",
            (
                "northing", "northings", "y", "y_coord", "coord_y", "utm_n", "utm_y", "utm_north",
                "utm_northing", "y_utm", "north_m", "northing_m", "y_m", "north_km", "y_km",
            ),
            "--x",
        ),
        Role(
            "examined",
            "people examined",
            (
                "n", "tested", "ex", "number_examined", "number_tested", "n_examined", "n_tested",
                "total_examined", "total_tested", "no_examined", "no_tested", "examinees",
                "denominator",
            ),
            "--examined",
        ),
        Role(
            "positive",
            "people who tested positive",
            (
                "positives", "pos", "pf", "cases", "number_positive", "n_positive", "n_positives",
                "no_positive", "total_positive", "pf_pos", "pf_positive", "numerator",
            ),
            "--positive",
        ),
    )
}  # fmt: skip
"""Meanings by name."""

_RATE = re.compile(r"(pf_?)?(pr|rate|percent|per_cent|positivity)([\d_].*)?|.*prevalence.*")


def normalised(name: str) -> str:
    """Reduce a column's name to small letters, digits and single underscores, without its unit.

    As in ``Longitude (deg)``, which becomes ``longitude``.
    """
    bare = re.sub(r"[(\[].*?[)\]]", " ", name.casefold())
    return re.sub(r"[^a-z0-9]+", "_", bare).strip("_")


def find_column(names: Sequence[str], role: str, given: str | None, source: str) -> str | None:
    """Find the column with a meaning, None if there is none.

    Args:
        names: Of the columns.
        role: A name in ``ROLES``.
        given: Name that the user said; None: by the usual names.
        source: Name of the table, for messages.

    Raises:
        UsageError: The given column is not there, or two could be meant.
    """
    if given is not None:
        return given_column(names, given, source, ROLES[role].option)
    same = [name for name in names if normalised(name) == role]
    found = same or [name for name in names if normalised(name) in ROLES[role].others]
    if len(found) > 1:
        listed = ", ".join(repr(name) for name in found)
        raise UsageError(
            f"{source}: columns {listed} could each be that of {ROLES[role].meaning}. Say which by "
            f"{ROLES[role].option}, or rename one {role!r}."
        )
    return found[0] if found else None


def required_column(names: Sequence[str], role: str, given: str | None, source: str) -> str:
    """Find the column with a meaning; arguments as :func:`find_column`.

    Raises:
        UsageError: There is none, or two could be meant.
    """
    found = find_column(names, role, given, source)
    if found is not None:
        return found
    advice = f"Name it {role!r}, or say which it is by {ROLES[role].option}."
    if role == "positive" and has_rate(names):
        rate = next(name for name in names if has_rate([name]))
        advice = (
            f"Column {rate!r} looks like a prevalence: the number of people who tested "
            "positive is needed instead, in a column 'positive'."
        )
    east = None if role != "longitude" else find_column(names, "east", None, source)
    if east is not None:
        advice = f"Column {east!r} looks like that of a map projection: say --units m, or km."
    raise UsageError(
        f"{source} has no column of {ROLES[role].meaning}. Its columns: {', '.join(names)}. "
        f"{advice}"
    )


def has_rate(names: Sequence[str]) -> bool:
    """Return whether a column's name is a usual one of prevalences."""
    return any(_RATE.fullmatch(normalised(name)) for name in names)


def given_column(names: Sequence[str], given: str, source: str, option: str) -> str:
    """Return the name of a column that the user said.

    Raises:
        UsageError: There is no such column.
    """
    if given not in names:
        raise UsageError(
            f"{source} has no column {given!r}, which {option} names. Its columns: "
            f"{', '.join(names)}."
        )
    return given
