"""Kilometres from degrees, against the haversine formula."""

from __future__ import annotations

import math

import pytest
import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from bo_stream.mapping import Kilometres, kilometres


def haversine(a: Tensor, b: Tensor) -> Tensor:
    """Distances along the sphere, ``n x 2 -> n``, in kilometres."""
    (lon_a, lat_a), (lon_b, lat_b) = (torch.deg2rad(X).unbind(-1) for X in (a, b))
    half = ((lat_b - lat_a) / 2).sin() ** 2
    half = half + lat_a.cos() * lat_b.cos() * ((lon_b - lon_a) / 2).sin() ** 2
    return 2.0 * 6371.0088 * half.sqrt().asin()


def sites(longitude: float, latitude: float, n: int = 40) -> Tensor:
    """Sites within 1.5 degrees of latitude and as many kilometres of longitude."""
    spread = 2.0 * torch.rand(n, 2, dtype=torch.float64) - 1.0
    wide = 1.5 / math.cos(math.radians(latitude))
    east = (longitude + wide * spread[:, 0] + 180.0) % 360.0 - 180.0
    return torch.stack((east, latitude + 1.5 * spread[:, 1]), -1)


@pytest.mark.parametrize("place", [(35.0, -6.0), (-5.3, 7.4), (180.0, -17.0), (20.0, 78.0)])
def test_distances_are_those_along_the_sphere(place: tuple[float, float]) -> None:
    X = sites(*place)
    km = kilometres(X).transform(X)
    exact = haversine(X[:20], X[20:])
    found = (km[:20] - km[20:]).norm(dim=-1)
    assert float((found / exact - 1.0).abs().max()) < 1e-3  # cos(c / 2), c under 350 km


def test_about_the_pole_and_from_0_to_360_degrees() -> None:
    X = torch.tensor([[0.0, 89.0], [90.0, 89.0], [180.0, 89.0], [-90.0, 89.0]]).double()
    km = kilometres(X).transform(X)
    assert float((km[0] - km[2]).norm()) == pytest.approx(float(haversine(X[0], X[2])), rel=1e-3)
    turned = torch.where(X < 0.0, X + torch.tensor([360.0, 0.0]).double(), X)
    torch.testing.assert_close(kilometres(X).transform(turned), km)


def test_other_columns_stay_and_gradients_flow() -> None:
    X = torch.cat((torch.rand(5, 1).double(), sites(35.0, -6.0, 5)), -1).requires_grad_()
    transform = kilometres(X.detach(), position=(1, 2))
    km = transform(X)
    assert torch.equal(km[:, 0], X[:, 0])
    assert torch.autograd.gradcheck(transform, X)


@pytest.mark.parametrize(
    ("position", "says"),
    [
        ([[-6.0, 135.0], [-7.0, 136.0]], "swapped: pass position=.1, 0."),
        ([[500_000.0, 9_300_000.0], [510_000.0, 9_310_000.0]], "metres"),
        ([[435.0, 7.0], [35.0, -6.0]], "Correct those rows"),
        ([[35.0, math.nan], [35.0, -6.0]], "Drop those rows"),
        ([[-90.0, 0.0], [90.0, 1.0]], "farther away"),
    ],
)
def test_what_is_no_position_in_degrees_is_named(position: list[list[float]], says: str) -> None:
    with pytest.raises(InputDataError, match=says):
        kilometres(torch.tensor(position).double())


def test_columns_that_are_not_there_are_refused() -> None:
    with pytest.raises(InputDataError, match="two columns"):
        kilometres(sites(0.0, 0.0), position=(0, 2))


def test_transforms_of_other_columns_are_not_equal() -> None:
    one, other = Kilometres((35.0, -6.0)), Kilometres((35.0, -6.0), (1, 0))
    assert one.equals(Kilometres((35.0, -6.0)))
    assert not one.equals(other)
    assert not one.equals(Kilometres((35.0, -7.0)))
