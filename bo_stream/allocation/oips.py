"""Online inducing points: by conditional variance (Novelty) and by correlation (OIPS)."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from gpytorch.kernels import Kernel
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.allocation.allocator import (
    Allocator,
    correlation,
    first_unlike,
    greedy_points,
)
from bo_stream.bases.inducing import InducingBasis, kernel_variance, largest_norm, members
from bo_stream.bases.radial import WIDE
from bo_stream.errors import check_whole
from bo_stream.linalg import inverse_lower, pivot_rows
from bo_stream.tensors import State, is_in, is_same, state_of

ROWS = 512
"""Number of inputs whose covariances with each other are in memory at a time."""

KEPT = 0.875
"""Fraction of ``max_points`` that a thinning keeps, so that there is room for others."""

RISE = 2.0
"""Least factor by which a thinning, or rounding, raises the threshold."""

NOVEL = 1e-12
"""Default tolerance: an input that keeps less adds less than a jitter would."""

_EXCESS = 10.0
"""Least threshold in errors of kernel values, which conditional variances amplify."""

_COARSEST = 1e-4
"""Threshold above which rounding errors do not raise it."""

_REDUNDANT = 0.25
"""Points are redundant when the least novelty falls below this fraction of it after a thinning."""


class Novelty(Allocator):
    """Selection of inputs that keep more than a threshold of their prior variance given the points.

    The threshold is ``tolerance``, by default what the smallest jitter would add, until there are
    more than ``max_points``. Then greedy variance thins them to seven eighths of that number, and
    the threshold becomes the largest fraction of its prior variance that a dropped point keeps
    given the others, at least twice the previous threshold. So the points are thinned at most
    ``log₂(1 / tolerance)`` times in a stream of any length. The threshold falls back to
    ``tolerance`` where a move of the hyperparameters has made points redundant. It rises, too, and
    points that the others nearly determine go, where these amplify rounding errors beyond it: of a
    smooth kernel whose inputs come from one end of a space to the other.

    - Cost: O(n M²) for n inputs; O(M³) when the points are thinned or hyperparameters have moved.
    - Memory: the Cholesky factor at the points, O(M²).
    - With a batch of kernels an input enters that is novel to any.
    - Source: the novelty of Csató and Opper (2002), which Engel, Mannor and Meir (2004) call
      approximate linear dependence; thinned as Burt, Rasmussen and van der Wilk (2020) choose.

    Args:
        max_points: Largest number of points.
        tolerance: Fraction of its prior variance that an input must keep to enter, in (0, 1).

    Raises:
        ValueError: The number is not positive, or the tolerance not in (0, 1).

    Example:
        >>> Z = Novelty(100).update(X[:0], X, kernel)
    """

    def __init__(self, max_points: int, tolerance: float = NOVEL) -> None:
        self.max_points = check_whole("max_points", max_points)
        if not 0.0 < tolerance < 1.0:
            raise ValueError(f"Expected tolerance in (0, 1), got {tolerance}.")
        self.tolerance = tolerance
        self._memory: _Held | None = None

    def to(self, like: Tensor) -> Self:
        """Return an allocator of the same memory on a tensor's device."""
        moved, held = copy(self), self._memory
        if held is not None:
            state = tuple(tensor.to(like.device) for tensor in held.state)
            moved._memory = replace(held, basis=held.basis.to(like.device), state=state)
        return moved

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        try:
            held = self._rechecked(Z.double(), kernel)
            for rows in X_new.double().split(ROWS):
                held, features = _above_rounding(held, rows)
                basis = _grown(held.basis, rows, held.threshold, features)
                held = replace(held, basis=basis)
                if basis.rank > self.max_points:
                    most = max(1, round(KEPT * self.max_points))
                    points = greedy_points(basis.Z, basis.kernel, most)
                    fewer = InducingBasis.of(basis.kernel, points, 1)
                    lost = float(_novelty(fewer, basis.Z, fewer.features(basis.Z)).max())
                    threshold, least = max(RISE * held.threshold, lost), _least_novelty(fewer)
                    held = replace(held, basis=fewer, threshold=threshold, least=least)
        except NotPSDError:  # values too wrong to compare points by
            self._memory = None
            return torch.cat((Z, X_new))[: self.max_points]
        self._memory = held
        return held.basis.Z.to(Z)

    def _rechecked(self, Z: Tensor, kernel: Kernel) -> _Held:
        """Return the points; after hyperparameters moved without those that others determine."""
        held = self._memory
        if held is not None and is_same((held.basis.Z,), (Z,)) and is_in(kernel, held.state):
            return held
        basis = _of_points(Z, kernel, self.tolerance)
        threshold, least = (self.tolerance, 0.0) if held is None else (held.threshold, held.least)
        if threshold > self.tolerance and _least_novelty(basis) < _REDUNDANT * least:
            threshold, least = self.tolerance, 0.0
        return _Held(basis, state_of(kernel), threshold, least)


@dataclass(frozen=True)
class _Held:
    """Points and values that were derived from them.

    Attributes:
        basis: Basis of the points, in float64.
        state: State of the kernel.
        threshold: Fraction of its prior variance that an input must keep to enter.
        least: Least fraction that a point kept given the others after the last thinning; 0 before.
    """

    basis: InducingBasis
    state: State
    threshold: float
    least: float


def _of_points(Z: Tensor, kernel: Kernel, threshold: float) -> InducingBasis:
    """Return the basis of the points that keep more than a fraction of their prior variance."""
    basis = InducingBasis.of(kernel, Z[:0], 1)
    for rows in Z.split(ROWS):
        basis = _grown(basis, rows, threshold)
    return basis


def _above_rounding(held: _Held, X: Tensor) -> tuple[_Held, Tensor]:
    """Raise the threshold above the rounding errors of conditional variances, and thin the points.

    Return the features of the inputs, too. Points that nearly determine each other amplify
    rounding, most at inputs beyond them all: an input there may seem to keep a negative variance,
    and would never enter. Cost O(n M²), and O(M³) when the threshold rises, at most
    ``log(1 / tolerance) / log(RISE)`` times.
    """
    features = held.basis.features(X)
    while held.threshold < _COARSEST and len(X) > 0:
        left = kernel_variance(held.basis.kernel, X, 1) - features.square().sum(-1)
        if not float(-(left / _positive_variance(held.basis, X)).min()) > held.threshold:
            break  # no variance is more negative than the threshold
        threshold = RISE * held.threshold
        basis = _of_points(held.basis.Z, held.basis.kernel, threshold)
        held = _Held(basis, held.state, threshold, _least_novelty(basis))
        features = basis.features(X)
    return held, features


def _grown(
    basis: InducingBasis, X: Tensor, threshold: float, features: Tensor | None = None
) -> InducingBasis:
    """Add inputs that keep more than a fraction of their prior variance; features may be known."""
    features = basis.features(X) if features is None else features
    novel = _novelty(basis, X, features).amax(0) > threshold
    X, features = X[novel], features[..., novel, :]
    if len(X) == 0:
        return basis
    pool = torch.cat((basis.Z, X))
    # relative to the prior variance, where distances are computed from norms about a mean
    error = torch.finfo(pool.dtype).eps * min(largest_norm(basis.kernel, pool), WIDE) ** 2
    threshold = max(threshold, _EXCESS * error)
    scale = _positive_variance(basis, X).sqrt()
    left = basis.residual_covariance(X, X, features, features)
    left = left / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    entering = {i for one in left.flatten(0, -3) for i in pivot_rows(one, threshold).tolist()}
    rows = sorted(entering)
    return basis.grown(X[rows], features[..., rows, :]) if rows else basis


def _novelty(basis: InducingBasis, X: Tensor, features: Tensor) -> Tensor:
    """Compute the fractions of their prior variance that inputs keep, a row for each kernel."""
    return (basis.residual_variance(X, features) / _positive_variance(basis, X)).flatten(0, -2)


def _positive_variance(basis: InducingBasis, X: Tensor) -> Tensor:
    """Return the prior variances; infinity in place of 0."""
    variance = kernel_variance(basis.kernel, X, 1)
    return torch.where(variance > 0.0, variance, torch.inf)


def _least_novelty(basis: InducingBasis) -> float:
    """Return the least fraction of prior variance that a point keeps given all others: O(M³)."""
    if basis.rank == 0:
        return 0.0
    precision = inverse_lower(basis.root).square().sum(-2)
    variance = kernel_variance(basis.kernel, basis.Z, 1)
    return float((variance * precision).reciprocal().min())


# --- online inducing point selection (OIPS) ------------------------------------------------------


_OIPS_ROWS = 1024
"""Number of inputs whose correlations with each other are in memory at a time."""


class OIPS(Allocator):
    """Online inducing point selection: accept x where ``max_j corr(x, Z_j) < rho``.

    One pass, deterministic given the order; a batch gives the same as its rows one by one. The
    threshold is on the correlation, so that an output scale does not change its meaning.

    - Cost: O(n M) for n points, and O(n) for each one accepted.
    - An input without prior variance, of a linear kernel the origin, is never accepted: a model
      needs another one among its first.
    - When hyperparameters move, ``prune`` drops points; gaps are filled by the data to come.
    - Source: [Galy-Fajou2021, algorithm 1].

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
            Z = Z[first_unlike(correlation(kernel, Z, Z) >= self.prune)]
        has_variance = (kernel_variance(kernel, X_new, 1) > 0.0).flatten(0, -2).any(0)
        parts = zip(X_new.split(_OIPS_ROWS), has_variance.split(_OIPS_ROWS), strict=True)
        for rows, is_novel in parts:
            if len(Z) > 0:
                is_novel = is_novel & (correlation(kernel, rows, Z).amax(-1) < self.rho)
            candidates = rows[is_novel]
            if self.isolation is not None:
                candidates = candidates[~self.isolation.of(candidates, Z, rows, kernel)]
            alike = correlation(kernel, candidates, candidates) >= self.rho
            Z = torch.cat((Z, candidates[first_unlike(alike)]))
        self._memory = (Z, *state_of(kernel))
        return Z


@dataclass(frozen=True)
class Isolation:
    """Rule for outliers: points unlike even their most similar points.

    The points compared with are the inducing points and the others of the batch, so a new region is
    entered by ``nearest`` points of one batch, an outlier never. [Galy-Fajou2021, section 5, the
    outlook]

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
        check_whole("nearest", self.nearest)
        if self.statistic not in ("median", "mean"):
            raise ValueError(f"Expected statistic 'median' or 'mean', got {self.statistic!r}.")

    def of(self, X: Tensor, Z: Tensor, batch: Tensor, kernel: Kernel) -> Tensor:
        """Return which of n rows X of a batch of b are isolated; none is without others.

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
    them are disjoint, and nothing in them can be selected again. At least as much of each as one of
    its 2^d orthants lies in the cube. With α the share of the cube that this is, one more point is
    selected with probability at most ``1 − α M``: ``E[M] <= (1 − (1 − α)^n) / α``.

    [Galy-Fajou2021, theorem 1, corrected] Their "inscribed hypercube" of side ``r √d / 2`` is more
    than the ball holds from d = 5 on, cubes in balls of radius r overlap, the domain's corners are
    forgotten, and the recursion is not normalised by its volume.

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
    n, d = check_whole("n", n, least=0), check_whole("d", d)
    for name, length in (("lengthscale", lengthscale), ("side", side)):
        if not 0.0 < length < math.inf:
            raise ValueError(f"Expected {name} to be positive and finite, got {length}.")
    reach = min(lengthscale * math.sqrt(-2.0 * math.log(rho)) / 2.0, side)
    orthant = math.pi ** (d / 2) / math.gamma(d / 2 + 1.0) * (reach / 2.0) ** d
    share = orthant / side**d
    return -math.expm1(n * math.log1p(-share)) / share


def nystroem_error_bound(n: int, points: int, rho: float) -> float:
    """Bound ``‖K_X − Q_X‖`` of n inputs of a correlation kernel, given OIPS' points.

    ``(n − M) (1 − rho² / (1 + M (M − 1) rho))``, relative to the prior variance, where every input
    has a point as like as rho: not of what :class:`Isolation` kept out, nor once hyperparameters
    have moved. [Galy-Fajou2021, theorem 2]

    Args:
        n: Number of inputs that the points were selected from.
        points: Number M of points.
        rho: OIPS' threshold, in (0, 1).

    Raises:
        ValueError: A number is out of range.
    """
    _check_rho(rho)
    n, points = check_whole("n", n), check_whole("points", points)
    if points > n:
        raise ValueError(f"Expected points of at most n = {n}, the inputs, got {points}.")
    return (n - points) * (1.0 - rho**2 / (1.0 + points * (points - 1) * rho))


def _check_rho(rho: float) -> None:
    if not 0.0 < rho < 1.0:
        raise ValueError(f"Expected rho in (0, 1), a correlation, got {rho}.")
