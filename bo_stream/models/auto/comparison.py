"""How far a posterior is from the exact one, in what a user sees of it: its standard deviations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bo_stream.bases.inducing import frozen
from bo_stream.bases.kernels import stacked_variance
from bo_stream.models.auto.exact import ExactMemory
from bo_stream.models.auto.families import exact_inference
from bo_stream.models.prior import Prior
from bo_stream.process.process import PosteriorProcess

COMPARED = 256
"""Most points of each kind at which a posterior is compared with the exact one."""

COMPARABLE = 2048
"""Most rows of which the exact posterior is computed only to be compared with."""

MEAN_ERROR = 0.4
"""Error of the mean, in posterior standard deviations, that is small.

With :data:`VARIANCE_RATIO` it separates, in twelve models fitted to functions of two to four inputs
(``benchmarks/accuracy/hand_overs.py``), five grids that follow the exact posterior (means off by
0.01 to 0.31, variances 0.86 to 1.04 times) from seven that do not (0.66 to 3.6; 0.40 to 1.25). Of
these six passed at 0.05 prior standard deviations at rows. A normal distribution that is off by
both limits is at a divergence of 0.1 nats.
"""

VARIANCE_RATIO = 1.0 / 0.75
"""Ratio of variances, or its inverse, that is small."""

RESOLVED = 0.1
"""Standard deviations below this part of the noise's count as much: the posteriors of functions
without noise are so narrow at rows that nothing an outcome can show would be told apart."""

ROUNDING = 1e-4
"""The same in the prior's standard deviations: what float64 leaves of a variance near zero."""


@dataclass(frozen=True)
class Discrepancy:
    """How far a posterior is from the exact one; all NaN where that is not known.

    Attributes:
        mean_error: Largest difference of the means at rows, in prior standard deviations.
        variance_error: Largest difference of the variances at rows, in prior variances.
        deviation: Largest difference of the means at rows, between rows and in the box, in exact
            posterior standard deviations, at least :data:`RESOLVED` of the noise's.
        least_ratio: Least ratio of the variance to the exact one there, of both no less than the
            square of such a standard deviation.
        largest_ratio: Largest such ratio.
    """

    mean_error: float = math.nan
    variance_error: float = math.nan
    deviation: float = math.nan
    least_ratio: float = math.nan
    largest_ratio: float = math.nan


@dataclass(frozen=True)
class ExactPosterior:
    """The exact posterior at rows, in the middle between neighbouring ones, and in the box.

    Attributes:
        points: ``... x p x d``, of which the first are rows.
        rows: Their number.
        mean: ``... x m x p``.
        variance: The same way.
        prior_variance: The same way.
        floor: Least variance that counts, ``... x m x 1`` or shaped as the others.
    """

    points: Tensor
    rows: int
    mean: Tensor
    variance: Tensor
    prior_variance: Tensor
    floor: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls, rows: ExactMemory, cache: Any, prior: Prior, box: Tensor | None
    ) -> ExactPosterior | None:
        """Solve, unless that is cached, and predict. Cost O(n³).

        Args:
            rows: Observations n.
            cache: Of the exact inference.
            prior: The hyperparameters.
            box: That inputs lie in, ``2 x d``; None: that of the rows.

        Returns:
            None without rows, with more than :data:`COMPARABLE`, or where the likelihood has no
            exact posterior.
        """
        inference = exact_inference(prior.likelihood)
        if inference is None or not 0 < len(rows) <= COMPARABLE:
            return None
        process, cache = inference.process(rows, cache, prior)
        some, points = comparison_points(rows.rows.X, box)
        mean, variance = process.marginals(points)
        kernel, stacked = frozen(prior.kernel), points.unsqueeze(-3)
        scale = stacked_variance(kernel, stacked, prior.num_outputs)
        noise = prior.standardized(rows.rows.told)[1].amin(-1, keepdim=True)
        floor = torch.maximum(RESOLVED**2 * noise, ROUNDING**2 * scale)
        return cls(points, some, mean, variance, scale, floor)

    @torch.no_grad()
    def discrepancy(self, process: PosteriorProcess) -> Discrepancy:
        """Compare another posterior with it."""
        mean, variance = process.marginals(self.points)
        error, exact = (mean - self.mean).abs(), torch.maximum(self.variance, self.floor)
        ratio = torch.maximum(variance, self.floor) / exact
        scale, at = self.prior_variance[..., : self.rows], slice(self.rows)
        return Discrepancy(
            float((error[..., at] / scale.sqrt()).max()),
            float(((variance - self.variance)[..., at].abs() / scale).max()),
            float((error / exact.sqrt()).max()),
            float(ratio.min()),
            float(ratio.max()),
        )


def comparison_points(X: Tensor, box: Tensor | None) -> tuple[int, Tensor]:
    """Choose rows, midpoints between each and its nearest other input, and points in a box.

    Args:
        X: Inputs of rows, ``... x n x d``, n at least 1.
        box: ``2 x d``; None: that of the rows.

    Returns:
        The number of rows, and the points, ``... x p x d``, rows first.
    """
    n, d = X.shape[-2:]
    index = torch.linspace(0, n - 1, min(COMPARED, n)).long().to(X.device)
    some, flat = X[..., index, :], X.flatten(0, -2)
    limits = torch.stack((flat.amin(0), flat.amax(0)))
    width = torch.where(limits[1] > limits[0], limits[1] - limits[0], 1.0)
    apart = torch.cdist(some / width, X / width)
    apart = torch.where(apart > 0.0, apart, torch.inf)  # an input that is there twice is none
    nearest = X.gather(-2, apart.argmin(-1, keepdim=True).expand(some.shape))
    limits = limits if box is None else box.to(X)
    inside = torch.quasirandom.SobolEngine(d).draw(COMPARED, dtype=X.dtype).to(X.device)
    inside = (limits[0] + (limits[1] - limits[0]) * inside).expand(*X.shape[:-2], COMPARED, d)
    return len(index), torch.cat((some, 0.5 * (some + nearest), inside), -2)
