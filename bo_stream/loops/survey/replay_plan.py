"""Sizes and designs of the replay of a finished survey."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bo_stream.errors import UsageError, check_whole

Design = Literal["adaptive", "random"]

DESIGNS: tuple[Design, ...] = ("adaptive", "random")

SEEDS = 3
"""Number of replays of each design, unless another is asked for."""


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """Sizes of a replay; a ``UsageError`` says what is out of range.

    Attributes:
        start: Number of sites that are drawn at random and told first.
        q: Number of sites of a round.
        rounds: Number of rounds after the first sites.
    """

    start: int = 100
    q: int = 10
    rounds: int = 10

    def __post_init__(self) -> None:
        for name in ("start", "q", "rounds"):
            check_whole(name, getattr(self, name), 1)

    @property
    def total(self) -> int:
        """Number of sites that are surveyed at the end."""
        return self.start + self.q * self.rounds

    def check(self, sites: int, source: str) -> None:
        """Check that so many sites with results are enough, one at least being left at the end.

        Args:
            sites: Number of sites with results.
            source: Name of their table, for messages.

        Raises:
            UsageError: They are too few.
        """
        if self.total < sites:
            return
        most = (sites - 1 - self.start) // self.q
        advice = (
            f"At most {most:,} rounds are possible (--rounds {most})."
            if most > 0
            else "Begin with fewer (--start), or choose fewer at a time (-q)."
        )
        raise UsageError(
            f"{source} has results of {sites:,} sites, too few for {self.start:,} first ones and "
            f"{self.rounds:,} rounds of {self.q:,}, after which one at least is to be left to "
            f"predict. {advice}"
        )
