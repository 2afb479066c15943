"""Versions of what a run was made with, for its records."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

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
