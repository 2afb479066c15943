"""An ingest that is interrupted anywhere goes on, and each fragment is in once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from pyarrow import parquet

from bo_stream.distributed import ingest, record
from bo_stream.distributed.fragments import Columns
from bo_stream.errors import UsageError
from tests.distributed.streams import (
    COLUMNS,
    GROUPS,
    assert_same,
    grid_model,
    streamed,
    table,
)
from tests.problems import Observations, observations


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
        patch.setattr(record, name, then(getattr(record, name)))
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


def test_two_processes_do_not_use_one_record(folder: Path, kept: Path) -> None:
    with (
        record.opened_record(kept, grid_model(), Columns.of(["a", "b"], "value", None), ()),
        pytest.raises(UsageError, match="is in use"),
    ):
        ingest(grid_model(), folder, **COLUMNS, record=kept)
