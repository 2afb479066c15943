"""First sites of a survey: spread out over the map and over the covariates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bo_stream.mapping import kilometres


def spread_coordinates(X: Tensor, sites: Tensor) -> Tensor:
    """Map sites to coordinates in which position and covariates weigh the same, ``n x d``.

    Positions are in units of the root mean square distance of the sites from their middle. A
    covariate is replaced by its rank among the sites, so that a few extreme values do not draw all
    choices; all covariates together have the mean square of the position.

    Args:
        X: Longitude, latitude, covariates without missing values, ``n x d``.
        sites: Those that define units and ranks, ``N x d``.
    """
    transform = kilometres(sites)
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


def spread_out(
    points: Tensor, q: int, taken: Tensor, admissible: Callable[[Sequence[int]], Tensor]
) -> list[int]:
    """Choose points one after the other, each the farthest from all others chosen and taken.

    The first one is the nearest to the mean if none is taken. Greedy maximin: the least distance is
    at least half of the largest possible one [Gonzalez, 1985, Clustering to minimize the maximum
    intercluster distance]. Costs O(N d) a point.

    Args:
        points: Candidates, ``N x d``.
        q: How many to choose at most.
        taken: Points that are taken already, ``k x d``.
        admissible: Returns, for those chosen so far, which may come next, ``N``.

    Returns:
        Positions in ``points``; fewer than q where no other is admissible.
    """
    distance = -(points - points.mean(0)).square().sum(-1)
    if len(taken):
        distance = torch.full_like(distance, torch.inf)
        for point in taken:
            distance = torch.minimum(distance, (points - point).square().sum(-1))
    chosen: list[int] = []
    for _ in range(q):
        allowed = admissible(chosen)
        if not bool(allowed.any()):
            break
        pick = int(distance.masked_fill(~allowed, -torch.inf).argmax())
        own = (points - points[pick]).square().sum(-1)
        distance = torch.minimum(distance, own) if chosen or len(taken) else own
        chosen.append(pick)
    return chosen
