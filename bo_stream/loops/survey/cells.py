"""Cells of a spreadsheet: numbers, ids, counts and dates as people write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bo_stream.errors import UsageError, plain
from bo_stream.likelihoods.binomial import MOST_EXAMINED
from bo_stream.loops.survey.columns import find_column, required_column
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.loops.survey.tables import CLEAR_COMMA, TableFormat

Array = NDArray[np.float64]
Texts = NDArray[np.object_]
Mask = NDArray[np.bool_]

DASHES = ("-", "--", "\N{EN DASH}", "\N{EM DASH}", "\N{MINUS SIGN}")
"""Texts of an empty cell that beside a plus sign mean negative."""

_MISSING = (
    *("", "na", "n/a", "n.a.", "n.a", "nan", "none", "null", "#n/a", "<na>", "n.d.", "n/d", "s/d"),
    *(*DASHES, ".", "..", "?"),
)
"""Texts of an empty cell, in lower case."""

_DECIMAL_COMMA = r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?"
_THOUSANDS = r"[+-]?\d{1,3}(?:[ '’.,\u00a0\u202f]\d{3})+(?:[.,]\d+)?"


class Cells:
    """A table whose faults are named as a spreadsheet shows them.

    Rows are named by the index of the table; ``read_table`` numbers them as a spreadsheet does.

    Attributes:
        table: The table; its columns have texts for names, all different.
        source: Name of the table for messages, such as its file's name.
        id_column: Column of the ids, for messages; None: there is none.
        names: Names of the columns.
    """

    def __init__(
        self,
        table: pd.DataFrame,
        source: str,
        id_column: str | None = None,
        whole: pd.DataFrame | None = None,
        numeric: Collection[str] | None = None,
    ) -> None:
        """Take a table as it is; nothing is read yet.

        Args:
            table: See the class.
            source: See the class.
            id_column: See the class.
            whole: Table that these rows are of, whose decimal marks are theirs; default: the table.
            numeric: Columns that are read as numbers, which have one decimal mark; default: all.
        """
        self.table, self.source, self.id_column = table.rename(columns=str), source, id_column
        self.names = list(self.table.columns)
        self._whole = self.table if whole is None else whole
        self._numeric = self.names if numeric is None else numeric
        self._known: dict[str, Texts] = {}

    def __len__(self) -> int:
        return len(self.table)

    def rows(self, positions: Sequence[int]) -> Cells:
        """Return some rows."""
        chosen = self.table.iloc[list(positions)]
        return Cells(chosen, self.source, self.id_column, self._whole, self._numeric)

    def row(self, position: int) -> str:
        """Name the row at a position, as in ``row 2 (id 17)``."""
        number = f"row {self.table.index[position]}"
        site = None if self.id_column is None else self.texts(self.id_column)[position]
        return f"{number} (id {site})" if site else number

    def fault(self, position: int, column: str | None, text: str) -> UsageError:
        """Return an error about a row, and about a cell in it if a column is given."""
        cell = "" if column is None else f", column {column!r}"
        return UsageError(f"{self.source}, {self.row(position)}{cell}: {text}")

    def refuse(
        self, where: Mask | np.bool_, column: str | None, text: str | Callable[[int], str]
    ) -> None:
        """Raise the error of :meth:`fault` about the first row of which a mask is true, if any.

        Args:
            where: Mask of the rows, ``n``.
            column: Of the cell.
            text: What is wrong there, or what says so of a row.

        Raises:
            UsageError: The mask is true of a row.
        """
        row = first(where)
        if row is not None:
            raise self.fault(row, column, text if isinstance(text, str) else text(row))

    def texts(self, column: str) -> Texts:
        """Return the cells of a column as texts, empty where missing, ``n``.

        Whole numbers have no decimal point: an id 17.0 is 17.
        """
        if column not in self._known:
            self._known[column] = _texts(self.table[column]).to_numpy(object)
        return self._known[column]

    @property
    def labels(self) -> Texts:
        """Labels of the rows as texts, as :meth:`texts` has them, ``n``."""
        return _texts(self.table.index.to_series()).to_numpy(object)

    def numbers(self, column: str, expected: str = "a number") -> Array:
        """Return the cells of a column as numbers, NaN where missing, ``n``.

        Decimal commas are read where they cannot be separators of thousands.

        Args:
            column: Its name.
            expected: Kind of number, for messages.

        Raises:
            UsageError: A cell is no number, is infinite, or has separators of thousands.
        """
        values = self.table[column]
        if values.dtype.kind in "fiub":
            read: Array = values.to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
        else:
            read = self._parsed(column, expected)
        self.refuse(np.isinf(read), column, f"expected {expected}, got infinity.")
        return read

    def _parsed(self, column: str, expected: str) -> Array:
        """Read a column of texts as numbers, or say what else they are."""
        texts = self.table[column].astype(str).str.replace("\N{MINUS SIGN}", "-")
        plain = pd.to_numeric(texts, errors="coerce")
        read: Array = plain.to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
        missing = np.isnan(read)
        read[~missing] = texts[~missing].map(float)  # exact, as pandas is from its release 3 on
        unread = np.flatnonzero(missing)
        # Numbers of a workbook are read with a point, whatever its texts have.
        if self._decimal_comma is not None and TableFormat.of(self._whole).suffix != ".xlsx":
            self.refuse(
                texts.str.contains(".", regex=False).to_numpy(bool) & ~missing,
                column,
                lambda row: (
                    f"{texts.iloc[row]!r} has a point, while {self._decimal_comma} has a decimal "
                    "comma. Write all numbers in one way, without separators of thousands."
                ),
            )
        for row, text in zip(unread.tolist(), _texts(texts.iloc[unread]), strict=True):
            if not text:
                continue
            thousands = re.fullmatch(_THOUSANDS, text)
            if re.fullmatch(_DECIMAL_COMMA, text) and (not thousands or self._decimal_comma):
                read[row] = float(text.replace(",", "."))
                continue
            fault = f"expected {expected}, got {text!r}."
            if thousands:
                fault = (
                    f"{text!r} seems to have a separator of thousands. Write numbers without them, "
                    "and with a decimal point."
                )
            elif text.endswith("%"):
                fault += " Write no per cent signs: the number alone."
            raise self.fault(row, column, fault)
        return read

    @cached_property
    def _decimal_comma(self) -> str | None:
        """First cell that is a number with a decimal comma beyond doubt, for messages."""
        for name in (name for name in self.names if name in self._numeric):
            if self._whole[name].dtype.kind in "fiubM":
                continue
            texts = self._whole[name].astype(str)
            texts = texts[texts.str.contains(",", regex=False).to_numpy(bool)].str.strip()
            clear = texts[texts.str.fullmatch(CLEAR_COMMA).to_numpy(bool)]
            if len(clear):
                return f"{clear.iloc[0]!r} (row {clear.index[0]}, column {name!r})"
        return None


def _texts(column: pd.Series[Any]) -> pd.Series[str]:
    """Return cells as texts without spaces around them, empty where missing."""
    texts = column.astype(str).str.strip()
    texts = texts.str.replace(r"^([+-]?\d+)\.0+$", r"\1", regex=True)
    missing = column.isna() | texts.str.lower().isin(_MISSING)
    return texts.where(~missing, "")


def first(mask: Mask | np.bool_) -> int | None:
    """Return the first position at which a mask is true, None if there is none."""
    positions = np.flatnonzero(mask)
    return int(positions[0]) if positions.size else None


def as_ids(ids: str | int | Iterable[str | int]) -> list[str]:
    """Return ids as texts; a text or a number is one id."""
    given = plain(ids)
    return [str(site) for site in ([given] if isinstance(given, str | int) else given)]


# --- ids of sites in tables that went through a spreadsheet, which takes them for numbers --------


_MOST_COMPARED = 5000
"""Number of sites up to which an unknown id is compared with all ids, letter by letter."""

_CLOSE = 0.75
"""Least share of letters that an id has in common with one that may be meant."""

_NUMBER = re.compile(r"\+?([0-9]+)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{1,4}))?")


def spreadsheet_number(site: str) -> str | None:
    """Return what is left of an id where a spreadsheet takes it for a number, None if it does not.

    As in ``062``, ``62`` and ``62.0``, which are all ``62e0``: digits without zeros at either end,
    and the power of ten.
    """
    found = _NUMBER.fullmatch(site)
    if found is None:
        return None
    whole, part, power = found.group(1), found.group(2) or "", int(found.group(3) or 0)
    digits = (whole + part).lstrip("0")
    short = digits.rstrip("0")
    return f"{short or 0}e{power - len(part) + len(digits) - len(short) if short else 0}"


def as_listed(ids: Iterable[str], listed: Iterable[str]) -> dict[str, list[str]]:
    """Find the listed ids that a spreadsheet may have turned into the ids of a table.

    Args:
        ids: Of the table.
        listed: Of the list.

    Returns:
        By each id of the table that is one number with others: the listed ones, in their order.
    """
    by_number: dict[str, list[str]] = {}
    for site in listed:
        number = spreadsheet_number(site)
        if number is not None:
            by_number.setdefault(number, []).append(site)
    numbers = {site: spreadsheet_number(site) for site in ids}
    return {s: by_number[n] for s, n in numbers.items() if n is not None and n in by_number}


def meant(site: str, listed: Sequence[str]) -> str | None:
    """Return the listed id that an unknown one may stand for, None if there is none like it.

    It has the same letters and numbers but for case, signs and leading zeros; or the same numbers
    and most of the letters, in the same order. Numbers that differ are other sites' numbers.
    """
    bare = _bare(site)
    same = next((other for other in listed if bare and _bare(other) == bare), None)
    if same is not None or len(listed) > _MOST_COMPARED:
        return same
    digits = _digits(site)
    alike = [other for other in listed if _digits(other) == digits]
    return next(iter(get_close_matches(site, alike, n=1, cutoff=_CLOSE)), None)


def _digits(site: str) -> str:
    return re.sub(r"\D+", "", site).lstrip("0")


def _bare(site: str) -> str:
    """Reduce an id to small letters and numbers without leading zeros."""
    return re.sub(r"(?<!\d)0+(?=\d)", "", re.sub(r"[\W_]+", "", site.casefold()))


# --- counts of people in a table: positives of examined, checked row by row ----------------------


@dataclass(frozen=True)
class Counts:
    """Result of a survey of one site.

    Attributes:
        positive: Number of people who tested positive.
        examined: Number of people examined.
    """

    positive: int
    examined: int


def number_columns(names: Sequence[str], settings: SurveySettings, source: str) -> set[str]:
    """Find the columns that are read as numbers: positions, covariates, costs and counts.

    Raises:
        UsageError: Several could be meant.
    """
    roles = {role: getattr(settings, role) for role in ("examined", "positive")}
    if settings.x is None or not set(settings.x) <= set(names):
        roles |= dict.fromkeys(settings.coordinates.names)
    free = settings.unclaimed(names)
    found = {
        find_column(free, role, given, source)
        for role, given in roles.items()
        if given is None or given in free
    }
    named = {*found, *(settings.x or ()), *settings.covariates, settings.cost}
    return {name for name in names if name in named}


def count_columns(cells: Cells, settings: SurveySettings) -> tuple[str, str]:
    """Find the columns of people examined and positive.

    They have the settings' names or, if the table has no such columns, usual ones.

    Raises:
        UsageError: A column is missing, or two could be meant.
    """
    names = settings.unclaimed(cells.names)
    one, other = (
        required_column(names, role, given if given in names else None, cells.source)
        for role, given in (("examined", settings.examined), ("positive", settings.positive))
    )
    return one, other


def read_counts(cells: Cells, columns: tuple[str, str]) -> dict[int, Counts]:
    """Read the counts of all rows that have them, by the position of the row.

    Rows in which both cells are empty are left out: these sites were not surveyed.

    Args:
        cells: The table.
        columns: Of :func:`count_columns`.

    Raises:
        UsageError: A cell is no count, named by row and column.
    """
    e, p = columns
    examined, positive = (cells.numbers(column, "a number of people") for column in (e, p))
    there = ~np.isnan(examined) & ~np.isnan(positive)
    half = first(np.isnan(examined) != np.isnan(positive))
    if half is not None:
        empty, other = (e, p) if np.isnan(examined[half]) else (p, e)
        raise cells.fault(
            half, empty, f"it is empty, but there is a number in column {other!r}. Fill both, or "
            "neither if the site was not surveyed.",
        )  # fmt: skip
    cells.refuse(
        examined > MOST_EXAMINED,
        e,
        lambda row: (
            f"expected at most {MOST_EXAMINED:,} people, more than any survey examines at one "
            f"site, got {examined[row]:,.15g}. Is the number right, and this column that of "
            "people examined?"
        ),
    )
    bad = first((examined < 1.0) | (examined != np.floor(examined)) & ~np.isnan(examined))
    if bad is not None:
        text = f"expected a whole number of people from 1, got {examined[bad]:g}."
        if examined[bad] == 0.0:
            text = "nobody was examined. Leave both cells empty if the site was not surveyed."
        raise cells.fault(bad, e, text)
    broken = first((positive != np.floor(positive)) & ~np.isnan(positive))
    if broken is not None:
        share, people = positive[broken], examined[broken]
        text = f"expected a whole number of people, got {share:g}."
        if 0.0 < share < 100.0:
            kind, whole = ("share", 1.0) if share < 1.0 else ("prevalence in per cent", 100.0)
            text += (
                f" It looks like a {kind}: give the number of people who tested positive, here "
                f"about {round(share * people / whole)} of {people:g}."
            )
        raise cells.fault(broken, p, text)
    cells.refuse(positive < 0.0, p, lambda row: f"expected a count from 0, got {positive[row]:g}.")
    cells.refuse(
        positive > examined,
        p,
        lambda row: (
            f"{positive[row]:.15g} positive, but only {examined[row]:.15g} examined. Give "
            "numbers of people, not per cent, and see that the columns are not swapped."
        ),
    )
    return {
        int(row): Counts(int(positive[row]), int(examined[row])) for row in np.flatnonzero(there)
    }


# --- dates of results, as tables have them: read where they can mean one day only ----------------


DATE = "date"
"""Name of the column of dates in all tables that a survey writes."""

_TIME = r"(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?: ?(?:Z|[+-]\d{2}:?\d{2}))?)?"
_ISO = re.compile(r"(\d{4})(?:([-/.])(\d{1,2})(?:\2(\d{1,2})" + _TIME + r")?)?")
_PARTS = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2(\d{4})" + _TIME)


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
    for row, text in enumerate(texts):
        try:
            read.append(_in_iso(text, day_first))
        except ValueError as error:
            raise cells.fault(row, column, f"{text!r} {error}") from error
    return read


def _in_iso(text: str, day_first: bool) -> str:
    """Return a date as ISO 8601 has it: a year, a month or a day; empty where missing.

    Args:
        text: The date, in the order of ISO 8601, or three numbers that end in the year.
        day_first: Whether three such numbers begin with the day where they could be either.

    Raises:
        ValueError: It is no date, its month is first, or day and month could be either.
    """
    if not text:
        return ""
    part = _PARTS.fullmatch(text)
    if part is not None:
        day, month, year = int(part[1]), int(part[3]), int(part[4])
        if month > 12 and day <= 12:
            raise ValueError(
                f"seems to have the month first. Write it as in {year:04}-{day:02}-{month:02}."
            )
        if day <= 12 and day != month and not day_first:
            either = f"{year:04}-{month:02}-{day:02} or {year:04}-{day:02}-{month:02}"
            raise ValueError(f"could be {either}. Write the one that is meant in that way.")
        return _checked(year, month, day).isoformat()
    iso = _ISO.fullmatch(text)
    if iso is None:
        raise ValueError("is no date that is understood. Write it as in 2026-01-31.")
    numbers = [int(number) for number in (iso[1], iso[3], iso[4]) if number is not None]
    whole = _checked(*numbers, *(1 for _ in range(3 - len(numbers))))
    return whole.isoformat()[: (4, 7, 10)[len(numbers) - 1]]


def _checked(year: int, month: int, day: int) -> date:
    if not 1900 <= year <= 2200:
        raise ValueError(f"has the year {year}. Write the date as in 2026-01-31.")
    try:
        return date(year, month, day)
    except ValueError:
        raise ValueError("is no day of the calendar. Write it as in 2026-01-31.") from None
