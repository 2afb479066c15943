"""The tasks of an ingest: fragments are read and summed by workers, and their sums joined."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch
from botorch.exceptions.errors import BotorchError

from bo_stream.distributed.sources import ColumnNames, Fault, Fragment, TableBatch
from bo_stream.distributed.sums import Sums, accumulate, inner_memory, merge
from bo_stream.errors import UsageError
from bo_stream.executors.engine import WorkerCount, is_lost
from bo_stream.models.wiski.memory import OnGrid
from bo_stream.storage.archive import one_line

BATCH_ROWS = 4096
"""Rows that are added to the sums at a time."""

GRID_ROWS = 65_536
"""Rows that are added at a time to sums on a grid: these need less memory a row, and are faster."""

_BAD_DATA = (ValueError, TypeError, ArithmeticError, BotorchError)
"""Errors of models for content that cannot be used."""


@dataclass(frozen=True)
class SumTask:
    """Fragments whose sums one worker makes.

    Attributes:
        number: Index of the task, in the order of the fragments.
        fragments: Consecutive fragments.
        columns: Columns to read.
        tolerant: Whether to leave out fragments that cannot be taken in.
        driver: Identifier of the process that the ingest runs in.
        recorded: Whether to return digests of the fragments, too.
    """

    number: int
    fragments: tuple[Fragment, ...]
    columns: ColumnNames
    tolerant: bool
    driver: int
    recorded: bool = False


@dataclass(frozen=True)
class PartialSums:
    """Sums of fragments.

    Attributes:
        sums: Sums of the fragments that could be read.
        keys: Keys of these fragments.
        faults: Fragments that could not be taken in. If the task is not tolerant, there is at most
            one, and the sums are of no use.
        digests: Digests of the contents, by key; none if the task is not recorded.
    """

    sums: Sums
    keys: tuple[str, ...]
    faults: tuple[Fault, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)

    def plus(self, other: PartialSums) -> PartialSums:
        """Return both together; the other's fragments come later."""
        return PartialSums(
            merge(self.sums, other.sums),
            (*self.keys, *other.keys),
            (*self.faults, *other.faults),
            {**self.digests, **other.digests},
        )


def run(task: SumTask, start: Sums) -> PartialSums:
    """Sum the fragments of a task. Memory O(size of the sums), for any number of rows.

    A tolerant task sums each fragment apart, so that one which fails midway leaves nothing behind.
    In processes other than the driver's torch computes on one thread: there is a worker for each
    processor.

    Args:
        task: The task.
        start: Sums of no observations; not changed.
    """
    keys, faults, digests = list[str](), list[Fault](), dict[str, str]()
    threads = torch.get_num_threads()
    if task.driver != os.getpid():
        torch.set_num_threads(1)
    try:
        sums = start if task.tolerant else copy.deepcopy(start)
        for fragment in task.fragments:
            try:
                own = _added(
                    copy.deepcopy(start) if task.tolerant else sums, fragment, task, digests
                )
                sums = merge(sums, own) if task.tolerant and keys else own
            except _BAD_DATA as error:
                faults.append(Fault.of(fragment.key, error))
                if not task.tolerant:
                    return PartialSums(start, (), tuple(faults))
            else:
                keys.append(fragment.key)
    finally:
        torch.set_num_threads(threads)
    return PartialSums(sums, tuple(keys), tuple(faults), digests)


def _added(sums: Sums, fragment: Fragment, task: SumTask, digests: dict[str, str]) -> Sums:
    """Add a fragment, and its digest if the task is recorded.

    The digest is computed before the fragment is read, and again if the file was written since.
    """
    like = next(sums.model.covar_module.parameters())
    columns, row = task.columns, 0
    with _reading():
        stamp = fragment.stamp()
        before = fragment.digest(columns) if task.recorded else ""
        batches = fragment.batches(columns)
    while True:
        with _reading():
            batch = next(batches, None)
        if batch is None:
            break
        start = 0
        while start < len(batch):
            is_on_grid = isinstance(inner_memory(sums.model), OnGrid)
            part = batch.rows(start, start + (GRID_ROWS if is_on_grid else BATCH_ROWS))
            start += len(part)
            arrays = (part.X, part.Y) if part.Yvar is None else (part.X, part.Y, part.Yvar)
            try:
                tensors = (torch.from_numpy(np.ascontiguousarray(a)).to(like) for a in arrays)
                sums = accumulate(sums, *tensors)
            except BotorchError as error:
                raise UsageError(f"{_position(part, row, columns)}: {one_line(error)}") from error
            row += len(part)
    if task.recorded:
        with _reading():
            is_changed = fragment.stamp() != stamp and fragment.digest(columns) != before
        if is_changed:
            raise UsageError("it was changed while it was read: wait until it is whole")
        digests[fragment.key] = before
    return sums


@contextmanager
def _reading() -> Iterator[None]:
    """Let any error of a reader say that content cannot be used, but for that of a lost worker."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UsageError) or is_lost(error):
            raise
        raise UsageError(one_line(error)) from error


def _position(batch: TableBatch, first: int, columns: ColumnNames) -> str:
    """Name the column and row of the first number that is not finite, else the rows of a batch."""
    names = (*(columns.x or ["X"] * batch.X.shape[1]), *(columns.y or ["Y"] * batch.Y.shape[1]))
    bad = np.argwhere(~np.isfinite(np.hstack((batch.X, batch.Y))))
    if len(bad):
        row, column = bad[0]
        return f"column {names[column]!r} holds NaN, infinity or nothing in row {first + row}"
    return f"rows {first} to {first + len(batch) - 1}"


# --- tasks in this process or by an executor: a few at a time, lost ones again --------------------


def sum_tasks(
    executor: Executor | None,
    tasks: Iterator[SumTask],
    start: Sums,
    at_once: int | None,
    retries: int,
) -> Generator[tuple[SumTask, PartialSums, int], None, None]:
    """Do tasks; those under way are cancelled when the iterator is closed.

    Args:
        executor: Executor of any kind; None: tasks are done here, one after another.
        tasks: Drawn one by one as tasks end, so that tasks of an iterable do not pile up.
        start: Sums of no observations, sent along.
        at_once: Most tasks under way; None: twice the workers of the executor, which may come and
            go.
        retries: How many times a task whose worker died is done again.

    Yields:
        A task, its sums, and how many times it was lost before.

    Raises:
        UsageError: A task was lost more often, or the executor takes no more.
        Exception: An error of the model that is none of its data.
    """
    if executor is None:
        yield from ((each, run(each, start), 0) for each in tasks)
        return
    capacity = WorkerCount(executor)
    under_way: dict[Future[PartialSums], tuple[SumTask, int]] = {}
    try:
        while True:
            most = at_once or 2 * capacity.now()
            while len(under_way) < most and (task := next(tasks, None)) is not None:
                under_way[_submitted(executor, task, start)] = (task, 0)
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                task, again = under_way.pop(future)
                error: BaseException | None
                try:
                    error = future.exception()
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as cancelled:  # together with its engine
                    error = cancelled
                if error is None:
                    yield task, future.result(), again
                elif isinstance(error, Exception) and not is_lost(error):
                    raise error
                elif again < retries:
                    under_way[_submitted(executor, task, start)] = (task, again + 1)
                else:
                    first, last = task.fragments[0].key, task.fragments[-1].key
                    span = first if first == last else f"{first} to {last}"
                    raise UsageError(
                        f"The task of {span} was lost {again + 1} times: {one_line(error)}. "
                        "Its worker may have had too little memory. The model is as it was."
                    ) from error
    finally:
        for future in under_way:
            future.cancel()


def _submitted(executor: Executor, task: SumTask, start: Sums) -> Future[PartialSums]:
    try:
        return executor.submit(run, task, start)
    except (BrokenExecutor, RuntimeError) as error:
        raise UsageError(
            f"The executor takes no more tasks: {one_line(error)}. After a worker of Python's "
            "ProcessPoolExecutor has died, none of its pool goes on; one of 'processes:N' is "
            "replaced. The model is as it was."
        ) from error


# --- a tree of sums by number: the same for every order of arrival, and small at any time ---------


class Node(NamedTuple):
    """A node of the tree.

    Attributes:
        start: Number of its first task.
        level: Level in the tree: the node stands for ``2^level`` tasks.
    """

    start: int
    level: int


@dataclass
class SumTree:
    """Parts of tasks, merged in pairs by their numbers.

    Of n tasks the tree stores O(log n + tasks that arrived early) parts. The sum does not depend on
    the order in which tasks are done: brackets follow from their numbers.

    Attributes:
        nodes: Parts that wait for their siblings, by node.
        keep: Called with each new node, its part, and the nodes that were merged into it.
    """

    nodes: dict[Node, PartialSums] = field(default_factory=dict)
    keep: Callable[[Node, PartialSums, tuple[Node, ...]], None] = lambda node, part, merged: None

    def add(self, number: int, part: PartialSums) -> None:
        """Add the part of a task."""
        node, merged = Node(number, 0), list[Node]()
        while (sibling := Node(node.start ^ (1 << node.level), node.level)) in self.nodes:
            other = self.nodes.pop(sibling)
            part = other.plus(part) if sibling < node else part.plus(other)
            merged.append(sibling)
            node = Node(min(node.start, sibling.start), node.level + 1)  # of both
        self.nodes[node] = part
        self.keep(node, part, tuple(merged))

    def holds(self, number: int) -> bool:
        """Return whether the tree has the part of a task."""
        return any(node.start <= number < node.start + (1 << node.level) for node in self.nodes)

    def total(self) -> PartialSums | None:
        """Merge all parts in the order of their numbers; None without any."""
        parts = [self.nodes[node] for node in sorted(self.nodes)]
        return reduce(lambda whole, part: whole.plus(part), parts) if parts else None
