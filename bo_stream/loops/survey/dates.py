"""Dates of results, as tables have them: read where they can mean one day only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import Cells
from bo_stream.loops.survey.columns import normalised
from bo_stream.loops.survey.settings import SurveySettings

DATE = "date"
"""Name of the column of dates in all tables that a survey writes."""

_OTHERS = (
    "survey_date", "date_of_survey", "date_survey", "surveydate", "date_surveyed", "visit_date",
    "date_of_visit", "date_visit", "exam_date", "examination_date", "date_examined",
    "date_of_examination", "date_enquete", "date_d_enquete", "date_visite", "data_inquerito",
    "data_do_inquerito", "fecha", "fecha_encuesta",
)  # fmt: skip
"""Its further usual names, normalised: English, French, Portuguese, Spanish."""

_TIME = r"(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?: ?(?:Z|[+-]\d{2}:?\d{2}))?)?"
_ISO = re.compile(r"(\d{4})(?:([-/.])(\d{1,2})(?:\2(\d{1,2})" + _TIME + r")?)?")
_PARTS = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2(\d{4})" + _TIME)


def find_dates(cells: Cells, settings: SurveySettings) -> str | None:
    """Find the column of dates by its usual names, None if there is none.

    Raises:
        UsageError: Two could be meant.
    """
    names = settings.unclaimed(cells.names)
    same = [name for name in names if normalised(name) == DATE]
    found = same or [name for name in names if normalised(name) in _OTHERS]
    if len(found) > 1:
        listed = ", ".join(repr(name) for name in found)
        raise UsageError(
            f"{cells.source}: columns {listed} could each be the dates of results. Rename the one "
            f"that is {DATE!r}."
        )
    return found[0] if found else None


def read_dates(cells: Cells, column: str) -> list[str]:
    """Return the dates of a column in ISO 8601, empty where missing, ``n``.

    Years (2026), months (2026-01) and days (2026-01-31) in the order of ISO 8601 are read, and
    days with the day first (31/01/2026, 31.01.2026). Numbers that are a day and a month in either
    order, as in 03/04/2026, are read where another date of the column shows that days go first.
    Times of day are left out.

    Raises:
        UsageError: A cell is no date, or could mean two, named by row and column.
    """
    texts = [str(text) for text in cells.texts(column)]
    parts = [_PARTS.fullmatch(text) for text in texts]
    day_first = any(part and int(part[1]) > 12 for part in parts)
    read = []
    for row, (text, part) in enumerate(zip(texts, parts, strict=True)):
        try:
            read.append(_day_first(part, day_first) if part else _iso(text))
        except ValueError as error:
            raise cells.fault(row, column, f"{text!r} {error}") from error
    return read


def _iso(text: str) -> str:
    """Read a year, a month or a day in the order of ISO 8601.

    Raises:
        ValueError: It is none.
    """
    if not text:
        return ""
    found = _ISO.fullmatch(text)
    if found is None:
        raise ValueError("is no date that is understood. Write it as in 2026-01-31.")
    numbers = [int(number) for number in (found[1], found[3], found[4]) if number is not None]
    whole = _checked(*numbers, *(1 for _ in range(3 - len(numbers))))
    return whole.isoformat()[: (4, 7, 10)[len(numbers) - 1]]


def _day_first(part: re.Match[str], day_first: bool) -> str:
    """Read a date of three numbers that ends in the year.

    Raises:
        ValueError: It is none, the month is first, or it could be either.
    """
    day, month, year = int(part[1]), int(part[3]), int(part[4])
    if month > 12 and day <= 12:
        raise ValueError(
            f"seems to have the month first. Write it as in {year:04}-{day:02}-{month:02}."
        )
    if day <= 12 and day != month and not day_first:
        either = f"{year:04}-{month:02}-{day:02} or {year:04}-{day:02}-{month:02}"
        raise ValueError(f"could be {either}. Write the one that is meant in that way.")
    return _checked(year, month, day).isoformat()


def _checked(year: int, month: int, day: int) -> date:
    if not 1900 <= year <= 2200:
        raise ValueError(f"has the year {year}. Write the date as in 2026-01-31.")
    try:
        return date(year, month, day)
    except ValueError:
        raise ValueError("is no day of the calendar. Write it as in 2026-01-31.") from None


def span(dates: Sequence[str]) -> str:
    """Say the first and the last of some dates, as in ``2026-01-03 to 2026-02-10``.

    Args:
        dates: In ISO 8601, empty where missing.
    """
    there = sorted(text for text in dates if text)
    if not there:
        return ""
    return there[0] if there[0] == there[-1] else f"{there[0]} to {there[-1]}"
