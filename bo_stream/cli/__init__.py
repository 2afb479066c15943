"""The command ``bo-stream``: options, progress and tables; the work is in ``bo_stream.loops``."""

from bo_stream.cli import optimize, replay, sample, survey  # noqa: F401 (each registers a command)
from bo_stream.cli.running import app

__all__ = ["app"]
