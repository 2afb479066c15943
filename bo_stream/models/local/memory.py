"""Which local model an observation belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.allocation.selection import first_unlike
from bo_stream.bases.kernels import stacked_correlation
from bo_stream.models.memory import Observations
from bo_stream.sufficient_statistics import target_columns


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
        """Room for observations, ``... x m x n``."""
        zero = torch.zeros(shape, dtype=torch.float64, device=device)
        return cls(zero.new_zeros(*shape, dim), zero, zero + 1.0, zero > 0.0, zero)

    def __getitem__(self, rows: slice) -> Rows:
        """Select some of the observations."""
        return Rows(self.X[..., rows, :], *(value[..., rows] for value in self._numbers()))

    def __len__(self) -> int:
        return self.targets.shape[-1]

    def map(self, rule: Callable[[Tensor], Tensor]) -> Rows:
        """Apply a rule to every tensor."""
        return Rows(*(rule(getattr(self, field.name)) for field in fields(self)))

    def combined(self, other: Rows, rule: Callable[[Tensor, Tensor], Tensor]) -> Rows:
        """Apply a rule to every pair of tensors."""
        names = [field.name for field in fields(self)]
        return Rows(*(rule(getattr(self, name), getattr(other, name)) for name in names))

    def _numbers(self) -> tuple[Tensor, ...]:
        return self.targets, self.noise, self.known, self.weight


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
        """Room for one model that has no observation.

        Args:
            batch: ``batch_shape x m``.
            size: s.
            dim: d.
            device: Of the tensors.
        """
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
        return replace(
            self,
            rows=self.rows.combined(room, lambda a, b: torch.cat((a, b))),
            entered=torch.cat((self.entered, self.entered.new_zeros(shape[:-1]))),
        )

    def with_rows(self, rows: Rows, model: Tensor) -> LocalMemory:
        """After some observations more; ``totals`` stay. Cost O(size of the memory).

        Args:
            rows: ``batch_shape x m x n``; in the order of their age.
            model: Which model takes each of them, ``batch_shape x m x n``, at most s a model; −1:
                none.
        """
        chosen = model.reshape(-1, model.shape[-1])
        each = chosen.unsqueeze(-1) == torch.arange(len(self.entered), device=model.device)
        entered = self.entered.reshape(len(self.entered), -1)
        rank = (each * (each.cumsum(-2) - 1 + entered.mT.unsqueeze(-2))).sum(-1)
        keep = chosen >= 0
        place = torch.arange(len(chosen), device=model.device).unsqueeze(-1).expand_as(chosen)
        index = (chosen[keep], place[keep], (rank % self.size)[keep])
        stored = self.rows.combined(
            rows, lambda store, new: _put(store, new, index, keep, self.size)
        )
        after = (entered + each.sum(-2).mT).view_as(self.entered)
        return replace(self, rows=_with_empty_places_filled(stored, after), entered=after)

    def counting(self, rows: Rows) -> LocalMemory:
        """Add the sums of some observations."""
        columns = target_columns(rows.targets)
        return replace(self, totals=self.totals + columns.mT @ (columns * rows.weight[..., None]))

    def by_age(self, model: int) -> Rows:
        """Observations of a model, empty places first, then by age, ``batch_shape x m x s``."""
        places = torch.arange(self.size, device=self.entered.device)
        order = (places + self.entered[model].unsqueeze(-1)) % self.size
        return self.rows.map(lambda store: _in_order(store[model], order))

    def scale(self, factor: float) -> LocalMemory:
        """Every observation counts ``factor`` times."""
        rows = replace(self.rows, weight=self.rows.weight * factor)
        return replace(self, rows=rows, totals=self.totals * factor)

    def map_targets(self, matrix: Tensor) -> LocalMemory:
        """Targets ``[Y, 1] @ matrix``, ``batch_shape x m x 2 x 2``; the new ones in place of Y."""
        factor, shift = (matrix[..., i, 0].unsqueeze(-1) for i in (0, 1))
        rows = replace(self.rows, targets=self.rows.targets * factor + shift)
        return replace(self, rows=rows, totals=matrix.mT @ self.totals @ matrix)

    def select(self, outputs: list[int]) -> LocalMemory:
        """Copy the memory of some of the outputs."""
        axis = self.entered.ndim - 1
        index = torch.tensor(outputs, device=self.entered.device)
        return LocalMemory(
            self.rows.map(lambda store: store.index_select(axis, index)),
            self.entered.index_select(axis, index),
            self.totals[..., outputs, :, :],
        )

    def to(self, device: torch.device) -> LocalMemory:
        """On another device."""
        rows = self.rows.map(lambda store: store.to(device))
        return LocalMemory(rows, self.entered.to(device), self.totals.to(device))

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


def _with_empty_places_filled(rows: Rows, entered: Tensor) -> Rows:
    """Put the input at each model's first place into its empty ones; their weight stays 0."""
    taken = _taken(entered, len(rows)).unsqueeze(-1)
    return replace(rows, X=torch.where(taken, rows.X, rows.X[..., :1, :]))


def _put(store: Tensor, new: Tensor, index: tuple[Tensor, ...], keep: Tensor, size: int) -> Tensor:
    """Copy ``C x ... x s (x d)`` with values of ``... x n (x d)`` put at their places."""
    changed = store.clone(memory_format=torch.contiguous_format)
    changed.view(len(store), len(keep), size, -1)[index] = new.reshape(*keep.shape, -1)[keep]
    return changed


def _in_order(store: Tensor, order: Tensor) -> Tensor:
    """Rows of ``... x s (x d)`` in the order of ``... x s``."""
    if store.ndim > order.ndim:
        return store.gather(-2, order.unsqueeze(-1).expand_as(store))
    return store.gather(-1, order)


@dataclass(frozen=True)
class Router:
    """An observation goes to the model whose centre is most like it, or begins a model.

    Attributes:
        w_gen: Correlation with the most similar centre below which a new model begins, in (0, 1).
        max_models: Largest number of models of a batch element and output; once there are so many,
            every observation goes to the most similar one.
    """

    w_gen: float
    max_models: int

    @torch.no_grad()
    def models_for(self, X: Tensor, memory: LocalMemory, kernel: Kernel, outputs: int) -> Tensor:
        """Number of the model for each of some inputs, ``batch_shape x m x n``.

        As one after the other, but for the centres, which stay until all have entered; a number
        from ``memory.alive.sum(0)`` on is of a new model. [NguyenTuong2008, algorithm 1]

        Args:
            X: ``batch_shape x m x n x d``.
            memory: Of the models.
            kernel: Of the correlations, in float64.
            outputs: m.
        """
        similarity = stacked_correlation(kernel, X, memory.centres, outputs)
        alive = memory.alive.movedim(0, -1)
        similarity = torch.where(alive.unsqueeze(-2), similarity, -torch.inf)
        pairs = stacked_correlation(kernel, X, X, outputs)
        n = X.shape[-2]
        each = zip(
            similarity.reshape(-1, n, similarity.shape[-1]),
            pairs.expand(*similarity.shape[:-1], n).reshape(-1, n, n),
            alive.sum(-1).flatten().tolist(),
            strict=True,
        )
        return torch.stack([self._one(*arguments) for arguments in each]).view(
            similarity.shape[:-1]
        )

    def _one(self, similarity: Tensor, pairs: Tensor, models: int) -> Tensor:
        """Select one batch element and output, ``n``."""
        best, chosen = similarity.max(-1)
        novel = (best < self.w_gen).nonzero().squeeze(-1)
        alike = pairs[novel][:, novel] >= self.w_gen
        seeds = novel[first_unlike(alike)][: self.max_models - models]
        if len(seeds) == 0:
            return chosen
        to_seeds, which = pairs[novel][:, seeds].max(-1)
        chosen[novel] = torch.where(to_seeds > best[novel], models + which, chosen[novel])
        return chosen
