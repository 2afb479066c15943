"""The warning that a memory was projected and is no longer exact."""

from __future__ import annotations


class ProjectionWarning(UserWarning):
    """A memory was expressed by points that do not determine it: an approximation from now on."""
