"""The latest inputs that a model observed, for routines that start from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Size, Tensor

LATEST = 64
"""How many inputs of the latest observations a model holds."""

WAITING = 16
"""At most so many parts, of at most ``2 LATEST`` rows, are held before they are joined."""


@dataclass(frozen=True)
class LatestInputs:
    """The last ``LATEST`` inputs that a model observed, and those of hypothetical observations.

    Attributes:
        parts: Observed, in order of arrival, each ``... x k x d``; they wait to be joined, so that
            an update costs one copy.
        hypothetical: Each ``... x q x d``, in the order in which a model was conditioned on them.
    """

    parts: tuple[Tensor, ...] = ()
    hypothetical: tuple[Tensor, ...] = ()

    @property
    def observed(self) -> Tensor | None:
        """Those observed, ``... x k x d``, or None before the first."""
        return _last(torch.cat(self.parts, -2)) if self.parts else None

    def with_rows(self, X: Tensor) -> LatestInputs:
        """After n more observations, ``... x n x d``. Cost O(LATEST d)."""
        new = _last(X.detach()).clone()
        former = self.parts if new.shape[-2] < LATEST else ()
        parts = (*former, new)
        if len(parts) > WAITING or sum(part.shape[-2] for part in parts) > 2 * LATEST:
            parts = (_last(torch.cat(parts, -2)),)
        return LatestInputs(parts, self.hypothetical)

    def followed_by(self, later: LatestInputs) -> LatestInputs:
        """Append those of another model, which observed all of its own later."""
        observed = later.observed
        return self if observed is None else self.with_rows(observed)

    def without(self, gone: Tensor, coordinates: Callable[[Tensor], Tensor]) -> LatestInputs:
        """Drop the latest of those rows that were taken out, as often as each was.

        Args:
            gone: In some coordinates, ``... x n x k``.
            coordinates: The map of inputs to them.
        """
        held = self.observed
        if held is None:
            return self
        rows, removed = _as_rows(coordinates(held)), _as_rows(gone)
        times = (rows.unsqueeze(1) == removed).all(-1).sum(-1)
        later = (rows.unsqueeze(1) == rows).all(-1).triu(1).sum(-1)
        return replace(self, parts=(held[..., later >= times, :],))

    def to(self, device: torch.device) -> LatestInputs:
        """Move the inputs to another device."""
        parts = tuple(X.to(device) for X in self.parts)
        return LatestInputs(parts, tuple(X.to(device) for X in self.hypothetical))

    def expanded(self, batch_shape: Size, like: Tensor, width: int) -> Tensor:
        """Return all of them in one tensor, ``batch_shape x k x d``.

        Args:
            batch_shape: That the model's posteriors have.
            like: Has the dtype and the device.
            width: Number d of inputs; hypothetical ones of another (under ``AppendFeatures``) are
                left out.
        """
        observed = self.observed
        held = like.new_empty(0, width) if observed is None else observed
        parts = (X.to(like) for X in (held, *self.hypothetical) if X.shape[-1] == width)
        return torch.cat([X.expand(*batch_shape, *X.shape[-2:]) for X in parts], -2)


def _last(X: Tensor) -> Tensor:
    """Return the last ``LATEST`` rows."""
    surplus = X.shape[-2] - LATEST
    return X.narrow(-2, surplus, LATEST) if surplus > 0 else X


def _as_rows(X: Tensor) -> Tensor:
    """Reshape ``batch_shape x n x d`` to ``n x (batch d)``: a row has all batches."""
    return X.double().movedim(-2, 0).flatten(1)
