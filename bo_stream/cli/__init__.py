"""The command ``bo-stream``: arguments in, progress and tables out; the work is in ``loops``."""

from bo_stream.cli import optimize, sample  # noqa: F401 (each registers its command)
from bo_stream.cli.app import app

__all__ = ["app"]
