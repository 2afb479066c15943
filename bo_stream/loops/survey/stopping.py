"""The stopping rule of a survey: how many more sites until few enough calls are wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bo_stream.loops.survey.words import per_cent

SOONER = 0.55
"""Sites that a rule takes, as a share of those that the look ahead needs.

The look ahead keeps hyperparameters and chooses all sites before any result. Rounds that are chosen
when results are in, by a model that is fitted anew, get there sooner: the
median of 14 replays of ``benchmarks/stopping.py``. It is rough: 0.13 to 0.80 in these.
"""

FACTOR = 1.5
"""Factor to either side of the forecast, as it is said; 11 of 17 replays were within it."""


@dataclass(frozen=True)
class Stopping:
    """Expected share of wrong calls now and after further sites, beside the share to be reached.

    Every site of the list is called, surveyed or not: above from the probability ``1 / (1 + w)`` of
    a prevalence above the threshold on, w the cost of a miss in false alarms, else below. The share
    is the mean over all sites of the probability that the call is wrong, by the model of all
    results so far. It is the model's own: how far to trust it, calibration says.

    Attributes:
        target: Share to be reached.
        shares: Expected now, and after 1, 2, ... further sites, the pending ones first.
        pending: Number of sites that are asked for and not told yet.
    """

    target: float
    shares: tuple[float, ...]
    pending: int

    @property
    def share(self) -> float:
        """Expected share of wrong calls today."""
        return self.shares[0]

    @property
    def reached(self) -> bool:
        """Whether the survey may end today."""
        return self.share <= self.target

    @property
    def more(self) -> int | None:
        """Number of further sites, pending ones included, until then; None: more than looked at."""
        sites = enumerate(self.shares)
        ahead = next((count for count, share in sites if share <= self.target), None)
        return None if ahead is None else math.ceil(SOONER * ahead)

    def in_words(self) -> str:
        """Say in a sentence or two how far it is."""
        now, line = per_cent(self.share), per_cent(self.target)
        rule = f"at most {line} of all calls are to be wrong; today {now} are expected to be"
        if self.reached:
            return f"Stopping rule reached: {rule}. You may end the survey here."
        waiting = f", the {self.pending:,} pending ones among them" if self.pending else ""
        if self.more is None:
            looked = math.floor(SOONER * (len(self.shares) - 1))
            if looked == self.pending == 0:
                return f"Stopping rule: {rule}, and no site is left to survey."
            return f"Stopping rule: {rule}. It takes more than {looked:,} more sites{waiting}."
        return (
            f"Stopping rule: {rule}. Until then roughly {self.more:,} more sites{waiting}; in "
            "replays of surveys it took a quarter to three times as many."
        )
