"""Tables as spreadsheets save them."""

from __future__ import annotations

import random
from datetime import date
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from openpyxl import Workbook, load_workbook

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import Cells
from bo_stream.loops.survey.tables import TableFormat, read_table

TEXT = "id,lon,lat,name\n007,35.5,-4.25,Séguéla\n008,36.0,-5,Ñandú\n"


def written(folder: Path, content: bytes | str, name: str = "sites.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def numbers(table: pd.DataFrame, column: str) -> list[float]:
    return Cells(table, "sites.csv").numbers(column).tolist()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252", "latin-1"]
)
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_encodings_separators_and_ends_of_lines(
    tmp_path: Path, encoding: str, separator: str, newline: str
) -> None:
    text = TEXT.replace(",", separator).replace("\n", newline)
    table = read_table(written(tmp_path, text.encode(encoding)))
    assert list(table.columns) == ["id", "lon", "lat", "name"]
    assert table["id"].tolist() == ["007", "008"]
    assert table["name"].tolist() == ["Séguéla", "Ñandú"]
    assert numbers(table, "lat") == [-4.25, -5.0]
    assert table.index.tolist() == [2, 3]
    assert table.index.name == "row"


def test_rows_are_numbered_as_on_the_screen_without_empty_ones(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, '\nid,name\n1,a\n\n"2","b\nc"\n,\n3\n'))
    assert table.index.tolist() == [3, 5, 7]
    assert table["name"].tolist() == ["a", "b\nc", ""]


def test_parquet(tmp_path: Path) -> None:
    frame = pd.DataFrame({"id": ["a", "b"], "lon": [35.5, np.nan], "n": [3, 4]}, index=[9, 8])
    frame.to_parquet(tmp_path / "sites.parquet")
    table = read_table(tmp_path / "sites.parquet")
    assert table.index.tolist() == [2, 3]
    np.testing.assert_equal(numbers(table, "lon"), [35.5, np.nan])
    assert numbers(table, "n") == [3.0, 4.0]


def test_the_numbers_of_rows_are_no_column(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "id,n\na,1\nb,2\n", "sites.csv"))
    table.to_parquet(tmp_path / "again.parquet")
    assert read_table(tmp_path / "again.parquet").equals(table)


def test_a_named_index_of_parquet_is_a_column(tmp_path: Path) -> None:
    path, frame = tmp_path / "sites.parquet", pd.DataFrame({"id": ["b", "a"], "n": [3, 4]})
    for indexed in (
        frame.set_index("id"),
        frame.set_index("id", drop=False),
        frame.set_index(["id", "n"]),
    ):
        indexed.to_parquet(path)
        table = read_table(path)
        assert table.index.tolist() == [2, 3]
        pd.testing.assert_frame_equal(table.reset_index(drop=True), frame, check_like=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"sites\.csv is empty"),
        ("\n \n", "is empty"),
        ("id,lon\n", r"no rows below its header \(id, lon\)"),
        ("id,lon,lon\n1,2,3\n", "row 1: two columns have the name 'lon'"),
        ("id,lon\n1,2\n2,3,5\n3,4\n", "row 3: 3 cells, expected 2 as in the header. Are its deci"),
        ("id;lon\n1;2;4\n", "row 2: 3 cells, expected 2"),
        ("id,lon,\n1,2,\n2,3,x\n", "row 3: a cell in column 3, which has no name in row 1"),
        (b"PK\x03\x04 a workbook", "is no text file. Save the sheet as .xlsx or as CSV"),
    ],
)
def test_tables_that_cannot_be_read(tmp_path: Path, content: bytes | str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        read_table(written(tmp_path, content))
    assert "\n" not in str(error.value)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_table(tmp_path / "sites.csv")
    with pytest.raises(UsageError, match=r"Expected a file, but .* is a folder"):
        read_table(tmp_path)
    with pytest.raises(UsageError, match=r"unknown type '.ods'.*Save the sheet as .xlsx or as CSV"):
        read_table(written(tmp_path, "", "sites.ods"))
    with pytest.raises(UsageError, match=r"sites.xlsx cannot be read as a workbook"):
        read_table(written(tmp_path, "", "sites.xlsx"))
    with pytest.raises(UsageError, match="cannot be read as a table"):
        read_table(written(tmp_path, "no parquet", "sites.parquet"))


def test_decimal_commas(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "id;lon;lat;rain\n1;35,5;-4,25;0,125\n2;36;-5;1,250\n"))
    assert numbers(table, "lon") == [35.5, 36.0]
    assert numbers(table, "lat") == [-4.25, -5.0]
    assert numbers(table, "rain") == [0.125, 1.25]  # as there are others beyond doubt
    quoted = read_table(written(tmp_path, 'id,lon\n1,"35,5"\n'))
    assert numbers(quoted, "lon") == [35.5]


def test_a_comma_in_a_text_of_a_workbook_leaves_its_numbers_alone(tmp_path: Path) -> None:
    pd.DataFrame({"lon": [35.5, 36.25], "rain": ["0,5", 1.5]}).to_excel(
        tmp_path / "sites.xlsx", index=False
    )
    table = read_table(tmp_path / "sites.xlsx")
    assert numbers(table, "lon") == [35.5, 36.25]
    assert numbers(table, "rain") == [0.5, 1.5]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (("1,200", "2,300"), r"row 2, column 'lon': '1,200' seems to have a separator of thousan"),
        (("1.5", "1,200.5"), "row 3, column 'lon': '1,200.5' seems to have a separator of thou"),
        (("1 200", "2"), "row 2, column 'lon': '1 200' seems to have a separator of thousands"),
        (("35,5", "36.5"), "row 3, column 'lon': '36.5' has a point, while '35,5' .row 2"),
        (("12 %", "2"), r"row 2, column 'lon': .* got '12 %'. Write no per cent signs"),
        (("1", "R"), r"row 3, column 'lon': expected a number, got 'R'"),
        (("1", "inf"), r"row 3, column 'lon': expected a number, got infinity"),
        (("4°43'S", "1"), r"row 2, column 'lon': expected a number, got"),
    ],
)
def test_cells_that_are_no_numbers(tmp_path: Path, cells: tuple[str, str], message: str) -> None:
    lines = "".join(f"{row};{cell}\n" for row, cell in enumerate(cells))
    table = read_table(written(tmp_path, f"id;lon\n{lines}"))
    with pytest.raises(UsageError, match=message):
        Cells(table, "sites.csv").numbers("lon")


def test_missing_cells(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "id,lon\na,\nb,NA\nc, - \nd,n/a\ne,2\n"))
    np.testing.assert_equal(numbers(table, "lon"), [np.nan] * 4 + [2.0])
    assert Cells(table, "sites.csv").texts("lon").tolist() == ["", "", "", "", "2"]


def test_a_row_is_named_with_its_id(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "id,lon\n17.0,1\n018,x\n"))
    cells = Cells(table, "sites.csv", "id")
    assert (cells.row(0), cells.row(1)) == ("row 2 (id 17)", "row 3 (id 018)")
    with pytest.raises(UsageError, match=r"sites.csv, row 3 \(id 018\), column 'lon': expected a"):
        cells.numbers("lon")


HOSTILE = [
    *("=1+1", "'=1+1", "''=x", "+5", "-5", "-5,3", "-cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "＝1"),
    *("a;b", "a,b|c", 'q"x', "l\nm", "r\rx", "é", "_x001B_", "_x005F_", "\x1b[31mred", "'plain"),
    *("062", "62", "1.50", "1e5", "-", "--", "0.1", "1234567890123456789", "TRUE", "000", "1,5"),
]
"""Texts that spreadsheets change, run, or take for something else."""

FORMATS = [TableFormat(".xlsx"), TableFormat()] + [
    TableFormat(".csv", separator, decimal, encoding, newline)
    for (separator, decimal), (encoding, newline) in zip(
        product(",;\t|", ".,"),
        product(("utf-8", "utf-8-sig", "utf-16", "cp1252"), ("\n", "\r\n")),
        strict=True,
    )
]


def hostile_table(decimal: str = ",") -> pd.DataFrame:
    """A table of hostile texts, and of numbers."""
    numbers = np.linspace(-30.0, 40.0, len(HOSTILE)) + 0.125
    texts = [text.replace(",", decimal) for text in HOSTILE]
    return pd.DataFrame({"id": texts, "=name": texts[::-1], "n": range(len(HOSTILE))}).assign(
        x=numbers, gap=[np.nan, *numbers[1:]], sure="a"
    )


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_what_is_written_is_read_as_it_was(tmp_path: Path, format: TableFormat) -> None:
    table, path = hostile_table(format.decimal), tmp_path / f"next{format.suffix}"
    path.write_bytes(format.write(table))
    read = read_table(path)
    assert list(read.columns) == list(table.columns)
    for name in ("id", "=name"):
        assert read[name].str.lstrip().tolist() == table[name].str.lstrip().tolist()
    digits = 4e-16 if format.suffix == ".xlsx" else 0.0  # of numbers in a workbook
    for name in ("n", "x", "gap"):
        values = Cells(read, "t").numbers(name)
        np.testing.assert_allclose(values, table[name].to_numpy(float), rtol=digits, atol=0.0)
    if format.suffix == ".csv":
        assert TableFormat.of(read).separator == format.separator
        assert TableFormat.of(read).newline == format.newline


def test_no_cell_of_a_text_file_begins_as_a_formula() -> None:
    for line in TableFormat().write(hostile_table()[["id"]]).decode().split("\n")[1:]:
        assert line.lstrip('"')[:1] not in set("=+@\t\r＝")
        assert (
            line.lstrip('"')[:1] != "-"
            or line.strip('"')[1:].replace(",", ".")[:1] in "5"
            or (line == "-")
        )


def test_no_cell_of_a_workbook_is_a_formula(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_bytes(TableFormat(".xlsx").write(hostile_table()))
    cells = [cell for row in load_workbook(tmp_path / "a.xlsx").active.rows for cell in row]
    assert {cell.data_type for cell in cells} <= {"s", "n", "inlineStr"}
    assert sum(cell.value == "=1+1" for cell in cells) == 2
    numbers = [cell.value for cell in cells if cell.column == 1 and cell.data_type == "n"]
    assert numbers == [-5, 62, 0.1]  # which a workbook shows as they are


@pytest.mark.parametrize(
    ("content", "written_as"),
    [
        (b"id;lon\r\n1;35,5\r\n", TableFormat(".csv", ";", ",", "utf-8", "\r\n")),
        (b"\xef\xbb\xbfid,lon\n1,35.5\n", TableFormat(".csv", ",", ".", "utf-8-sig", "\n")),
        (b"sep=|\nid|lon\n1|35.5\n", TableFormat(".csv", "|", ".", "utf-8", "\n")),
        (b"id;n\r1;35\r", TableFormat(".csv", ";", ",", "utf-8", "\r")),
        ("id\tnom\n1\té\n".encode("utf-16"), TableFormat(".csv", "\t", ".", "utf-16", "\n")),
        ("id;nom\n1.5;é\n".encode("cp1252"), TableFormat(".csv", ";", ".", "cp1252", "\n")),
    ],
)
def test_how_a_table_is_written(tmp_path: Path, content: bytes, written_as: TableFormat) -> None:
    table = read_table(written(tmp_path, content))
    assert TableFormat.of(table) == written_as
    assert TableFormat.of(table.iloc[:1]) == written_as
    assert TableFormat.of(pd.DataFrame()) == TableFormat()


def test_a_letter_that_an_encoding_lacks_is_written_in_another(tmp_path: Path) -> None:
    table = pd.DataFrame({"id": ["Ségou", "ሀዋሳ"]})
    content = TableFormat(encoding="cp1252").write(table)
    assert read_table(written(tmp_path, content))["id"].tolist() == ["Ségou", "ሀዋሳ"]


def test_a_workbook_is_read_as_its_sheet_shows_it(tmp_path: Path) -> None:
    book = Workbook()
    book.active.title = "empty"
    sheet = book.create_sheet("list")
    for row in ([], ["id", None, " Nom  du\nvillage "], ["007", None, "a"], [], [7, None, 1.5]):
        sheet.append(row)
    sheet.append([8, None, date(2026, 1, 31)])
    sheet["A6"].number_format = "000"
    book.create_sheet("other").append(["x"])
    book.save(tmp_path / "sites.xlsx")
    with pytest.warns(UserWarning, match="sheet 'list' is read, not 'other'"):
        table = read_table(tmp_path / "sites.xlsx")
    assert list(table.columns) == ["id", "Nom du village"]
    assert table["id"].tolist() == ["007", "7", "008"]
    assert table["Nom du village"].tolist() == ["a", "1.5", "2026-01-31"]
    assert table.index.tolist() == [3, 5, 6]


def test_a_cell_that_does_not_end_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"row 3: a quotation mark \(\"\) opens a cell that does n"
    ):
        read_table(written(tmp_path, 'id,name\n1,a\n2,"b\n3,c\n'))


def test_hostile_tables_are_read_or_refused(tmp_path: Path) -> None:
    draw, read, refused = random.Random(0), 0, 0
    pieces = [*HOSTILE, "", " ", "\n", "\r\n", '"', "\x00", "é", "\ufeff", "id", "lon", "1" * 400]
    for number in range(150):
        separator = draw.choice(",;\t|")
        lines = [
            separator.join(draw.choice(pieces) for _ in range(draw.randint(1, 4)))
            for _ in range(draw.randint(0, 6))
        ]
        text = draw.choice(["", "id;lon\n", "\ufeffid,lon\n", "sep=;\n"]) + "\n".join(lines)
        encoding = draw.choice(["utf-8", "utf-16", "latin-1", "utf-16-le", "utf-16-be"])
        content = text.encode(encoding, "replace")
        if draw.random() < 0.2:
            content = content[: draw.randint(0, len(content))]
        path = written(tmp_path, content, f"t{number % 2}{draw.choice(['.csv', '.xlsx', '.txt'])}")
        try:
            table = read_table(path)
        except UsageError as error:
            refused += path.name in str(error)
            continue
        read += 1
        again = tmp_path / "again.csv"
        again.write_bytes(TableFormat.of(table).write(table))
        before = table.map(str.strip)
        after = read_table(again).map(str.strip)
        assert after.to_numpy().tolist() == before.to_numpy().tolist()
    assert min(read, refused) > 10
    assert read + refused == 150


@pytest.mark.parametrize("mark", "\x0b\x0c\x1c\x1d\x1e\x1f\x85\u2028\u2029")
@pytest.mark.parametrize("written_as", [TableFormat(), TableFormat(".xlsx")])
def test_line_ends_of_no_table_are_texts(
    tmp_path: Path, mark: str, written_as: TableFormat
) -> None:
    """Python's ``str.splitlines`` ends a line at each of them, a spreadsheet at none."""
    cells = [mark, f"a{mark}b", f"{mark}a", f"a{mark}", f"{mark},;", f"={mark}"]
    table = pd.DataFrame({"id": [f"{row}" for row in range(len(cells))], "name": cells})
    path = written(tmp_path, written_as.write(table), f"sites{written_as.suffix}")
    assert read_table(path).reset_index(drop=True).equals(table)
    alone = table[["name"]]
    path = written(tmp_path, written_as.write(alone), f"names{written_as.suffix}")
    assert read_table(path).reset_index(drop=True).equals(alone)


@pytest.mark.parametrize(("separator", "other"), list(product(",;\t|", ",;|")))
def test_a_separator_of_the_header_in_a_row_is_not_taken_for_the_one(
    tmp_path: Path, separator: str, other: str
) -> None:
    """Each row has as many of it as of the true ones, but within quotation marks."""
    table = pd.DataFrame({"c0": [other], f"c1{other}": ["\u2028"]})
    path = written(tmp_path, TableFormat(separator=separator).write(table))
    assert read_table(path).reset_index(drop=True).equals(table)
