"""Positions in kilometres from longitude and latitude.

The map is Lambert's azimuthal equal-area projection about the middle of the sites [Snyder, 1987,
Map Projections: A Working Manual, eq. 24-2 to 24-4]. Two columns stay two, as a grid of positions
needs, where chords in three dimensions would need a third; the middle of the sites is taken on the
sphere, so that neither a pole nor the date line is special. At c radians from the middle lengths
are wrong by the factor cos(c / 2): 0.3 % at 1,000 km, 7.6 % at 5,000 km, beyond which it refuses.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from botorch.exceptions.errors import InputDataError
from botorch.models.transforms.input import AffineInputTransform, InputTransform
from torch import Tensor

Units = Literal["degrees", "kilometres", "metres"]
"""Of positions: longitude and latitude, or east and north on a map projection, such as UTM."""

_LENGTHS = {"kilometres": 1.0, "metres": 1000.0}

RADIUS = 6371.0088
"""Mean radius of the Earth, in kilometres."""

REACH = 5000.0
"""Largest distance from the middle of the sites, in kilometres."""


class Kilometres(InputTransform):
    """Replace longitude and latitude in degrees by kilometres east and north of a centre.

    Other columns stay. The image of a box of degrees is no box: a model that covers a box (WISKI)
    chooses it from the inputs, without ``bounds``.

    Attributes:
        centre: Longitude and latitude of the point that becomes (0, 0), in degrees.
        position: Columns of longitude and latitude.
    """

    centre: Tensor

    def __init__(self, centre: tuple[float, float], position: tuple[int, int] = (0, 1)) -> None:
        super().__init__()
        self.register_buffer("centre", torch.tensor(centre, dtype=torch.float64))
        self.position = position
        self.transform_on_train = self.transform_on_eval = self.transform_on_fantasize = True

    def transform(self, X: Tensor) -> Tensor:
        """Map ``... x n x d`` inputs.

        Raises:
            InputDataError: Positions are not in degrees, or over 5,000 km from the centre.
        """
        check_degrees(X, self.position)
        longitude, latitude = (torch.deg2rad(X[..., column]) for column in self.position)
        east, north = torch.deg2rad(self.centre.to(X)).unbind()
        turn = longitude - east
        cosine = north.sin() * latitude.sin() + north.cos() * latitude.cos() * turn.cos()
        if bool((cosine < math.cos(REACH / RADIUS)).any()):
            raise InputDataError(
                f"Expected sites within {REACH:,.0f} km of their middle, longitude and latitude "
                f"{self.centre.tolist()}, got one that is farther away. Model continents apart."
            )
        scale = RADIUS * (2.0 / (1.0 + cosine)).sqrt()
        x = scale * latitude.cos() * turn.sin()
        y = north.cos() * latitude.sin() - north.sin() * latitude.cos() * turn.cos()
        columns = list(X.unbind(-1))
        columns[self.position[0]], columns[self.position[1]] = x, scale * y
        return torch.stack(columns, -1)


def kilometres(
    sites: Tensor, position: tuple[int, int] = (0, 1), units: Units = "degrees"
) -> InputTransform:
    """Make the input transform of positions to kilometres about the middle of the sites.

    Args:
        sites: ``... x n x d``, all that are to be mapped.
        position: Columns of longitude and latitude, or of east and north.
        units: ``"degrees"``, or ``"kilometres"`` or ``"metres"`` on a map projection.

    Raises:
        InputDataError: Positions are not in these units, or reach farther than 5,000 km from their
            middle.
        ValueError: The units are none of these.
    """
    check_positions(sites, position, units)
    if units == "degrees":
        return projection(sites, position)
    columns, length = list(position), torch.full((2,), _LENGTHS[units]).to(sites)
    positions = sites[..., columns].flatten(0, -2)
    middle = positions.mean(0)
    farthest = float(((positions - middle) / length).norm(dim=-1).max())
    if farthest > REACH:
        raise InputDataError(
            f"Expected sites within {REACH:,.0f} km of their middle, got one {farthest:,.0f} km "
            f"away with units={units!r}. Are the units others? Else model continents apart."
        )
    return AffineInputTransform(sites.shape[-1], length, middle, indices=columns)


def projection(sites: Tensor, position: tuple[int, int] = (0, 1)) -> Kilometres:
    """Make the input transform from degrees to kilometres about the middle of the sites.

    Args:
        sites: ``... x n x d``, all that are to be mapped.
        position: Columns of longitude and latitude, in degrees.

    Raises:
        InputDataError: Positions are not in degrees, or reach farther than 5,000 km from their
            middle.
    """
    check_degrees(sites, position)
    x, y, z = _on_sphere(sites, position).flatten(0, -2).mean(0).tolist()
    centre = math.degrees(math.atan2(y, x)), math.degrees(math.atan2(z, math.hypot(x, y)))
    transform = Kilometres(centre, position)
    transform.transform(sites)
    return transform


def places(X: Tensor, position: tuple[int, int], units: Units) -> Tensor:
    """Compute positions in kilometres whose distances have the order of those along the ground.

    In space, ``... x n x d -> ... x n x 3``, or on a map projection, ``... x n x 2``.
    """
    if units == "degrees":
        return RADIUS * _on_sphere(X, position)
    return X[..., list(position)].double() / _LENGTHS[units]


def _on_sphere(X: Tensor, position: tuple[int, int]) -> Tensor:
    longitude, latitude = (torch.deg2rad(X[..., column].double()) for column in position)
    across = latitude.cos()
    return torch.stack((across * longitude.cos(), across * longitude.sin(), latitude.sin()), -1)


def check_positions(X: Tensor, position: tuple[int, int], units: Units) -> None:
    """Check two columns: degrees by :func:`check_degrees`, others that they are finite.

    Raises:
        InputDataError: They are not.
        ValueError: The units are unknown.
    """
    if units == "degrees":
        check_degrees(X, position)
        return
    if units not in _LENGTHS:
        raise ValueError(
            f"Expected units to be 'degrees', 'kilometres' or 'metres', got {units!r}."
        )
    _check_columns(X, position, "east and north")


def check_degrees(X: Tensor, position: tuple[int, int]) -> None:
    """Check that two columns are longitudes, -180 to 360, and latitudes, -90 to 90.

    Columns that are swapped are noticed where a longitude is no latitude; of sites near the
    Greenwich meridian and the equator the values do not tell.

    Raises:
        InputDataError: They are not.
    """
    longitude, latitude = _check_columns(X, position, "longitude and latitude")
    if _fits(longitude, latitude):
        return
    found = (
        f"{float(longitude.min()):.6g} to {float(longitude.max()):.6g} and "
        f"{float(latitude.min()):.6g} to {float(latitude.max()):.6g}"
    )
    if _fits(latitude, longitude):
        advice = f"They are swapped: pass position={position[::-1]}."
    elif float(torch.maximum(longitude.abs().max(), latitude.abs().max())) > 1000.0:
        advice = "These look like metres of a map projection: pass units='metres'."
    else:
        advice = "Correct those rows."
    raise InputDataError(
        "Expected longitudes from -180 to 360 and latitudes from -90 to 90 degrees in columns "
        f"{position}, got {found}. {advice}"
    )


def _fits(longitude: Tensor, latitude: Tensor) -> bool:
    inside = (longitude >= -180.0) & (longitude <= 360.0) & (latitude.abs() <= 90.0)
    return bool(inside.all())


def _check_columns(X: Tensor, position: tuple[int, int], names: str) -> tuple[Tensor, Tensor]:
    """Check that two columns are there and finite, and return them."""
    if max(position) >= X.shape[-1] or min(position) < 0 or position[0] == position[1]:
        raise InputDataError(
            f"Expected position to be two columns of the {X.shape[-1]} of the sites, {names}, "
            f"got {position}."
        )
    first, second = (X[..., column].detach() for column in position)
    if not bool((first.isfinite() & second.isfinite()).all()):
        raise InputDataError(
            f"Expected {names}, columns {position}, of every site, got NaN or "
            "infinity. Drop those rows."
        )
    return first, second
