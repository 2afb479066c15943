"""Points at which gradients can be checked by differences: none lies beside a kink.

Cubic interpolation has a jump in its second derivative wherever an input crosses from one cell of
a grid to the next, and a :class:`LocalGP` that blends its nearest models only has a jump where two
models are equally near. Central differences across either are off, however exact the gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bo_stream import HeteroscedasticWISKI
from bo_stream.bases.grid.mesh import Grid, Mesh
from bo_stream.models.base import StreamingGP
from bo_stream.models.local import LocalGP, LocalProcess
from bo_stream.models.wiski.grid_model import GridModel
from bo_stream.process import PosteriorProcess
from bo_stream.testing.streams import smooth_points as points_away_from_kinks

MARGIN = 0.05
"""Least distance from a cell's border, in cells."""

TIE = 0.005
"""Least distance from a tie, in the models' shares: hundreds of times what a step of 1e-5 moves."""


def smooth_points(model: StreamingGP, *shape: int, **options: Any) -> Tensor:
    """Uniform points, ``shape x d``; options as of :func:`bo_stream.testing`'s."""
    return points_away_from_kinks(model, is_smooth_at, *shape, **options)


def is_smooth_at(model: StreamingGP, X: Tensor) -> Tensor:
    """Whether each of ``n x d`` points is away from all kinks of the model's posterior, ``n``."""
    if isinstance(model, LocalGP):
        return _has_no_tie(model.process(), X)
    if not isinstance(model, GridModel):
        return torch.ones(len(X), dtype=torch.bool, device=X.device)
    grids = [model, model.noise_model] if isinstance(model, HeteroscedasticWISKI) else [model]
    inputs = model.coordinates(X.to(model.train_targets)).double()
    inside = [_is_inside_cells(one._memory.grid, inputs) for one in grids]
    return torch.stack(inside).all(0)


def _is_inside_cells(mesh: Mesh, X: Tensor) -> Tensor:
    pairs = zip(mesh.parts, mesh.groups, strict=True)
    positions = torch.cat([position_in_cell(grid, X[..., group]) for grid, group in pairs], -1)
    return ((positions - 0.5).abs() <= 0.5 - MARGIN).all(-1)


def position_in_cell(grid: Grid, X: Tensor) -> Tensor:
    """In [0, 1), ``... x d``; the lattice goes on beyond the grid's box, as the grid grows."""
    scaled = (X - torch.tensor(grid.lower).to(X)) / torch.tensor(grid.spacing).to(X)
    return scaled - scaled.floor()


def _has_no_tie(process: PosteriorProcess, X: Tensor) -> Tensor:
    """Whether the last model that counts is more like each point than the first that does not."""
    assert isinstance(process, LocalProcess)
    models = process.centres.shape[-2]
    if process.nearest >= models:
        return torch.ones(len(X), dtype=torch.bool, device=X.device)
    shares = replace(process, nearest=models).amplitudes(X).square().sort(-1, descending=True)[0]
    last, following = shares[..., process.nearest - 1], shares[..., process.nearest]
    apart = (following == 0.0) | (last - following > TIE)  # 0: so many models have no observation
    return apart.movedim(-1, 0).flatten(1).all(-1)
