"""The versions of Ax and BoTorch that ``bo_stream.ax`` extends; it imports neither."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

SUPPORTED = {"ax-platform": ">=1.3.1,<1.4", "botorch": ">=0.18.1,<0.19"}
"""Version specifiers by distribution: what is extended is not part of Ax's stable interface."""


def check_versions(supported: dict[str, str] = SUPPORTED) -> None:
    """Check the installed versions against specifiers by distribution.

    Raises:
        ImportError: A distribution is not installed, or in another version.
    """
    for name, expected in supported.items():
        try:
            installed = version(name)
        except PackageNotFoundError as error:
            raise ImportError(
                f"bo_stream.ax needs {name}{expected}, and it is not installed. Run pip install "
                "'bo-stream[ax]'."
            ) from error
        if not SpecifierSet(expected).contains(installed, prereleases=True):
            raise ImportError(
                f"bo_stream.ax expects {name}{expected}, but {name} {installed} is installed. "
                f"Run pip install '{name}{expected}', or upgrade bo-stream."
            )
