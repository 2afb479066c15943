"""What all memories share: their base class, observations on their way in, statistics, checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from bo_stream.likelihoods.sites import Sites
from bo_stream.tensors import map_tensors, none_set
from bo_stream.warnings import warn_of_lost_digits
from bo_stream.weights import (
    G,
    SufficientStatistics,
    Whitened,
    continued,
    target_columns,
    weighted_statistics,
)


class Memory(ABC):
    """What is left of the data: what any model can ask a memory, and do to it.

    A memory is a frozen dataclass. What is done to it is done to its parts: to those of its fields
    that are statistics, observations or memories. A family overrides what other fields follow in.
    """

    if TYPE_CHECKING:  # a property of most memories, and a field of some

        @property
        @abstractmethod
        def totals(self) -> Tensor:
            """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""

    @property
    def counts(self) -> Tensor:
        """Number of observations, ``... x m``."""
        return self.totals[..., 1, 1]

    @abstractmethod
    def known_sums(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Sum known noise variances, their inverses, and ones, ``... x m`` each; None without."""

    def mean_known_noise(self) -> Tensor | None:
        """Mean of the known noise variances, ``... x m``, or None without any."""
        sums = self.known_sums()
        return None if sums is None else sums[0] / torch.where(sums[2] > 0.0, sums[2], 1.0)

    def scale(self, factor: float) -> Self:
        """Let every observation count ``factor`` times."""
        return self._each(lambda part: part.scale(factor))

    def map_targets(self, matrix: Tensor) -> Self:
        """Turn targets into ``[Y, 1] @ matrix``, ``... x m x 2 x 2``, exactly; the last stays."""
        return self._each(lambda part: part.map_targets(matrix))

    def select(self, outputs: list[int]) -> Self:
        """Copy the memory of some of the outputs."""
        return self._each(lambda part: part.select(outputs))

    def to(self, device: torch.device) -> Self:
        """Move the memory to another device."""

        def moved(item: Any) -> Any:
            own = isinstance(item, Memory)
            return item.to(device) if own else map_tensors(item, lambda t: t.to(device))

        return self._each(moved, object)

    def _each(self, rule: Callable[[Any], Any], *more: type) -> Self:
        """Apply a rule to the parts, and to fields of ``more`` types; to each item of a tuple."""
        types = (Memory, SufficientStatistics, Observations, *more)

        def changed(item: Any) -> Any:
            if isinstance(item, tuple):
                return tuple(map(changed, item))
            return rule(item) if isinstance(item, types) else item

        own: Any = self
        return replace(own, **{f.name: changed(getattr(own, f.name)) for f in fields(own)})


# --- observations as a memory takes them ---------------------------------------------------------


class Targets(NamedTuple):
    """Outcomes in a memory's units.

    Attributes:
        targets: ``batch x m x n``; of counts ``batch x 2 x n``, positives and trials of m = 1.
        noise: Known noise variances, ``batch x m x n``, with 1 where unknown.
        known: Whether the noise is known, ``batch x 1 x n``.
    """

    targets: Tensor
    noise: Tensor
    known: Tensor


class Measured(Protocol):
    """Anything that has outcomes in a memory's units, as :class:`Targets` has them."""

    @property
    def targets(self) -> Tensor:
        """Outcomes, ``... x m x n``."""

    @property
    def noise(self) -> Tensor:
        """Known noise variances, ``... x m x n``."""

    @property
    def known(self) -> Tensor:
        """Whether the noise is known, ``... x 1 x n``."""


SAME = 1e-5
"""Relative difference up to which two observations are taken for the same."""

_SMALLEST = 1e-300
"""Least size that differences are divided by: zeros differ from all else."""

NOT_HELD = (
    "Expected observations that are in memory, with X, Y and Yvar as they were given to the model; "
    "got some that are not among its rows: they were never put in, or with other Y or Yvar. The "
    "model is as it was."
)


@dataclass(frozen=True)
class Observations:
    """A checked batch of observations in the memory's units.

    Attributes:
        X: ``batch x n x d``, transformed inputs.
        targets: ``batch x m x n``, less the memory's shift.
        noise: Known noise variances, ``batch x m x n``, with 1 where unknown.
        known: Whether the noise is known, ``batch x 1 x n``.
        sign: 1 to add, −1 to take out.
        sites: Gaussian observations that stand for outcomes of another likelihood while these are
            stored as rows, ``batch x m x n``; None: of none so far.
    """

    X: Tensor
    targets: Tensor
    noise: Tensor
    known: Tensor
    sign: float
    sites: Sites | None = None

    @classmethod
    def none(cls, X: Tensor, batch: torch.Size, columns: int = 1) -> Observations:
        """Make an empty batch of inputs like X, ``... x d``, and outputs ``batch_shape x m``.

        Of each output there are as many columns of outcomes; of several, there are sites.
        """
        noise = torch.zeros(*batch, 0, dtype=torch.float64, device=X.device)
        inputs = noise.new_zeros(*batch[:-1], 0, X.shape[-1])
        targets = noise.repeat_interleave(columns, -2)
        sites = None if columns == 1 else Sites.none(noise)
        return cls(inputs, targets, noise, noise[..., :1, :].bool(), 1.0, sites)

    @classmethod
    def joined(cls, batches: Sequence[Observations]) -> Observations:
        """Join several batches of one sign."""
        X = torch.cat([batch.X for batch in batches], -2)
        columns = zip(*((b.targets, b.noise, b.known) for b in batches), strict=True)
        targets, noise, known = (torch.cat(each, -1) for each in columns)
        sites = None
        if any(batch.sites is not None for batch in batches):  # others are without information
            each = [batch.sites or Sites.none(batch.noise) for batch in batches]
            precision, shift = zip(*((s.precision, s.shift) for s in each), strict=True)
            sites = Sites(torch.cat(precision, -1), torch.cat(shift, -1))
        return cls(X, targets, noise, known, batches[0].sign, sites)

    def __len__(self) -> int:
        return self.X.shape[-2]

    def rows(self, which: slice | Tensor) -> Observations:
        """Select some of them."""
        targets, noise, known = (t[..., which] for t in (self.targets, self.noise, self.known))
        sites = map_tensors(self.sites, lambda values: values[..., which])
        return Observations(self.X[..., which, :], targets, noise, known, self.sign, sites)

    def select(self, outputs: list[int]) -> Observations:
        """Select some of the outputs."""
        columns = self.targets.unflatten(-2, (self.noise.shape[-2], -1))
        targets = columns[..., outputs, :, :].flatten(-3, -2)
        sites = map_tensors(self.sites, lambda values: values[..., outputs, :])
        return replace(self, targets=targets, noise=self.noise[..., outputs, :], sites=sites)

    def map_targets(self, matrix: Tensor) -> Observations:
        """Map the target columns to ``[Y, 1] @ matrix``, of which the last stays."""
        return replace(self, targets=(target_columns(self.targets) @ matrix)[..., 0])

    @property
    def told(self) -> Observations:
        """Observations for a Gaussian process: these, or those that are equal to their sites."""
        if self.sites is None:
            return self
        targets, noise = self.sites.pseudo_observations()
        return Observations(self.X, targets, noise, torch.ones_like(self.known), self.sign)

    def like(self, one: Observations, left: Tensor) -> Tensor:
        """Say which of those left are the same as one, in all batch elements and outputs, ``n``.

        Those equal to the bit if there are any. Else the nearest, if it differs by no more than
        rounding: an outcome by ``SAME`` of its size or of that of half of the others, an input by
        ``SAME`` of how far half of them are from the middle, and a hundredth of its own size.
        """
        same = (self.X == one.X).all(-1).unsqueeze(-2) & (self.known == one.known)
        same = same & (self.targets == one.targets) & (self.noise == one.noise)
        equal = same.movedim(-1, 0).flatten(1).all(-1) & left
        if len(self) == 0 or bool(equal.any()):
            return equal
        X = self.X.flatten(0, -2)
        width = (X - X.median(0).values).abs().median(0).values
        inputs = (self.X - one.X).abs() / (width + 0.01 * one.X.abs()).clamp_min(_SMALLEST)
        typical = self.targets.abs().median(-1, keepdim=True).values
        size = one.targets.abs().maximum(typical).clamp_min(_SMALLEST)
        outcomes = (self.targets - one.targets).abs() / size
        noise = (self.noise - one.noise).abs() / one.noise.clamp_min(_SMALLEST)
        apart = torch.where(self.known == one.known, 0.0, torch.inf).to(inputs)
        every = (inputs.amax(-1).unsqueeze(-2), outcomes, noise, apart)
        difference = torch.stack([e.movedim(-1, 0).flatten(1).amax(-1) for e in every]).amax(0)
        difference = torch.where(left, difference, torch.inf)
        return (difference <= SAME) & (difference == difference.min())

    def positions(self, data: Observations, width: Tensor, but: Tensor | None = None) -> Tensor:
        """Find each observation of a batch among these, each of these once, ``batch x k``.

        Two are the same where no number differs by more than ``SAME``, inputs in parts of a
        ``width``, ``d``, and outcomes of the largest one: those in float32 are rounded.

        Args:
            data: The batch.
            width: Of the inputs.
            but: Which of these are passed over, ``batch x n``; None: none.

        Raises:
            InputDataError: One is not among them.
        """
        differences = self._differences(data, width)
        used = differences.new_zeros(*differences.shape[:-2], len(self))
        if but is not None:
            used = used.masked_fill(but, torch.inf)
        found = [used[..., :0].long()]
        for row in differences.unbind(-2):
            nearest, index = (row + used).min(-1, keepdim=True)
            if not bool((nearest <= SAME).all()):
                raise InputDataError(NOT_HELD)
            used = used.scatter(-1, index, torch.inf)
            found.append(index)
        return torch.cat(found, -1)

    def _differences(self, data: Observations, width: Tensor) -> Tensor:
        """Compute the largest relative difference of any two observations, ``batch x k x n``."""
        parts = (data.X.unsqueeze(-2) - self.X.unsqueeze(-3)).abs() / width.to(self.X)
        inputs = parts.amax(-1)
        scale = self.targets.abs().amax(-1, keepdim=True).clamp_min(_SMALLEST).unsqueeze(-1)
        outcomes = (data.targets.unsqueeze(-1) - self.targets.unsqueeze(-2)).abs() / scale
        noise = (data.noise.log().unsqueeze(-1) - self.noise.log().unsqueeze(-2)).abs()
        kind = data.known.unsqueeze(-1) != self.known.unsqueeze(-2)
        # rows that are alike are told apart by their noise, which may have been raised since
        tie = 1e-6 * SAME * noise.clamp_max(1.0).amax(-3)
        apart = torch.where(kind, torch.inf, 0.0).to(inputs).amax(-3)
        return inputs.maximum(outcomes.amax(-3)) + apart + tie

    def all_but(self, taken: Tensor) -> Tensor:
        """List the positions of all but some, each ``batch x k``, in order."""
        kept = torch.ones_like(self.known[..., 0, :]).scatter(-1, taken, False)
        return kept.nonzero()[:, -1].view(*kept.shape[:-1], len(self) - taken.shape[-1])

    def at(self, positions: Tensor) -> Observations:
        """Select those at some positions, ``batch x k``, of each batch element its own."""

        def gathered(values: Tensor) -> Tensor:
            return values.gather(-1, positions.unsqueeze(-2).expand(*values.shape[:-1], -1))

        X = self.X.gather(-2, positions.unsqueeze(-1).expand(*positions.shape, self.X.shape[-1]))
        columns = map_tensors((self.targets, self.noise, self.known), gathered)
        return Observations(X, *columns, self.sign, map_tensors(self.sites, gathered))

    @property
    def any_known(self) -> bool:
        """Whether any noise variance is known."""
        return bool(self.known.any())

    def learned_group(self) -> tuple[Tensor, Tensor]:
        """Relative noise and weights of those with unknown noise, ``batch x 1 x n`` each."""
        weight = self.sign * (~self.known).to(self.targets)
        return torch.ones_like(weight), weight

    def known_group(self) -> tuple[Tensor, Tensor]:
        """Noise variances and weights of those with known noise, ``batch x m x n`` each."""
        weight = (self.sign * self.known.to(self.targets)).expand(self.noise.shape)
        return self.noise, weight

    def known_sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sum the known noise variances, their inverses, and ones, ``batch x m`` each."""
        noise, weight = self.known_group()
        return (noise * weight).sum(-1), (weight / noise).sum(-1), weight.sum(-1)


def staying(rows: Observations, data: Observations) -> Tensor:
    """Say which rows stay when a batch is taken out, each of its observations once, ``n``."""
    stay = torch.ones(len(rows), dtype=torch.bool, device=rows.X.device)
    for i in range(len(data)):
        found = torch.nonzero(rows.like(data.rows(slice(i, i + 1)), stay)).flatten()
        stay[found[:1]] = False
    return stay


# --- statistics in weights -----------------------------------------------------------------------


@dataclass(frozen=True)
class NoiseGroups(Memory, Generic[G]):
    """Statistics of the observations whose noise is inferred, and of those whose noise is known.

    Attributes:
        learned: Observations whose noise level is learned: relative noise 1, one gram for all
            outputs.
        known: Observations with known noise, or None.
    """

    learned: SufficientStatistics[G]
    known: SufficientStatistics[G] | None = None

    def __add__(self, other: Self) -> Self:
        learned = self.learned + other.learned
        return replace(self, learned=learned, known=added(self.known, other.known))

    def map(self, rule: Callable[[SufficientStatistics[G]], SufficientStatistics[G]]) -> Self:
        """Apply a rule to both kinds of noise."""
        learned, known = rule(self.learned), self.known
        return replace(self, learned=learned, known=None if known is None else rule(known))

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        learned, known = self.learned, self.known
        return learned.totals if known is None else learned.totals + known.totals

    def known_sums(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """See :meth:`Memory.known_sums`."""
        known = self.known
        return None if known is None else (known.noise_sum, known.energy[..., 1, 1], known.count)


class WhitenedMemory(NoiseGroups[Tensor]):
    """The memory in the weights of one basis, whitened or values at centres: what a solve needs."""

    def leading(self, rank: int) -> WhitenedMemory:
        """Keep the first weights only."""
        return self.map(
            lambda s: replace(s, gram=s.gram[..., :rank, :rank], moment=s.moment[..., :rank, :])
        )

    def continued(self, features: Tensor, data: Observations) -> WhitenedMemory:
        """Append features that are zero of all observations but some in memory.

        Of these ``features`` are all, ``... x m x n x p``, those known already first.
        """
        learned = continued(self.learned, features, data.targets, *data.learned_group())
        if self.known is None:
            return WhitenedMemory(learned)
        known = continued(self.known, features, data.targets, *data.known_group())
        return WhitenedMemory(learned, known)

    def observed(self, features: Tensor, data: Observations) -> WhitenedMemory:
        """Add a batch with these whitened features. Cost O(n r²)."""
        return self.observed_by(partial(weighted_statistics, features), data)

    def observed_by(
        self, rule: Callable[[Tensor, Tensor, Tensor], Whitened], data: Observations
    ) -> WhitenedMemory:
        """Add a batch; ``rule`` makes statistics of targets, noise and weights."""
        learned, known = self.learned, self.known
        none = not data.known.is_cpu and known is None and none_set(data.known)
        count = 0 if none else int(data.known.sum())
        if count < data.known.numel():
            learned = learned + rule(data.targets, *data.learned_group())
        if count > 0:
            known = added(known, rule(data.targets, *data.known_group()))
        return WhitenedMemory(learned, known)


def added(
    first: SufficientStatistics[G] | None, second: SufficientStatistics[G] | None
) -> SufficientStatistics[G] | None:
    """Add statistics, of which either may be missing."""
    if first is None or second is None:
        return second if first is None else first
    return first + second


class HoldsStatistics(Memory):
    """A memory of ``statistics``, which answer what any memory is asked; see :class:`Memory`."""

    statistics: WhitenedMemory

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations."""
        return self.statistics.totals

    def known_sums(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """See :meth:`Memory.known_sums`."""
        return self.statistics.known_sums()


# --- whether what is left when observations are taken out can be of observations -----------------


_ROUNDING = 1e-8
"""Negative part of the former statistics that counts as a rounding error."""


def check_remainder(after: WhitenedMemory, before: WhitenedMemory) -> None:
    """Check that what would be left can be of observations: ``[Φ, Y, 1]ᵀ D⁻¹ [Φ, Y, 1] ⪰ 0``.

    Cost O(r³) for dense grams, O(M) for diagonal ones. InputDataError: It cannot.
    """
    _check_groups(after, before, _may_be_data)


def check_outcomes(after: WhitenedMemory, before: WhitenedMemory, weighted: bool = True) -> None:
    """Check that sums of outcomes that would be left can be of any: ``[Y, 1]ᵀ D⁻¹ [Y, 1] ⪰ 0``.

    Where features have changed since observations came, what these have added to the other sums is
    not known any more. InputDataError: They cannot.

    Args:
        after: What would be left.
        before: What there is now.
        weighted: Whether to take sums with D⁻¹. Those of sites also contain their scales: take sums
            without it.
    """

    def may_be_outcomes(left: Whitened, was: Whitened) -> Tensor:
        sums, scale = (s.energy if weighted else s.totals for s in (left, was))
        columns = _positive(scale.diagonal(dim1=-2, dim2=-1)).rsqrt()
        relative = sums * columns.unsqueeze(-1) * columns.unsqueeze(-2)
        relative.diagonal(dim1=-2, dim2=-1).add_(_ROUNDING)
        return torch.linalg.cholesky_ex(relative)[1] == 0

    _check_groups(after, before, may_be_outcomes)


def _check_groups(
    after: WhitenedMemory, before: WhitenedMemory, rule: Callable[[Whitened, Whitened], Tensor]
) -> None:
    pairs = ((after.learned, before.learned), (after.known, before.known or after.known))
    for left, was in pairs:
        if left is None or was is None:
            continue
        if not bool(rule(left, was).all()):
            raise never_in()
        warn_of_lost_digits(left.totals, was.totals)


def never_in() -> InputDataError:
    """Build the error for observations without which the rest could not be of any."""
    return InputDataError(
        "Expected X, Y and Yvar of observations in memory, as they were given to update, got some "
        "without which its statistics would be of no observations: they were never put in, or with "
        "other Y or Yvar, or forget has scaled them down, to(dtype) has rounded them, or the stem "
        "or the input transform has moved since. The model is as it was."
    )


def _may_be_data(left: Whitened, was: Whitened) -> Tensor:
    """Say whether statistics can be of observations, up to rounding of ``was``: ``... x m``."""
    if left.gram.shape[-1] != left.gram.shape[-2]:  # a diagonal, kept as a column
        return _diagonal_may_be_data(left, was)
    scale = _positive(_largest(was.gram.diagonal(dim1=-2, dim2=-1)))
    squares = was.energy.diagonal(dim1=-2, dim2=-1)
    columns = (scale.unsqueeze(-1) / _positive(squares)).sqrt()
    moment = left.moment * columns.unsqueeze(-2)
    energy = left.energy * columns.unsqueeze(-1) * columns.unsqueeze(-2)
    gram = left.gram.expand(*moment.shape[:-2], *left.gram.shape[-2:])
    upper, lower = torch.cat((gram, moment), -1), torch.cat((moment.mT, energy), -1)
    whole = torch.cat((upper, lower), -2) / scale[..., None, None]
    whole.diagonal(dim1=-2, dim2=-1).add_(_ROUNDING)
    return torch.linalg.cholesky_ex(whole)[1] == 0


def _diagonal_may_be_data(left: Whitened, was: Whitened) -> Tensor:
    rounding = _ROUNDING * _positive(_largest(was.gram.squeeze(-1)))
    gram = left.gram.squeeze(-1) + rounding.unsqueeze(-1)
    explained = (left.moment.square() / gram.unsqueeze(-1)).sum(-2)
    room = (left.energy + _ROUNDING * was.energy).diagonal(dim1=-2, dim2=-1)
    return (gram > 0.0).all(-1) & (explained <= room).all(-1)


def _largest(values: Tensor) -> Tensor:
    return values.amax(-1) if values.shape[-1] > 0 else values.sum(-1)


def _positive(values: Tensor) -> Tensor:
    return torch.where(values > 0.0, values, 1.0)
