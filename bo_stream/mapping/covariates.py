"""Covariates of sites: missing values, scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from botorch.exceptions.errors import InputDataError
from botorch.models.transforms.input import AffineInputTransform, ChainedInputTransform
from scipy.spatial import cKDTree
from torch import Tensor

from bo_stream.mapping.positions import Units, check_positions, kilometres, places


def fill_missing(
    X: Tensor,
    sites: Tensor | None = None,
    position: tuple[int, int] = (0, 1),
    codes: Sequence[float] = (-9999.0,),
    units: Units = "degrees",
) -> Tensor:
    """Fill missing covariates with those of the nearest site that has them.

    Most are missing where a cell of a raster is sea or cloud: the nearest site is in a cell beside
    it. Costs O(log n) for each missing value.

    Args:
        X: ``n x d``, positions and covariates; NaN where missing.
        sites: ``n' x d``, where to look for values; default X itself.
        position: Columns of longitude and latitude, or of east and north.
        codes: Numbers that stand for missing values.
        units: Of positions: ``"degrees"``, or ``"kilometres"`` or ``"metres"`` on a map projection.

    Returns:
        A copy of X without missing values.

    Raises:
        InputDataError: A position is missing, or a covariate at all sites.
        ValueError: The units are none of these.
    """
    known = X if sites is None else sites
    check_positions(X, position, units)
    check_positions(known, position, units)
    filled = X.clone()
    for column in set(range(X.shape[-1])) - set(position):
        gaps = _missing(X[:, column], codes)
        if not bool(gaps.any()):
            continue
        there = ~_missing(known[:, column], codes)
        if not bool(there.any()):
            raise InputDataError(
                f"Expected a value of covariate {column} at one site at least, got none. Leave the "
                "column out."
            )
        tree = cKDTree(places(known[there], position, units).numpy(force=True))
        _, nearest = tree.query(places(X[gaps], position, units).numpy(force=True))
        rows = torch.as_tensor(nearest, device=known.device)
        filled[gaps, column] = known[there, column][rows].to(X)
    return filled


def _missing(values: Tensor, codes: Sequence[float]) -> Tensor:
    coded = torch.isin(values, torch.as_tensor(codes).to(values))
    return coded | ~values.isfinite()


def map_inputs(
    sites: Tensor, position: tuple[int, int] = (0, 1), units: Units = "degrees"
) -> ChainedInputTransform:
    """Make a model's input transform: positions in kilometres, covariates standardised.

    Args:
        sites: ``n x d``, all that are to be mapped, without missing values.
        position: Columns of longitude and latitude, or of east and north.
        units: Of positions: ``"degrees"``, or ``"kilometres"`` or ``"metres"`` on a map projection.

    Raises:
        InputDataError: Positions are not in these units, or a covariate is missing.
        ValueError: The units are none of these.
    """
    if not bool(sites.isfinite().all()):
        raise InputDataError(
            "Expected sites without missing values, got NaN or infinity. Call fill_missing first."
        )
    steps = {"position": kilometres(sites, position, units)}
    d = sites.shape[-1]
    covariates = [column for column in range(d) if column not in position]
    if not covariates:
        return ChainedInputTransform(**steps)
    values = sites[..., covariates].flatten(0, -2)
    sd = values.std(0) if len(values) > 1 else torch.ones_like(values[0])
    spread = torch.where(sd > 1e-9 * values.abs().amax(0), sd, torch.ones_like(sd))
    scale = AffineInputTransform(d, spread, values.mean(0), indices=covariates)
    return ChainedInputTransform(**steps, covariates=scale)
