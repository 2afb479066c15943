"""Observations of which each process holds some, drawn as if one process held all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.collective import Collective
from bo_stream.models.prior import Prior
from bo_stream.models.stochastic.replay import Batch, Replay, StreamReplay


@dataclass(frozen=True)
class ShardedReplay(Replay):
    """Rows in one order over all processes, each of which is held by one of them.

    Places are drawn from all rows by the same random numbers everywhere, and each process gets
    those rows of a draw that it holds: together they have the draw of a process that holds all.

    Attributes:
        own: Rows of this process.
        held: Number of rows of all processes.
        count: Observations of all processes.
        here: Places of this process's rows among all, ascending, on the CPU.
        collective: The processes.
    """

    own: StreamReplay
    held: int
    count: int
    here: Tensor
    collective: Collective

    @classmethod
    def shared_out(cls, whole: StreamReplay, collective: Collective) -> ShardedReplay:
        """Give each process an equal part of rows that all of them hold."""
        held, size, rank = whole.held, collective.size, collective.rank
        here = torch.arange(held * rank // size, held * (rank + 1) // size)
        own = StreamReplay.empty(whole.at(here[:0])).plus(whole.at(here))
        return cls(own, held, whole.count, here, collective)

    @property
    def left_alone(self) -> StreamReplay:
        """This process's rows, which stand for all observations."""
        return replace(self.own, count=self.count)

    def at(self, index: Tensor) -> Batch:
        """Return those rows at some places that are here."""
        return self.own.at(self._found(index)[0])

    def _found(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Find places here: positions of rows, and where these are in the index."""
        if len(self.here) == 0:
            return index[:0], index[:0]
        positions = torch.searchsorted(self.here, index).clamp_max(len(self.here) - 1)
        found = torch.nonzero(self.here[positions] == index).flatten()
        return positions[found], found

    def in_units(self, rows: Batch, prior: Prior) -> Batch:
        """Return the rows: they were put in as the process has them."""
        return rows

    def completed(self, rows: Batch, places: Tensor) -> Batch:
        """Put the rows of a draw together, on each process."""
        _, found = self._found(places)
        X, Y = (self.collective.assembled(t, found, len(places)) for t in (rows.X, rows.Y))
        return Batch(X, Y)

    def plus(self, new: Batch) -> ShardedReplay:
        """Add rows of each process, in the order of ranks."""
        counts = self.collective.counts(len(new), new.X.device)
        first = self.held + sum(counts[: self.collective.rank])
        return replace(
            self,
            own=self.own.plus(new),
            here=torch.cat((self.here, torch.arange(first, first + len(new)))),
            held=self.held + sum(counts),
            count=self.count + sum(counts),
        )

    def select(self, outputs: list[int]) -> ShardedReplay:
        """Select some of the outputs."""
        return replace(self, own=self.own.select(outputs))

    def to(self, device: torch.device) -> ShardedReplay:
        """Move to another device."""
        return replace(self, own=self.own.to(device))
