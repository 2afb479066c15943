"""The tasks of an ingest: fragments are read and summed by workers, and their sums joined."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from botorch.exceptions.errors import BotorchError
from torch import Tensor

from bo_stream.distributed.sources import Array, Batch, Columns, Fault, Fragment
from bo_stream.distributed.sums import Sums, accumulate, inner_memory, merge
from bo_stream.errors import UsageError
from bo_stream.executors.engine import Capacity
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


# --- tasks done by an executor: a few at a time, lost ones again ---------------------------------


@dataclass(frozen=True)
class Done:
    """A task that is done.

    Attributes:
        task: The task.
        part: Its sums.
        again: How many times it was lost before.
    """

    task: Task
    part: Part
    again: int


def done_here(tasks: Iterator[Task], start: Sums) -> Generator[Done, None, None]:
    """Do tasks in this process, one after another."""
    for task in tasks:
        yield Done(task, run(task, start), 0)


def done_by(
    executor: Executor, tasks: Iterator[Task], start: Sums, at_once: int | None, retries: int
) -> Generator[Done, None, None]:
    """Do tasks by an executor; what is under way is cancelled when the iterator is closed.

    Args:
        executor: Of any kind.
        tasks: Drawn as places become free, so that those of an iterable do not pile up.
        start: Sums of no observations, sent along.
        at_once: Most tasks under way; None: twice the workers of the executor, which may come and
            go.
        retries: How many times a task is done again whose worker died.

    Raises:
        UsageError: A task was lost more often, or the executor takes no more.
    """
    capacity = Capacity(executor)
    under_way: dict[Future[Part], tuple[Task, int]] = {}
    try:
        while True:
            most = at_once or 2 * capacity.now()
            while len(under_way) < most and (task := next(tasks, None)) is not None:
                under_way[_submitted(executor, task, start)] = (task, 0)
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                task, again = under_way.pop(future)
                error = _error(future)
                if error is None:
                    yield Done(task, future.result(), again)
                elif again < retries:
                    under_way[_submitted(executor, task, start)] = (task, again + 1)
                else:
                    raise UsageError(
                        f"The task of {_span(task)} was lost {again + 1} times: {one_line(error)}. "
                        "Its worker may have had too little memory. The model is as it was."
                    ) from error
    finally:
        for future in under_way:
            future.cancel()


def _error(future: Future[Part]) -> BaseException | None:
    try:
        return future.exception()
    except BaseException as error:  # of a future that was cancelled with its engine
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return error


def _submitted(executor: Executor, task: Task, start: Sums) -> Future[Part]:
    try:
        return executor.submit(run, task, start)
    except (BrokenExecutor, RuntimeError) as error:
        raise UsageError(
            f"The executor takes no more tasks: {one_line(error)}. After a worker of Python's "
            "ProcessPoolExecutor has died, none of its pool goes on; one of 'processes:N' is "
            "replaced. The model is as it was."
        ) from error


def _span(task: Task) -> str:
    first, last = task.fragments[0].key, task.fragments[-1].key
    return first if first == last else f"{first} to {last}"


# --- a tree of sums by number: the same for every order of arrival, and small at any time --------


@dataclass(frozen=True, order=True)
class Place:
    """A node of the tree.

    Attributes:
        start: Number of its first task.
        level: It holds ``2^level`` tasks.
    """

    start: int
    level: int

    @property
    def stop(self) -> int:
        """Number after that of its last task."""
        return self.start + (1 << self.level)

    @property
    def sibling(self) -> Place:
        """The node that it is merged with."""
        return Place(self.start ^ (1 << self.level), self.level)

    @property
    def parent(self) -> Place:
        """The node that both become."""
        return Place(min(self.start, self.sibling.start), self.level + 1)


@dataclass
class SumTree:
    """Parts of tasks, merged in pairs by their numbers.

    It holds O(log n + tasks that arrived early) parts of n tasks. The sum does not depend on the
    order in which tasks are done: its brackets are those of their numbers.

    Attributes:
        nodes: Parts that wait for others.
        keep: Called with each node that is new, and with those that it was made of.
    """

    nodes: dict[Place, Part] = field(default_factory=dict)
    keep: Callable[[Place, Part, tuple[Place, ...]], None] = lambda place, part, former: None

    def add(self, number: int, part: Part) -> None:
        """Put in the part of a task."""
        place, former = Place(number, 0), list[Place]()
        while (sibling := place.sibling) in self.nodes:
            other = self.nodes.pop(sibling)
            part = other.plus(part) if sibling < place else part.plus(other)
            former.append(sibling)
            place = place.parent
        self.nodes[place] = part
        self.keep(place, part, tuple(former))

    def holds(self, number: int) -> bool:
        """Say whether the part of a task is in."""
        return any(place.start <= number < place.stop for place in self.nodes)

    def total(self) -> Part | None:
        """Merge all parts in the order of their numbers; None without any."""
        whole: Part | None = None
        for _, part in sorted(self.nodes.items(), key=lambda item: item[0]):
            whole = part if whole is None else whole.plus(part)
        return whole
