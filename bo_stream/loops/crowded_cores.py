"""A warning that threads which spin while they wait slow a run down beside other processes."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from bo_stream.warnings import users_stack_level

LEAST_SECONDS = 1.0
"""Seconds of work before anything is concluded."""

LEAST_SHARE = 0.8
"""Least share of a core that a thread which computes has where the cores are its own."""

PREEMPTIONS_A_SECOND = 20.0
"""Most preemptions per second on a core of its own; on a shared one there are hundreds."""


class CrowdedCoresWarning(UserWarning):
    """A warning that other processes use the same cores, and threads of this one spin."""


def usage_of_this_thread() -> NDArray[np.float64]:
    """Return the thread's wall time, processor time, preemptions and sleeps since some time.

    Times are in seconds, preemptions and sleeps are context switches, involuntary and voluntary.
    All are zero on systems other than Linux.
    """
    if sys.platform != "linux":
        return np.zeros(4)
    import resource

    used = resource.getrusage(resource.RUSAGE_THREAD)
    at_work = used.ru_utime + used.ru_stime
    return np.array([time.monotonic(), at_work, used.ru_nivcsw, used.ru_nvcsw])


class CoreWatch:
    """A context that warns once if the work within it is slowed down by threads that spin.

    Threads of one process wait for each other many times in an update. One that spins keeps the
    core that another one needs until the system takes it away: two are then far slower than one.
    """

    def __init__(self, usage: Callable[[], NDArray[np.float64]] = usage_of_this_thread) -> None:
        """Measure by ``usage``, which returns the use so far by the thread that works."""
        self._usage = usage
        self._sum = self._before = np.zeros(4)
        passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        sleeping = passive or os.environ.get("GOMP_SPINCOUNT") == "0"
        self._said = torch.get_num_threads() == 1 or sleeping

    def __enter__(self) -> Self:
        self._before = self._usage()
        return self

    def __exit__(self, *_: Any) -> None:
        self._sum = self._sum + self._usage() - self._before
        if self._sum[0] >= LEAST_SECONDS:
            self._warn_if_crowded()
            self._sum = np.zeros(4)

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
