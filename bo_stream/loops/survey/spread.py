"""First sites of a survey: spread out over the map and over the covariates."""

from __future__ import annotations

import torch
from torch import Tensor

from bo_stream.acquisition.constraints import Round
from bo_stream.loops.survey.coordinates import DEGREES, Coordinates


def spread_coordinates(X: Tensor, sites: Tensor, coordinates: Coordinates = DEGREES) -> Tensor:
    """Map sites to coordinates in which position and covariates weigh the same, ``n x d``.

    Positions are in units of the root mean square distance of the sites from their middle. A
    covariate is replaced by its rank among the sites, so that a few extreme values do not draw all
    choices; all covariates together have the mean square of the position.

    Args:
        X: Positions and covariates without missing values, ``n x d``.
        sites: Those that define units and ranks, ``N x d``.
        coordinates: Units of positions.
    """
    transform = coordinates.plane(sites)
    places = transform.transform(sites)[:, :2]
    middle = places.mean(0)
    radius = (places - middle).square().sum(-1).mean().sqrt().clamp_min(1e-9)
    columns = [(transform.transform(X)[:, :2] - middle) / radius]
    covariates = sites.shape[-1] - 2
    for column in range(2, sites.shape[-1]):
        ranks = _ranks(X[:, column].contiguous(), sites[:, column])
        columns.append((12.0 / covariates) ** 0.5 * ranks.unsqueeze(-1))
    return torch.cat(columns, -1)


def _ranks(values: Tensor, sample: Tensor) -> Tensor:
    """Return ranks among a sample, from -1/2 to 1/2; a constant sample has rank 0."""
    ordered = sample.sort().values
    low = torch.searchsorted(ordered, values, right=False)
    high = torch.searchsorted(ordered, values, right=True)
    return 0.5 * (low + high).to(values) / len(sample) - 0.5


def spread_out(points: Tensor, q: int, taken: Tensor, start: Round) -> list[tuple[int, float]]:
    """Choose points one after the other, each the farthest from all others chosen and taken.

    The first one is the nearest to the mean if none is taken. Greedy maximin: without constraints
    the least distance is at least half of the largest possible one [Gonzalez, 1985, Clustering to
    minimize the maximum intercluster distance]. Costs O(N d) a point.

    Args:
        points: Candidates, ``N x d``.
        q: How many to choose at most.
        taken: Points that are taken already, ``k x d``.
        start: A round without sites, which says which candidates may be chosen.

    Returns:
        Positions in ``points`` and costs; fewer than q where no other point may be chosen.
    """
    distance = torch.full_like(points[:, 0], torch.inf)
    for point in taken:
        distance = torch.minimum(distance, _squared(points, point))
    priority = distance if len(taken) else -_squared(points, points.mean(0))
    chosen: list[tuple[int, float]] = []
    while len(chosen) < q:
        costs = start.costs()
        feasible = start.feasible(costs)
        if not bool(feasible.any()):
            break
        pick = int(priority.masked_fill(~feasible, -torch.inf).argmax())
        cost = 0.0 if costs is None else float(costs[pick])
        chosen.append((pick, cost))
        start = start.visiting(pick, cost)
        priority = distance = torch.minimum(distance, _squared(points, points[pick]))
    return chosen


def _squared(points: Tensor, point: Tensor) -> Tensor:
    return (points - point).square().sum(-1)
