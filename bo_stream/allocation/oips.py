"""Online inducing point selection (OIPS), with the bounds of Galy-Fajou and Opper (2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.allocation.allocator import Allocator, checked_number
from bo_stream.allocation.selection import correlation, first_apart
from bo_stream.bases.inducing import members
from bo_stream.tensors import State, is_in, state_of

ROWS = 1024
"""Number of inputs whose correlations with each other are held at a time."""


class OIPS(Allocator):
    """Online inducing point selection: accept x where ``max_j corr(x, Z_j) < rho``.

    One pass, deterministic given the order; a batch gives the same as its rows one by one. The
    threshold is on the correlation, so that an output scale does not change its meaning.

    - Cost: O(n M) for n points, and O(n) for each one accepted.
    - When hyperparameters move, ``prune`` drops points; gaps are filled by the data to come.
    - Source: Galy-Fajou and Opper (2021), algorithm 1.

    Args:
        rho: Accept points less correlated than this with every inducing point, in (0, 1).
        prune: Drop points more correlated than this with an older one, from rho to 1, which drops
            nothing; half-way if omitted.
        isolation: Rule for outliers, which are never accepted; none if omitted.

    Raises:
        ValueError: A threshold is out of range.

    Example:
        >>> Z = OIPS(0.8).update(X[:0], X, kernel)
    """

    def __init__(
        self, rho: float, prune: float | None = None, isolation: Isolation | None = None
    ) -> None:
        _check_rho(rho)
        self.rho = rho
        self.prune = (1.0 + rho) / 2.0 if prune is None else prune
        if not rho <= self.prune <= 1.0:
            raise ValueError(f"Expected prune from rho = {rho} to 1, got {prune}.")
        self.isolation = isolation
        self._memory: State | None = None

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        seen = self._memory  # points that were all selected under these hyperparameters stay
        stay = seen is not None and is_in(kernel, seen[1:]) and bool(members(Z, seen[0]).all())
        if not stay and self.prune < 1.0:
            Z = Z[first_apart(Z, kernel, self.prune)]
        for rows in X_new.split(ROWS):
            candidates = rows
            if len(Z) > 0:
                candidates = rows[correlation(kernel, rows, Z).amax(-1) < self.rho]
            if self.isolation is not None:
                candidates = candidates[~self.isolation.of(candidates, Z, rows, kernel)]
            accepted = candidates[first_apart(candidates, kernel, self.rho)]
            Z = torch.cat((Z, accepted))
        self._memory = (Z, *state_of(kernel))
        return Z


@dataclass(frozen=True)
class Isolation:
    """Rule for outliers: points unlike even those that are most like them.

    The points compared with are the inducing points and the others of the batch, so a new region is
    entered by ``nearest`` points of one batch, an outlier never. (The outlook of Galy-Fajou and
    Opper (2021), section 5.)

    Attributes:
        below: Typical correlation below which a point is isolated, in (0, 1).
        nearest: Number of most correlated points that count.
        statistic: Typical correlation of these: their median or mean.
    """

    below: float = 0.1
    nearest: int = 3
    statistic: Literal["median", "mean"] = "median"

    def __post_init__(self) -> None:
        if not 0.0 < self.below < 1.0:
            raise ValueError(f"Expected below in (0, 1), a correlation, got {self.below}.")
        checked_number("nearest", self.nearest)
        if self.statistic not in ("median", "mean"):
            raise ValueError(f"Expected statistic 'median' or 'mean', got {self.statistic!r}.")

    def of(self, X: Tensor, Z: Tensor, batch: Tensor, kernel: Kernel) -> Tensor:
        """Say which of n rows X of a batch of b are isolated; none is without others.

        Cost O(n (M + b)) for M inducing points Z.
        """
        others = len(Z) + len(batch) - 1
        if others == 0 or len(X) == 0:
            return torch.zeros(len(X), dtype=torch.bool, device=X.device)
        values = correlation(kernel, X, torch.cat((Z, batch)))
        nearest = values.topk(min(self.nearest, others) + 1).values[:, 1:]
        typical = nearest.median(-1).values if self.statistic == "median" else nearest.mean(-1)
        return typical < self.below


def expected_points_bound(
    n: int, d: int, rho: float, lengthscale: float, side: float = 1.0
) -> float:
    """Bound the expected number of points that OIPS selects of n uniform ones in a cube.

    Selected points are ``r = lengthscale √(−2 log rho)`` apart, so that balls of radius r / 2 about
    them are disjoint, and nothing in them can be selected again. At least one of the 2^d orthants
    of each lies in the cube. With α the share of the cube that this is, one more point is selected
    with probability at most ``1 − α M``: ``E[M] <= (1 − (1 − α)^n) / α``.

    Source: Galy-Fajou and Opper (2021), theorem 1, corrected: their "inscribed hypercube" of side
    ``r √d / 2`` is more than the ball holds from d = 5 on, cubes in balls of radius r overlap, the
    domain's corners are forgotten, and the recursion is not normalised by its volume.

    Args:
        n: Number of inputs, uniform in ``[0, side]^d``.
        d: Number of dimensions.
        rho: OIPS' threshold, in (0, 1).
        lengthscale: Of the RBF kernel ``exp(−|x − x'|² / (2 lengthscale²))``.
        side: Of the cube.

    Raises:
        ValueError: A number is out of range.
    """
    _check_rho(rho)
    n, d = checked_number("n", n, least=0), checked_number("d", d)
    for name, length in (("lengthscale", lengthscale), ("side", side)):
        if not 0.0 < length < math.inf:
            raise ValueError(f"Expected {name} to be positive and finite, got {length}.")
    reach = min(lengthscale * math.sqrt(-2.0 * math.log(rho)) / 2.0, side)
    orthant = math.pi ** (d / 2) / math.gamma(d / 2 + 1.0) * (reach / 2.0) ** d
    share = orthant / side**d
    return -math.expm1(n * math.log1p(-share)) / share


def nystroem_error_bound(n: int, points: int, rho: float) -> float:
    """Bound ``‖K_X − Q_X‖`` of n inputs of a correlation kernel, given OIPS' points.

    ``(n − M) (1 − rho² / (1 + M (M − 1) rho))``, in parts of the prior variance. Source:
    Galy-Fajou and Opper (2021), theorem 2.

    Args:
        n: Number of inputs that the points were selected from.
        points: Number M of points.
        rho: OIPS' threshold, in (0, 1).

    Raises:
        ValueError: A number is out of range.
    """
    _check_rho(rho)
    n, points = checked_number("n", n), checked_number("points", points)
    if points > n:
        raise ValueError(f"Expected points of at most n = {n}, the inputs, got {points}.")
    return (n - points) * (1.0 - rho**2 / (1.0 + points * (points - 1) * rho))


def _check_rho(rho: float) -> None:
    if not 0.0 < rho < 1.0:
        raise ValueError(f"Expected rho in (0, 1), a correlation, got {rho}.")
