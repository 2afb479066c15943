"""Remarks on places and covariates of results that look wrong, though they may be right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from bo_stream.loops.survey.cells import Array, Cells, first
from bo_stream.loops.survey.sites import SurveySites

MOVED = 10.0
"""Distance from a site's place in the list, in kilometres, from which a result is remarked on."""

FACTOR = 20.0
"""Factor between typical values of a covariate that may be one between units."""


def moved_sites(
    cells: Cells, places: Array, sites: SurveySites, listed: NDArray[np.intp]
) -> list[str]:
    """Remark on sites of the list whose position in a table is far from that in the list.

    Args:
        cells: The table, n rows.
        places: Positions in it, NaN where missing, ``n x 2``.
        sites: The list.
        listed: Places of the rows' sites in it, ``n``; -1: not in it.
    """
    rows = np.flatnonzero((listed >= 0) & ~np.isnan(places).any(axis=1))
    told, known = torch.from_numpy(places[rows]), sites.X[listed[rows], :2]
    in_space = sites.coordinates.in_space
    apart = (in_space(told) - in_space(known)).norm(dim=-1).tolist()
    return [
        f"{cells.row(int(row))} lies {distance:,.0f} km from where the list has this site: is the "
        "id right? The list's position is used."
        for row, distance in zip(rows, apart, strict=True)
        if distance > MOVED
    ]


def far_sites(cells: Cells, read: Array, sites: SurveySites) -> list[str]:
    """Remark on a new site that is much farther from the list's middle than its own sites.

    Args:
        cells: The table of new sites.
        read: Positions and covariates, ``n x d``.
        sites: The list.
    """
    in_space, (first_name, second_name) = sites.coordinates.in_space, sites.coordinates.names
    known = in_space(sites.X[:, :2])
    middle = known.mean(0)
    reach = (known - middle).norm(dim=-1).max()
    apart = (in_space(torch.from_numpy(read[:, :2])) - middle).norm(dim=-1)
    far = first((apart > 1.5 * reach + 10.0).numpy())
    if far is None:
        return []
    return [
        f"{cells.row(far)} lies {float(apart[far]):,.0f} km from the middle of the list: is its "
        f"position right, and {first_name} not taken for {second_name}?"
    ]


def odd_covariates(read: Array, sites: SurveySites) -> list[str]:
    """Remark on covariates of new sites that look to be in another unit than the list's.

    Args:
        read: Positions and covariates of the new sites, ``n x d``.
        sites: The list.
    """
    remarks = []
    for column, name in enumerate(sites.covariates, start=2):
        values, known = read[:, column], sites.X[:, column].numpy()
        values = values[~np.isnan(values)]
        if values.size and _in_another_unit(values, known):
            remarks.append(
                f"{name}: the new sites have {_span(values)}, the list has {_span(known)}. Is it "
                "in the same unit? Per cent and shares are easily mixed."
            )
    return remarks


def _in_another_unit(values: Array, known: Array) -> bool:
    """Tell whether values are outside a sample, and far off by difference or by factor."""
    low, high = known.min(), known.max()
    typical, usual = np.median(values), np.median(known)
    if low <= typical <= high:
        return False
    margin = 0.5 * (high - low)
    if not low - margin <= typical <= high + margin:
        return True
    return usual != 0.0 and not 1.0 / FACTOR < typical / usual < FACTOR


def _span(values: Sequence[float] | Array) -> str:
    low, high = np.min(values), np.max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
