"""Cells of a table as numbers and texts; a fault names row and column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bo_stream.errors import UsageError

Array = NDArray[np.float64]
Texts = NDArray[np.object_]
Mask = NDArray[np.bool_]

MISSING = (
    *("", "na", "n/a", "n.a.", "n.a", "nan", "none", "null", "#n/a", "<na>", "n.d.", "n/d", "s/d"),
    *("-", "--", ".", "..", "\N{EN DASH}", "\N{EM DASH}", "\N{MINUS SIGN}", "?"),
)
"""Texts of an empty cell, in lower case."""

_DECIMAL_COMMA = r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?"
_CLEAR_COMMA = r"[+-]?(?:0*,\d+|\d+,(?:\d{1,2}|\d{4,}))"
_THOUSANDS = r"[+-]?\d{1,3}(?:[ '’.,\u00a0\u202f]\d{3})+(?:[.,]\d+)?"


class Cells:
    """A table whose faults are said as a spreadsheet shows them.

    Rows are named by the index of the table: that of ``read_table`` numbers them as a spreadsheet
    does.

    Attributes:
        table: The table; its columns have texts for names, all different.
        source: Name of the table for messages, such as its file's name.
        id_column: Column of the ids, for messages; None: there is none.
    """

    def __init__(
        self,
        table: pd.DataFrame,
        source: str,
        id_column: str | None = None,
        whole: pd.DataFrame | None = None,
    ) -> None:
        """Take a table as it is; nothing is read yet.

        Args:
            table: See the class.
            source: See the class.
            id_column: See the class.
            whole: Table that these rows are of, whose decimal marks are theirs; default: the table.
        """
        self.table, self.source, self.id_column = table, source, id_column
        self._whole = table if whole is None else whole
        self._known: dict[str, Texts] = {}

    def __len__(self) -> int:
        return len(self.table)

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self.table.columns)

    def rows(self, positions: Sequence[int]) -> Cells:
        """Return some rows."""
        return Cells(self.table.iloc[list(positions)], self.source, self.id_column, self._whole)

    def row(self, position: int) -> str:
        """Name the row at a position, as in ``row 2 (id 17)``."""
        number = f"row {self.table.index[position]}"
        site = None if self.id_column is None else self.texts(self.id_column)[position]
        return f"{number} (id {site})" if site else number

    def fault(self, position: int, column: str | None, text: str) -> UsageError:
        """Return an error about a row, and about a cell in it if a column is given."""
        cell = "" if column is None else f", column {column!r}"
        return UsageError(f"{self.source}, {self.row(position)}{cell}: {text}")

    def texts(self, column: str) -> Texts:
        """Return the cells of a column as texts, empty where missing, ``n``.

        Whole numbers have no decimal point: an id 17.0 is 17.
        """
        if column not in self._known:
            self._known[column] = _texts(self.table[column]).to_numpy(object)
        return self._known[column]

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
        infinite = first(np.isinf(read))
        if infinite is not None:
            raise self.fault(infinite, column, f"expected {expected}, got infinity.")
        return read

    def _parsed(self, column: str, expected: str) -> Array:
        texts = self.table[column].astype(str).str.replace("\N{MINUS SIGN}", "-")
        plain = pd.to_numeric(texts, errors="coerce")
        read: Array = plain.to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
        unread = np.flatnonzero(np.isnan(read))
        if self._has_decimal_commas:
            pointed = first(texts.str.contains(".", regex=False).to_numpy(bool) & ~np.isnan(read))
            if pointed is not None:
                raise self.fault(
                    pointed,
                    column,
                    f"{texts.iloc[pointed]!r} has a point, while other numbers of this table have "
                    "decimal commas. Write all in one way, without separators of thousands.",
                )
        for row, text in zip(unread, _texts(texts.iloc[unread]), strict=True):
            if text:
                read[row] = self._with_comma(int(row), column, text, expected)
        return read

    def _with_comma(self, row: int, column: str, text: str, expected: str) -> float:
        """Read a number with a decimal comma, or say what else it is."""
        thousands = re.fullmatch(_THOUSANDS, text)
        if re.fullmatch(_DECIMAL_COMMA, text) and (not thousands or self._has_decimal_commas):
            return float(text.replace(",", "."))
        if thousands:
            raise self.fault(
                row,
                column,
                f"{text!r} seems to have a separator of thousands. Write numbers without them, and "
                "with a decimal point.",
            )
        if text.endswith("%"):
            raise self.fault(
                row,
                column,
                f"expected {expected}, got {text!r}. Write no per cent signs: the number alone.",
            )
        raise self.fault(row, column, f"expected {expected}, got {text!r}.")

    @cached_property
    def _has_decimal_commas(self) -> bool:
        """Whether a cell of the table is a number with a decimal comma beyond doubt."""
        columns = [self._whole[name] for name in self._whole.columns]
        return any(_has_clear_comma(c) for c in columns if c.dtype.kind not in "fiubM")


def _has_clear_comma(column: pd.Series[Any]) -> bool:
    texts = column.astype(str)
    with_comma = texts[texts.str.contains(",", regex=False).to_numpy(bool)]
    return bool(with_comma.str.strip().str.fullmatch(_CLEAR_COMMA).any())


def _texts(column: pd.Series[Any]) -> pd.Series[str]:
    """Return cells as texts without spaces around them, empty where missing."""
    texts = column.astype(str).str.strip()
    texts = texts.str.replace(r"^([+-]?\d+)\.0+$", r"\1", regex=True)
    missing = column.isna() | texts.str.lower().isin(MISSING)
    return texts.where(~missing, "")


def first(mask: Mask | np.bool_) -> int | None:
    """Return the first place where a mask holds, None if there is none."""
    places = np.flatnonzero(mask)
    return int(places[0]) if places.size else None
