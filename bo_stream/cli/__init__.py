"""The command ``bo-stream``: arguments in, progress and tables out; the work is in ``loops``."""

from bo_stream.cli.sample import app

__all__ = ["app"]
