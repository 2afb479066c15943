"""Batches of many points for an acquisition function, by fantasies at a shared set of candidates.

Beside pending points BoTorch's Monte Carlo acquisition functions value a point x by
``E[(u(x) − max(b, max u(pending)))⁺]`` over the joint posterior of the utilities u, where b is what
is reached already. Here the values at the pending points and at those chosen so far are drawn S
times (Snoek, Larochelle and Adams, 2012, section 3.2). Given such a fantasy f(x) is normal, and the
expectation has a closed form; the mean over the fantasies values a candidate.

All candidates are conditioned on a chosen one together, by a further column of the partial Cholesky
factor of their covariance. So with N candidates, k known points and a basis of r functions a choice
costs O(N (r + k + S)), after O(k³ + N k²) once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from botorch.acquisition.analytic import _log_ei_helper
from torch import Tensor

from bo_stream.linalg import safe_cholesky, solve_lower
from bo_stream.loops.predictions import process_at
from bo_stream.models.base import StreamingGP
from bo_stream.process.process import PosteriorProcess
from bo_stream.tensors import map_tensors

FANTASIES = 64
"""Number S of draws of the values at points without an outcome."""

LEAST_VARIANCE = 1e-10
"""Least conditional variance of a candidate, over its posterior variance."""

FAR = 8.0
"""Standard deviations below all means at which nothing is reached: every value is larger."""


class Utility(Protocol):
    """What a batch is to make large: a function of values f, normal given a fantasy."""

    def of(self, values: Tensor, mean: Tensor) -> Tensor:
        """Compute utilities of values, whose posterior mean before all fantasies is given."""

    def log_gain(self, fantasy: Tensor, sd: Tensor, mean: Tensor, reached: Tensor) -> Tensor:
        """Compute ``log E (u − reached)⁺``.

        Args:
            fantasy: Mean of f given a fantasy, ``S x N``.
            sd: Standard deviation given a fantasy, ``N``.
            mean: Posterior mean, ``N``.
            reached: Largest utility so far, ``S x 1``.
        """


@dataclass(frozen=True)
class Value(Utility):
    """The value itself: expected improvement and simple regret."""

    def of(self, values: Tensor, mean: Tensor) -> Tensor:
        """Return the values."""
        return values

    def log_gain(self, fantasy: Tensor, sd: Tensor, mean: Tensor, reached: Tensor) -> Tensor:
        """Compute the logarithm of the expected improvement."""
        return _log_expected_excess(fantasy - reached, sd)


@dataclass(frozen=True)
class UpperBound(Utility):
    """Utility ``mean + √(β π / 2) |f − mean|``, of expectation ``mean + √β sd``.

    [Wilson2018, table 1]

    Attributes:
        beta: β.
    """

    beta: float

    @property
    def _factor(self) -> float:
        return math.sqrt(self.beta * math.pi / 2.0)

    def of(self, values: Tensor, mean: Tensor) -> Tensor:
        """Compute the utilities of values."""
        return mean + self._factor * (values - mean).abs()

    def log_gain(self, fantasy: Tensor, sd: Tensor, mean: Tensor, reached: Tensor) -> Tensor:
        """Compute the log expected excess of ``c |f − mean|`` over ``a = reached − mean``.

        For a > 0 it is that of ``c (f − mean)`` and of ``−c (f − mean)``; for a < 0 it is more by
        −a than for 0.
        """
        above = (reached - mean).clamp_min(0.0)
        shift, spread = self._factor * (fantasy - mean), self._factor * sd
        both = torch.logaddexp(
            _log_expected_excess(shift - above, spread),
            _log_expected_excess(-shift - above, spread),
        )
        return torch.logaddexp(both, (mean - reached).clamp_min(0.0).log())


def _log_expected_excess(mean: Tensor, sd: Tensor) -> Tensor:
    """Compute ``log E z⁺`` of normal z, exact far into the tail. [Ament2023, eq. 8 and 9]."""
    return sd.log() + _log_ei_helper(mean / sd)


@dataclass(frozen=True)
class Known:
    """Points beside which a batch is chosen, in the unit cube.

    Attributes:
        X: Points whose values are drawn and then count as reached, ``k x d``: those without an
            outcome, maybe some with one.
        means: Points whose posterior means count as reached, ``k' x d``.
    """

    X: Tensor
    means: Tensor


@torch.no_grad()
def choose_by_fantasies(
    model: StreamingGP, utility: Utility, known: Known, X: Tensor, q: int, seed: int
) -> Tensor:
    """Choose q of N candidates one after the other, each given those before.

    Args:
        model: Model of one output.
        utility: What is to be large.
        known: Points to be chosen beside.
        X: Candidates, ``N x d``.
        q: Number of points, at most N.
        seed: Seed of the fantasies.

    Returns:
        Rows of the chosen candidates, ``q``, in the order of choice.
    """
    process, inputs = process_at(model, X)
    candidates = Candidates(process, inputs, len(known.X) + q, seed)
    reached = candidates.lowest.expand(FANTASIES, 1)
    for points, drawn in ((known.X, True), (known.means, False)):
        if len(points) > 0:
            told = model.transform_inputs(points).double()
            mean = process.mean(told)[0]
            values = candidates.condition_on(told) if drawn else mean.unsqueeze(0)
            reached = reached.maximum(utility.of(values, mean).amax(-1, keepdim=True))
    free = torch.zeros_like(candidates.mean)
    chosen = []
    for _ in range(q):
        gains = utility.log_gain(candidates.fantasies, candidates.sd, candidates.mean, reached)
        row = int((gains.logsumexp(0) + free).argmax())
        free[row] = -torch.inf
        values = candidates.choose(row).unsqueeze(-1)
        reached = reached.maximum(utility.of(values, candidates.mean[row]))
        chosen.append(row)
    return torch.tensor(chosen, device=X.device)


class Candidates:
    """N candidates, conditioned on S fantasies of the values at other points.

    Attributes:
        mean: Posterior means, ``N``.
        fantasies: Means given each fantasy, ``S x N``.
        variance: Variances given a fantasy, ``N``.
    """

    def __init__(self, process: PosteriorProcess, X: Tensor, room: int, seed: int) -> None:
        """Begin with the posterior itself.

        Args:
            process: The posterior.
            X: Candidates as the process takes them, ``N x d``.
            room: Number of points that will be conditioned on.
            seed: Seed of the fantasies.
        """
        self._process, self._points = process, process.at(X)
        self.mean = process.mean_at(self._points)[0]
        self.variance = process.variance_at(self._points)[0].clamp_min(0.0)
        self.fantasies = self.mean.expand(FANTASIES, -1).clone()
        self._least = LEAST_VARIANCE * self.variance.max()
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randn(room, FANTASIES, generator=generator, dtype=torch.float64)
        self._draws = draws.to(self.mean)
        # rows of the partial factor R, of which the explained covariance is R^T R
        self._factor = self.mean.new_zeros(room, len(self.mean))
        self._count = 0

    @property
    def lowest(self) -> Tensor:
        """A value below all that are to be expected."""
        return self.mean.min() - FAR * self.variance.max().sqrt()

    @property
    def sd(self) -> Tensor:
        """Standard deviations given a fantasy, ``N``."""
        return self.variance.clamp_min(self._least).sqrt()

    def condition_on(self, X: Tensor) -> Tensor:
        """Draw the values at k other points, the first ones, and return them, ``S x k``."""
        known = self._process.at(X)
        factor = safe_cholesky(self._process.cross_covariance(known, known))[0]
        rows = solve_lower(factor, self._process.cross_covariance(known, self._points)[0])
        draws = self._draws[: len(X)]
        self._add(rows)
        return self._process.mean_at(known)[0] + (factor @ draws).mT

    def choose(self, row: int) -> Tensor:
        """Draw the value at a candidate, and return it, ``S``."""
        point = map_tensors(self._points, lambda each: each[..., row : row + 1, :])
        before = self._factor[: self._count]
        covariance = self._process.cross_covariance(point, self._points)[0, 0]
        covariance = covariance - before[:, row] @ before
        self._add((covariance / self.sd[row]).unsqueeze(0))
        return self.fantasies[:, row]

    def _add(self, rows: Tensor) -> None:
        """Add rows of the factor. Cost O(N S) each."""
        now = slice(self._count, self._count + len(rows))
        self._factor[now] = rows
        self.fantasies += self._draws[now].mT @ rows
        self.variance = (self.variance - rows.square().sum(0)).clamp_min(0.0)
        self._count = now.stop
