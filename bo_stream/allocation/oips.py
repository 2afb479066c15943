"""OIPS: a point becomes an inducing point when none is like it."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.allocation.correlation import correlation
from bo_stream.allocation.isolation import Isolation
from bo_stream.bases.members import members
from bo_stream.module_state import State, is_in, state_of

ROWS = 1024
"""Points whose correlations with each other are held at a time."""


class OIPS(Allocator):
    """Online inducing point selection: accept x where ``max_j corr(x, Z_j) < rho``.

    One pass, deterministic given the order; a batch gives the same as its rows one by one. The
    threshold is on the correlation, so that an output scale does not change its meaning.

    - Cost: O(n M) for n points, and O(n) for each one accepted.
    - When hyperparameters move: points that have become alike (correlation above ``prune``) go, the
      younger first; where all have become strangers, the data to come fill the gaps.
    - Source: Galy-Fajou and Opper (2021), algorithm 1.

    Example:
        >>> Z = OIPS(0.8).update(X[:0], X, kernel)
    """

    def __init__(
        self,
        rho: float,
        prune: float | None = None,
        isolation: Isolation | None = None,
    ) -> None:
        """Set the thresholds.

        Args:
            rho: Accept what is less correlated than this with every inducing point, in (0, 1).
            prune: Drop an inducing point that is more correlated than this with an older one, from
                rho to 1; half-way from rho to 1 if omitted. 1 drops nothing.
            isolation: Which points are outliers, never to be accepted; none if omitted.

        Raises:
            ValueError: A threshold is out of range.
        """
        if not 0.0 < rho < 1.0:
            raise ValueError(f"Expected rho in (0, 1), a correlation, got {rho}.")
        self.rho = rho
        self.prune = (1.0 + rho) / 2.0 if prune is None else prune
        if not rho <= self.prune <= 1.0:
            raise ValueError(f"Expected prune from rho = {rho} to 1, got {prune}.")
        self.isolation = isolation
        self._settled: State | None = None

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        Z = self._rechecked(Z, kernel)
        for rows in X_new.split(ROWS):
            candidates = rows[self._likeness(rows, Z, kernel) < self.rho]
            if self.isolation is not None:
                candidates = candidates[~self.isolation.of(candidates, Z, rows, kernel)]
            accepted = candidates[first_apart(candidates, kernel, self.rho)]
            Z = torch.cat((Z, accepted))
        self._settled = (Z, *state_of(kernel))
        return Z

    def _rechecked(self, Z: Tensor, kernel: Kernel) -> Tensor:
        """Pruned, unless all have been together already and the hyperparameters have not moved."""
        if self._settled is None or not is_in(kernel, self._settled[1:]):
            return self.pruned(Z, kernel)
        return Z if bool(members(Z, self._settled[0]).all()) else self.pruned(Z, kernel)

    @torch.no_grad()
    def pruned(self, Z: Tensor, kernel: Kernel) -> Tensor:
        """Those of Z, in order, that no older one that stays resembles by more than ``prune``."""
        return Z if self.prune >= 1.0 else Z[first_apart(Z, kernel, self.prune)]

    def fresh(self) -> OIPS:
        """An allocator of the same settings."""
        return OIPS(self.rho, self.prune, self.isolation)

    def _likeness(self, X: Tensor, Z: Tensor, kernel: Kernel) -> Tensor:
        """Largest correlation with an inducing point, ``n``."""
        if len(Z) == 0:
            return X.new_full((len(X),), -1.0)
        return correlation(kernel, X, Z).amax(-1)


def first_apart(X: Tensor, kernel: Kernel, threshold: float) -> Tensor:
    """Indices of the rows that a pass in order accepts, each unlike all accepted before it.

    Cost O(n²), and O(n) more for each one accepted.
    """
    return first_unlike(correlation(kernel, X, X) >= threshold)


def first_unlike(alike: Tensor) -> Tensor:
    """Indices that a pass in order accepts, each alike to none accepted before it.

    Only those that are alike to others are looked at one by one.

    Args:
        alike: Which are, ``n x n``, symmetric.
    """
    itself = torch.eye(len(alike), dtype=torch.bool, device=alike.device)
    free = (alike & ~itself).any(-1)
    accepted = ~free
    while bool(free.any()):
        i = int(free.to(torch.uint8).argmax())
        accepted[i] = True
        free &= ~alike[i]
        free[i] = False
    return torch.nonzero(accepted).flatten()
