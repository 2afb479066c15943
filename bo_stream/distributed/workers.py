"""Tasks done by an executor: a few at a time, lost ones again, their parts in any order."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass

from bo_stream.distributed.sums import Sums
from bo_stream.distributed.tasks import Part, Task, run
from bo_stream.errors import UsageError
from bo_stream.executors.engine import Capacity
from bo_stream.storage.archive import one_line


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
