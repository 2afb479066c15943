"""Tables as spreadsheets save them: read as they are written, and written as they were read."""

from __future__ import annotations

import csv
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date, datetime
from io import BytesIO, StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bo_stream.errors import UsageError

_ROW = "row"
"""Name of the index of a table that was read: rows numbered as a spreadsheet does, from 2."""

SEPARATORS = (",", ";", "\t", "|")

_COMPARED = 20
"""Number of rows by which the separator is found."""

_MOST_BYTES = 1 << 30
"""Size of an unpacked workbook, in bytes, above which it is not read."""

_ATTRIBUTE = "format"
"""Key of a table's attributes under which its format lies, as plain values."""

_LINE_END = re.compile(r"\r\n|\r|\n")
_BLANK_START = re.compile(r"(?:[ \t]*(?:\r\n|\r|\n))*")
_HINT = re.compile(r'"?sep=([,;\t|])"?[ \t]*(?:\r\n|\r|\n)', re.IGNORECASE)
SUFFIXES = (".csv", ".tsv", ".txt", ".xlsx", ".parquet")

_NUMBER = re.compile(r"-?(?:\d+(?:[.,]\d*)?|[.,]\d+)(?:[eE][+-]?\d+)?")
_FORMULA = re.compile(r"'*(?:[\t\r]|\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")
"""Beginning of a text that a spreadsheet takes for a formula, behind any number of apostrophes."""

CLEAR_COMMA = r"[+-]?(?:0*,\d+|\d+,(?:\d{1,2}|\d{4,}))"
"""Pattern of a number with a decimal comma that cannot be a separator of thousands."""

_POINT = r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?"
_ESCAPED = re.compile(r"_x([0-9A-Fa-f]{4})_")
_UNWRITABLE = re.compile(r"[\x00-\x08\x0b-\x1f\ud800-\udfff\ufffe\uffff]|_(?=x[0-9A-Fa-f]{4}_)")


class NoRowsError(UsageError):
    """A file is empty, or has no rows below its header."""


@dataclass(frozen=True)
class TableFormat:
    """How a table is written: as a spreadsheet in the user's country wrote it.

    Attributes:
        suffix: ``.csv``, ``.tsv``, or ``.xlsx``, a workbook, to which the others do not apply.
        separator: Character between cells.
        decimal: Decimal mark of numbers, a point or a comma.
        encoding: Of the text, with the mark (BOM) that it began with: ``utf-8-sig`` has one.
        newline: End of a line.
    """

    suffix: str = ".csv"
    separator: str = ","
    decimal: str = "."
    encoding: str = "utf-8"
    newline: str = "\n"

    @classmethod
    def of(cls, table: pd.DataFrame) -> TableFormat:
        """Return the format of a table that :func:`read_table` read; the default of any other."""
        values = table.attrs.get(_ATTRIBUTE)
        return cls(**values) if isinstance(values, dict) else cls()

    def given_to(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return a table that says to have this format."""
        marked = table.copy(deep=False)
        marked.attrs = {**table.attrs, _ATTRIBUTE: asdict(self)}
        return marked

    def write(self, table: pd.DataFrame) -> bytes:
        """Write a table, without its index, so that ``read_table`` reads the same cells.

        Texts that a spreadsheet takes for formulas (those that begin with ``=``, ``+``, ``-`` or
        ``@`` and are no number) are kept from it: by an apostrophe before them in a text file, by
        the type of the cell in a workbook. ``read_table`` takes the apostrophe away.

        Args:
            table: Its missing values become empty cells.

        Returns:
            Content of the file, in UTF-8 with a mark where the encoding lacks a character.
        """
        columns = [  # plain values of Python, None where missing
            [
                None if missing else value.item() if isinstance(value, np.generic) else value
                for value, missing in zip(column, column.isna(), strict=True)
            ]
            for _, column in table.items()
        ]
        rows = [[str(name) for name in table.columns], *map(list, zip(*columns, strict=True))]
        if self.suffix == ".xlsx":
            return _workbook(rows)
        alone = len(columns) == 1  # no separator tells which one it is
        lines = (self.separator.join(self._cell(value, alone) for value in row) for row in rows)
        text = "".join(line + self.newline for line in lines)
        try:
            return text.encode(self.encoding)
        except UnicodeEncodeError:
            return text.encode("utf-8-sig", "replace")

    def _cell(self, value: Any, alone: bool) -> str:
        """Write a cell of a text file."""
        if value is None:
            return ""
        if isinstance(value, float):
            text = _shown(value, "").replace(".", self.decimal)
            if re.fullmatch(r"-?\d*[1-9]\d*,\d{3}", text):  # which could be thousands
                text += "0"
        else:
            text = str(value).replace("\0", "\N{REPLACEMENT CHARACTER}")  # no text has NUL
            if _FORMULA.match(text) and text != "-" and not _NUMBER.fullmatch(text):
                text = f"'{text}"
        # Other separators, too, or the one of the header could be taken for them.
        marks = "" if _NUMBER.fullmatch(text) and not alone else "".join(SEPARATORS)
        if any(mark in text for mark in marks + self.separator) or re.search(
            r'^\s|\s$|["\r\n]', text
        ):
            return '"' + text.replace('"', '""') + '"'
        return text


def _workbook(rows: Iterable[Sequence[Any]]) -> bytes:
    """Write rows as the sheet of a workbook: numbers as numbers, all else as texts."""
    from openpyxl import Workbook
    from openpyxl.cell import WriteOnlyCell

    book = Workbook(write_only=True)
    sheet = book.create_sheet("bo-stream")
    for row in rows:
        cells = []
        for value in row:
            number = _number(value)
            if value is None or number is not None:
                cells.append(WriteOnlyCell(sheet, number))
                continue
            text = str(value)
            text = f"'{text}" if text.startswith("'") and _FORMULA.match(text) else text
            escaped = _UNWRITABLE.sub(lambda found: f"_x{ord(found.group()):04X}_", text)
            cell = WriteOnlyCell(sheet, escaped)
            cell.data_type, cell.number_format = "s", "@"  # or a text that begins with = is one
            cells.append(cell)
        sheet.append(cells)
    file = BytesIO()
    book.save(file)
    return file.getvalue()


def _number(value: Any) -> int | float | None:
    """Return the number of a cell, of a text only if a workbook shows the number as that text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if not isinstance(value, str):
        return value if abs(value) < 1e300 else None
    if not re.fullmatch(r"-?\d{1,15}(?:\.\d+)?", value):
        return None
    number = float(value)
    return number if _shown(number, "") == value else None


# --- reading ------------------------------------------------------------------------------------


def read_table(path: str | Path) -> pd.DataFrame:
    """Read a table with a header.

    Of a text file and of a workbook the cells are texts, so that an id keeps its leading zeros and
    nothing is guessed; :class:`~bo_stream.loops.survey.cells.Cells` reads numbers from them.
    Encodings are UTF-8, UTF-16 and Windows-1252, separators commas, semicolons, tabs and bars.
    Empty rows are dropped. Of a workbook it is the first sheet that has cells. Of a parquet file a
    named index is a column, too.

    Args:
        path: ``.csv``, ``.tsv``, ``.txt``, ``.xlsx`` or ``.parquet``.

    Returns:
        The table; its index, named ``row``, numbers the rows as a spreadsheet does: the header is
        row 1. :meth:`TableFormat.of` says how it was written.

    Raises:
        UsageError: No such file, a folder, no table, no rows, or two columns of one name.
    """
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"Expected a file, but {str(path)!r} is a folder. Name a file in it.")
    if not path.is_file():
        raise UsageError(f"No such file: {path}.")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        advice = (
            " Save the sheet as .xlsx or as CSV." if suffix.startswith((".xls", ".ods")) else ""
        )
        raise UsageError(
            f"{path} is of unknown type {suffix or '(no suffix)'!r}. Expected one of "
            f"{', '.join(SUFFIXES)}.{advice}"
        )
    row = 1
    if suffix == ".parquet":
        try:
            table = pd.read_parquet(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read as a table: {_first_line(error)}") from error
        # A named index, such as the ids, is a column.
        table = table.reset_index(
            [name for name in table.index.names if name not in {None, _ROW, *table}]
        )
        table = table.set_index(pd.RangeIndex(2, len(table) + 2, name=_ROW))
        written = TableFormat()
    else:
        whole, written = _read_workbook(path) if suffix == ".xlsx" else _read_text(path)
        row, table = int(whole.index[0]), _under_header(path, whole)
    names = [str(name) for name in table.columns]
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise UsageError(f"{path}, row {row}: two columns have the name {twice[0]!r}. Rename one.")
    if table.empty:
        raise NoRowsError(f"{path} has no rows below its header ({', '.join(names)}).")
    return written.given_to(table.set_axis(names, axis=1))


def _read_text(path: Path) -> tuple[pd.DataFrame, TableFormat]:
    """Read a text file, cells as texts and the header as a row, and tell how it is written."""
    text, encoding = decoded(path.read_bytes(), path)
    start = _BLANK_START.match(text)
    blank_start = start.group() if start is not None else ""
    blank = len(_LINE_END.findall(blank_start))
    text = text[len(blank_start) :] if text.strip() else ""
    hint = _HINT.match(text)  # of spreadsheets: sep=;
    if hint is not None:
        blank, text = blank + 1, text[hint.end() :]
    if not text.strip():
        raise NoRowsError(f"{path} is empty.")
    separator = hint.group(1) if hint is not None else _separator(text)
    try:
        whole = pd.read_csv(
            StringIO(text),
            sep=separator,
            header=None,
            dtype=str,
            keep_default_na=False,
            skip_blank_lines=False,
            skipinitialspace=True,
        ).fillna("")
    except ValueError as error:
        raise UsageError(_fault(path, separator, blank, error)) from error
    whole.index = pd.RangeIndex(1 + blank, 1 + blank + len(whole), name=_ROW)
    # The decimal mark is that of numbers beyond doubt, else what goes with the separator.
    cells = [column.iloc[1:].str.strip() for _, column in whole.items()]
    decimal = "," if separator == ";" else "."
    if any(bool(column.str.fullmatch(CLEAR_COMMA).any()) for column in cells):
        decimal = ","
    elif any(bool(column.str.fullmatch(_POINT).any()) for column in cells):
        decimal = "."
    end = _LINE_END.search(text)
    suffix = ".tsv" if path.suffix.lower() == ".tsv" else ".csv"
    newline = "\n" if end is None else end.group()
    return whole, TableFormat(suffix, separator, decimal, encoding, newline)


def _separator(text: str) -> str:
    """Find the separator: one that cuts the first rows alike, else the header into most cells.

    Of several that do, one by which each quotation mark that opens a cell is closed at its end: a
    separator within a quoted cell leaves marks on both of its sides.
    """

    def cuts(mark: str) -> tuple[bool, bool, int]:
        for strict in (True, False):
            file = StringIO(text, newline="")
            rows = csv.reader(file, delimiter=mark, skipinitialspace=True, strict=strict)
            try:
                cells = [len(row) for row in islice(rows, _COMPARED) if row]
            except csv.Error:  # a cell without end, or something behind its end
                continue
            alike = cells[0] > 1 and len(set(cells)) == 1
            return alike, strict, cells[0]
        return False, False, 0

    return max(SEPARATORS, key=cuts)


def _read_workbook(path: Path) -> tuple[pd.DataFrame, TableFormat]:
    """Read the first filled sheet of a workbook, its cells as the texts that it shows."""
    from openpyxl import load_workbook

    try:
        with zipfile.ZipFile(path) as packed:
            size = sum(part.file_size for part in packed.infolist())
        if size > _MOST_BYTES:
            raise UsageError(
                f"{path} is {size / 2**20:,.0f} MiB unpacked, expected at most "
                f"{_MOST_BYTES / 2**20:,.0f} MiB. Save the sheet as CSV."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parts of a workbook that are no cells
            book = load_workbook(path, read_only=True, data_only=True)
            try:
                sheets = [(sheet.title, list(_rows(sheet))) for sheet in book.worksheets]
            finally:
                book.close()
    except UsageError:
        raise
    except Exception as error:  # a damaged workbook fails in any way
        raise UsageError(
            f"{path} cannot be read as a workbook ({type(error).__name__}). Save the sheet again, "
            "or as CSV."
        ) from error
    filled = [(title, rows) for title, rows in sheets if any(any(row) for row in rows)]
    if not filled:
        raise NoRowsError(f"{path} is empty.")
    (title, rows), others = filled[0], [repr(title) for title, _ in filled[1:]]
    if others:
        warnings.warn(
            f"{path}: sheet {title!r} is read, not {', '.join(others)}.", UserWarning, stacklevel=2
        )
    start = next(number for number, row in enumerate(rows) if any(row))
    width = max(len(row) for row in rows)
    padded = [row + [""] * (width - len(row)) for row in rows[start:]]
    index = pd.RangeIndex(1 + start, 1 + start + len(padded), name=_ROW)
    return pd.DataFrame(padded, index=index, dtype=object).astype(str), TableFormat(".xlsx")


def _rows(sheet: Any) -> Iterator[list[str]]:
    """Yield the rows of a sheet as texts, without empty cells at their ends."""
    sheet.reset_dimensions()
    for row in sheet.iter_rows():
        texts = [_shown(cell.value, getattr(cell, "number_format", "")) for cell in row]
        while texts and not texts[-1]:
            texts.pop()
        yield texts


def _shown(value: Any, number_format: str | None) -> str:
    """Write the value of a cell as a text; numbers to all their digits."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _ESCAPED.sub(lambda found: chr(int(found.group(1), 16)), value)
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, int) and re.fullmatch("0+", number_format or ""):
        return f"{value:0{len(number_format or '')}d}"
    if isinstance(value, datetime) and value.time() == datetime.min.time():
        value = value.date()
    if isinstance(value, (date, datetime)):
        return value.isoformat()
    return repr(value) if isinstance(value, float) else str(value)


def _under_header(path: Path, whole: pd.DataFrame) -> pd.DataFrame:
    """Take the first row of a table as the names of its columns, and drop empty rows.

    Raises:
        UsageError: A column without a name is not empty.
    """
    header = int(whole.index[0])
    names = [" ".join(str(name).replace("\ufeff", "").split()) for name in whole.iloc[0]]
    names = [name[1:] if name.startswith("'") and _FORMULA.match(name) else name for name in names]
    table = whole.iloc[1:]
    if len(table):
        table = table[(table != "").any(axis=1)].apply(
            # The apostrophe keeps a text from being a formula.
            lambda cells: cells.mask(
                cells.str.startswith("'") & cells.str.match(_FORMULA), cells.str[1:]
            )
        )
    for position in (position for position, name in enumerate(names) if not name):
        filled = table.index[table.iloc[:, position] != ""]
        if len(filled):
            raise UsageError(
                f"{path}, row {filled[0]}: a cell in column {position + 1}, which has no name in "
                f"row {header}. Name the column, or empty it."
            )
    return table.set_axis(names, axis=1).loc[:, [name != "" for name in names]]


def decoded(content: bytes, path: Path) -> tuple[str, str]:
    """Decode a text file: UTF-8 or UTF-16, with or without a mark, else Windows-1252.

    Returns:
        The text and the name of its encoding.

    Raises:
        UsageError: It is no text.
    """
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    elif b"\0" in content[:200]:
        encoding = "utf-16-be" if content[:1] == b"\0" else "utf-16-le"
    else:
        encoding = "utf-8-sig" if content.startswith(b"\xef\xbb\xbf") else "utf-8"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        encoding = "cp1252"
        text = content.decode(encoding, errors="replace")
    if "\0" in text or content.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise UsageError(f"{path} is no text file. Save the sheet as .xlsx or as CSV.")
    return text, encoding


def _fault(path: Path, separator: str, blank: int, error: Exception) -> str:
    """Say which row has more cells than the header, or a quotation mark that is not closed."""
    text = _first_line(error)
    found = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", text)
    if found is None:
        opened = re.search(r"EOF inside string starting at row (\d+)", text)
        if opened is None:
            return f"{path} cannot be read as a table: {text}"
        return (
            f'{path}, row {int(opened.group(1)) + 1 + blank}: a quotation mark (") opens a cell '
            "that does not end. Close it, or take it away."
        )
    expected, line, saw = map(int, found.groups())
    advice = f"Is there a {separator!r} in a cell? Then put that cell in quotation marks."
    if separator == ",":
        advice = "Are its decimal marks commas? Then save it with semicolons between the cells."
    return (
        f"{path}, row {line + blank}: {saw} cells, expected {expected} as in the header. {advice}"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)
