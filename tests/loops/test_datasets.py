from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bo_stream.errors import UsageError
from bo_stream.loops.datasets import Dataset, read_dataset
from tests.loops.small import COLUMNS, TARGET, small_map, write_npz


def as_table(data: Dataset) -> pd.DataFrame:
    return pd.DataFrame(
        {"lon": data.X[:, 0], "lat": data.X[:, 1], "prevalence": data.y, "name": "a"}
    )


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    data = small_map()
    paths = {suffix: tmp_path / f"map.{suffix}" for suffix in ("npz", "csv", "parquet")}
    write_npz(paths["npz"], data)
    as_table(data).to_csv(paths["csv"], index=False)
    as_table(data).to_parquet(paths["parquet"])
    return paths


@pytest.mark.parametrize("suffix", ["npz", "csv", "parquet"])
def test_every_format_gives_the_same_data(files: dict[str, Path], suffix: str) -> None:
    expected = small_map()
    read = read_dataset(files[suffix], list(COLUMNS), None if suffix == "npz" else TARGET)
    np.testing.assert_array_equal(read.X, expected.X)
    np.testing.assert_array_equal(read.y, expected.y)
    assert read.columns == COLUMNS
    assert read.target == TARGET
    assert read.fingerprint == expected.fingerprint
    assert read.y.flags.writeable  # or torch warns when it takes the array


def test_npz_columns_can_be_chosen_and_another_array_be_the_target(tmp_path: Path) -> None:
    data = small_map()
    path = tmp_path / "map.npz"
    np.savez(path, X=data.X, y=data.y, later=data.y + 1, columns=np.array(COLUMNS))
    read = read_dataset(path, ["lat"], "later")
    np.testing.assert_array_equal(read.X, data.X[:, 1:])
    np.testing.assert_array_equal(read.y, data.y + 1)
    assert (read.columns, read.target) == (("lat",), "later")


def test_npz_without_names_gets_some(tmp_path: Path) -> None:
    data = small_map()
    np.savez(tmp_path / "map.npz", X=data.X[:, 0], y=data.y)
    read = read_dataset(tmp_path / "map.npz")
    assert (read.columns, read.target) == (("x0",), "y")


def test_unit_cube_by_the_box_of_the_data() -> None:
    data = small_map()
    np.testing.assert_allclose(data.unit_X.min(0), 0.0, atol=1e-15)
    np.testing.assert_allclose(data.unit_X.max(0), 1.0, atol=1e-15)
    low, high = data.bounds
    np.testing.assert_allclose(low + data.unit_X * (high - low), data.X)


def test_fingerprint_is_of_values_and_names() -> None:
    data = small_map()
    moved = Dataset(data.X, data.y, data.columns, data.target, "elsewhere")
    renamed = Dataset(data.X, data.y, data.columns, "incidence", data.source)
    changed = Dataset(data.X, np.where(data.y == data.y.max(), 0.0, data.y), *moved_names(data))
    assert moved.fingerprint == data.fingerprint
    assert len({data.fingerprint, renamed.fingerprint, changed.fingerprint}) == 3


def moved_names(data: Dataset) -> tuple[tuple[str, ...], str, str]:
    return data.columns, data.target, data.source


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            ["lon", "height"],
            TARGET,
            "has no column 'height', which --x names. Its columns: lon, lat, prevalence, name",
        ),
        (["lon"], "incidence", "has no column 'incidence'"),
        (None, TARGET, "Say which columns"),
        (["lon"], None, "Say which columns"),
        (["lon", "lon"], TARGET, "Column 'lon' is named twice among x and y"),
        ([TARGET, "lon"], TARGET, f"Column {TARGET!r} is named twice among x and y"),
        (["lon", "name"], TARGET, "row 2, column 'name': expected a number, got 'a'"),
    ],
)
def test_wrong_columns_of_a_table(
    files: dict[str, Path], x: list[str] | None, y: str | None, message: str
) -> None:
    for suffix in ("csv", "parquet"):
        with pytest.raises(UsageError, match=message):
            read_dataset(files[suffix], x, y)


def test_wrong_names_of_an_npz(files: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match=r"has no column 'height'\. Its columns: lon, lat"):
        read_dataset(files["npz"], ["height"])
    with pytest.raises(UsageError, match="Column 'lon' is named twice among x and y"):
        read_dataset(files["npz"], ["lon", "lon"])
    with pytest.raises(UsageError, match=r"has no array 'later'\. It has: X, columns, target, y"):
        read_dataset(files["npz"], None, "later")


@pytest.mark.parametrize("name", ["a.npz", "a.csv", "a.parquet"])
@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe nothing of the kind \x80"])
def test_damaged_file(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=name):
        read_dataset(tmp_path / name, ["a"], "b")


def test_missing_file_and_unknown_type(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Expected a file, but '\.' is a folder"):
        read_dataset(".")
    with pytest.raises(UsageError, match="No such file"):
        read_dataset(tmp_path / "a.npz")
    (tmp_path / "a.xls").write_bytes(b"")
    with pytest.raises(
        UsageError, match=r"unknown type '.xls'. Expected one of .npz, .csv, .tsv, .txt, .xlsx"
    ):
        read_dataset(tmp_path / "a.xls")


def test_pickled_arrays_are_not_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", X=np.array([{}, []], dtype=object), y=np.zeros(2))
    with pytest.raises(UsageError, match="plain arrays"):
        read_dataset(tmp_path / "a.npz")


@pytest.mark.parametrize("shape", [(), (40, 2, 2)])
def test_an_array_of_inputs_of_another_shape_is_refused(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    np.savez(tmp_path / "a.npz", X=np.zeros(shape), y=np.arange(40.0))
    with pytest.raises(UsageError, match="expected array X of shape n x d, got "):
        read_dataset(tmp_path / "a.npz")


def test_values_that_cannot_be_used() -> None:
    data = small_map()
    y = data.y.copy()
    y[[7, 9]] = np.nan, np.inf
    with pytest.raises(
        UsageError, match=r"'prevalence' holds NaN or infinity in 2 of 120 rows .*row 7"
    ):
        Dataset(data.X, y, *moved_names(data))
    with pytest.raises(UsageError, match="'lat' is 3 in every row"):
        Dataset(np.stack((data.X[:, 0], np.full(120, 3.0)), -1), data.y, *moved_names(data))
    with pytest.raises(UsageError, match="has 19 rows, expected at least 20"):
        Dataset(data.X[:19], data.y[:19], *moved_names(data))
    with pytest.raises(UsageError, match="expected inputs of shape n x d"):
        Dataset(data.X, data.y[:-1], *moved_names(data))


def test_missing_cells_of_a_table_are_named(files: dict[str, Path]) -> None:
    table = pd.read_csv(files["csv"])
    table.loc[3, "lat"] = np.nan
    table.to_csv(files["csv"], index=False)
    with pytest.raises(
        UsageError, match=r"map.csv, row 5, column 'lat': it is empty, as 1 of 120 cells are"
    ):
        read_dataset(files["csv"], ["lon", "lat"], TARGET)


def test_a_table_as_a_spreadsheet_of_another_country_saves_it(tmp_path: Path) -> None:
    data = small_map()
    rows = [" Lon ;Lat;  Prévalence "]
    rows += [";".join(map(repr, map(float, row))).replace(".", ",") for row in triples(data)]
    (tmp_path / "carte.csv").write_bytes("\r\n".join(rows).encode("cp1252"))
    read = read_dataset(tmp_path / "carte.csv", ["Lon", "Lat"], "Prévalence")
    np.testing.assert_array_equal(read.X, data.X)
    np.testing.assert_array_equal(read.y, data.y)


def triples(data: Dataset) -> list[list[float]]:
    return np.column_stack((data.X, data.y)).tolist()


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("12 %", "row 4, column 'lat': expected a number, got '12 %'. Write no per cent signs"),
        (" - ", "row 4, column 'lat': it is empty, as 1 of 120"),
        ("n.a.", "row 4, column 'lat': it is empty"),
        ("?1", "row 4, column 'lat': expected a number, got '?1'"),
    ],
)
def test_faults_of_cells_are_named_as_a_spreadsheet_shows_them(
    tmp_path: Path, cell: str, message: str
) -> None:
    rows = [f"{a}|{b}|{c}" for a, b, c in triples(small_map())]
    rows[2] = rows[2].split("|")[0] + f"|{cell}|0.5"
    (tmp_path / "map.txt").write_text("\n".join(["lon|lat|y", *rows]))
    with pytest.raises(UsageError, match=re.escape(message)):
        read_dataset(tmp_path / "map.txt", ["lon", "lat"], "y")
