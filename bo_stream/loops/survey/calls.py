"""Calls of a survey: which sites are above the threshold, which below, which uncertain."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

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
