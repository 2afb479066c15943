"""Points for gradient checks lie away from kinks, whatever is drawn."""

from __future__ import annotations

import pytest
import torch

from bo_stream import WISKI
from bo_stream.testing.streams import centre
from tests.laws.cases import CASES
from tests.laws.registry import DIM, Case, Setting, Stream
from tests.support.problems import observations
from tests.support.smooth_points import MARGIN, is_smooth_at, position_in_cell, smooth_points

GRIDS = [case for case in CASES if "WISKI" in case.name]
TWO_NEAREST = next(case for case in CASES if case.name == "LocalGP, scaled Matérn, two nearest")


@pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")
@pytest.mark.parametrize("case", GRIDS, ids=lambda case: case.name)
def test_points_lie_inside_the_cells_of_every_grid(case: Case) -> None:
    stream = Stream(case, Setting())
    model = stream.model(stream.data(10))
    X = smooth_points(model, 3, 200, low=0.1, high=0.8, shifts=(0.0, 0.1))
    assert X.shape == (3, 200, DIM)
    assert bool(((X >= 0.1) & (X <= 0.8)).all())
    mesh = model._memory.grid
    for shift in (0.0, 0.1):
        inputs = model.coordinates(X + shift)
        for grid, group in zip(mesh.parts, mesh.groups, strict=True):
            position = position_in_cell(grid, inputs[..., group])
            assert float(position.min()) >= MARGIN
            assert float(position.max()) <= 1.0 - MARGIN


def test_points_on_either_side_of_a_border_are_refused() -> None:
    data = observations(10)
    model = WISKI(*data.astuple(), grid_size=9, bounds=torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    X = torch.tensor([[0.5 + 1e-6, 0.4], [0.5 - 1e-6, 0.4], [0.4, 0.5], [0.45, 0.4]]).double()
    assert is_smooth_at(model, X).tolist() == [False, False, False, True]


def test_points_between_two_models_that_are_as_near_are_refused() -> None:
    """There the posterior jumps."""
    stream = Stream(TWO_NEAREST, Setting())
    model = stream.model(stream.data(200))
    line = torch.linspace(0.0, 1.0, 4001, dtype=torch.float64)
    X = torch.stack((line, 0.3 + 0.4 * line), -1)
    means = centre(model.posterior(X)).detach().squeeze(-1)
    steps, clear = means.diff().abs(), is_smooth_at(model, X)
    beside = clear[:-1] & clear[1:]
    jumps = steps > 20.0 * steps.median()
    assert bool(jumps.any())
    assert not bool((jumps & beside).any())
    assert is_smooth_at(model, smooth_points(model, 50)).all()
