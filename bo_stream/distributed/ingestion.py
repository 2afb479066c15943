"""Put a whole source of observations into a model: fragments are summed by workers, once each."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from botorch.exceptions.errors import BotorchError
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from torch import Tensor

from bo_stream.bases.grid.statistics import gram_numbers
from bo_stream.distributed.record import Record, opened_record
from bo_stream.distributed.sources import (
    Array,
    Columns,
    Fault,
    Format,
    Fragment,
    Listing,
    listed,
    refuse,
    streamed,
)
from bo_stream.distributed.sums import Sums, finish, inner_memory, set_inner_memory, zero
from bo_stream.distributed.tasks import Done, SumTree, Task, done_by, done_here
from bo_stream.errors import UsageError, check_one_of, check_whole
from bo_stream.executors import check_picklable, check_workers, executor_of
from bo_stream.executors.engine import Capacity
from bo_stream.models.base import StreamingGP
from bo_stream.models.outcomes.labels import LabelOutcomes
from bo_stream.models.wiski.memory import OnGrid
from bo_stream.storage.archive import one_line
from bo_stream.storage.trusted import Trusted


def bounds_of(source: Any, x: str | Sequence[str], file_format: Format | None = None) -> Tensor:
    """Return the least and the largest inputs of a source, ``2 x d`` in float64.

    Of parquet files they are in the footers, so that no rows are read; others are read once.

    Args:
        source: As of :func:`~bo_stream.distributed.ingest`; an iterable is used up.
        x: Names of the columns of the inputs.
        file_format: Of files; None: by their names.

    Raises:
        UsageError: A fragment cannot be read or lacks a column, or there are no rows.

    Example:
        >>> model = WISKI(X, Y, bounds=bounds_of("data/*.parquet", ["lon", "lat"]))
    """
    columns = Columns.of(x, None, None)
    found = listed(source, columns, file_format)
    refuse(found.faults if found is not None else ())
    fragments = streamed(source, columns) if found is None else found.fragments
    boxes = [box for fragment in fragments for box in _boxes(fragment, columns)]
    if not boxes:
        raise UsageError("Expected a source of at least one row, got none.")
    ends = np.stack(boxes)
    return torch.from_numpy(np.stack((ends[:, 0].min(0), ends[:, 1].max(0))))


def _boxes(fragment: Fragment, columns: Columns) -> Iterator[Array]:
    known = fragment.box(columns)
    if known is not None:
        yield known
        return
    try:
        for batch in fragment.batches(columns):
            if len(batch):
                yield np.stack((np.nanmin(batch.X, 0), np.nanmax(batch.X, 0)))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{fragment.key}: {one_line(error)}") from error


def grown_over(sums: Sums, found: Listing, columns: Columns) -> tuple[Sums, Listing]:
    """Grow the grid of sums of no observations over the boxes that fragments are known to have.

    So that all workers begin with the grid that they end with, and fragments too far outside are
    found before any is read. Nothing is done for models without a grid.

    Args:
        sums: Sums of no observations.
        found: The fragments.
        columns: Of the inputs.

    Returns:
        The sums, and the fragments; those too far outside are among the faults.
    """
    memory = inner_memory(sums.model)
    if not isinstance(memory, OnGrid) or not sums.model.maps_boxes:
        return sums, found
    kept, faults = list[Fragment](), list(found.faults)
    like = next(sums.model.covar_module.parameters())
    for fragment in found.fragments:
        box = fragment.box(columns)
        try:
            if box is not None and box.shape[1] == sums.model.input_dim:
                corners = sums.model.coordinates(torch.from_numpy(box).to(like))
                memory = memory.covering(corners.to(torch.float64))
            kept.append(fragment)
        except (BotorchError, ValueError) as error:
            faults.append(Fault(fragment.key, one_line(error)))
    model = sums.model._shallow_copy()
    set_inner_memory(model, memory)
    return Sums(model), replace(found, fragments=tuple(kept), faults=tuple(faults))


# --- put a whole source of observations into a model: fragments are summed by workers ------------


TASK_ROWS = 250_000
"""Least rows of a task, of more than one fragment where these are smaller."""

NUMBERS_A_ROW = 2
"""Of sums on a grid, for each row of a task: with fewer rows it takes longer to pass them on."""

MERGED_A_ROW = 20
"""Numbers of sums on a grid that are merged in the time in which a row is added, at least."""

LEAST_MERGED = 5_000
"""Rows that are added in the time in which the smallest sums are passed on and merged."""

BYTES_A_NUMBER = 8
"""Of a file that does not say how many rows it has."""

OnError: TypeAlias = Literal["raise", "skip"]


@dataclass(frozen=True)
class Ingested:
    """What an ingest did.

    Attributes:
        rows: Number of observations that it put into the model.
        fragments: Number of fragments that it read.
        resumed: Number of fragments that the record held already.
        skipped: Fragments that could not be taken in, with the reason of each.
        retried: Number of tasks that were done again since a worker died.
        bytes: Size of what it read, as far as known.
        seconds: Of wall time.
    """

    rows: float
    fragments: int
    resumed: int
    skipped: tuple[Fault, ...]
    retried: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.rows / max(self.seconds, 1e-9)
        return (
            f"{self.rows:,.0f} rows of {self.fragments:,} fragments in {self.seconds:.1f} s "
            f"({rate:,.0f} a second), {self.resumed:,} from the record, {len(self.skipped):,} "
            "skipped"
        )


def ingest(
    model: StreamingGP,
    source: Any,
    x: str | Sequence[str] = (),
    y: str | Sequence[str] = (),
    yvar: str | Sequence[str] | None = None,
    *,
    executor: str | Executor | None = None,
    on_error: OnError = "raise",
    record: str | Path | None = None,
    file_format: Format | None = None,
    task_rows: int | None = None,
    at_once: int | None = None,
    retries: int = 2,
    trusted: Sequence[Trusted] = (),
    progress: bool = True,
) -> Ingested:
    """Put all rows of a source into a model, in place: all of them at the end, or none.

    Workers sum fragments and return the sums, which are merged in a tree by the numbers of the
    fragments: the result equals one stream to rounding, and does not depend on who is first; with
    ``task_rows`` not on the number of workers either. A worker's memory does not depend on the
    number of rows. Of a grid model the grid is grown first over what the footers of parquet files
    say of the inputs; where nothing is said, it grows on the way.

    Args:
        model: One whose statistics add up, see :func:`zero`, of no batch shape.
        source: A file, a folder, a pattern such as ``"data/*.parquet"`` or several files, parquet
            or csv; a data set of ``pyarrow.dataset``; a Dask DataFrame; a Ray Dataset; or any
            iterable of tables (Arrow, pandas) or of arrays ``(X, Y)`` or ``(X, Y, Yvar)``.
        x: Names of the columns of the inputs.
        y: Names of the columns of the outcomes, or the one of the labels.
        yvar: Names of the columns of noise variances, one for each of y; missing values: unknown.
        executor: That does the tasks: ``processes:4``, ``dask:ADDRESS`` or another name that
            :func:`~bo_stream.executors.executor_of` opens for this ingest, or any executor of
            ``concurrent.futures``, which stays open. None: tasks are done here, one after another.
        on_error: What to do with a fragment that cannot be read, that has other columns, types or
            units, values that are missing or infinite, or inputs too far outside of the grid:
            ``raise`` ends the ingest, ``skip`` leaves it out whole. A fragment is a row group of a
            parquet file, another file, a partition or a batch.
        record: A folder in which to keep what is in, so that an ingest that was interrupted, even
            killed, goes on, and a later one takes in only fragments that are new. Batches of an
            iterable are known by their numbers, and must come again in the same order.
        file_format: Of files; None: by their names.
        task_rows: Rows that a worker sums before it returns the sums; None: see
            :func:`default_task_rows`.
        at_once: Most tasks under way; None: twice the executor's workers.
        retries: How many times a task is done again whose worker died.
        trusted: Classes of your own in the model that a record may name; see
            :meth:`StreamingGP.load`.
        progress: Whether to draw a bar over the bytes, where standard error is a terminal.

    Returns:
        What was done; the model changes in place.

    Raises:
        UnsupportedError: Sums of the model cannot be merged, or the record is of other
            hyperparameters.
        UsageError: An argument, a fragment or the record cannot be used, a task was lost too often,
            or the record belongs to a Ray Dataset. The model is as it was.

    Example:
        >>> ingest(model, "data/*.parquet", x=["lon", "lat"], y="temperature", record="taken")
    """
    began, before = time.monotonic(), model.num_observations
    columns = Columns.of(x, y, yvar)
    _check(model, source, record, on_error, task_rows, retries)
    start = zero(model)
    found = listed(source, columns, file_format)
    if found is not None:
        _check_columns(columns, model)
        start, found = grown_over(start, found, columns)
        if on_error == "raise":
            refuse(found.faults)
    with _by(executor) as workers, opened_record(record, model, columns, trusted) as kept:
        if workers is not None:
            check_workers(workers)
            check_picklable("model", start.model, workers)
        tally = _Tally(list(found.faults) if found is not None else [])
        rows = _task_rows(start, found, kept, workers) if task_rows is None else task_rows
        tree = _tree(kept, found, start, rows, tally)
        fragments = streamed(source, columns) if found is None else found.fragments
        new = _new(fragments, kept, tally)
        tasks = _tasks(new, columns, on_error == "skip", rows, kept is not None)
        with _Bar(progress, found) as bar:
            left = _left(tasks, tree)
            if workers is None:
                done = done_here(left, start)
            else:
                done = done_by(workers, left, start, at_once, retries)
            with closing(done):  # which cancels what is under way if this raises
                _add(done, tree, kept, tally, bar)
        sums = _sealed(tree, kept, tally)
        if sums is not None:
            finish(model, sums)
    return tally.report(model.num_observations - before, time.monotonic() - began)


def _by(executor: str | Executor | None) -> AbstractContextManager[Executor | None]:
    return nullcontext() if executor is None else executor_of(executor)


@dataclass
class _Tally:
    """Counts of an ingest under way.

    Attributes:
        faults: Fragments that cannot be taken in.
        fragments: Number of those that were read.
        resumed: Number of those that the record held.
        retried: Number of tasks that were done again.
        bytes: Size of what was read.
    """

    faults: list[Fault]
    fragments: int = 0
    resumed: int = 0
    retried: int = 0
    bytes: int = 0

    def report(self, rows: float, seconds: float) -> Ingested:
        """Return what was done."""
        return Ingested(
            rows,
            self.fragments,
            self.resumed,
            tuple(self.faults),
            self.retried,
            self.bytes,
            seconds,
        )


def _tree(
    kept: Record | None, found: Listing | None, start: Sums, task_rows: int, tally: _Tally
) -> SumTree:
    """Begin a tree, or go on with that of the record."""
    if kept is None:
        return SumTree()
    tree = kept.begun(None if found is None else found.fragments, start, task_rows)
    tally.resumed += sum(len(part.keys) for part in tree.nodes.values())
    return tree


def _new(fragments: Iterable[Fragment], kept: Record | None, tally: _Tally) -> Iterator[Fragment]:
    """Draw the fragments that no ended ingest of the record took in."""
    if kept is None:
        yield from fragments
        return
    for fragment in fragments:
        if kept.is_in(fragment):
            tally.resumed += 1
        else:
            yield fragment


def default_task_rows(numbers: int, rows: int | None = None, workers: int = 1) -> int:
    """Return the rows of a task, unless told.

    Of rows without end a task has ``TASK_ROWS``, or more if the sums are large. Of n rows no worker
    is to be without a task: it has at most n over the workers. But the workers add a task in as
    long as the driver merges the sums of all of them if it has √(n m) rows, where m rows are added
    while one merge takes place: it has at least as many.

    Args:
        numbers: Of sums on a grid; 0 for others.
        rows: n; None: not known.
        workers: Number of tasks that are done at a time.
    """
    endless = max(TASK_ROWS, numbers // NUMBERS_A_ROW)
    if rows is None:
        return endless
    merged = max(LEAST_MERGED, numbers // MERGED_A_ROW)
    return min(endless, max(math.ceil(rows / workers), math.isqrt(rows * merged)))


def _task_rows(
    start: Sums, found: Listing | None, kept: Record | None, workers: Executor | None
) -> int:
    memory = inner_memory(start.model)
    numbers = gram_numbers(memory.grid) if isinstance(memory, OnGrid) else 0
    if found is None or workers is None:
        return default_task_rows(numbers)
    new = [each.num_rows for each in found.fragments if kept is None or not kept.is_in(each)]
    known = [rows for rows in new if rows is not None]
    whole = sum(known) if len(known) == len(new) else None
    return default_task_rows(numbers, whole, Capacity(workers).now())


def _tasks(
    fragments: Iterable[Fragment],
    columns: Columns,
    tolerant: bool,
    task_rows: int,
    recorded: bool,
) -> Iterator[Task]:
    """Draw tasks of consecutive fragments of so many rows together."""
    waiting, rows = list[Fragment](), 0
    numbers = itertools.count()

    def task() -> Task:
        return Task(next(numbers), tuple(waiting), columns, tolerant, os.getpid(), recorded)

    for fragment in fragments:
        waiting.append(fragment)
        rows += _rows(fragment, columns, task_rows)
        if rows >= task_rows:
            yield task()
            waiting, rows = [], 0
    if waiting:
        yield task()


def _rows(fragment: Fragment, columns: Columns, unknown: int) -> int:
    """Return the number of rows of a fragment, or a guess by its size."""
    if fragment.num_rows is not None:
        return fragment.num_rows
    return fragment.size // (BYTES_A_NUMBER * len(columns.all)) if fragment.size else unknown


def _left(tasks: Iterator[Task], tree: SumTree) -> Iterator[Task]:
    """Draw the tasks that the record does not hold."""
    held = SumTree(dict(tree.nodes))
    return (task for task in tasks if not held.holds(task.number))


def _add(
    done: Iterator[Done], tree: SumTree, kept: Record | None, tally: _Tally, bar: _Bar
) -> None:
    """Put the parts of tasks into the tree.

    Raises:
        UsageError: A task that is not tolerant met a fragment that cannot be taken in; or one has
            the content of a file that the record has under another name.
    """
    for each in done:
        if not each.task.tolerant:
            refuse(each.part.faults)
        if kept is not None:
            kept.check_new(each.task.fragments, each.part.digests)
        tree.add(each.task.number, each.part)
        tally.fragments += len(each.part.keys)
        tally.bytes += each.task.size
        tally.retried += each.again
        bar.advance(each.task.size)


def _sealed(tree: SumTree, kept: Record | None, tally: _Tally) -> Sums | None:
    """Return the sums that the model lacks, after they are in the record."""
    part = tree.total()
    if part is not None:
        tally.faults += part.faults
    if kept is None:
        return None if part is None else part.sums
    kept.seal(part)
    return kept.base


# --- checks -------------------------------------------------------------------------------------


def _check(
    model: StreamingGP,
    source: object,
    record: object,
    on_error: str,
    task_rows: int | None,
    retries: int,
) -> None:
    check_one_of("on_error", on_error, ("raise", "skip"))
    if task_rows is not None:
        check_whole("task_rows", task_rows, 1)
    check_whole("retries", retries, 0)
    if tuple(model.batch_shape):
        raise UsageError(
            f"Expected a model of one stream, got one of batch shape {tuple(model.batch_shape)}. "
            "Use a model for each."
        )
    if record is not None and type(source).__module__.startswith("ray."):
        raise UsageError(
            "Expected no record with a Ray Dataset, for its blocks have no names that stay. Name "
            "the files that it reads instead."
        )


def _check_columns(columns: Columns, model: StreamingGP) -> None:
    labels = isinstance(model.outcomes, LabelOutcomes)
    outcomes = 1 if labels else model.num_outputs * model.outcomes.columns
    wanted = (("x", columns.x, model.input_dim, "input"), ("y", columns.y, outcomes, "outcome"))
    for argument, names, number, what in wanted:
        if len(names) != number:
            raise UsageError(
                f"Expected {argument} to name a column for each of the model's {number} {what}s, "
                f"got {list(names)}."
            )


# --- progress -----------------------------------------------------------------------------------


class _Bar:
    """A progress bar over bytes, or none."""

    def __init__(self, wanted: bool, found: Listing | None) -> None:
        size = 0 if found is None else sum(each.size for each in found.fragments)
        console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("ingest"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (wanted and console.is_terminal),
        )
        self._task = self._progress.add_task("", total=size or None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, size: int) -> None:
        """Show that so many bytes more are in."""
        self._progress.update(self._task, advance=size)
