"""Counts of people in a table: positives of examined, checked row by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bo_stream.likelihoods.binomial import MOST_EXAMINED
from bo_stream.loops.survey.cells import Array, Cells, first
from bo_stream.loops.survey.columns import required_column
from bo_stream.loops.survey.settings import SurveySettings


@dataclass(frozen=True)
class Counts:
    """Result of a survey of one site.

    Attributes:
        positive: Number of people who tested positive.
        examined: Number of people examined.
    """

    positive: int
    examined: int


def read_counts(cells: Cells, settings: SurveySettings) -> dict[int, Counts]:
    """Read the counts of all rows that have them, by the place of the row.

    Rows in which both cells are empty are left out: these sites were not surveyed.

    Raises:
        UsageError: A column is missing, or a cell is no count, named by row and column.
    """
    e, p = (_column(cells, role, settings) for role in ("examined", "positive"))
    examined, positive = (cells.numbers(column, "a number of people") for column in (e, p))
    there = ~np.isnan(examined) & ~np.isnan(positive)
    half = first(np.isnan(examined) != np.isnan(positive))
    if half is not None:
        empty, other = (e, p) if np.isnan(examined[half]) else (p, e)
        raise cells.fault(
            half, empty, f"it is empty, but there is a number in column {other!r}. Fill both, or "
            "neither if the site was not surveyed.",
        )  # fmt: skip
    _check_examined(cells, e, examined)
    _check_positive(cells, p, positive, examined)
    return {
        int(row): Counts(int(positive[row]), int(examined[row])) for row in np.flatnonzero(there)
    }


def _column(cells: Cells, role: str, settings: SurveySettings) -> str:
    """Find a column by the settings' name, or if the table has no such column by usual names."""
    given = getattr(settings, role)
    names = settings.unclaimed(cells.names)
    return required_column(names, role, given if given in names else None, cells.source)


def _check_examined(cells: Cells, column: str, examined: Array) -> None:
    many = first(examined > MOST_EXAMINED)
    if many is not None:
        raise cells.fault(
            many,
            column,
            f"expected at most {MOST_EXAMINED:,} people, more than any survey examines at one "
            f"site, got {examined[many]:,.15g}. Is the number right, and this column that of "
            "people examined?",
        )
    bad = first((examined < 1.0) | (examined != np.floor(examined)) & ~np.isnan(examined))
    if bad is None:
        return
    value = examined[bad]
    text = f"expected a whole number of people from 1, got {value:g}."
    if value == 0.0:
        text = "nobody was examined. Leave both cells empty if the site was not surveyed."
    raise cells.fault(bad, column, text)


def _check_positive(cells: Cells, column: str, positive: Array, examined: Array) -> None:
    broken = first((positive != np.floor(positive)) & ~np.isnan(positive))
    if broken is not None:
        share, people = positive[broken], examined[broken]
        text = f"expected a whole number of people, got {share:g}."
        if 0.0 < share < 1.0:
            text += _instead("share", share * people, people)
        elif 0.0 < share < 100.0:
            text += _instead("prevalence in per cent", share * people / 100.0, people)
        raise cells.fault(broken, column, text)
    negative = first(positive < 0.0)
    if negative is not None:
        raise cells.fault(negative, column, f"expected a count from 0, got {positive[negative]:g}.")
    more = first(positive > examined)
    if more is not None:
        raise cells.fault(
            more, column,
            f"{positive[more]:.15g} positive, but only {examined[more]:.15g} examined. Give "
            "numbers of people, not per cent, and see that the columns are not swapped.",
        )  # fmt: skip


def _instead(what: str, count: float, people: float) -> str:
    return (
        f" It looks like a {what}: give the number of people who tested positive, here about "
        f"{round(count)} of {people:g}."
    )
