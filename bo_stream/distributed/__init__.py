"""Beyond one process: statistics from many files, replicas, and training on many processes."""

from typing import TYPE_CHECKING

from bo_stream.lazy_names import lazy_names

if TYPE_CHECKING:
    from bo_stream.distributed.boxes import bounds_of
    from bo_stream.distributed.ingestion import Ingested, ingest
    from bo_stream.distributed.replica import BestPoint, Exchanged, Replica, ReplicaWarning
    from bo_stream.distributed.sources import Fault
    from bo_stream.distributed.stores import FolderStore, MemoryStore
    from bo_stream.distributed.sums import Sums, accumulate, finish, merge, rebased, zero

__all__ = [
    "BestPoint",
    "Exchanged",
    "Fault",
    "FolderStore",
    "Ingested",
    "MemoryStore",
    "Replica",
    "ReplicaWarning",
    "Sums",
    "accumulate",
    "bounds_of",
    "finish",
    "ingest",
    "merge",
    "rebased",
    "zero",
]

if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error
    __getattr__ = lazy_names(
        __name__,
        {
            "boxes": ("bounds_of",),
            "ingestion": ("Ingested", "ingest"),
            "replica": ("BestPoint", "Exchanged", "Replica", "ReplicaWarning"),
            "sources": ("Fault",),
            "stores": ("FolderStore", "MemoryStore"),
            "sums": ("Sums", "accumulate", "finish", "merge", "rebased", "zero"),
        },
    )


def __dir__() -> list[str]:
    """List all public names, imported or not."""
    return sorted({*globals(), *__all__})
