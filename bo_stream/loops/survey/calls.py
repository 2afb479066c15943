"""Calls of villages above or below a threshold, and when enough of them are right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray


def per_cent(share: float) -> str:
    """Write a share as per cent, with two digits below ten."""
    value = 100.0 * share
    digits = 0 if abs(value) >= 9.95 or value == 0.0 else 1 if abs(value) >= 0.095 else 2
    return f"{value:,.{digits}f} %"


# --- calls of a survey: which sites are above the threshold, which below, which uncertain --------


ABOVE, UNCERTAIN, BELOW = "above", "uncertain", "below"

NUMBERS = ("prevalence", "lower", "upper", "probability")


def calls_table(predictions: pd.DataFrame, labels: pd.DataFrame) -> pd.DataFrame:
    """List the sites with their calls: those above first, then uncertain ones, then those below.

    Sites above and uncertain ones are in the order of falling probability, sites below of rising
    one, so that the surest calls of each kind come first.

    Args:
        predictions: Of a survey with a threshold, a row a site: ``id``, position, ``class``,
            ``prevalence``, ``lower``, ``upper``, ``exceedance``, ``examined``, ``positive``,
            ``date``.
        labels: Other columns of the list of sites, such as name and district, indexed by id; see
            ``Survey.labels``. Sites that are not in it have empty ones.

    Returns:
        ``id``, the labels (with ``listed_`` before a name that another column of this table has),
        position, ``call`` (above, uncertain or below), ``prevalence`` (mean), ``lower`` and
        ``upper`` (95 % interval), ``probability`` (of a prevalence above the threshold),
        ``examined`` and ``positive`` (NaN where not surveyed), ``date`` (of the result).

    Raises:
        ValueError: The predictions have no threshold.
    """
    if "class" not in predictions:
        raise ValueError("Expected predictions with a threshold, got none: there are no calls.")
    renamed = predictions.rename(columns={"class": "call", "exceedance": "probability"})
    place = ["longitude", "latitude"] if "longitude" in predictions else ["east", "north"]
    numbers = renamed[[*place, "call", *NUMBERS, "examined", "positive", "date"]]
    taken = {"id", *numbers.columns}
    names = [f"listed_{name}" if name in taken else str(name) for name in labels.columns]
    described = labels.set_axis(names, axis=1).reindex(predictions["id"]).reset_index(drop=True)
    table = pd.concat(
        (predictions[["id"]].reset_index(drop=True), described, numbers.reset_index(drop=True)),
        axis=1,
    )
    rank = table["call"].map({ABOVE: 0, UNCERTAIN: 1, BELOW: 2})
    rising = table["probability"].where(table["call"] == BELOW, -table["probability"])
    order = table.assign(_rank=rank, _rising=rising).sort_values(
        ["_rank", "_rising"], kind="stable"
    )
    return table.loc[order.index].reset_index(drop=True)


def chances_of_wrong_calls(chances: NDArray[np.float64], cut: float) -> NDArray[np.float64]:
    """Compute the probability of each call that it is wrong.

    Args:
        chances: Probability of a prevalence above the threshold, of each site.
        cut: That from which on a site is called above; see ``SurveySettings.cheaper_above``.
    """
    return np.where(chances >= cut, 1.0 - chances, chances)


# --- the stopping rule of a survey: how many more sites until few enough calls are wrong ---------


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
