"""Where the command writes."""

from __future__ import annotations

from rich.console import Console

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)
