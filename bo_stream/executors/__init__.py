"""Executors of ``concurrent.futures``: processes of this machine, Dask, Ray, submitit; checks."""

from typing import TYPE_CHECKING

from bo_stream.lazy_names import lazy_names

if TYPE_CHECKING:
    from bo_stream.executors.checks import check_picklable, check_workers
    from bo_stream.executors.dask import DaskExecutor
    from bo_stream.executors.engine import LostTaskError, LostTaskWarning, WaitingWarning
    from bo_stream.executors.opening import executor_of
    from bo_stream.executors.processes import ProcessExecutor
    from bo_stream.executors.ray import RayExecutor
    from bo_stream.executors.submitit import SubmititExecutor

__all__ = [
    "DaskExecutor",
    "LostTaskError",
    "LostTaskWarning",
    "ProcessExecutor",
    "RayExecutor",
    "SubmititExecutor",
    "WaitingWarning",
    "check_picklable",
    "check_workers",
    "executor_of",
]

if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error
    __getattr__ = lazy_names(
        __name__,
        {
            "checks": ("check_picklable", "check_workers"),
            "dask": ("DaskExecutor",),
            "engine": ("LostTaskError", "LostTaskWarning", "WaitingWarning"),
            "opening": ("executor_of",),
            "processes": ("ProcessExecutor",),
            "ray": ("RayExecutor",),
            "submitit": ("SubmititExecutor",),
        },
    )


def __dir__() -> list[str]:
    """List all public names, imported or not."""
    return sorted({*globals(), *__all__})
