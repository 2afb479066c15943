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
    No point is proposed that is known already, unless no other is found.

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
        if self._A is None or not self.levels:
            return snapped
        few = torch.zeros(X.shape[-1], dtype=torch.bool, device=X.device)
        few[list(self.levels)] = True
        kept = self._drawn(torch.where(few, inside, snapped), inside)
        return torch.where(self._holds(snapped).unsqueeze(-1), snapped, kept)

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

    def _holds(self, X: Tensor) -> Tensor:
        """Return which points keep the constraints, ``n``."""
        if self._A is None or self._b is None:
            return torch.ones(len(X), dtype=torch.bool, device=X.device)
        return (X @ self._A.to(X).mT <= self._b.to(X).reshape(-1) + TOLERANCE).all(-1)

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

    def nearer(self, X: Tensor, centre: Tensor, generator: torch.Generator | None) -> Tensor:
        """Let inputs of few values be as at a centre, ``d``, but for ``CHANGED`` on average."""
        few = list(self.levels)
        kept = torch.rand(len(X), len(few), generator=generator) * len(few) >= CHANGED
        moved = X.clone()
        moved[:, few] = torch.where(kept.to(X.device), centre[few], X[:, few])
        return moved

    def new(self, X: Tensor, inside: Tensor, known: Tensor) -> Tensor:
        """Admit candidates, and leave out those that are known, and repetitions.

        Args:
            X: ``c x d``.
            inside: A point of the domain, ``d``.
            known: Points that are known already, ``m x d``.

        Returns:
            At most ``c x d``; where all are known, all of them.
        """
        distinct = torch.unique(self.admit(X, inside), dim=0)
        seen = set(_keys(self.snap(known.to(X))))
        new = [i for i, key in enumerate(_keys(distinct)) if key not in seen]
        return distinct[new] if new else distinct

    @staticmethod
    def best_of_each(values: Tensor) -> Tensor:
        """Choose for each function, ``n x c``, its best candidate, none twice if they suffice."""
        left, chosen = values.clone(), []
        for row in left:
            chosen.append(int(row.argmax()))
            if len(chosen) < values.shape[-1]:
                left[:, chosen[-1]] = -torch.inf
        return torch.tensor(chosen, device=values.device)

    def new_or(self, X: Tensor, others: Tensor, known: Tensor) -> Tensor:
        """Return points, or the others where one is known or a repetition; ``n x d`` each."""
        seen, old = set(_keys(self.snap(known.to(X)))), []
        for key in _keys(X):
            old.append(key in seen)
            seen.add(key)
        return torch.where(torch.tensor(old, device=X.device).unsqueeze(-1), others, X)


def _keys(X: Tensor) -> list[bytes]:
    """Return each row's values as bytes; the sign of a zero does not count."""
    return [row.tobytes() for row in (X + 0.0).detach().cpu().numpy()]
