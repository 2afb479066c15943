"""The command ``bo-stream``: options, progress and tables; the work is in ``bo_stream.loops``."""

from bo_stream.cli import optimize, sample, survey  # noqa: F401 (each registers its command)
from bo_stream.cli.app import app

__all__ = ["app"]
