"""Add a whole source of observations to a model: workers sum its fragments, once each."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager, nullcontext
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
from bo_stream.distributed.ingest_record import IngestRecord, opened_record
from bo_stream.distributed.sources import (
    Array,
    ColumnNames,
    Fault,
    Format,
    Fragment,
    FragmentListing,
    listed,
    refuse,
    streamed,
)
from bo_stream.distributed.sums import Sums, finish, inner_memory, set_inner_memory, zero
from bo_stream.distributed.tasks import SumTask, SumTree, sum_tasks
from bo_stream.errors import UsageError, check_one_of, check_whole
from bo_stream.executors import check_picklable, check_workers, executor_of
from bo_stream.executors.engine import WorkerCount
from bo_stream.models.base import StreamingGP
from bo_stream.models.outcomes.gaussian import LabelOutcomes
from bo_stream.models.wiski.memory import OnGrid
from bo_stream.storage.archive import one_line
from bo_stream.storage.trusted import Trusted

TASK_ROWS = 250_000
"""Least number of rows of a task, by default."""

NUMBERS_A_ROW = 2
"""Most numbers of sums on a grid for each row of a task: with fewer, passing them on is slow."""

MERGED_A_ROW = 20
"""Numbers of sums on a grid that are merged in the time in which a row is added, at least."""

LEAST_MERGED = 5_000
"""Rows that a worker adds in the time in which the smallest sums are passed on and merged."""

BYTES_A_NUMBER = 8
"""Assumed size of a number in a file with an unknown number of rows."""

OnError: TypeAlias = Literal["raise", "skip"]


@dataclass(frozen=True)
class Ingested:
    """The result of an ingest.

    Attributes:
        rows: Number of observations that it put into the model.
        fragments: Number of fragments that it read.
        resumed: Number of fragments that the record had already.
        skipped: Fragments that could not be taken in, with the reason of each.
        retried: Number of tasks that were done again because a worker died.
        bytes: Size of the fragments that it read, as far as known.
        seconds: Wall time in seconds.
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
    """Add all rows of a source to a model, in place: all of them at the end, or none.

    Workers sum fragments and return the sums, which are merged in a tree by the numbers of the
    fragments: the result equals one stream to rounding, and does not depend on who is first; with
    ``task_rows`` not on the number of workers either. A worker's memory does not depend on the
    number of rows. The grid of a grid model is grown first over the inputs, as far as footers of
    parquet files have their bounds; else it grows on the way.

    Args:
        model: Model whose statistics add up, see :func:`zero`, without batch shape.
        source: A file, a folder, a pattern such as ``"data/*.parquet"`` or several files, parquet
            or csv; a data set of ``pyarrow.dataset``; a Dask DataFrame; a Ray Dataset; or any
            iterable of tables (Arrow, pandas) or of arrays ``(X, Y)`` or ``(X, Y, Yvar)``.
        x: Names of the columns of the inputs.
        y: Names of the columns of the outcomes, or the one of the labels.
        yvar: Names of the columns of noise variances, one for each of y; missing values: unknown.
        executor: Executor of the tasks: ``processes:4``, ``dask:ADDRESS`` or another name that
            :func:`~bo_stream.executors.executor_of` opens for this ingest, or any executor of
            ``concurrent.futures``, which stays open. None: tasks are done here, one after another.
        on_error: What to do with a fragment that cannot be read, that has other columns, types or
            units, values that are missing or infinite, or inputs too far outside of the grid:
            ``raise`` ends the ingest, ``skip`` leaves it out whole. A fragment is a row group of a
            parquet file, another file, a partition or a batch.
        record: A folder that records the fragments that are in, so that an interrupted, even
            killed, ingest goes on, and a later one takes in only new fragments. Batches of an
            iterable are known by their numbers, and must come again in the same order.
        file_format: Format of the files; None: by their names.
        task_rows: Number of rows that a worker sums before it returns the sums; None: see
            :func:`default_task_rows`.
        at_once: Most tasks under way; None: twice the executor's workers.
        retries: How many times a task whose worker died is done again.
        trusted: Classes of your own in the model that a record may name; see
            :meth:`StreamingGP.load`.
        progress: Whether to draw a bar over the bytes, where standard error is a terminal.

    Returns:
        The result; the model changes in place.

    Raises:
        UnsupportedError: Sums of the model cannot be merged, or the record is of other
            hyperparameters.
        UsageError: An argument, a fragment or the record cannot be used, a task was lost too often,
            or the record belongs to a Ray Dataset. The model is as it was.

    Example:
        >>> ingest(model, "data/*.parquet", x=["lon", "lat"], y="temperature", record="taken")
    """
    began, before = time.monotonic(), model.num_observations
    columns = ColumnNames.of(x, y, yvar)
    _check_arguments(model, source, record, on_error, task_rows, retries, at_once)
    start = zero(model)
    listing = listed(source, columns, file_format)
    if listing is not None:
        _check_columns(columns, model)
        start, listing = _grown_over(start, listing, columns)
        if on_error == "raise":
            refuse(listing.faults)
    opened = nullcontext() if executor is None else executor_of(executor)
    with opened as workers, opened_record(record, model, columns, trusted) as history:
        if workers is not None:
            check_workers(workers)
            check_picklable("model", start.model, workers)
        if task_rows is None:
            task_rows = _task_rows(start, listing, history, workers)
        tree, counts = SumTree(), Counter[str]()
        if history is not None:
            tree = history.begun(None if listing is None else listing.fragments, start, task_rows)
            counts["resumed"] += sum(len(part.keys) for part in tree.nodes.values())
        fragments = streamed(source, columns) if listing is None else listing.fragments
        tasks = _tasks(fragments, columns, on_error == "skip", task_rows, history, tree, counts)
        done = sum_tasks(workers, tasks, start, at_once, retries)
        with _progress_bar(progress) as bar, closing(done):  # cancels tasks on an error
            known = () if listing is None else listing.fragments
            row = bar.add_task("", total=sum(each.size for each in known) or None)
            for task, part, again in done:
                if on_error == "raise":
                    refuse(part.faults)
                if history is not None:
                    history.check_new(task.fragments, part.digests)
                tree.add(task.number, part)
                size = sum(each.size for each in task.fragments)
                counts.update(fragments=len(part.keys), bytes=size, retried=again)
                bar.advance(row, size)
        total = tree.total()
        faults = () if listing is None else listing.faults
        sums = None if total is None else total.sums
        if history is not None:  # the sums are in the record before they are in the model
            history.seal(total)
            sums = history.base
        if sums is not None:
            finish(model, sums)
    return Ingested(
        model.num_observations - before,
        counts["fragments"],
        counts["resumed"],
        faults if total is None else (*faults, *total.faults),
        counts["retried"],
        counts["bytes"],
        time.monotonic() - began,
    )


def _check_arguments(
    model: StreamingGP,
    source: object,
    record: object,
    on_error: str,
    task_rows: int | None,
    retries: int,
    at_once: int | None,
) -> None:
    check_one_of("on_error", on_error, ("raise", "skip"))
    for name, number in (("task_rows", task_rows), ("at_once", at_once)):
        if number is not None:
            check_whole(name, number, 1)
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


def _check_columns(columns: ColumnNames, model: StreamingGP) -> None:
    labels = isinstance(model.outcomes, LabelOutcomes)
    outcomes = 1 if labels else model.num_outputs * model.outcomes.columns
    wanted = (("x", columns.x, model.input_dim, "input"), ("y", columns.y, outcomes, "outcome"))
    for argument, names, number, what in wanted:
        if len(names) != number:
            raise UsageError(
                f"Expected {argument} to name a column for each of the model's {number} {what}s, "
                f"got {list(names)}."
            )


# --- tasks: groups of fragments -------------------------------------------------------------------


def default_task_rows(numbers: int, rows: int | None = None, workers: int = 1) -> int:
    """Return the rows of a task, by default.

    For an unknown number of rows it is ``TASK_ROWS``, or more if the sums are large. For n rows it
    is at most n divided by the number of workers, so that no worker is without a task, but at least
    √(n m), where m is the number of rows that a worker adds during one merge: then the driver
    merges the sums of all tasks in the time in which a worker adds one task.

    Args:
        numbers: Number of numbers in sums on a grid; 0 for other sums.
        rows: Number n of rows; None: not known.
        workers: Number of tasks that are done at a time.
    """
    endless = max(TASK_ROWS, numbers // NUMBERS_A_ROW)
    if rows is None:
        return endless
    merged = max(LEAST_MERGED, numbers // MERGED_A_ROW)
    return min(endless, max(math.ceil(rows / workers), math.isqrt(rows * merged)))


def _task_rows(
    start: Sums,
    listing: FragmentListing | None,
    history: IngestRecord | None,
    workers: Executor | None,
) -> int:
    """Return the rows of a task for a source, from the numbers of rows as far as known."""
    memory = inner_memory(start.model)
    numbers = gram_numbers(memory.grid) if isinstance(memory, OnGrid) else 0
    if listing is None or workers is None:
        return default_task_rows(numbers)
    new = [
        each.num_rows for each in listing.fragments if history is None or not history.is_in(each)
    ]
    known = [rows for rows in new if rows is not None]
    whole = sum(known) if len(known) == len(new) else None
    return default_task_rows(numbers, whole, WorkerCount(workers).now())


def _tasks(
    fragments: Iterable[Fragment],
    columns: ColumnNames,
    tolerant: bool,
    task_rows: int,
    history: IngestRecord | None,
    tree: SumTree,
    counts: Counter[str],
) -> Iterator[SumTask]:
    """Draw tasks of consecutive fragments that have at least ``task_rows`` rows together.

    Fragments that an ended ingest of the record took in are only counted, as ``resumed``, and tasks
    whose sums the tree has at the start are left out.
    """
    resumed = SumTree(dict(tree.nodes))

    def groups() -> Iterator[tuple[Fragment, ...]]:
        group, rows = list[Fragment](), 0
        for fragment in fragments:
            if history is not None and history.is_in(fragment):
                counts["resumed"] += 1
                continue
            group.append(fragment)
            if fragment.num_rows is not None:
                rows += fragment.num_rows
            elif fragment.size:
                rows += fragment.size // (BYTES_A_NUMBER * len(columns.all))
            else:
                rows += task_rows
            if rows >= task_rows:
                yield tuple(group)
                group, rows = [], 0
        if group:
            yield tuple(group)

    for number, group in enumerate(groups()):
        if not resumed.holds(number):
            yield SumTask(number, group, columns, tolerant, os.getpid(), history is not None)


# --- inputs that are known before rows are read ---------------------------------------------------


def _grown_over(
    sums: Sums, listing: FragmentListing, columns: ColumnNames
) -> tuple[Sums, FragmentListing]:
    """Grow the grid of sums of no observations over the known boxes of all fragments.

    So all workers begin with the final grid, and fragments too far outside are found before any is
    read. Nothing is done for models without a grid.

    Args:
        sums: Sums of no observations.
        listing: The fragments.
        columns: Names of the columns of the inputs.

    Returns:
        The sums, and the fragments; those too far outside are among the faults.
    """
    memory = inner_memory(sums.model)
    if not isinstance(memory, OnGrid) or not sums.model.maps_boxes:
        return sums, listing
    reached, faults = list[Fragment](), list(listing.faults)
    like = next(sums.model.covar_module.parameters())
    for fragment in listing.fragments:
        box = fragment.box(columns)
        try:
            if box is not None and box.shape[1] == sums.model.input_dim:
                corners = sums.model.coordinates(torch.from_numpy(box).to(like))
                memory = memory.covering(corners.to(torch.float64))
            reached.append(fragment)
        except (BotorchError, ValueError) as error:
            faults.append(Fault(fragment.key, one_line(error)))
    model = sums.model._shallow_copy()
    set_inner_memory(model, memory)
    return Sums(model), replace(listing, fragments=tuple(reached), faults=tuple(faults))


def bounds_of(source: Any, x: str | Sequence[str], file_format: Format | None = None) -> Tensor:
    """Return the least and the largest inputs of a source, ``2 x d`` in float64.

    The footers of parquet files have them, so that no rows are read; other files are read once.

    Args:
        source: A source as of :func:`~bo_stream.distributed.ingest`; an iterable is used up.
        x: Names of the columns of the inputs.
        file_format: Format of the files; None: by their names.

    Raises:
        UsageError: A fragment cannot be read or lacks a column, or there are no rows, or a column
            has no numbers or infinite ones.

    Example:
        >>> model = WISKI(X, Y, bounds=bounds_of("data/*.parquet", ["lon", "lat"]))
    """
    columns = ColumnNames.of(x, None, None)
    listing = listed(source, columns, file_format)
    refuse(() if listing is None else listing.faults)
    boxes = list[Array]()
    for fragment in streamed(source, columns) if listing is None else listing.fragments:
        known = fragment.box(columns)
        if known is not None:
            boxes.append(known)
            continue
        try:
            boxes += (
                np.stack((np.fmin.reduce(batch.X), np.fmax.reduce(batch.X)))
                for batch in fragment.batches(columns)
                if len(batch)
            )
        except Exception as error:
            raise UsageError(str(Fault.of(fragment.key, error))) from error
    if not boxes:
        raise UsageError("Expected a source of at least one row, got none.")
    ends = np.stack(boxes)
    box = np.stack((np.fmin.reduce(ends[:, 0]), np.fmax.reduce(ends[:, 1])))
    for name, low, high in zip(columns.x, *box.tolist(), strict=False):
        if not math.isfinite(high - low):
            raise UsageError(
                f"Expected finite numbers in column {name!r}, got {low:g} to {high:g}. Leave rows "
                "out that have no value or an infinite one, or give the bounds yourself."
            )
    return torch.from_numpy(box)


# --- progress -------------------------------------------------------------------------------------


@contextmanager
def _progress_bar(wanted: bool) -> Iterator[Progress]:
    """Open a progress bar over bytes; where standard error is no terminal nothing is drawn."""
    console = Console(stderr=True, highlight=False)
    bar = Progress(
        TextColumn("ingest"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    # before release 15 of Rich one that is disabled ends with an empty line
    with bar if wanted and console.is_terminal else nullcontext():
        yield bar
