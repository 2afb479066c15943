"""Positions that are metres or kilometres on a map projection already."""

import pytest
import torch
from botorch.exceptions.errors import InputDataError

from bo_stream import OSGPR
from bo_stream.mapping import fill_missing, map_inputs, map_kernel, screen_covariates

METRES = torch.tensor(
    [
        [500_000.0, 9_300_000.0, 1.0],
        [540_000.0, 9_300_000.0, 2.0],
        [500_000.0, 9_330_000.0, -9999.0],
        [505_000.0, 9_330_000.0, 6.0],
    ],
    dtype=torch.float64,
)


def test_metres_and_kilometres_are_kilometres_about_the_middle() -> None:
    sites = fill_missing(METRES, units="metres")
    assert sites[:, 2].tolist() == [1.0, 2.0, 6.0, 6.0]
    found = map_inputs(sites, units="metres")(sites)
    assert torch.allclose((found[0] - found[1])[:2].norm(), torch.tensor(40.0).double())
    assert torch.allclose(found.mean(0), torch.zeros(3).double(), atol=1e-9)
    in_kilometres = torch.cat((sites[:, :2] / 1000.0, sites[:, 2:]), -1)
    same = map_inputs(in_kilometres, units="kilometres")(in_kilometres)
    assert torch.allclose(same, found)


def test_a_map_of_metres_is_that_of_kilometres() -> None:
    random = torch.Generator().manual_seed(0)
    sites = 1e5 * torch.rand(30, 3, dtype=torch.float64, generator=random)
    Y = (sites[:, :1] / 3e4).sin() + 1e-5 * sites[:, 2:]
    means = []
    for units, length in (("metres", 1.0), ("kilometres", 1000.0)):
        X = torch.cat((sites[:, :2] / length, sites[:, 2:]), -1)
        kernel = map_kernel(X, units=units)
        model = OSGPR(
            X[:20], Y[:20], covar_module=kernel, input_transform=map_inputs(X, units=units)
        )
        means.append(model.posterior(X).mean.detach())
    assert torch.allclose(*means, rtol=1e-6)
    table = screen_covariates(sites[:6], Y[:6], units="metres")
    assert bool(table.notna().all(axis=None))


def test_bad_positions() -> None:
    with pytest.raises(InputDataError, match="units='metres'"):
        map_inputs(METRES)
    with pytest.raises(ValueError, match="units"):
        map_kernel(METRES, units="miles")  # type: ignore[arg-type]
    gap = METRES.clone()
    gap[1, 0] = torch.nan
    with pytest.raises(InputDataError, match="east and north"):
        fill_missing(gap, units="metres")
    with pytest.raises(InputDataError, match="two columns"):
        map_kernel(METRES, position=(0, 3), units="metres")
