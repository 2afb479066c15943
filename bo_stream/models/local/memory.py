"""What a stream leaves behind in some local models: the last observations of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.models.memory import Observations
from bo_stream.tensors import map_tensors, zip_tensors


@dataclass(frozen=True)
class Rows:
    """Observations, each output's on their own.

    Attributes:
        X: ``... x m x n x d``.
        targets: ``... x m x n``, less the memory's shift.
        noise: Known variances, ``... x m x n``, with 1 where unknown.
        known: Whether the noise is known, ``... x m x n``.
        weight: How many times each counts, ``... x m x n``; 0: it is not there.
    """

    X: Tensor
    targets: Tensor
    noise: Tensor
    known: Tensor
    weight: Tensor

    @classmethod
    def of(cls, data: Observations) -> Rows:
        """Hold a batch, the same inputs for every output."""
        shape = data.targets.shape
        X = data.X.unsqueeze(-3).expand(*shape, data.X.shape[-1])
        known = data.known.expand(shape)
        return cls(X, data.targets, data.noise, known, torch.ones_like(data.targets))

    @classmethod
    def none(cls, shape: tuple[int, ...], dim: int, device: torch.device) -> Rows:
        """Make room for observations, ``... x m x n``."""
        zero = torch.zeros(shape, dtype=torch.float64, device=device)
        return cls(zero.new_zeros(*shape, dim), zero, zero + 1.0, zero > 0.0, zero)

    def __getitem__(self, rows: slice) -> Rows:
        """Select some of the observations."""
        numbers = (self.targets, self.noise, self.known, self.weight)
        return Rows(self.X[..., rows, :], *(each[..., rows] for each in numbers))

    def __len__(self) -> int:
        return self.targets.shape[-1]


@dataclass(frozen=True)
class LocalMemory:
    """The last s observations of each of C local models, and the sums of all there ever were.

    Each batch element and output has models of its own, the first ones of the C.

    Attributes:
        rows: ``C x batch_shape x m x s``; a model's next observation takes its oldest one's place.
            Places not taken yet have weight 0 and the input at the model's first place, since
            gpytorch centres inputs at their mean before it subtracts squares.
        entered: How many observations each model ever took, ``C x batch_shape x m``.
        totals: ``[Y, 1]ᵀ [Y, 1]`` of all observations, those forgotten for want of room among
            them, ``batch_shape x m x 2 x 2``.
    """

    rows: Rows
    entered: Tensor
    totals: Tensor

    @classmethod
    def empty(cls, batch: torch.Size, size: int, dim: int, device: torch.device) -> LocalMemory:
        """Make room for one model of s observations of d inputs, for ``batch_shape x m``."""
        entered = torch.zeros(1, *batch, dtype=torch.long, device=device)
        totals = torch.zeros(*batch, 2, 2, dtype=torch.float64, device=device)
        return cls(Rows.none((1, *batch, size), dim, device), entered, totals)

    @property
    def size(self) -> int:
        """Largest number s of observations of a model."""
        return len(self.rows)

    @property
    def alive(self) -> Tensor:
        """Which models have an observation, ``C x batch_shape x m``."""
        return self.entered > 0

    @property
    def centres(self) -> Tensor:
        """Mean of each model's inputs, ``batch_shape x m x C x d``; 0 of one that has none."""
        count = self.entered.clamp_max(self.size).unsqueeze(-1)
        total = (self.rows.X * _taken(self.entered, self.size).unsqueeze(-1)).sum(-2)
        return (total / count.clamp_min(1)).movedim(0, -2)

    def with_room(self, models: int) -> LocalMemory:
        """Make room for some models at least, in powers of two."""
        more = 2 ** (max(models, 1) - 1).bit_length() - len(self.entered)
        if more <= 0:
            return self
        shape = (more, *self.entered.shape[1:], self.size)
        room = Rows.none(shape, self.rows.X.shape[-1], self.entered.device)
        rows = zip_tensors(lambda a, b: torch.cat((a, b)), self.rows, room)
        entered = torch.cat((self.entered, self.entered.new_zeros(shape[:-1])))
        return replace(self, rows=rows, entered=entered)

    def with_rows(self, rows: Rows, model: Tensor) -> LocalMemory:
        """Add rows by age; ``totals`` stay. Cost O(size of the memory).

        ``model`` is the number of the one that takes each, ``batch_shape x m x n``; −1: none. At
        most s go to one model.
        """
        chosen = model.reshape(-1, model.shape[-1])
        each = chosen.unsqueeze(-1) == torch.arange(len(self.entered), device=model.device)
        entered = self.entered.reshape(len(self.entered), -1)
        rank = (each * (each.cumsum(-2) - 1 + entered.mT.unsqueeze(-2))).sum(-1)
        keep = chosen >= 0
        place = torch.arange(len(chosen), device=model.device).unsqueeze(-1).expand_as(chosen)
        index = (chosen[keep], place[keep], (rank % self.size)[keep])
        stored = zip_tensors(lambda a, b: _put(a, b, index, keep, self.size), self.rows, rows)
        after = (entered + each.sum(-2).mT).view_as(self.entered)
        taken = _taken(after, self.size).unsqueeze(-1)
        X = torch.where(taken, stored.X, stored.X[..., :1, :])  # see :attr:`rows`
        return replace(self, rows=replace(stored, X=X), entered=after)

    def by_age(self, model: int) -> Rows:
        """List the observations of a model, ``batch_shape x m x s``: empty places, then by age."""
        places = torch.arange(self.size, device=self.entered.device)
        order = (places + self.entered[model].unsqueeze(-1)) % self.size

        def in_order(store: Tensor) -> Tensor:
            index = order.unsqueeze(-1) if store[model].ndim > order.ndim else order
            return torch.take_along_dim(store[model], index, order.ndim - 1)

        return map_tensors(self.rows, in_order)

    def scale(self, factor: float) -> LocalMemory:
        """Let every observation count ``factor`` times."""
        rows = replace(self.rows, weight=self.rows.weight * factor)
        return replace(self, rows=rows, totals=self.totals * factor)

    def map_targets(self, matrix: Tensor) -> LocalMemory:
        """Turn targets into ``[Y, 1] @ matrix``, exactly."""
        factor, shift = (matrix[..., i, 0].unsqueeze(-1) for i in (0, 1))
        rows = replace(self.rows, targets=self.rows.targets * factor + shift)
        return replace(self, rows=rows, totals=matrix.mT @ self.totals @ matrix)

    def select(self, outputs: list[int]) -> LocalMemory:
        """Copy the memory of some of the outputs."""
        axis = self.entered.ndim - 1
        index = torch.tensor(outputs, device=self.entered.device)
        rows = map_tensors(self.rows, lambda store: store.index_select(axis, index))
        entered = self.entered.index_select(axis, index)
        return LocalMemory(rows, entered, self.totals[..., outputs, :, :])

    def to(self, device: torch.device) -> LocalMemory:
        """Move the memory to another device."""
        return map_tensors(self, lambda tensor: tensor.to(device))

    @property
    def counts(self) -> Tensor:
        """Number of observations, those forgotten among them, ``batch_shape x m``."""
        return self.totals[..., 1, 1]

    def mean_known_noise(self) -> Tensor | None:
        """Mean of the known noise variances that are held, or None without any."""
        if not bool(self.rows.known.any()):
            return None
        weight = self.rows.weight * self.rows.known
        total = (weight * self.rows.noise).sum(-1).sum(0)
        count = weight.sum(-1).sum(0)
        return total / torch.where(count > 0.0, count, 1.0)


def _taken(entered: Tensor, size: int) -> Tensor:
    """Return which of ``size`` places hold an observation, ``... -> ... x size``."""
    return torch.arange(size, device=entered.device) < entered.unsqueeze(-1)


def _put(store: Tensor, new: Tensor, index: tuple[Tensor, ...], keep: Tensor, size: int) -> Tensor:
    """Copy ``C x ... x s (x d)`` with values of ``... x n (x d)`` put at their places."""
    changed = store.clone(memory_format=torch.contiguous_format)
    changed.view(len(store), len(keep), size, -1)[index] = new.reshape(*keep.shape, -1)[keep]
    return changed
