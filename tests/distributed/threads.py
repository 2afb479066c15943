"""Processes that are threads: the sums of data-parallel training without starting anything."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from bo_stream.collective import Collective

T = TypeVar("T")
PATIENCE = 300.0
"""Seconds to wait for another thread."""


class Threads(Collective):
    """One of several threads; sums are in the order of ranks."""

    def __init__(self, rank: int, barrier: threading.Barrier, given: dict[int, Tensor]) -> None:
        super().__init__(rank, barrier.parties)
        self._barrier, self._given = barrier, given

    def sum(self, value: Tensor) -> Tensor:
        assert not value.requires_grad
        self._given[self.rank] = value.clone()
        self._barrier.wait(PATIENCE)
        parts = [self._given[rank] for rank in range(self.size)]
        assert all(part.shape == value.shape for part in parts)
        total = sum(parts[1:], parts[0].clone())
        self._barrier.wait(PATIENCE)
        return total


def together(size: int, work: Callable[[Collective], T]) -> list[T]:
    """What each of some threads returns; the first error of one ends all."""
    barrier, given = threading.Barrier(size), dict[int, Tensor]()

    def one(rank: int) -> T:
        try:
            return work(Threads(rank, barrier, given))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
