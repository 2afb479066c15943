"""Cells of a table as numbers and texts; a fault names row and column."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bo_stream.loops.errors import UsageError

Array = NDArray[np.float64]

MISSING = ("", "na", "n/a", "nan", "none", "null", "-", ".", "#n/a", "<na>")
"""Texts of an empty cell, in lower case."""

_DECIMAL_COMMA = r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?"
_CLEAR_COMMA = r"[+-]?(?:0*,\d+|\d+,(?:\d{1,2}|\d{4,}))"
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:[ '’.,\u00a0\u202f]\d{3})+(?:[.,]\d+)?")


@dataclass(frozen=True)
class Cells:
    """A table whose faults are said as a spreadsheet shows them.

    Attributes:
        table: Any index; that of ``read_table`` numbers rows as a spreadsheet does.
        source: Name of the table for messages, such as its file's name.
        id_column: Column of the ids, for messages; None: there is none.
    """

    table: pd.DataFrame
    source: str
    id_column: str | None = None

    def __len__(self) -> int:
        return len(self.table)

    def fault(self, position: int, column: str | None, text: str) -> NoReturn:
        """Raise an error about a row, and about a cell in it if a column is given.

        Raises:
            UsageError: Always.
        """
        where = f"{self.source}, {self.row(position)}"
        raise UsageError(f"{where}{'' if column is None else f', column {column!r}'}: {text}")

    def row(self, position: int) -> str:
        """Name the row at a position, as in ``row 2 (id 17)``."""
        number = f"row {self.table.index[position]}"
        if self.id_column is None:
            return number
        return f"{number} (id {self.texts(self.id_column)[position]})"

    def texts(self, column: str) -> NDArray[np.object_]:
        """Return the cells of a column as texts, empty where missing, ``n``.

        Whole numbers are written without a decimal point: an id 17.0 is 17.
        """
        return self._texts[column].to_numpy(object)

    def numbers(self, column: str, expected: str = "a number") -> Array:
        """Return the cells of a column as numbers, NaN where missing, ``n``.

        Decimal commas are read where no cell of the column has a point.

        Args:
            column: Its name.
            expected: Kind of number, for messages.

        Raises:
            UsageError: A cell is no number, is infinite, or has thousands separators.
        """
        values = self.table[column]
        if values.dtype.kind in "fiub" and not isinstance(values.dtype, pd.CategoricalDtype):
            read = values.to_numpy(dtype=np.float64, na_value=np.nan)
        else:
            read = self._numbers_of_texts(column, expected)
        infinite = np.flatnonzero(np.isinf(read))
        if infinite.size:
            self.fault(infinite[0], column, f"expected {expected}, got infinity.")
        return read

    def _numbers_of_texts(self, column: str, expected: str) -> Array:
        texts = self._texts[column]
        plain = pd.to_numeric(texts, errors="coerce").to_numpy(np.float64, na_value=np.nan)
        unread = np.flatnonzero(np.isnan(plain) & (texts != "").to_numpy(bool))
        points = texts.str.contains(".", regex=False).to_numpy(bool)
        if self._decimal_commas and bool(points.any()):
            row = int(np.flatnonzero(points)[0])
            self.fault(
                row, column, f"{texts.iloc[row]!r} has a point, while numbers elsewhere in this "
                "table have decimal commas. Write all with the same mark, and no separators of "
                "thousands.",
            )  # fmt: skip
        for row in unread.tolist():
            plain[row] = self._number(row, column, str(texts.iloc[row]), expected)
        return plain

    def _number(self, row: int, column: str, text: str, expected: str) -> float:
        """Read a number that is not written with a point."""
        if self._decimal_commas and re.fullmatch(_DECIMAL_COMMA, text):
            return float(text.replace(",", "."))
        if text.endswith("%"):
            self.fault(row, column, f"expected {expected}, got {text!r}. Write no per cent signs.")
        if _THOUSANDS.fullmatch(text):
            self.fault(
                row, column, f"{text!r} has a separator of thousands or a decimal comma, which "
                "cannot be told apart. Write it without separators, or with a decimal point.",
            )  # fmt: skip
        if re.fullmatch(_DECIMAL_COMMA, text):
            return float(text.replace(",", "."))
        self.fault(row, column, f"expected {expected}, got {text!r}.")

    @cached_property
    def _decimal_commas(self) -> bool:
        """Whether a cell of the table is a number with a decimal comma beyond doubt."""
        texts = [name for name in self.table if self.table[name].dtype.kind not in "fiubM"]
        return any(
            bool(self._texts[name].str.fullmatch(_CLEAR_COMMA).any()) for name in map(str, texts)
        )

    @cached_property
    def _texts(self) -> dict[str, pd.Series]:
        return _Lazy(self._text_of)

    def _text_of(self, column: str) -> pd.Series:
        values = self.table[column]
        if values.dtype.kind == "f":
            values = _whole_as_whole(values)
        texts = values.astype(str).str.strip()
        missing = values.isna() | texts.str.lower().isin(MISSING)
        return texts.where(~missing, "")


class _Lazy(dict[str, pd.Series]):
    """A dictionary that computes what is missing."""

    def __init__(self, compute: Callable[[str], pd.Series]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, key: str) -> pd.Series:
        self[key] = self._compute(key)
        return self[key]


def _whole_as_whole(values: pd.Series) -> pd.Series:
    """Turn numbers into objects, whole ones into integers."""
    numbers = values.to_numpy(np.float64, na_value=np.nan)
    objects: list[Any] = [int(v) if v == np.floor(v) and abs(v) < 2**53 else v for v in numbers]
    return pd.Series(objects, index=values.index, dtype=object)


def first(mask: Sequence[bool] | NDArray[np.bool_]) -> int | None:
    """Return the first place where a mask holds, None if there is none."""
    places = np.flatnonzero(mask)
    return int(places[0]) if places.size else None
