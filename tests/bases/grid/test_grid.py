"""Where nodes lie, what they weigh, and how a grid grows."""

from __future__ import annotations

import pytest
import torch
from gpytorch.utils.interpolation import Interpolation
from torch import Tensor

from bo_stream.bases.grid.mesh import EDGE, Grid
from bo_stream.testing.streams import assert_close
from tests.oracles.interpolation import grid_nodes, line_weights
from tests.support.problems.grids import mesh_of, mesh_over

BOUNDS = torch.tensor([[-1.0, 2.0], [1.0, 5.0]], dtype=torch.float64)
SIZES = (8, 6)


@pytest.fixture
def grid() -> Grid:
    return Grid.over(BOUNDS, SIZES)


def points(n: int) -> Tensor:
    """Uniform points in the box, and its corners."""
    inside = BOUNDS[0] + (BOUNDS[1] - BOUNDS[0]) * torch.rand(n, 2, dtype=torch.float64)
    return torch.cat((BOUNDS, inside))


def test_nodes_tile_the_box_and_pad_it(grid: Grid) -> None:
    assert grid.size == SIZES
    assert_close(grid.bounds, BOUNDS)
    for i in range(2):
        assert_close(grid.nodes(i), grid_nodes(*BOUNDS[:, i].tolist(), SIZES[i]))


@pytest.mark.parametrize("dimension", [0, 1])
def test_weights_are_the_oracles(grid: Grid, dimension: int) -> None:
    x = points(20)[:, dimension]
    expected = line_weights(x, *BOUNDS[:, dimension].tolist(), SIZES[dimension])
    assert_close(grid.interpolation_matrix(dimension, x), expected)


@pytest.mark.filterwarnings("ignore:torch.sparse")
def test_weights_are_gpytorchs(grid: Grid) -> None:
    X = points(20)
    nodes = [grid.nodes(i) for i in range(2)]
    index, values = Interpolation().interpolate(nodes, X)
    witness = torch.zeros(len(X), SIZES[0] * SIZES[1]).double().scatter_add(-1, index, values)
    lines = [grid.interpolation_matrix(i, X[:, i]) for i in range(2)]
    assert_close((lines[0].unsqueeze(-1) * lines[1].unsqueeze(-2)).flatten(-2), witness)


def test_weights_have_the_derivative_of_the_oracles(grid: Grid) -> None:
    x = points(20)[2:, 0].requires_grad_()
    values = torch.randn(SIZES[0], dtype=torch.float64)
    (actual,) = torch.autograd.grad((grid.interpolation_matrix(0, x) @ values).sum(), x)
    (expected,) = torch.autograd.grad((line_weights(x, -1.0, 1.0, SIZES[0]) @ values).sum(), x)
    assert_close(actual, expected)


def test_located_points_are_in_their_cells(grid: Grid) -> None:
    X = points(50)
    cell, t = grid.locate(X)
    spacing = torch.tensor(grid.spacing, dtype=torch.float64)
    assert bool(((cell >= 0) & (cell < torch.tensor(grid.cells))).all())
    assert bool(((t >= 0) & (t <= 1)).all())
    assert_close(BOUNDS[0] + (cell + t) * spacing, X)


@pytest.mark.parametrize(
    ("point", "below", "above"),
    [
        ((0.0, 3.0), (0, 0), (0, 0)),
        ((-1.0, 5.0), (0, 0), (0, 0)),
        ((-1.01, 3.0), (1, 0), (0, 0)),
        ((0.0, 5.0 + 2.5), (0, 0), (0, 3)),
        ((1.4, 1.0), (0, 1), (1, 0)),
    ],
)
def test_grows_by_the_whole_cells_that_are_missing(
    grid: Grid, point: tuple[float, float], below: tuple[int, int], above: tuple[int, int]
) -> None:
    X = torch.tensor([point], dtype=torch.float64)
    mesh = mesh_of(grid).grown_to(X)
    (larger,) = mesh.parts
    assert mesh_of(grid).contains(X) == (below == above == (0, 0))
    assert mesh.contains(X)
    assert mesh.contains(BOUNDS)
    assert grid.offset_in(larger) == below
    for i in range(2):
        assert larger.cells[i] == below[i] + grid.cells[i] + above[i]
        window = slice(below[i], below[i] + SIZES[i])
        assert_close(larger.nodes(i)[window], grid.nodes(i))


@pytest.mark.parametrize(
    ("bounds", "sizes"),
    [
        ([[-1.0, 2.0], [1.0, 5.0]], (9, 6)),
        ([[-1.1, 2.0], [0.9, 5.0]], SIZES),
        ([[-0.6, 2.0], [1.0, 5.0]], (7, 6)),
    ],
    ids=["other spacing", "other origin", "smaller"],
)
def test_has_no_place_in_a_grid_without_its_nodes(
    grid: Grid, bounds: list[list[float]], sizes: tuple[int, int]
) -> None:
    assert grid.offset_in(Grid.over(torch.tensor(bounds).double(), sizes)) is None


def test_no_points_are_inside(grid: Grid) -> None:
    assert mesh_of(grid).contains(torch.empty(0, 2))


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_a_rounding_error_outside_is_inside(grid: Grid, side: float) -> None:
    edge = BOUNDS[0] if side < 0 else BOUNDS[1]
    spacing = torch.tensor(grid.spacing, dtype=torch.float64)
    assert mesh_of(grid).contains((edge + side * 0.5 * EDGE * spacing).unsqueeze(0))
    assert not mesh_of(grid).contains((edge + side * 2.0 * EDGE * spacing).unsqueeze(0))


@pytest.mark.parametrize(("below", "place"), [(-1, None), (0, 0), (2, 2), (3, None)])
def test_has_a_place_in_a_grid_only_where_it_fits(below: int, place: int | None) -> None:
    small = Grid((0.5 * below,), (0.5,), (4,))
    expected = None if place is None else (place,)
    assert small.offset_in(Grid((0.0,), (0.5,), (6,))) == expected


def test_a_box_in_single_precision_has_the_nodes_of_the_one_that_was_rounded() -> None:
    grid = mesh_of(Grid((3.1, -700.3), (0.01, 7.7), (9, 30)))
    rounded = mesh_over(grid.bounds.float().double(), grid.parts[0].size)
    part = rounded.grown_to(rounded.bounds + 0.5)
    assert rounded != grid
    assert rounded.aligned(grid, torch.finfo(torch.float32).eps) == grid
    assert rounded.aligned(grid, torch.finfo(torch.float64).eps) == rounded
    assert part.aligned(grid, torch.finfo(torch.float32).eps) == grid.grown_to(grid.bounds + 0.5)


@pytest.mark.parametrize(
    "other",
    [Grid((0.001,), (0.5,), (4,)), Grid((0.0,), (0.501,), (4,)), Grid((0.25,), (0.5,), (4,))],
)
def test_other_nodes_stay_their_own(other: Grid) -> None:
    assert other.aligned_to(Grid((0.0,), (0.5,), (4,)), torch.finfo(torch.float32).eps) == other
