"""How fast this machine is, beside the one that the table of costs was fitted on."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

Clock = Callable[[], float]

PLAIN = {"calls": 100, "gradients": 20, "factors": 0}
"""Plain tensor expressions for each Cholesky factor and its gradient in three probes. LAPACK starts
threads for the smallest matrix, plain expressions start none: on two threads the probes take 1.3,
1.9 and 3 times as long as on one.
"""

KINDS = (*PLAIN, "flops", "elements")
"""What costs time: many small operations, among which factorizations of small matrices and their
gradients are few, many or most; dense linear algebra; passes over large arrays.
"""


@cache
def speeds(threads: int, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Time probes on this machine, once a process for each number of threads.

    It takes a fifth of a second or so.

    Args:
        threads: What ``torch.get_num_threads()`` says; it is not changed.
        clock: Seconds so far.

    Returns:
        Seconds of a probe of each of ``KINDS``, the least of some repeats.
    """
    return {kind: _least(probe, clock) for kind, probe in _probes().items()}


def timed_now(clock: Clock) -> dict[str, float]:
    """Time the probes anew, whatever was found before."""
    return speeds.__wrapped__(0, clock)


def _least(probe: Callable[[], object], clock: Clock, repeats: int = 5) -> float:
    probe()
    found = []
    for _ in range(repeats):
        begin = clock()
        probe()
        found.append(clock() - begin)
    return min(found)


def _probes() -> dict[str, Callable[[], object]]:
    small = torch.eye(6, dtype=torch.float64).requires_grad_()
    square = torch.eye(512, dtype=torch.float64) + 0.001
    long = torch.linspace(0.0, 1.0, 200_000, dtype=torch.float64)
    result = torch.empty_like(long)  # allocated once: a first touch of memory would count, too

    def small_operations(repeats: int, plain: int) -> None:
        for _ in range(repeats):
            factor = torch.linalg.cholesky(small + small.mT + 1.0)
            (factor * factor).sum().backward()
            for _ in range(plain):
                (factor.unsqueeze(-2) * 2.0).sum(-1)

    def flops() -> None:
        torch.linalg.cholesky(square @ square)

    def elements() -> None:
        for _ in range(5):
            torch.mul(long, long, out=result).exp_().sum()

    return {
        "calls": lambda: small_operations(6, PLAIN["calls"]),
        "gradients": lambda: small_operations(16, PLAIN["gradients"]),
        "factors": lambda: small_operations(30, PLAIN["factors"]),
        "flops": flops,
        "elements": elements,
    }
