"""Tables as spreadsheets save them: encodings, separators, and rows numbered as on the screen."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pandas as pd

from bo_stream.errors import UsageError

ROW = "row"
"""Name of the index of a table that was read: rows numbered as a spreadsheet does, from 2."""

SEPARATORS = (",", ";", "\t")

_LINE_END = re.compile(r"\r\n|\r|\n")
_BLANK_START = re.compile(r"(?:[ \t]*(?:\r\n|\r|\n))*")
_SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")


def read_table(path: str | Path) -> pd.DataFrame:
    """Read a table with a header.

    Of a text file the cells stay text, so that an id keeps its leading zeros and nothing is
    guessed; :class:`~bo_stream.loops.survey.cells.Cells` reads numbers from them. Encodings are
    UTF-8, UTF-16 and Windows-1252, separators commas, semicolons and tabs. Empty rows are dropped.

    Args:
        path: ``.csv``, ``.tsv``, ``.txt`` or ``.parquet``.

    Returns:
        The table; its index, named ``row``, numbers the rows as a spreadsheet does: the header is
        row 1.

    Raises:
        UsageError: No such file, no table, no rows, or two columns of one name.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"No such file: {path}.")
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        advice = " Save the sheet as CSV." if suffix.startswith((".xls", ".ods")) else ""
        raise UsageError(
            f"{path} is of unknown type {suffix or '(no suffix)'!r}. Expected one of "
            f"{', '.join(_SUFFIXES)}.{advice}"
        )
    table = _read_parquet(path) if suffix == ".parquet" else _read_text(path)
    names = [str(name) for name in table.columns]
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise UsageError(f"{path}, row 1: two columns have the name {twice[0]!r}. Rename one.")
    if table.empty:
        raise UsageError(f"{path} has no rows below its header ({', '.join(names)}).")
    return table.set_axis(names, axis=1)


def _read_parquet(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a table: {_first_line(error)}") from error
    return table.set_index(pd.RangeIndex(2, len(table) + 2, name=ROW))


def _read_text(path: Path) -> pd.DataFrame:
    """Read a text file, all of its cells as text."""
    text = decoded(path.read_bytes(), path)
    blank, text = _without_blank_start(text)
    if not text:
        raise UsageError(f"{path} is empty.")
    header = _LINE_END.split(text, maxsplit=1)[0]
    separator = max(SEPARATORS, key=lambda mark: len(_cells(header, mark)))
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
    whole.index = pd.RangeIndex(1 + blank, 1 + blank + len(whole), name=ROW)
    names = [str(name).strip() for name in whole.iloc[0]]
    table = whole.iloc[1:]
    table = table[(table != "").any(axis=1)]
    _check_nameless(path, table, names, 1 + blank)
    return table.set_axis(names, axis=1).loc[:, [name != "" for name in names]]


def _without_blank_start(text: str) -> tuple[int, str]:
    """Count the empty lines that a text begins with, and drop them."""
    start = _BLANK_START.match(text)
    blank = start.group() if start is not None else ""
    return len(_LINE_END.findall(blank)), "" if not text.strip() else text[len(blank) :]


def _check_nameless(path: Path, table: pd.DataFrame, names: Sequence[str], header: int) -> None:
    """Check that columns without a name are empty."""
    for place in (place for place, name in enumerate(names) if not name):
        filled = table.index[table.iloc[:, place] != ""]
        if len(filled):
            raise UsageError(
                f"{path}, row {filled[0]}: a cell in column {place + 1}, which has no name in row "
                f"{header}. Name the column, or empty it."
            )


def decoded(content: bytes, path: Path) -> str:
    """Decode a text file: UTF-8 or UTF-16, with or without a mark, else Windows-1252.

    Raises:
        UsageError: It is no text.
    """
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    elif b"\0" in content[:200]:
        encoding = "utf-16-be" if content[:1] == b"\0" else "utf-16-le"
    else:
        encoding = "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        text = content.decode("cp1252", errors="replace")
    if "\0" in text or content.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise UsageError(f"{path} is no text file. Save the sheet as CSV.")
    return text


def _cells(line: str, separator: str) -> list[str]:
    return next(csv.reader([line], delimiter=separator), [])


def _fault(path: Path, separator: str, blank: int, error: Exception) -> str:
    """Say which row has more cells than the header."""
    found = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
    if found is None:
        return f"{path} cannot be read as a table: {_first_line(error)}"
    expected, line, saw = map(int, found.groups())
    advice = "Is there a comma in a cell?"
    if separator == ",":
        advice = "Are its decimal marks commas? Then save it with semicolons between the cells."
    return (
        f"{path}, row {line + blank}: {saw} cells, expected {expected} as in the header. {advice}"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)
