"""The adapter of streaming strategies."""

from __future__ import annotations

from bo_stream.ax.cross_validation import LeavesRowsOut
from bo_stream.ax.table_adapter import BringsTables


class StreamAdapter(LeavesRowsOut, BringsTables):
    """Ax's adapter, which cross-validates in closed form, and chooses from tables."""
