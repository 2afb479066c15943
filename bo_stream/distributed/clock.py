"""Vector clocks: which deltas of which writers a sum contains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

Dot = tuple[str, int]
"""A delta's identity: its writer, and its number among that writer's, from 1."""


MOST = 10**8 - 1
"""Largest number of a delta, as keys have it."""


@dataclass(frozen=True)
class VectorClock:
    """A set of deltas: of each writer all up to a number, and some beyond it.

    Attributes:
        upto: Writer to the number up to which all of its deltas are in the set.
        beyond: Writer to the numbers of those in the set that follow a gap.
    """

    upto: Mapping[str, int] = field(default_factory=dict)
    beyond: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def __contains__(self, dot: Dot) -> bool:
        writer, number = dot
        below = number <= self.upto.get(writer, 0)
        return below or number in self.beyond.get(writer, frozenset())

    def plus(self, dots: Iterable[Dot]) -> VectorClock:
        """Return the set with further deltas."""
        beyond = {writer: set(numbers) for writer, numbers in self.beyond.items()}
        for writer, number in dots:
            beyond.setdefault(writer, set()).add(number)
        upto = dict(self.upto)
        for writer, numbers in beyond.items():
            last = upto.get(writer, 0)
            while last + 1 in numbers:
                last += 1
            upto[writer] = last
        left = {w: frozenset(n for n in numbers if n > upto[w]) for w, numbers in beyond.items()}
        return VectorClock(
            {writer: last for writer, last in upto.items() if last > 0},
            {writer: numbers for writer, numbers in left.items() if numbers},
        )

    def joined(self, other: VectorClock) -> VectorClock:
        """Return the union of two sets."""
        writers = {*self.upto, *other.upto}
        upto = {w: max(self.upto.get(w, 0), other.upto.get(w, 0)) for w in writers}
        return VectorClock(upto, self.beyond).plus(other._dots_beyond())

    def covers(self, other: VectorClock) -> bool:
        """Say whether the set contains another."""
        return not self.lacking(other)

    def lacking(self, other: VectorClock) -> list[Dot]:
        """List what another set has and this one has not."""
        below = (
            (writer, number)
            for writer, last in sorted(other.upto.items())
            for number in range(self.upto.get(writer, 0) + 1, last + 1)
        )
        return [dot for dot in (*below, *other._dots_beyond()) if dot not in self]

    def _dots_beyond(self) -> list[Dot]:
        return [(w, n) for w, numbers in sorted(self.beyond.items()) for n in sorted(numbers)]

    def plain(self) -> dict[str, Any]:
        """Return plain values, of which :meth:`of_plain` makes the clock again."""
        beyond = {writer: sorted(numbers) for writer, numbers in self.beyond.items()}
        return {"upto": dict(self.upto), "beyond": beyond}

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> Self:
        """Build a clock of plain values.

        Raises:
            ValueError: They are of another form.
        """
        try:
            upto = {str(writer): int(last) for writer, last in values["upto"].items()}
            beyond = {str(w): frozenset(map(int, n)) for w, n in values["beyond"].items()}
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"it has no vector clock ({error!r})") from error
        largest = max(
            (*upto.values(), *(n for numbers in beyond.values() for n in numbers)), default=0
        )
        if largest > MOST:
            raise ValueError(f"it has a delta of the number {largest}, expected at most {MOST}")
        return cls(upto, beyond)


def spelled(dots: Iterable[Dot]) -> str:
    """Spell deltas for a message, some of each writer."""
    numbers: dict[str, list[int]] = {}
    for writer, number in dots:
        numbers.setdefault(writer, []).append(number)
    return "; ".join(
        f"{writer}: {', '.join(map(str, own[:5]))}{', ...' if len(own) > 5 else ''}"
        for writer, own in numbers.items()
    )
