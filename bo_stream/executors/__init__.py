"""Executors of ``concurrent.futures``: processes of this machine, Dask, Ray; and checks of them."""

from typing import TYPE_CHECKING

from bo_stream.lazy_names import lazy_names

if TYPE_CHECKING:
    from bo_stream.executors.checks import check_picklable, check_workers
    from bo_stream.executors.dask import DaskExecutor
    from bo_stream.executors.engine import LostTaskError, LostTaskWarning
    from bo_stream.executors.opening import executor_of
    from bo_stream.executors.processes import ProcessExecutor
    from bo_stream.executors.ray import RayExecutor

__all__ = [
    "DaskExecutor",
    "LostTaskError",
    "LostTaskWarning",
    "ProcessExecutor",
    "RayExecutor",
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
            "engine": ("LostTaskError", "LostTaskWarning"),
            "opening": ("executor_of",),
            "processes": ("ProcessExecutor",),
            "ray": ("RayExecutor",),
        },
    )


def __dir__() -> list[str]:
    """List all public names, imported or not."""
    return sorted({*globals(), *__all__})
