"""The task of a worker: read some fragments and return their sums, and what could not be taken."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from botorch.exceptions.errors import BotorchError
from torch import Tensor

from bo_stream.distributed.additivity import inner_memory
from bo_stream.distributed.fragments import Array, Batch, Columns, Fragment
from bo_stream.distributed.sources import Fault
from bo_stream.distributed.sums import Sums, accumulate, merge
from bo_stream.errors import UsageError
from bo_stream.models.wiski.memory import OnGrid
from bo_stream.storage.archive import one_line

BATCH_ROWS = 4096
"""Rows that are put into the sums at a time."""

GRID_ROWS = 65_536
"""The same of sums on a grid, which need little memory a row and are faster by cell."""

_BAD_DATA = (OSError, ValueError, TypeError, ArithmeticError, BotorchError)
"""What readers and models raise for content that cannot be taken; Arrow's errors are among them."""


@dataclass(frozen=True)
class Task:
    """Fragments whose sums one worker makes.

    Attributes:
        number: Among the tasks, in the order of the fragments.
        fragments: Consecutive ones.
        columns: To read.
        tolerant: Whether to leave out fragments that cannot be taken in.
        driver: Number of the process that the ingest runs in.
        recorded: Whether to return digests of the fragments, too.
    """

    number: int
    fragments: tuple[Fragment, ...]
    columns: Columns
    tolerant: bool
    driver: int
    recorded: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(each.size for each in self.fragments)


@dataclass(frozen=True)
class Part:
    """Sums of fragments.

    Attributes:
        sums: Of those that were taken in.
        keys: Their keys.
        faults: Those that could not be taken in. If the task is not tolerant, there is at most one,
            and nothing is of use.
        digests: Of the contents that were taken in, by key; none if the task is not recorded.
    """

    sums: Sums
    keys: tuple[str, ...]
    faults: tuple[Fault, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)

    def plus(self, other: Part) -> Part:
        """Return both together; the other's fragments come later."""
        return Part(
            merge(self.sums, other.sums),
            (*self.keys, *other.keys),
            (*self.faults, *other.faults),
            {**self.digests, **other.digests},
        )


def run(task: Task, start: Sums) -> Part:
    """Sum the fragments of a task. Memory O(size of the sums), whatever the number of rows.

    In another process than the driver's torch computes on one thread: there is a worker for each
    processor.

    Args:
        task: Of which fragments.
        start: Sums of no observations; not changed.
    """
    with _threads(None if task.driver == os.getpid() else 1):
        return _strict(task, start) if not task.tolerant else _tolerant(task, start)


def _strict(task: Task, start: Sums) -> Part:
    sums, digests = copy.deepcopy(start), dict[str, str]()
    for fragment in task.fragments:
        try:
            sums = _added(sums, fragment, task, digests)
        except _BAD_DATA as error:
            return Part(start, (), (Fault.of(fragment.key, error),))
    return Part(sums, tuple(each.key for each in task.fragments), (), digests)


def _tolerant(task: Task, start: Sums) -> Part:
    """Sum each fragment apart, so that one which fails midway leaves nothing behind."""
    sums, keys, faults, digests = start, list[str](), list[Fault](), dict[str, str]()
    for fragment in task.fragments:
        try:
            own = _added(copy.deepcopy(start), fragment, task, digests)
            sums = merge(sums, own) if keys else own
            keys.append(fragment.key)
        except _BAD_DATA as error:
            faults.append(Fault.of(fragment.key, error))
    return Part(sums, tuple(keys), tuple(faults), digests)


def _added(sums: Sums, fragment: Fragment, task: Task, digests: dict[str, str]) -> Sums:
    """Add a fragment, and its digest if the task is recorded.

    The digest is made before it is read, and once more afterwards if the file was written since.
    """
    columns, stamp, before, row = task.columns, fragment.stamp(), "", 0
    if task.recorded:
        before = fragment.digest(columns)
    for batch in fragment.batches(columns):
        start = 0
        while start < len(batch):
            part = batch.rows(start, start + _rows_at_once(sums))
            start += len(part)
            try:
                sums = accumulate(sums, *tensors(sums, part))
            except BotorchError as error:
                raise UsageError(f"{_place(part, row, columns)}: {one_line(error)}") from error
            row += len(part)
    if task.recorded:
        if fragment.stamp() != stamp and fragment.digest(columns) != before:
            raise UsageError("it was changed while it was read: wait until it is whole")
        digests[fragment.key] = before
    return sums


def _rows_at_once(sums: Sums) -> int:
    return GRID_ROWS if isinstance(inner_memory(sums.model), OnGrid) else BATCH_ROWS


def tensors(sums: Sums, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a batch as the model of some sums takes it, of its dtype and on its device."""
    like = next(sums.model.covar_module.parameters())

    def tensor(values: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(like)

    Yvar = None if batch.Yvar is None else tensor(batch.Yvar)
    return tensor(batch.X), tensor(batch.Y), Yvar


def _place(batch: Batch, first: int, columns: Columns) -> str:
    """Name the column and the row of the first number that is missing; else the rows of a batch."""
    names = (*(columns.x or ["X"] * batch.X.shape[1]), *(columns.y or ["Y"] * batch.Y.shape[1]))
    bad = np.argwhere(~np.isfinite(np.hstack((batch.X, batch.Y))))
    if len(bad):
        row, column = bad[0]
        return f"column {names[column]!r} holds NaN, infinity or nothing in row {first + row}"
    return f"rows {first} to {first + len(batch) - 1}"


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Let torch compute on so many threads; None: as it does."""
    former = torch.get_num_threads()
    torch.set_num_threads(former if number is None else number)
    try:
        yield
    finally:
        torch.set_num_threads(former)
