"""The command ``bo-stream``: options, progress and tables; the work is in ``bo_stream.loops``."""

from bo_stream.cli import optimize, replay, sample, survey  # noqa: F401 (each registers a command)
from bo_stream.cli.app import app

__all__ = ["app"]
