"""A source that is ingested is its rows in one stream, or is refused by name; in one process."""

from __future__ import annotations

import copy
import io
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import Normalize
from pyarrow import parquet
from rich.console import Console

from bo_stream import WISKI, DirichletWISKI
from bo_stream.distributed import bounds_of, ingest, ingestion, zero
from bo_stream.distributed.sources import ColumnNames, FileFragment
from bo_stream.errors import UsageError
from bo_stream.testing.streams import assert_untouched, fingerprint
from tests.distributed.streams import (
    COLUMNS,
    UNIT,
    assert_same,
    grid_model,
    streamed,
    table,
    write_files,
)
from tests.support.problems import Observations, observations


def changed(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    parquet.write_table(change(parquet.read_table(path)), path, row_group_size=50)


# --- sources ------------------------------------------------------------------------------------

FILES: dict[str, Callable[[Path], Any]] = {
    "a folder": lambda folder: folder,
    "a pattern": lambda folder: f"{folder}/*.parquet",
    "files": lambda folder: sorted(folder.glob("*.parquet")),
    "a data set": lambda folder: ds.dataset(folder),
}


def test_no_line_is_written_where_there_is_no_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before release 15 of Rich a bar that is disabled ends with an empty line."""
    monkeypatch.setattr("rich.progress.Progress.stop", lambda bar: bar.console.print())
    ingest(grid_model(), str(folder), **COLUMNS)
    assert capsys.readouterr().err == ""


@pytest.mark.matrix
@pytest.mark.parametrize("task_rows", [1, 100, 10_000])
@pytest.mark.parametrize("source", FILES.values(), ids=FILES)
def test_files_are_one_stream(
    source: Callable[[Path], Any],
    task_rows: int,
    folder: Path,
    parts: list[Observations],
    X: torch.Tensor,
) -> None:
    model = grid_model(observations(7))
    expected = streamed(model, parts)
    done = ingest(model, source(folder), **COLUMNS, task_rows=task_rows)
    assert (done.rows, done.fragments, done.skipped) == (350, 3 + 2 + 4, ())
    assert done.bytes > 0
    assert_same(model, expected, X)


def test_tasks_have_more_rows_where_the_sums_are_large() -> None:
    bounds = torch.tensor([[0.0] * 3, [1.0] * 3])
    empty = torch.empty(0, 3, dtype=torch.float64), torch.empty(0, 1, dtype=torch.float64)
    fine, coarse = (WISKI(*empty, bounds=bounds, grid_size=size) for size in (20, 10))
    moments = 17**3 * 7**3  # of the cells
    assert ingestion._task_rows(zero(fine), None, None, None) == moments // 2
    assert ingestion._task_rows(zero(coarse), None, None, None) == ingestion.TASK_ROWS


def test_tasks_of_few_rows_are_for_all_workers_until_merging_takes_as_long() -> None:
    default = ingestion.default_task_rows
    assert default(0, 10**6, 1) == default(0, 10**9, 100) == ingestion.TASK_ROWS
    assert default(0, 10**6, 8) == 125_000
    assert default(0, 10**6, 100) == default(0, 10**6, 10_000) == 70_710  # √(10⁶ · 5,000)
    assert default(2 * 10**6, 10**6, 2) == 500_000
    assert default(2 * 10**6, 10**6, 100) == 316_227  # √(10⁶ · 100,000)
    assert default(2 * 10**6, None, 100) == 10**6


class Counted(ThreadPoolExecutor):
    """Threads that count what they are given."""

    tasks = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.tasks += 1
        return super().submit(fn, *args, **kwargs)


@pytest.mark.parametrize(("workers", "tasks"), [(1, 1), (4, 4), (40, 20)])
def test_workers_have_tasks_where_the_footers_say_how_many_rows_there_are(
    workers: int, tasks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 400 rows, in groups of ten, of which a merge takes as long as one: √400 at least."""
    monkeypatch.setattr(ingestion, "LEAST_MERGED", 1)
    monkeypatch.setattr(ingestion, "MERGED_A_ROW", 10**6)
    parquet.write_table(table(observations(400)), tmp_path / "a.parquet", row_group_size=10)
    with Counted(workers) as executor:
        done = ingest(grid_model(), tmp_path, **COLUMNS, executor=executor)
    assert (done.rows, executor.tasks) == (400, tasks)


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_text_files_are_parsed_as_numbers(
    tmp_path: Path, parts: list[Observations], X: torch.Tensor, suffix: str
) -> None:
    whole = Observations(parts[0].X, parts[0].Y.round())  # integers in the first file
    folder = tmp_path / "data"
    folder.mkdir()
    for number, part in enumerate((whole, parts[1])):
        table(part).to_pandas().to_csv(folder / f"{number}.{suffix}", index=False)
    model = grid_model()
    expected = streamed(model, [whole, parts[1]])
    assert ingest(model, folder, **COLUMNS).fragments == 2
    assert_same(model, expected, X)


def _as_arrays(part: Observations) -> Any:
    return part.X.numpy(), part.Y.numpy()


BATCHES: dict[str, Callable[[Observations], Any]] = {
    "tensors": lambda part: (part.X, part.Y),
    "arrays": _as_arrays,
    "Arrow": table,
    "record batches": lambda part: table(part).to_batches()[0],
    "pandas": lambda part: table(part).to_pandas(),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_are_one_stream(kind: str, parts: list[Observations], X: torch.Tensor) -> None:
    model = grid_model()
    expected = streamed(model, parts)
    done = ingest(model, (BATCHES[kind](part) for part in parts), **COLUMNS, task_rows=150)
    assert (done.rows, done.fragments) == (350, 3)
    assert_same(model, expected, X)


@pytest.mark.parametrize("kind", ["Arrow", "pandas"])
def test_one_table_is_a_source(kind: str, parts: list[Observations], X: torch.Tensor) -> None:
    model = grid_model()
    ingest(model, BATCHES[kind](parts[0]), **COLUMNS)
    assert_same(model, streamed(grid_model(), parts[:1]), X)


def test_a_filtered_data_set_is_read_by_its_batches(folder: Path) -> None:
    filtered = ds.dataset(folder).filter(ds.field("a") > 0.5)
    said = r"without a filter, .*source=dataset.to_batches"
    with pytest.raises(UsageError, match=said):
        bounds_of(filtered, "a")
    with pytest.raises(UsageError, match=said):
        ingest(grid_model(), filtered, **COLUMNS)
    assert bounds_of(filtered.to_batches(), "a")[0] > 0.5
    assert ingest(grid_model(), filtered.to_batches(), **COLUMNS).rows == filtered.count_rows()


def test_an_iterable_is_drawn_as_it_is_summed(parts: list[Observations]) -> None:
    """So that what it makes never piles up."""
    summed: list[int] = []
    model = grid_model()

    def batches() -> Iterator[Any]:
        for number in range(5):
            yield parts[0].X, parts[0].Y
            summed.append(number)
            assert len(summed) == number + 1

    ingest(model, batches(), task_rows=1)
    assert model.num_observations == 600


def test_known_noise_is_a_column_and_missing_means_unknown(tmp_path: Path, X: torch.Tensor) -> None:
    data = observations(90).with_noise("known")
    model = grid_model(data[:5])
    parquet.write_table(table(data[5:]), tmp_path / "a.parquet")
    expected = streamed(model, [data[5:]])
    ingest(model, tmp_path, **COLUMNS, yvar="variance")
    assert_same(model, expected, X)
    values = table(data[5:])
    gaps = pa.array([None, *values["variance"].to_pylist()[1:]])
    parquet.write_table(values.set_column(3, "variance", gaps), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"a.parquet#0: rows 0 to 84: .*Expected Yvar"):
        ingest(model, tmp_path, **COLUMNS, yvar="variance")


def test_labels_and_several_outputs(tmp_path: Path, X: torch.Tensor) -> None:
    data = observations(120, outputs=2)
    labels = (data.X[:, 0] * 3.0).floor()
    more = {"label": labels.long().numpy(), "second": data.Y[:, 1].numpy()}
    parquet.write_table(table(data, **more), tmp_path / "a.parquet", row_group_size=50)
    classifier = DirichletWISKI(X, torch.zeros(5), bounds=UNIT, grid_size=9)
    expected = copy.deepcopy(classifier).update(data.X, labels)
    ingest(classifier, tmp_path, x=["a", "b"], y="label", task_rows=1)
    assert_same(classifier, expected, X)
    model = grid_model(data[:4])
    expected = streamed(model, [data])
    ingest(model, tmp_path, x=["a", "b"], y=["value", "second"], task_rows=1)
    assert_same(model, expected, X)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of Dask's reader
def test_a_dask_data_frame_is_a_source(folder: Path, parts: list[Observations]) -> None:
    frame = pytest.importorskip("dask.dataframe").read_parquet(folder)
    model = grid_model()
    done = ingest(model, frame[frame.a >= 0.0], **COLUMNS)
    assert (done.rows, done.fragments) == (350, 3)
    assert_same(model, streamed(grid_model(), parts), parts[0].X[:5])
    with pytest.raises(UsageError, match="The Dask DataFrame has no column 'b', but"):
        ingest(model, frame[["a", "value"]], **COLUMNS)


# --- bounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_bounds_of_a_source(tmp_path: Path, parts: list[Observations], suffix: str) -> None:
    folder = write_files(tmp_path / "data", parts, suffix)
    X = torch.cat([part.X for part in parts])
    expected = torch.stack((X.amin(0), X.amax(0)))
    torch.testing.assert_close(bounds_of(folder, ["a", "b"]), expected, rtol=1e-12, atol=0.0)
    assert bounds_of(folder, "a").shape == (2, 1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([None, None], "column 'b', got nan to nan"),
        ([1.0, math.inf], "column 'b', got 1 to inf"),
    ],
)
def test_bounds_that_are_not_finite_are_refused(values: list[Any], message: str) -> None:
    first = pd.DataFrame({"a": [0.0, 1.0], "b": values}, dtype=float)
    with pytest.raises(UsageError, match=message):
        bounds_of([first], ["a", "b"])
    known = pd.DataFrame({"a": [0.5], "b": [2.0]})
    if values[0] is None:
        assert bounds_of([first, known], ["a", "b"]).tolist() == [[0.0, 2.0], [1.0, 2.0]]


@pytest.mark.parametrize("column", [0, 2])
def test_a_footer_that_cannot_be_read_says_nothing(
    column: int, folder: Path, parts: list[Observations], X: torch.Tensor
) -> None:
    """As of a column in float16, an input or not."""

    def halved(t: pa.Table) -> pa.Table:
        name = t.column_names[column]
        return t.set_column(column, name, pa.array(t[name].to_numpy().astype(np.float16)))

    changed(folder / "part-01.parquet", halved)
    half = parts[1].X.clone(), parts[1].Y.clone()
    half[column // 2][:, 0] = half[column // 2][:, 0].half()
    taken = [parts[0], Observations(*half), parts[2]]
    model = grid_model()
    assert ingest(model, folder, **COLUMNS).fragments == 3 + 2 + 4
    assert_same(model, streamed(grid_model(), taken), X)
    inputs = torch.cat([part.X for part in taken])
    ends = torch.stack((inputs.amin(0), inputs.amax(0)))
    assert torch.equal(bounds_of(folder, ["a", "b"]), ends)


def test_hidden_files_of_a_folder_are_left_out(folder: Path) -> None:
    for name in (".copies", "_temporary"):
        (folder / name).mkdir()
        shutil.copy(folder / "part-00.parquet", folder / name / "part-00.parquet")
    shutil.copy(folder / "part-00.parquet", folder / ".part-00.parquet")
    assert ingest(grid_model(), folder, **COLUMNS).rows == 350


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_grid_grows_over_all_that_comes(
    tmp_path: Path, parts: list[Observations], X: torch.Tensor, suffix: str
) -> None:
    moved = [Observations(parts[0].X - 0.8, parts[0].Y), Observations(parts[2].X + 0.7, parts[2].Y)]
    folder = write_files(tmp_path / "data", moved, suffix)
    transform = Normalize(2, bounds=torch.tensor([[0.0, 0.0], [2.0, 2.0]]).double())
    for options in ({}, {"input_transform": transform}):
        model = grid_model(**options)
        expected = streamed(model, moved)
        ingest(model, folder, **COLUMNS, task_rows=1)
        assert model.grid_size == expected.grid_size
        assert_same(model, expected, X)


def test_inputs_too_far_outside_are_found_before_anything_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, X: torch.Tensor, parts: list[Observations]
) -> None:
    """As of a file in degrees among files in radians."""
    path = folder / "part-01.parquet"
    changed(path, lambda t: t.set_column(0, "a", pa.array(np.degrees(t["a"].to_numpy()))))
    model = grid_model()
    with monkeypatch.context() as patch:
        patch.setattr("bo_stream.distributed.tasks.accumulate", None)
        with pytest.raises(UsageError, match=r"part-01.parquet#0: .*too far outside the bounds"):
            ingest(model, folder, **COLUMNS)
    done = ingest(model, folder, **COLUMNS, on_error="skip")
    assert [fault.key for fault in done.skipped] == ["part-01.parquet#0", "part-01.parquet#1"]
    assert_same(model, streamed(grid_model(), [parts[0], parts[2]]), X)


# --- bad fragments ------------------------------------------------------------------------------


def _torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _scrambled(path: Path) -> None:
    """A page of the second row group is overwritten."""
    place = parquet.read_metadata(path).row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 60] = bytes(range(60))
    path.write_bytes(content)


def _without(path: Path) -> None:
    changed(path, lambda t: t.drop_columns("b"))


def _as_text(path: Path) -> None:
    changed(path, lambda t: t.set_column(1, "b", t["b"].cast(pa.string())))


def _with_gap(path: Path) -> None:
    values = parquet.read_table(path)["value"].to_pylist()
    values[53] = None
    changed(path, lambda t: t.set_column(2, "value", pa.array(values)))


def _twice(path: Path) -> None:
    changed(path, lambda t: t.append_column("a", t["b"]))


def _in_feet(path: Path) -> None:
    for each, unit in ((path.with_name("part-00.parquet"), "m"), (path, "ft")):
        field = pa.field("value", pa.float64(), metadata={"unit": unit})
        changed(each, lambda t, field=field: t.set_column(2, field, t["value"]))


BAD: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "torn": (_torn, ["part-01.parquet"], "magic bytes"),
    "empty": (lambda path: path.write_bytes(b""), ["part-01.parquet"], "size"),
    "scrambled": (_scrambled, ["part-01.parquet#1"], "OSError|ArrowInvalid"),
    "a column missing": (_without, ["part-01.parquet"], "has no column 'b', but"),
    "a column twice": (_twice, ["part-01.parquet"], "has 2 columns 'a', expected one: rename them"),
    "a column of text": (_as_text, ["part-01.parquet"], "column 'b' is of type string"),
    "a missing value": (_with_gap, ["part-01.parquet#1"], "column 'value' .* in row 3"),
    "another unit": (_in_feet, ["part-01.parquet"], "column 'value' is in 'ft', .* in 'm'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_fragment_is_named_and_fatal_or_left_out(
    kind: str, folder: Path, parts: list[Observations], X: torch.Tensor
) -> None:
    spoil, keys, reason = BAD[kind]
    spoil(folder / "part-01.parquet")
    model = grid_model(observations(6))
    good = [parts[0], *([parts[1][:50]] if keys == ["part-01.parquet#1"] else []), parts[2]]
    expected = streamed(model, good)
    before = fingerprint(model)
    with pytest.raises(UsageError, match=f"{keys[0]}: .*{reason}.*on_error='skip'"):
        ingest(model, folder, **COLUMNS)
    assert_untouched(model, before)
    done = ingest(model, folder, **COLUMNS, on_error="skip", task_rows=130)
    assert [fault.key for fault in done.skipped] == keys
    assert_same(model, expected, X)


def test_a_page_that_changed_on_the_disk_is_found_by_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    values = table(observations(500))
    parquet.write_table(values, path, write_page_checksum=True, compression="none")
    place = parquet.read_metadata(path).row_group(0).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[place + 200] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"a.parquet#0: .*(CRC|could be corrupt)"):
        ingest(grid_model(), path, **COLUMNS)


def test_a_word_among_numbers_is_named_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,value\n0.1,0.2,3\n0.3,many,4\n")
    with pytest.raises(UsageError, match=r"a.csv: .*[Rr]ow #3.*many"):
        ingest(grid_model(), tmp_path, **COLUMNS)


def test_a_bad_batch_is_named_by_its_number(parts: list[Observations]) -> None:
    model = grid_model()
    Y = parts[1].Y.clone()
    Y[7] = torch.inf
    batches = [(parts[0].X, parts[0].Y), (parts[1].X, Y)]
    with pytest.raises(UsageError, match=r"batch 1: column 'Y' holds NaN, .* in row 7"):
        ingest(model, batches)
    assert model.num_observations == 0
    assert ingest(model, batches, on_error="skip").skipped[0].key == "batch 1"
    assert model.num_observations == 120
    with pytest.raises(UsageError, match=r"batch 0: Expected batches of shapes"):
        ingest(model, [(parts[0].X, parts[0].Y[:5])])


@pytest.mark.parametrize(
    "bad",
    [
        (np.array([["a", "b"]] * 3), np.zeros((3, 1))),
        ([[0.1, 0.2], [0.3]], np.zeros((2, 1))),
        (np.zeros((3, 2)), None),
        (None, np.zeros((3, 1)), None),
    ],
    ids=["words", "ragged", "no outcomes", "no inputs"],
)
def test_a_batch_of_what_are_no_arrays_of_numbers(parts: list[Observations], bad: Any) -> None:
    batches, model = [(parts[0].X, parts[0].Y.clone().requires_grad_()), bad], grid_model()
    with pytest.raises(UsageError, match="batch 1: Expected batches of"):
        ingest(model, batches)
    assert ingest(model, batches, on_error="skip").skipped[0].key == "batch 1"
    assert model.num_observations == len(parts[0].X)


@pytest.mark.parametrize("executor", [None, "threads:2"])
@pytest.mark.parametrize("method", ["batches", "digest"])
@pytest.mark.parametrize("kind", [KeyError, RuntimeError])
def test_any_error_of_a_reader_is_of_its_fragment(
    kind: type[Exception],
    method: str,
    executor: str | None,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = getattr(FileFragment, method)

    def reader(fragment: FileFragment, columns: ColumnNames) -> Any:
        if fragment.key == "part-01.parquet#1":
            raise kind("of the reader")
        return read(fragment, columns)

    monkeypatch.setattr(FileFragment, method, reader)
    options: dict[str, Any] = {**COLUMNS, "executor": executor, "record": tmp_path / "kept"}
    with pytest.raises(UsageError, match=rf"part-01.parquet#1: {kind.__name__}: .*of the reader"):
        ingest(grid_model(), folder, **options)
    done = ingest(grid_model(), folder, **options, on_error="skip")
    assert [fault.key for fault in done.skipped] == ["part-01.parquet#1"]
    assert done.rows == 340


def test_any_error_of_a_reader_of_bounds_is_of_its_fragment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[Observations]
) -> None:
    folder = write_files(tmp_path / "data", parts, "csv")
    monkeypatch.setattr(FileFragment, "batches", lambda fragment, columns: {}["reader"])
    with pytest.raises(UsageError, match=r"part-00.csv: KeyError: 'reader'"):
        bounds_of(folder, ["a", "b"])


@pytest.mark.parametrize("executor", [None, "threads:2"])
def test_a_batch_with_other_columns_is_skipped_like_a_file(
    parts: list[Observations], executor: str | None
) -> None:
    tables = [table(part) for part in parts]
    tables[1] = tables[1].drop_columns(["b"])
    options: dict[str, Any] = {**COLUMNS, "executor": executor, "task_rows": 1}
    with pytest.raises(UsageError, match=r"batch 1: it has no column 'b'"):
        ingest(grid_model(), tables, **options)
    with pytest.raises(UsageError, match=r"batch 1: it has no column 'b'"):
        bounds_of(tables, ["a", "b"])
    model = grid_model()
    done = ingest(model, [*tables, 7], **options, on_error="skip")
    assert [fault.key for fault in done.skipped] == ["batch 1", "batch 3"]
    assert_same(model, streamed(grid_model(), [parts[0], parts[2]]), parts[0].X[:5])


# --- progress -----------------------------------------------------------------------------------


def test_the_bar_is_over_the_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    screen = partial(Console, file=written, force_terminal=True, width=200)
    monkeypatch.setattr(ingestion, "Console", lambda **_: screen())
    done = ingest(grid_model(), folder, **COLUMNS, task_rows=1)
    size = f"{done.bytes / 1000:.1f}"
    assert f"{size}/{size} kB" in written.getvalue()
    written.truncate(0)
    ingest(grid_model(), folder, **COLUMNS, progress=False)
    assert "kB" not in written.getvalue()


# --- bad arguments ------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "x": ({"x": ["a"]}, "x to name a column for each of the model's 2 inputs, got .'a'"),
    "y": ({"y": ["a", "b"], "x": ["value", "a"]}, "each column once"),
    "yvar": ({"yvar": ["c", "d"]}, "yvar to name a column for each of y"),
    "on_error": ({"on_error": "ignore"}, "on_error to be one of raise, skip"),
    "task_rows": ({"task_rows": 0}, "task_rows to be a whole number of at least 1"),
    "at_once": ({"at_once": -1}, "at_once to be a whole number of at least 1"),
    "source": ({"source": 7}, "source to be files, a folder"),
    "no files": ({"source": "nowhere/*.parquet"}, "no files of nowhere"),
    "a file twice": (
        {"source": lambda folder: [folder / "part-00.parquet", folder / "part-00.parquet"]},
        "part-00.parquet#0 more than once",
    ),
    "no such column": ({"y": "price"}, "part-00.parquet: it has no column 'price', but"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_said_before_anything_is_read(name: str, folder: Path) -> None:
    change, said = WRONG[name]
    change = {k: v(folder) if callable(v) else v for k, v in change.items()}
    with pytest.raises(UsageError, match=said):
        ingest(grid_model(), **{"source": folder, **COLUMNS, **change})


def test_files_of_two_formats_are_refused(folder: Path) -> None:
    (folder / "more.csv").write_text("a,b,value\n0.1,0.2,3\n")
    with pytest.raises(UsageError, match="files of one format"):
        ingest(grid_model(), folder, **COLUMNS)
    assert ingest(grid_model(), f"{folder}/*.csv", **COLUMNS).rows == 1


def test_models_that_cannot_be_summed_say_so_before_anything_is_read(
    parts: list[Observations],
) -> None:
    from bo_stream import AutoGP

    with pytest.raises(UnsupportedError, match="got a AutoGP"):
        ingest(AutoGP(*parts[0].astuple()), "nowhere")
