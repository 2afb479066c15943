"""Expected number of wrong calls, above or below a threshold, after further observations."""

from __future__ import annotations

import numpy as np
import torch
from botorch.exceptions.errors import UnsupportedError
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, owens_t
from torch import Tensor

from bo_stream.acquisition.criteria import Misclassification, Threshold
from bo_stream.acquisition.feature_nipv import PointMeasure, box_of, listed_inputs
from bo_stream.acquisition.lookahead import removed_share
from bo_stream.acquisition.site_choice import MOST_PAIRS, gains_before
from bo_stream.acquisition.site_noise import SiteNoise
from bo_stream.acquisition.target_gains import JointTargetGains
from bo_stream.models.base import StreamingGP

LEAST = 1e-12
"""Distances and shares of the variance stay this far from 0 and 1, where the formula divides."""

_Array = NDArray[np.float64]


@torch.no_grad()
def expected_wrong_calls(
    model: StreamingGP,
    targets: Tensor,
    sites: Tensor,
    threshold: float,
    trials: int | None = None,
    miss_cost: float = 1.0,
) -> Tensor:
    """Compute the expected share of wrong calls after observing the first 0, 1, ..., k sites.

    A target with the probability P of exceeding the threshold is called above from
    ``P = 1 / (1 + miss_cost)`` on, by the cheaper call, else below. Hyperparameters stay as they
    are, and a count is taken for an observation of its logit with the noise of its expected
    information. Cost O(k M) memory and O(k² M) time.

    Args:
        model: Of the logit of prevalence, of one output.
        targets: Points that are called, ``M x d``.
        sites: To be observed, in this order, ``k x d``.
        threshold: Of prevalence.
        trials: Examined at a site.
        miss_cost: Cost of calling a point below that is above, in costs of the opposite mistake.

    Returns:
        ``k + 1`` means over the targets: the first is that of the posterior as it is.

    Raises:
        UnsupportedError: There are too many pairs of a site and a target.
    """
    points = listed_inputs(model, "targets", targets)
    pool = listed_inputs(model, "sites", sites) if len(sites) else points[:1]
    measure = PointMeasure(points, torch.ones_like(points[:, 0]))
    process = model.feature_process(box_of(torch.cat((points, pool))))
    offset, scale = (float(value) for value in model._offset_and_scale())
    mean, variance = (moment[0] for moment in process.marginals(points))
    limit = Threshold(threshold, "prevalence")
    distance = limit.distance(offset + scale * mean, scale**2 * variance.clamp_min(0.0))
    criterion = Misclassification(threshold, "prevalence")
    gains = gains_before(model, SiteNoise.of(model, pool, trials), measure, criterion)
    if not isinstance(gains, JointTargetGains):
        raise UnsupportedError(
            f"Expected at most {MOST_PAIRS:,} pairs of a site and a target, got {len(pool):,} "
            f"sites and {len(points):,} targets. Give some of the targets, drawn at random."
        )
    means = []
    for place in range(len(sites) + 1):
        share = removed_share(gains.removed, gains.lookahead.variance)
        means.append(wrong_call(distance, share, 1.0 / (1.0 + miss_cost)).mean())
        if place < len(sites):
            gains = gains.observing(place)
    return torch.stack(means)


def wrong_call(distance: Tensor, share: Tensor, cut: float) -> Tensor:
    """Compute the expected probability of a wrong call, above from a probability ``cut`` on.

    For ``f ~ N(m, s²)``, a threshold t and observations that remove the share ``ρ²`` of the
    variance: with ``h = (t − m) / s`` and ``k = (h + √(1 − ρ²) Φ⁻¹(cut)) / ρ`` a point is called
    above where a normal variable of correlation ρ with ``(f − m) / s`` exceeds k. That f and this
    variable lie on different sides has the probability ``2 (T(h, a_h) + T(k, a_k) + β)``, T Owen's
    function. Source: Owen (1956), Annals of Mathematical Statistics 27(4), eq. 3.1. With ``cut`` =
    1/2 it is the expectation that :class:`~bo_stream.Misclassification` has.

    Args:
        distance: ``(m − t) / s``, ``M``.
        share: ``ρ²``, in [0, 1], ``M``.
        cut: In (0, 1).
    """
    h: _Array = -distance.cpu().double().numpy()
    rho2: _Array = share.cpu().double().numpy().clip(LEAST, 1.0 - LEAST)
    rho, rest = np.sqrt(rho2), np.sqrt(1.0 - rho2)
    h = np.where(np.abs(h) < LEAST, LEAST, h)
    k = (h + rest * ndtri(cut)) / rho
    k = np.where(np.abs(k) < LEAST, LEAST, k)
    apart = 0.5 * (h * k < 0.0)
    sums = owens_t(h, (k - rho * h) / (h * rest)) + owens_t(k, (h - rho * k) / (k * rest))
    above = ndtr(-h)
    now = np.where(above >= cut, 1.0 - above, above)
    later = (2.0 * (sums + apart)).clip(0.0, 1.0)
    return torch.as_tensor(np.where(rho2 <= LEAST, now, later)).to(distance)
