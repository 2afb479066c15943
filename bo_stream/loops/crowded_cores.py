"""A warning that threads which spin while they wait slow a run down beside other processes."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch

from bo_stream.warnings import users_stack_level

LEAST_SECONDS = 1.0
"""Seconds of work before anything is concluded."""

LEAST_SHARE = 0.8
"""Least share of a core that a thread which computes has where the cores are its own."""

PREEMPTIONS_A_SECOND = 20.0
"""Most preemptions per second on a core of its own; on a shared one there are hundreds."""


class CrowdedCoresWarning(UserWarning):
    """A warning that other processes use the same cores, and threads of this one spin."""


class Usage(NamedTuple):
    """Use of the processor by a thread.

    Attributes:
        seconds: Wall time.
        core_seconds: Processor time.
        preempted: Number of involuntary context switches.
        slept: Number of voluntary context switches.
    """

    seconds: float = 0.0
    core_seconds: float = 0.0
    preempted: float = 0
    slept: float = 0

    @classmethod
    def of_this_thread(cls) -> Self:
        """Return the use since some time in the past; all zero on systems other than Linux."""
        if sys.platform != "linux":
            return cls()
        import resource

        used = resource.getrusage(resource.RUSAGE_THREAD)
        at_work = used.ru_utime + used.ru_stime
        return cls(time.monotonic(), at_work, used.ru_nivcsw, used.ru_nvcsw)

    def plus(self, other: Usage, sign: int = 1) -> Usage:
        """Add another use, or subtract it."""
        return Usage(*(a + sign * b for a, b in zip(self, other, strict=True)))


class CoreWatch:
    """A context that warns once if the work within it is slowed down by threads that spin.

    Threads of one process wait for each other many times in an update. One that spins keeps the
    core that another one needs until the system takes it away: two are then far slower than one.
    """

    def __init__(self, usage: Callable[[], Usage] = Usage.of_this_thread) -> None:
        """Measure by ``usage``, which returns the use so far by the thread that works."""
        self._usage = usage
        self._sum = self._before = Usage()
        passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        sleeping = passive or os.environ.get("GOMP_SPINCOUNT") == "0"
        self._said = torch.get_num_threads() == 1 or sleeping

    def __enter__(self) -> Self:
        self._before = self._usage()
        return self

    def __exit__(self, *_: Any) -> None:
        self._sum = self._sum.plus(self._usage().plus(self._before, -1))
        if self._sum.seconds >= LEAST_SECONDS:
            self._warn_if_crowded()
            self._sum = Usage()

    def _warn_if_crowded(self) -> None:
        """Warn if the thread wanted a core, never slept, and often had none."""
        seconds, core_seconds, preempted, slept = self._sum
        often = preempted > max(slept, PREEMPTIONS_A_SECOND * core_seconds)
        if often and core_seconds < LEAST_SHARE * seconds and not self._said:
            self._said = True
            warnings.warn(
                f"Other processes use the same cores: this one had "
                f"{100 * core_seconds / seconds:.0f} % of a core, and its "
                f"{torch.get_num_threads()} threads spin while they wait for each other. "
                "Set OMP_WAIT_POLICY=PASSIVE in the environment before Python starts, or "
                "OMP_NUM_THREADS=1.",
                CrowdedCoresWarning,
                stacklevel=users_stack_level(),
            )
