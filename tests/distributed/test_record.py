"""An ingest that is interrupted anywhere goes on, and each fragment is in once."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from pyarrow import csv, parquet

from bo_stream.distributed import ingest, ingest_record
from bo_stream.distributed.sources import ColumnNames, FileFragment
from bo_stream.errors import UsageError
from bo_stream.storage.archive import FileFormat, atomic_write, write_index
from tests.distributed.streams import (
    COLUMNS,
    GROUPS,
    assert_same,
    grid_model,
    streamed,
    table,
    write_files,
)
from tests.support.problems import Observations, observations


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


class Stopped(Exception):
    """A process that ends at this place."""


def ending_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Let the process end before the given one of all writes and removals of a record."""
    counted = iter(range(10**6))

    def then(action: Any) -> Any:
        def act(*args: Any, **kwargs: Any) -> Any:
            if next(counted) == number:
                raise Stopped
            return action(*args, **kwargs)

        return act

    for name in ("atomic_write", "write_index"):
        patch.setattr(ingest_record, name, then(getattr(ingest_record, name)))
    patch.setattr(Path, "unlink", then(Path.unlink))


@pytest.mark.integration
def test_a_process_may_end_before_any_write(
    folder: Path, parts: list[Observations], kept: Path, X: torch.Tensor
) -> None:
    expected = streamed(grid_model(), parts)
    arguments: dict[str, Any] = {**COLUMNS, "task_rows": 100, "record": kept}
    for number in range(10**6):
        with pytest.MonkeyPatch.context() as patch:
            ending_at(number, patch)
            try:
                ingest(grid_model(), folder, **arguments)
                break
            except Stopped:
                pass
        model = grid_model()
        done = ingest(model, folder, **arguments)
        assert done.fragments + done.resumed == GROUPS
        assert done.rows == 350
        assert_same(model, expected, X)
        for path in kept.iterdir():
            path.unlink()
    assert number > 12


def test_what_is_in_is_not_read_again(
    folder: Path, parts: list[Observations], kept: Path, X: torch.Tensor
) -> None:
    path = folder / "part-01.parquet"
    whole = path.read_bytes()
    values = parquet.read_table(path)
    gaps = pa.array([*values["value"].to_pylist()[:-1], None])
    parquet.write_table(values.set_column(2, "value", gaps), path, row_group_size=50)
    arguments: dict[str, Any] = {**COLUMNS, "task_rows": 1, "record": kept}
    with pytest.raises(UsageError, match=r"part-01.parquet#1"):
        ingest(grid_model(), folder, **arguments)
    path.write_bytes(whole)
    model = grid_model()
    done = ingest(model, folder, **arguments)
    assert (done.resumed, done.fragments, done.rows) == (4, GROUPS - 4, 350)
    assert_same(model, streamed(grid_model(), parts), X)


@pytest.mark.parametrize("in_files", [True, False])
def test_an_interrupted_ingest_goes_on_with_tasks_of_another_size(
    in_files: bool, folder: Path, parts: list[Observations], kept: Path, X: torch.Tensor
) -> None:
    """What is in is known by fragments then: numbers of tasks mean others."""
    source = folder if in_files else [table(part) for part in parts]
    arguments: dict[str, Any] = {**COLUMNS, "record": kept, "progress": False}
    with pytest.MonkeyPatch.context() as patch:
        ending_at(9, patch)
        with pytest.raises(Stopped):
            ingest(grid_model(), source, **arguments, task_rows=1)
    model = grid_model()
    done = ingest(model, source, **arguments, task_rows=200)
    assert done.resumed > 0
    assert done.rows == 350
    assert_same(model, streamed(grid_model(), parts), X)


def test_a_later_ingest_takes_only_what_is_new(
    folder: Path, parts: list[Observations], kept: Path, X: torch.Tensor
) -> None:
    more = observations(80)
    model, first = grid_model(more[:5]), grid_model(more[:5])
    arguments: dict[str, Any] = {**COLUMNS, "record": kept}
    ingest(model, folder, **arguments)
    assert ingest(model, folder, **arguments).rows == 0
    parquet.write_table(table(more[5:]), folder / "a-new-one.parquet")
    done = ingest(model, folder, **arguments)
    assert (done.rows, done.fragments, done.resumed) == (75, 1, GROUPS)
    expected = streamed(first, [*parts, more[5:]])
    assert_same(model, expected, X)
    done = ingest(first, folder, **arguments)  # as after a crash before the model was saved
    assert (done.rows, done.fragments, done.resumed) == (425, 0, GROUPS + 1)
    assert_same(first, expected, X)
    with pytest.raises(UsageError, match=r"a model of one of \[5, 355, 430\] observations, got"):
        ingest(grid_model(), folder, **arguments)


def test_skipped_fragments_are_tried_again(
    folder: Path, parts: list[Observations], kept: Path, X: torch.Tensor
) -> None:
    path = folder / "part-01.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    model = grid_model()
    arguments: dict[str, Any] = {**COLUMNS, "record": kept, "on_error": "skip"}
    assert len(ingest(model, folder, **arguments).skipped) == 1
    path.write_bytes(whole)
    done = ingest(model, folder, **arguments)
    assert (done.rows, done.skipped) == (60, ())
    assert_same(model, streamed(grid_model(), parts), X)


def test_files_that_come_while_it_is_interrupted_are_taken_too(
    folder: Path, parts: list[Observations], kept: Path, X: torch.Tensor
) -> None:
    arguments: dict[str, Any] = {**COLUMNS, "task_rows": 1, "record": kept}
    with pytest.MonkeyPatch.context() as patch:
        ending_at(14, patch)
        with pytest.raises(Stopped):
            ingest(grid_model(), folder, **arguments)
    new = observations(30)
    parquet.write_table(table(new), folder / "a-new-one.parquet")
    model = grid_model()
    done = ingest(model, folder, **arguments)
    assert done.rows == 380
    assert 0 < done.resumed < GROUPS
    assert_same(model, streamed(grid_model(), [*parts, new]), X)


def test_a_file_that_changes_while_it_is_interrupted_is_refused(folder: Path, kept: Path) -> None:
    arguments: dict[str, Any] = {**COLUMNS, "task_rows": 1, "record": kept}
    with pytest.MonkeyPatch.context() as patch:
        ending_at(20, patch)
        with pytest.raises(Stopped):
            ingest(grid_model(), folder, **arguments)
    path = folder / "part-00.parquet"
    parquet.write_table(parquet.read_table(path).slice(3), path, row_group_size=50)
    for _ in range(2):  # whatever the first look at the record leaves behind
        with pytest.raises(UsageError, match=r"part-00.parquet#0 has changed since"):
            ingest(grid_model(), folder, **arguments)


def test_a_file_that_changed_after_it_was_taken_in_is_refused(folder: Path, kept: Path) -> None:
    model = grid_model()
    ingest(model, folder, **COLUMNS, record=kept)
    path = folder / "part-01.parquet"
    parquet.write_table(parquet.read_table(path).slice(3), path, row_group_size=50)
    with pytest.raises(UsageError, match=r"part-01.parquet#0 has changed since it was taken in"):
        ingest(model, folder, **COLUMNS, record=kept)
    assert model.num_observations == 350


def test_a_file_under_another_name_is_not_taken_in_twice(folder: Path, kept: Path) -> None:
    model = grid_model()
    ingest(model, folder, **COLUMNS, record=kept)
    with pytest.raises(UsageError, match=r"part-00.parquet#0 has the content of part-00.parquet#0"):
        ingest(model, [folder / "part-00.parquet"], **COLUMNS, record=kept)
    (folder / "part-01.parquet").rename(folder / "renamed.parquet")
    with pytest.raises(UsageError, match=r"renamed.parquet#0 has the content of part-01.parquet#0"):
        ingest(model, folder, **COLUMNS, record=kept)
    assert model.num_observations == 350


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_files_without_rows_are_alike_and_do_not_count_twice(
    suffix: str, parts: list[Observations], tmp_path: Path, kept: Path
) -> None:
    folder = write_files(tmp_path / "data", [parts[0], parts[1][:0]], suffix)
    model, arguments = grid_model(), {**COLUMNS, "record": kept}
    assert ingest(model, folder, **arguments).rows == 120
    write_files(folder, [parts[0], parts[1][:0], parts[1][:0], parts[1]], suffix)
    done = ingest(model, folder, **arguments)
    assert (done.rows, done.skipped) == (60, ())
    assert ingest(model, folder, **arguments).fragments == 0


def test_batches_are_known_by_their_numbers(
    parts: list[Observations], kept: Path, X: torch.Tensor
) -> None:
    def torn() -> Iterator[Any]:
        yield from ((part.X, part.Y) for part in parts[:2])
        raise Stopped

    with pytest.raises(Stopped):
        ingest(grid_model(), torn(), task_rows=1, record=kept)
    model = grid_model()
    batches = [(part.X, part.Y) for part in parts]
    done = ingest(model, batches, task_rows=1, record=kept)
    assert (done.resumed, done.fragments) == (2, 1)
    assert_same(model, streamed(grid_model(), parts), X)


def test_records_of_another_kind_are_refused(folder: Path, kept: Path) -> None:
    model = grid_model()
    ingest(model, folder, **COLUMNS, record=kept)
    with pytest.raises(UsageError, match=r"is of the columns .*'value'"):
        ingest(model, folder, x=["b", "a"], y="value", record=kept)
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.covar_module.parameters()).add_(0.1)
    with pytest.raises(UnsupportedError, match="different covar_module"):
        ingest(other, folder, **COLUMNS, record=kept)


@pytest.mark.parametrize("name", ["ingest.json", "sealed-0.json", "sealed-0.safetensors"])
def test_a_damaged_record_is_said_to_be_so(folder: Path, kept: Path, name: str) -> None:
    model = grid_model()
    ingest(model, folder, **COLUMNS, record=kept)
    path = kept / name
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"damaged|no record"):
        ingest(model, folder, **COLUMNS, record=kept)


def test_drafts_of_a_process_that_was_killed_are_removed(folder: Path, kept: Path) -> None:
    model, drafts = grid_model(), list[Path]()
    ingest(model, folder, **COLUMNS, record=kept)
    for name in ("ingest.json", "node-2-0.json", "sealed-0.safetensors"):
        with suppress(Stopped), atomic_write(kept / name) as file:
            drafts.append(Path(file.name))
            raise Stopped
    for path in (*drafts, kept / ".mine.json"):
        path.touch()
    ingest(model, folder, **COLUMNS, record=kept)
    assert not any(path.exists() for path in drafts)
    assert (kept / ".mine.json").exists()


def test_two_processes_do_not_use_one_record(folder: Path, kept: Path) -> None:
    columns = ColumnNames.of(["a", "b"], "value", None)
    with (
        ingest_record.opened_record(kept, grid_model(), columns, ()),
        pytest.raises(UsageError, match="is in use"),
    ):
        ingest(grid_model(), folder, **COLUMNS, record=kept)


# --- what is in a record is known by its content ------------------------------------------------


def two_records(folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Records of all files, and of the first alone."""
    ingest(grid_model(), folder, **COLUMNS, record=tmp_path / "kept")
    ingest(grid_model(), folder / "part-00.parquet", **COLUMNS, record=tmp_path / "other")
    return tmp_path / "kept", tmp_path / "other"


def assert_refused(folder: Path, kept: Path, message: str) -> None:
    """No model takes in anything by the record, and the record stays as it is."""
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    for number in (0, 350):
        model = grid_model(observations(number))
        with pytest.raises(UsageError, match=message):
            ingest(model, folder, **COLUMNS, record=kept)
        assert model.num_observations == number
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before


@pytest.mark.parametrize("ended", [True, False])
def test_a_record_without_its_index_is_refused(ended: bool, folder: Path, kept: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ending_at(10**6 if ended else 9, patch)
        try:
            ingest(grid_model(), folder, **COLUMNS, task_rows=1, record=kept)
        except Stopped:
            assert not ended
    (kept / "ingest.json").unlink()
    name = "sealed-0" if ended else "node-0"
    assert_refused(folder, kept, rf"has no ingest.json, but sums .*{name}.*Restore ingest.json")


@pytest.mark.parametrize("suffixes", [(".json", ".safetensors"), (".safetensors",), (".json",)])
def test_sums_of_another_record_are_refused(
    suffixes: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    kept, other = two_records(folder, tmp_path)
    for suffix in suffixes:
        shutil.copy(other / f"sealed-0{suffix}", kept / f"sealed-0{suffix}")
    assert_refused(folder, kept, r"damaged at sealed-0: .*(copied or renamed|not those)")


def test_sums_under_another_name_are_refused(folder: Path, tmp_path: Path) -> None:
    model, kept = grid_model(), tmp_path / "kept"
    ingest(model, folder / "part-00.parquet", **COLUMNS, record=kept)
    ingest(model, sorted(folder.iterdir())[1:], **COLUMNS, record=kept)
    whole = {path.name: path.read_bytes() for path in kept.glob("sealed-*")}
    for suffix in (".json", ".safetensors"):
        (kept / f"sealed-1{suffix}").write_bytes(whole[f"sealed-0{suffix}"])
    with pytest.raises(UsageError, match=r"damaged at sealed-1: .* node 'sealed-0', expected"):
        ingest(model, folder / "part-00.parquet", **COLUMNS, record=kept)


def test_an_index_older_than_its_sums_is_refused(folder: Path, kept: Path) -> None:
    model = grid_model()
    ingest(model, folder / "part-00.parquet", **COLUMNS, record=kept)
    former = (kept / "ingest.json").read_bytes()
    ingest(model, sorted(folder.iterdir())[1:], **COLUMNS, record=kept)
    (kept / "ingest.json").write_bytes(former)
    with pytest.raises(UsageError, match=r"ingest.json is older than sealed-1.json beside it"):
        ingest(grid_model(), folder / "part-00.parquet", **COLUMNS, record=kept)


def test_nodes_of_an_earlier_ingest_are_refused(
    folder: Path, parts: list[Observations], kept: Path
) -> None:
    arguments: dict[str, Any] = {**COLUMNS, "task_rows": 1, "record": kept}
    with pytest.MonkeyPatch.context() as patch:
        ending_at(9, patch)
        with pytest.raises(Stopped):
            ingest(grid_model(), folder, **arguments)
    former = {path: path.read_bytes() for path in kept.glob("node-0-*")}
    model = grid_model()
    ingest(model, folder, **arguments)
    new = write_files(folder.parent / "new", [each[:40] for each in parts])
    for path in sorted(new.iterdir()):
        path.rename(new / f"new-{path.name}")
    with pytest.MonkeyPatch.context() as patch:
        ending_at(3, patch)
        with pytest.raises(Stopped):
            ingest(model, new, **arguments)
    for path, content in former.items():
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"damaged at node-0-\d: it says that it is of the"):
        ingest(model, new, **arguments)
    assert model.num_observations == 350


def test_a_record_of_the_first_version_is_named(folder: Path, kept: Path) -> None:
    kept.mkdir()
    content = {"columns": {}, "begun": 0.0, "sealed": [], "plan": ""}
    write_index(kept / "ingest.json", FileFormat("bo_stream record of an ingest", 1), content)
    with pytest.raises(UsageError, match=r"version 1 do not say .* with another record"):
        ingest(grid_model(), folder, **COLUMNS, record=kept)


# --- sources that change ------------------------------------------------------------------------


def reordered(path: Path) -> None:
    """Other outcomes in the middle: the same numbers, sizes, ends and, here, the same time."""
    values = parquet.read_table(path)
    found = values["value"].to_numpy().copy()
    found[70_000:80_000] = found[70_000:80_000][::-1]
    write_long(path, values.set_column(2, "value", pa.array(found)))


def write_long(path: Path, values: pa.Table) -> None:
    parquet.write_table(values, path, compression="none", use_dictionary=False)


def edited(path: Path) -> None:
    """One digit in the middle."""
    content = bytearray(path.read_bytes())
    place = next(i for i in range(len(content) // 2, len(content)) if content[i : i + 1].isdigit())
    content[place] = ord("1") if content[place] != ord("1") else ord("2")
    path.write_bytes(content)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_change_in_the_middle_of_a_file_is_noticed(
    suffix: str, tmp_path: Path, kept: Path
) -> None:
    path, values = tmp_path / f"long.{suffix}", table(observations(150_000))
    if suffix == "csv":
        csv.write_csv(values, path)
    else:
        write_long(path, values)
    model, about = grid_model(), path.stat()
    ingest(model, path, **COLUMNS, record=kept)
    os.utime(path, ns=(0, 0))  # the time of a file does not count
    assert ingest(model, path, **COLUMNS, record=kept).resumed == 1
    (edited if suffix == "csv" else reordered)(path)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert path.stat().st_size == about.st_size
    with pytest.raises(UsageError, match=rf"long.{suffix}.* has changed since it was taken in"):
        ingest(model, path, **COLUMNS, record=kept)


def test_a_change_of_other_columns_is_none(folder: Path, kept: Path) -> None:
    """Of parquet the columns that are read count."""
    path, model = folder / "part-01.parquet", grid_model()
    values = parquet.read_table(path)
    for number in (0, 1):
        more = values.append_column("note", pa.array([number] * len(values)))
        parquet.write_table(more, path, row_group_size=50)
        assert ingest(model, folder, **COLUMNS, record=kept).fragments == GROUPS * (1 - number)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_file_that_changes_while_it_is_read(
    on_error: Any, folder: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = folder / "part-01.parquet", FileFragment.batches
    values = parquet.read_table(path)

    def batches(fragment: FileFragment, columns: ColumnNames) -> Iterator[Any]:
        yield from whole(fragment, columns)
        if fragment.key == "part-01.parquet#0":
            changed = values.set_column(2, "value", pa.array(np.arange(60.0)))
            parquet.write_table(changed, path, row_group_size=50)

    monkeypatch.setattr(FileFragment, "batches", batches)
    arguments: dict[str, Any] = {**COLUMNS, "record": kept, "on_error": on_error}
    if on_error == "raise":
        with pytest.raises(UsageError, match=r"part-01.parquet#0: it was changed while it was"):
            ingest(grid_model(), folder, **arguments)
    else:
        fault, *_ = ingest(grid_model(), folder, **arguments).skipped
        assert "was changed while it was read" in str(fault)


def test_a_batch_that_changed_while_it_was_interrupted_is_refused(
    parts: list[Observations], kept: Path
) -> None:
    def torn() -> Iterator[Any]:
        yield from ((part.X, part.Y) for part in parts[:2])
        raise Stopped

    with pytest.raises(Stopped):
        ingest(grid_model(), torn(), task_rows=1, record=kept)
    batches = [(part.X, part.Y + 1.0) for part in parts]
    with pytest.raises(UsageError, match="batch 0 has changed since it was taken in"):
        ingest(grid_model(), batches, task_rows=1, record=kept)
