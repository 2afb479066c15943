"""Points of the unit cube that can be evaluated: inputs of few values, and linear constraints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

TOLERANCE = 1e-9
"""By how much a linear constraint may be missed, for rounding."""

CHANGED = 2
"""Mean number of inputs of few values in which a candidate differs from the centre."""


class Domain:
    """A part of the unit cube: some inputs have few values, and ``A x <= b``.

    A region search has its candidates and points admitted, and asks for the boxes of its searches.

    Example:
        >>> domain = Domain({3: torch.tensor([0.25, 0.75])}, torch.ones(1, d), torch.tensor([2.0]))
        >>> domain.admit(X, inside)
    """

    def __init__(
        self,
        levels: Mapping[int, Tensor] | None = None,
        A: Tensor | None = None,
        b: Tensor | None = None,
    ) -> None:
        """Define a domain.

        Args:
            levels: Ascending values of inputs that have few, by the input's position.
            A: ``k x d``.
            b: ``k``.
        """
        self.levels = dict(levels or {})
        self._A, self._b = A, b

    def snap(self, X: Tensor) -> Tensor:
        """Move points, ``n x d``, to the nearest values of the inputs that have few."""
        snapped = X.clone()
        for j, values in self.levels.items():
            known = values.to(X)
            middles = (known[1:] + known[:-1]) / 2.0
            snapped[:, j] = known[torch.searchsorted(middles, X[:, j].contiguous())]
        return snapped

    def admit(self, X: Tensor, inside: Tensor) -> Tensor:
        """Move points into the domain, ``n x d``.

        A point that breaks a constraint is drawn along a line to a point of the domain. Where its
        inputs of few values then miss the constraint again, these become those of that point.

        Args:
            X: Points of the unit cube, ``n x d``.
            inside: A point of the domain, ``d``, or one for each, ``n x d``.
        """
        inside = inside.expand(X.shape)
        snapped = self.snap(self._drawn(X, inside))
        if self._A is None or self._b is None or not self.levels:
            return snapped
        few = torch.zeros(X.shape[-1], dtype=torch.bool, device=X.device)
        few[list(self.levels)] = True
        kept = self._drawn(torch.where(few, inside, snapped), inside)
        holds = (snapped @ self._A.to(X).mT <= self._b.to(X).reshape(-1) + TOLERANCE).all(-1)
        return torch.where(holds.unsqueeze(-1), snapped, kept)

    def _drawn(self, X: Tensor, inside: Tensor) -> Tensor:
        """Draw points that break a constraint along a line to points that do not."""
        if self._A is None or self._b is None:
            return X
        A, b = self._A.to(X), self._b.to(X).reshape(-1)
        steps = (X - inside) @ A.mT
        room = (b - inside @ A.mT).clamp_min(0.0)
        shares = torch.where(steps > 0.0, room / steps.clamp_min(1e-300), torch.inf)
        share = shares.amin(-1, keepdim=True).clamp_max(1.0)
        return inside + share * (X - inside)

    def widened(self, bounds: Tensor, centre: Tensor) -> Tensor:
        """Widen a box, ``2 x d``, to the next values of inputs that have few, on both sides."""
        low, high = bounds.clone()
        for j, values in self.levels.items():
            known = values.to(bounds)
            at = int((known - centre[j]).abs().argmin())
            low[j] = low[j].minimum(known[max(at - 1, 0)])
            high[j] = high[j].maximum(known[min(at + 1, len(known) - 1)])
        return torch.stack((low, high))

    def pinned(self, bounds: Tensor, starts: Tensor) -> Tensor:
        """Return the boxes of searches, ``2 x n x d``, in which inputs of few values stay.

        Args:
            bounds: ``2 x d``.
            starts: Where the searches start, ``n x d``.
        """
        boxes = bounds.unsqueeze(-2).repeat(1, len(starts), 1)
        few = list(self.levels)
        boxes[..., few] = starts[:, few]
        return boxes

    def candidates(self, X: Tensor, centre: Tensor, generator: torch.Generator) -> Tensor:
        """Admit candidates about a centre, which differ from it in few inputs of few values.

        Args:
            X: ``n x d``.
            centre: A point of the domain, ``d``.
            generator: Of random numbers, on the CPU.

        Returns:
            At most ``n x d``, without repetitions where there are inputs of few values.
        """
        few = list(self.levels)
        if not few:
            return self.admit(X, centre)
        stays = torch.rand(len(X), len(few), generator=generator) * len(few) >= CHANGED
        moved = X.clone()
        moved[:, few] = torch.where(stays.to(X.device), centre[few], X[:, few])
        return self.admit(moved, centre).unique(dim=0)
