"""Finished parts of a long benchmark, kept in a file to go on from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class Finished:
    """Results by key, written to a file as they come; read again by a run of the same settings."""

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        """Read the file, if there is one of these settings.

        Args:
            file: Where it is, or will be.
            settings: Plain values.
        """
        self._file = file
        self._settings = json.loads(json.dumps(settings))
        content = json.loads(file.read_text()) if file.is_file() else {}
        same = content.get("settings") == self._settings
        self._parts: dict[str, Any] = content["parts"] if same else {}

    def part(self, key: str, kind: type[T], compute: Callable[[], T]) -> T:
        """A result that the file holds, or that is computed and then written to it.

        Args:
            key: Its name.
            kind: Its class, a dataclass of plain values.
            compute: Makes it.
        """
        if key not in self._parts:
            self._parts[key] = asdict(compute())
            self._file.parent.mkdir(parents=True, exist_ok=True)
            whole = self._file.with_suffix(".writing")  # a kill leaves the old file, or the new one
            whole.write_text(json.dumps({"settings": self._settings, "parts": self._parts}))
            whole.replace(self._file)
        return kind(**self._parts[key])

    def remove(self) -> None:
        """When the benchmark has ended."""
        self._file.unlink(missing_ok=True)
