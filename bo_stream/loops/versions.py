"""Versions of what a run was made with, for its records."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bo_stream.loops.errors import UsageError

_PACKAGES = ("bo-stream", "torch", "botorch", "gpytorch", "linear-operator", "numpy", "scipy")


def package_version(name: str) -> str:
    """The installed version of a package, ``unknown`` if it runs from a source tree."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def all_versions() -> dict[str, str]:
    """Versions of Python and of the packages that take part in a result."""
    return {"python": platform.python_version()} | {n: package_version(n) for n in _PACKAGES}


def check_written_by_this(content: Mapping[str, Any], path: Path, file_format: int) -> None:
    """Refuse a checkpoint of another version of the package or of another format.

    Raises:
        UsageError: It is such a one.
        KeyError: It does not say.
    """
    mine, version = package_version("bo-stream"), content["bo_stream"]
    if content["format"] != file_format or version != mine:
        raise UsageError(
            f"{path} was written by bo_stream {version} (checkpoint format {content['format']}); "
            f"this is {mine} (format {file_format}). Resume it with that version, or start anew in "
            "another folder."
        )
