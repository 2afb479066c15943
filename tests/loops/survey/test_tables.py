"""Tables as spreadsheets save them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import Cells
from bo_stream.loops.survey.tables import read_table

TEXT = "id,lon,lat,name\n007,35.5,-4.25,Séguéla\n008,36.0,-5,Ñandú\n"


def written(folder: Path, content: bytes | str, name: str = "sites.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def numbers(table: pd.DataFrame, column: str) -> list[float]:
    return Cells(table, "sites.csv").numbers(column).tolist()


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252", "latin-1"]
)
@pytest.mark.parametrize("separator", [",", ";", "\t"])
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


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (("1,200", "2,300"), r"row 2, column 'lon': '1,200' seems to have a separator of thousan"),
        (("1.5", "1,200.5"), "row 3, column 'lon': '1,200.5' seems to have a separator of thou"),
        (("1 200", "2"), "row 2, column 'lon': '1 200' seems to have a separator of thousands"),
        (("35,5", "36.5"), "row 3, column 'lon': '36.5' has a point, while other numbers"),
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
