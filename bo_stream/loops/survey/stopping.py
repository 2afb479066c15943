"""The stopping rule of a survey: how many more sites until few enough calls are wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bo_stream.loops.survey.words import per_cent

RATE = 0.65
"""Rate b at which the expected share of wrong calls falls with the number n of results, ``n^−b``.

That of 32 replays of ``benchmarks/maps/stopping.py`` (seeds 0 to 2 and 5 to 9), in the middle: half
of them had rates of 0.49 to 0.75 from the fourth round on.
"""

WITHIN = (
    "in three of four replays it took two thirds to one and a half times as many, in the others a "
    "quarter to more than three times"
)
"""How rough the forecast is after the first random sites: of the 20 replays of seeds 15 to 19."""


@dataclass(frozen=True)
class Stopping:
    """Expected share of wrong calls today, beside the share to be reached.

    Every site of the list is called, surveyed or not: above from the probability ``1 / (1 + w)`` of
    a prevalence above the threshold on, w the cost of a miss in false alarms, else below. The share
    is the mean over all sites of the probability that the call is wrong. It is the model's own: how
    far to trust it, calibration says.

    What it will be is not the model's to say: its look ahead holds the hyperparameters of today,
    but each fit moves them, and these steps decide. The share s is taken to fall as in replays,
    ``s ∝ n^−b`` with the number n of results and b ``RATE``.

    Attributes:
        target: Share to be reached.
        share: Expected share of wrong calls today.
        results: Number n of sites with results.
        pending: Number of sites that are asked for and have no result yet.
        left: Number of sites of the list without a result that may be surveyed, pending ones too.
    """

    target: float
    share: float
    results: int
    pending: int
    left: int

    @property
    def reached(self) -> bool:
        """Whether the survey may end today."""
        return self.share <= self.target

    @property
    def more(self) -> int | None:
        """Number of further sites, pending ones included, until then; None: more than are left.

        ``n ((s / target)^(1 / b) − 1)``.
        """
        if self.reached:
            return 0
        growth = math.log(self.share / self.target) / RATE
        if growth > math.log1p(self.left / self.results):
            return None
        return math.ceil(self.results * math.expm1(growth))

    def in_words(self) -> str:
        """Say in a sentence or two how far it is."""
        now, line = per_cent(self.share), per_cent(self.target)
        rule = f"at most {line} of all calls are to be wrong; today {now} are expected to be"
        if self.reached:
            return f"Stopping rule reached: {rule}. You may end the survey here."
        waiting = f", the {self.pending:,} pending ones among them" if self.pending else ""
        if self.left == 0:
            return f"Stopping rule: {rule}, and no site is left to survey."
        if self.more is None:
            return f"Stopping rule: {rule}. It takes more than the {self.left:,} sites left."
        until = f"Until then roughly {self.more:,} more sites{waiting}"
        return f"Stopping rule: {rule}. {until}; {WITHIN}."
