"""What a replica was told and has not sent yet, in deltas that are numbered and never changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from bo_stream.distributed.clock import Dot
from bo_stream.distributed.deltas import Delta
from bo_stream.distributed.records import Store, delta_key, sealed
from bo_stream.distributed.stores import TakenError
from bo_stream.models.base import StreamingGP


@dataclass(frozen=True)
class Parcel:
    """A delta as it is written, once or several times.

    Attributes:
        dot: Which one it is.
        observations: Number of observations.
        content: Its bytes, which say which one it is.
    """

    dot: Dot
    observations: int
    content: bytes

    @classmethod
    def of(cls, dot: Dot, delta: Delta, search: str) -> Self:
        """Pack a delta."""
        count = delta.observations
        return cls(dot, count, sealed(delta_key(dot), search, {"count": count}, delta.arrays()))


class Outbox:
    """Packs what was told into deltas; one that may have been written is not packed anew.

    Attributes:
        run: The run whose deltas they are.
        search: Digest of the search.
        template: The model without observations that all replicas begin with.
    """

    def __init__(self, run: str, search: str, template: StreamingGP) -> None:
        """Begin with nothing, and the number 1."""
        self.run, self.search, self.template = run, search, template
        self._told: list[Delta] = []
        self._packed: Delta
        self._parcel: Parcel | None = None
        self._number = 0

    def add(self, told: Delta) -> None:
        """Add observations to the next delta."""
        total = told if not self._told else self._told[0].plus([told])
        self._told = [total.settled(self.template)]

    def parcel(self) -> Parcel | None:
        """Return the next delta to be written, None if there is nothing to send."""
        if self._parcel is None and self._told:
            (self._packed,), self._told = self._told, []
            self._parcel = self._numbered()
        return self._parcel

    def _numbered(self) -> Parcel:
        """Pack the delta under the next number."""
        self._number += 1
        return Parcel.of((self.run, self._number), self._packed, self.search)

    def send(self, store: Store) -> Iterator[Parcel]:
        """Write what there is; yield each delta when it is written, for others to take.

        A number at which the store has what this run never wrote, such as a copy, is left out. A
        call that raises has lost nothing, and the next one goes on.
        """
        while (parcel := self.parcel()) is not None:
            try:
                store[delta_key(parcel.dot)] = parcel.content
            except TakenError:
                self._parcel = self._numbered()
                continue
            self._parcel = None
            yield parcel
