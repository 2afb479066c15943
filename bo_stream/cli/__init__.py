"""The command ``bo-stream``: options, progress and tables; the work is in ``bo_stream.loops``."""

from bo_stream.cli import (  # noqa: F401 (each registers a command)
    benchmark,
    optimize,
    replay,
    sample,
    survey,
)
from bo_stream.cli.running import app

__all__ = ["app"]
