"""Observations to draw from, for models that learn from these instead of from statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from bo_stream.collective import ALONE, Collective
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.sites import ExpectedLogProb
from bo_stream.models.inference import Prior
from bo_stream.models.memory import Memory
from bo_stream.tensors import map_tensors
from bo_stream.weights import target_columns

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP

M = TypeVar("M", bound="StreamingGP")

ROWS = 2048
"""Observations that a bound of all of them visits at a time."""

FIRST_ROWS = 1024
"""Observations of a data set that a model begins with, unless its minibatches have another size."""


@dataclass(frozen=True)
class Batch:
    """Inputs and outcomes of some observations.

    Attributes:
        X: ``batch_shape x n x d``.
        Y: ``batch_shape x n x m``.
    """

    X: Tensor
    Y: Tensor

    def __len__(self) -> int:
        return self.X.shape[-2]

    @property
    def targets(self) -> Tensor:
        """Outcomes, ``batch_shape x m x n``."""
        return self.Y.mT

    def rows(self, which: slice | Tensor) -> Batch:
        """Select some of them."""
        return Batch(self.X[..., which, :], self.Y[..., which, :])


class Replay(ABC):
    """Observations to draw from. A value: nothing that is done to it changes it.

    Law: ``count / size`` times the sum of anything over a draw of ``size`` rows has the sum over
    all observations for its mean.

    Attributes:
        count: Number n of observations that the bound is of: all that ever came.
        held: Number of rows that can be drawn, at most n.
        collective: Processes that draw from it together, each of which gets its own rows of a draw.
        here: Places of the rows that this process holds; None: all.
    """

    count: int
    held: int
    collective: Collective = ALONE
    here: Tensor | None = None

    @property
    def weight(self) -> float:
        """Observations that came for each row that is stored."""
        return self.count / max(self.held, 1)

    def check_not_empty(self) -> None:
        """Check that there is something to learn from.

        Raises:
            InputDataError: There is not.
        """
        if self.held == 0:
            raise InputDataError(
                "Expected observations to learn from, got an empty stream. Give train_X and "
                "train_Y, or update the model first."
            )

    @abstractmethod
    def at(self, index: Tensor) -> Batch:
        """Return rows by their places, ``k`` whole numbers below ``held``: those that are here."""

    def in_units(self, rows: Batch, prior: Prior) -> Batch:
        """Bring rows that were drawn to the units of the process, in which a stream stores them.

        Raises:
            InputDataError: What a data set gave is not finite, or the likelihood cannot have it.
        """
        return rows

    @abstractmethod
    def plus(self, new: Batch) -> Replay:
        """Add observations.

        Raises:
            UnsupportedError: Nothing can be added to a data set.
        """

    @abstractmethod
    def select(self, outputs: list[int]) -> Replay:
        """Select some of the outputs."""

    @abstractmethod
    def to(self, device: torch.device) -> Replay:
        """Move to another device."""

    def draw(self, size: int, generator: torch.Generator | None = None) -> Batch:
        """Draw rows uniformly with replacement; as many as are stored: each once. Cost O(size).

        Raises:
            ValueError: More rows than are stored, or none.
        """
        return self.at(self.places(size, generator))

    def sample(self, size: int, generator: torch.Generator, prior: Prior) -> Batch:
        """Draw rows in the units of the process; errors as :meth:`draw` and :meth:`in_units`."""
        return self.in_units(self.at(self.places(size, generator)), prior)

    def whole_sample(self, size: int, generator: torch.Generator, prior: Prior) -> Batch:
        """Draw as :meth:`sample`, with the rows that other processes hold."""
        places = self.places(size, generator)
        return self.completed(self.in_units(self.at(places), prior), places)

    def completed(self, rows: Batch, places: Tensor) -> Batch:
        """Add to rows at some places those of them that other processes hold."""
        return rows

    def places(self, size: int, generator: torch.Generator | None) -> Tensor:
        """Draw places as :meth:`draw` does."""
        if not 1 <= size <= self.held:
            raise ValueError(
                f"Expected a minibatch of 1 to {self.held} observations, as many as are stored, "
                f"got {size}. Take a smaller batch_size, or update with more data first."
            )
        if size == self.held:
            return torch.arange(size)
        return torch.randint(self.held, (size,), generator=generator)

    def chunks(self, size: int) -> Iterator[Batch]:
        """Yield all rows that are stored here, in order, ``size`` at a time."""
        places = torch.arange(self.held) if self.here is None else self.here
        for index in places.split(size):
            yield self.at(index)

    def outcomes(
        self, prior: Prior, likelihood: Likelihood
    ) -> Iterator[tuple[Tensor, ExpectedLogProb]]:
        """Yield inputs of all rows, some at a time, with a likelihood of their outcomes."""
        model = OutcomeModel(likelihood, prior.num_outputs)
        for batch in self.chunks(ROWS):
            rows = self.in_units(batch, prior)
            yield rows.X, model.expected_log_prob(rows.targets)


def generator_at(seed: int, position: int) -> torch.Generator:
    """Return the random numbers of a position in a sequence: no state to keep or restore."""
    return torch.Generator().manual_seed((1_000_003 * seed + position) % 2**63)


@dataclass
class _Rows:
    """Room for rows, of which the first are filled; shared by the values that it grew out of."""

    data: Batch
    filled: int


@dataclass(frozen=True)
class StreamReplay(Replay):
    """All rows of a stream, or a uniform sample of at most ``capacity`` of them.

    Unbounded, memory is O(n) and adding k rows costs O(k), amortised. Bounded, memory is O(c) for a
    capacity c and adding costs O(k + c); each of the n observations that came is stored with the
    same probability ``c / n``, so that draws stay unbiased for sums over all n, the sample's own
    randomness included. Source: Vitter (1985), algorithm R.

    Attributes:
        room: Where the rows are.
        capacity: Most rows to hold; None: all.
        seed: Of the sample.
    """

    room: _Rows
    held: int
    count: int
    capacity: int | None = None
    seed: int = 0

    @classmethod
    def empty(cls, like: Batch, capacity: int | None = None, seed: int = 0) -> StreamReplay:
        """Begin without observations, in the shapes, dtypes and device of some.

        Raises:
            ValueError: The capacity is not positive.
        """
        if capacity is not None and capacity < 1:
            raise ValueError(f"Expected to hold at least 1 observation or None, got {capacity}.")
        return cls(_Rows(like.rows(slice(0, 0)), 0), 0, 0, capacity, seed)

    def at(self, index: Tensor) -> Batch:
        """Return rows by their places."""
        held = self.room.data
        index = index.to(held.X.device, non_blocking=index.is_cpu)
        return Batch(held.X[..., index, :], held.Y[..., index, :])

    def plus(self, new: Batch) -> StreamReplay:
        """Add observations, of which a full sample keeps each with its fair chance."""
        room = len(new) if self.capacity is None else min(len(new), self.capacity - self.held)
        added = self._appended(new.rows(slice(0, room)))
        return added._sampled(new.rows(slice(room, None)))

    def _appended(self, new: Batch) -> StreamReplay:
        if len(new) == 0:
            return self
        end, room = self.held + len(new), self.room
        if room.filled != self.held or end > len(room.data):
            # room for twice as many as needed, but never beyond the capacity
            length = 2 * end if self.capacity is None else min(2 * end, self.capacity)
            spare = (0, 0, 0, length - self.held)
            held = room.data.rows(slice(0, self.held))
            wide = map_tensors(held, lambda tensor: torch.nn.functional.pad(tensor, spare))
            room = _Rows(wide, self.held)
        for whole, part in ((room.data.X, new.X), (room.data.Y, new.Y)):
            whole[..., self.held : end, :] = part
        room.filled = end
        return replace(self, room=room, held=end, count=self.count + len(new))

    def _sampled(self, new: Batch) -> StreamReplay:
        """Let more observations replace some of a full sample."""
        if len(new) == 0:
            return self
        last = self.count + torch.arange(1, len(new) + 1, dtype=torch.float64)
        draws = torch.rand(
            len(new), dtype=torch.float64, generator=generator_at(self.seed, self.count)
        )
        places = (draws * last).long()
        rows = torch.nonzero(places < self.held).flatten()
        kept = dict(zip(places[rows].tolist(), rows.tolist(), strict=True))  # a later one wins
        count = self.count + len(new)
        if not kept:
            return replace(self, count=count)
        data = map_tensors(self.room.data, torch.clone)
        to, of = (torch.tensor(list(part)) for part in (kept.keys(), kept.values()))
        for whole, part in ((data.X, new.X), (data.Y, new.Y)):
            whole[..., to.to(whole.device), :] = part[..., of.to(part.device), :]
        return replace(self, room=_Rows(data, self.held), count=count)

    def select(self, outputs: list[int]) -> StreamReplay:
        """Select some of the outputs, in tensors of its own."""
        data = self.room.data
        return replace(self, room=_Rows(Batch(data.X.clone(), data.Y[..., outputs]), self.held))

    def to(self, device: torch.device) -> StreamReplay:
        """Move to another device."""
        data = map_tensors(self.room.data, lambda tensor: tensor.to(device))
        return replace(self, room=_Rows(data, self.held))


@dataclass(frozen=True)
class DatasetReplay(Replay):
    """A data set of pairs ``(x, y)``, read a minibatch at a time: it may be larger than memory.

    Attributes:
        dataset: Has a length; item i is an input, ``d``, and an outcome, ``m`` or a number.
        like: No rows of these, but their dtypes and device.
        outputs: Columns of the outcomes.
    """

    dataset: Dataset[Any]
    like: Batch
    outputs: tuple[int, ...]
    held: int
    count: int

    @classmethod
    def of(cls, dataset: Dataset[Any]) -> DatasetReplay:
        """Read the shape of the pairs from the first one.

        Raises:
            UnsupportedError: It can only be iterated.
            InputDataError: It is empty, or its first item is no pair of tensors.
            BotorchTensorDimensionError: The first item is of another shape.
        """
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise UnsupportedError(
                f"Expected a Dataset with a length and items, got {type(dataset).__name__}. Give "
                "what it iterates over to update, batch by batch."
            )
        if len(dataset) == 0:
            raise InputDataError("Expected a Dataset of at least one observation, got none.")
        first, n = _pair(dataset, 0), len(dataset)
        return cls(dataset, first.rows(slice(0, 0)), tuple(range(first.Y.shape[-1])), n, n)

    def at(self, index: Tensor) -> Batch:
        """Read rows by their places.

        Raises:
            InputDataError: An item is no pair of tensors.
            BotorchTensorDimensionError: An item is of another shape than the first one.
        """
        pairs, widths = list[Batch](), (self.like.X.shape[-1], self.like.Y.shape[-1])
        for i in index.tolist():
            pair = _pair(self.dataset, i)
            came = pair.X.shape[-1], pair.Y.shape[-1]
            if came != widths:
                raise BotorchTensorDimensionError(
                    "Expected item {} of the Dataset to be an input of {} numbers and an outcome "
                    "of {}, as in the first one read, got {} and {}.".format(i, *widths, *came)
                )
            pairs.append(pair)
        X, Y = (torch.cat(part) for part in ([p.X for p in pairs], [p.Y for p in pairs]))
        return Batch(X.to(self.like.X), Y[:, list(self.outputs)].to(self.like.Y))

    def in_units(self, rows: Batch, prior: Prior) -> Batch:
        """Check and transform rows as the model does in an update."""
        model = prior.model
        rows = map_tensors(rows, lambda tensor: tensor.to(model.train_targets))
        targets, _ = model.standardized(rows.X, rows.Y)
        return Batch(model.coordinates(rows.X).double(), targets.mT)

    def plus(self, new: Batch) -> DatasetReplay:
        """Refuse, but for no observations."""
        if len(new) == 0:
            return self
        raise UnsupportedError(
            "A model of a Dataset takes no further observations. Build it from tensors and update "
            "it batch by batch, or add to the Dataset (torch.utils.data.ConcatDataset)."
        )

    def select(self, outputs: list[int]) -> DatasetReplay:
        """Select some of the outputs."""
        return replace(self, outputs=tuple(self.outputs[i] for i in outputs))

    def to(self, device: torch.device) -> DatasetReplay:
        """Move to a device: rows are put there when they are read."""
        return replace(self, like=map_tensors(self.like, lambda t: t.to(device)))


def build_from(model: type[M], dataset: Dataset[Any], options: Mapping[str, Any], place: int) -> M:
    """Build a model that draws its rows from a data set, of a first minibatch of it.

    Options are the constructor's; ``batch_size`` and ``seed`` count here, if they are given, beside
    the place of the random numbers. Errors are those of :meth:`DatasetReplay.of`.
    """
    replay = DatasetReplay.of(dataset)
    size = min(options.get("batch_size") or FIRST_ROWS, replay.held)
    first = replay.draw(size, generator_at(options.get("seed", 0), place))
    built = model(first.X, first.Y, **options)
    built._set_memory(replace(built._memory, replay=replay))
    return built


def _pair(dataset: Dataset[Any], i: int) -> Batch:
    """Read observation i as a batch of one."""
    item = dataset[i]
    if not (isinstance(item, tuple | list) and len(item) == 2):
        raise InputDataError(
            f"Expected items (x, y) of the Dataset, got a {type(item).__name__} for item {i}."
        )
    x, y = (torch.as_tensor(part) for part in item)
    if x.ndim != 1 or y.ndim > 1:
        raise BotorchTensorDimensionError(
            f"Expected item {i} of the Dataset to be an input `d` and an outcome `m`, got "
            f"{tuple(x.shape)} and {tuple(y.shape)}."
        )
    return Batch(x.unsqueeze(0), y.reshape(1, -1))


class HoldsRows(Memory):
    """A memory whose observations are in ``replay``, in units of the process."""

    replay: Replay

    @property
    @abstractmethod
    def counts(self) -> Tensor:
        """Number of observations that came, ``... x m``."""

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]``, ``... x m x 2 x 2``; of a sample scaled to all that came. O(n)."""
        total = self.counts.new_zeros(*self.counts.shape, 2, 2)
        for batch in self.replay.chunks(2 * ROWS):
            columns = target_columns(batch.Y.to(total).mT[..., : total.shape[-3], :])
            total = total + columns.mT @ columns
        return self.replay.collective.sum(total) * self.replay.weight

    def known_sums(self) -> None:
        """Return None: the noise is the likelihood's."""

    def map_targets(self, matrix: Tensor) -> Self:
        """Return the same: under a likelihood all models have their targets in one unit."""
        return self

    def scale(self, factor: float) -> NoReturn:
        """Refuse.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"forget({factor:g}) needs a memory of statistics, but this model learns from the "
            "observations themselves. Bound how many it holds by max_rows, or build it again."
        )
