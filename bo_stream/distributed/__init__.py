"""Beyond one process: statistics from many files, replicas, and training on many processes."""

from typing import TYPE_CHECKING

from bo_stream.lazy_names import lazy_names

if TYPE_CHECKING:
    from bo_stream.distributed.training import LostProcessError, Processes, data_parallel

__all__ = ["LostProcessError", "Processes", "data_parallel"]

if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error
    __getattr__ = lazy_names(
        __name__, {"training": ("LostProcessError", "Processes", "data_parallel")}
    )


def __dir__() -> list[str]:
    """List all public names, imported or not."""
    return sorted({*globals(), *__all__})
