"""Stores that replicas exchange through: a shared folder, and one in memory.

Any ``MutableMapping[str, bytes]`` will do, such as those of ``zarr``, ``zict`` or ``fsspec``: a
value is written whole, and a key that was written can be listed and read by all from then on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from bo_stream.errors import UsageError
from bo_stream.storage.archive import atomic_write


class MemoryStore(MutableMapping[str, bytes]):
    """A store in the memory of this process, for replicas in threads and for tests."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def __getitem__(self, key: str) -> bytes:
        return self._values[key]

    def __setitem__(self, key: str, value: bytes) -> None:
        _check_same(key, self._values.setdefault(key, value), value)

    def __delitem__(self, key: str) -> None:
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted([*self._values]))

    def __len__(self) -> int:
        return len(self._values)


class FolderStore(MutableMapping[str, bytes]):
    """A store in a folder that all replicas can reach, on a disk or a network file system.

    A value is a file, which is written beside its place and moved there, so that others see it
    whole or not at all; what a killed process leaves behind has a name that begins with a dot, and
    is no key. Nothing is locked.
    """

    def __init__(self, path: str | Path) -> None:
        """Use a folder, which is created if necessary.

        Raises:
            UsageError: It is a file, or cannot be created.
        """
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be used as a folder to exchange in: {error}"
            ) from error

    def __getitem__(self, key: str) -> bytes:
        try:
            return self._file(key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise KeyError(key) from error

    def __setitem__(self, key: str, value: bytes) -> None:
        file = self._file(key)
        if file.exists():
            _check_same(key, file.read_bytes(), value)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as draft:
            draft.write(value)

    def __delitem__(self, key: str) -> None:
        try:
            self._file(key).unlink()
        except FileNotFoundError as error:
            raise KeyError(key) from error

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._keys()))

    def __len__(self) -> int:
        return sum(1 for _ in self._keys())

    def _keys(self) -> Iterator[str]:
        for folder, folders, files in os.walk(self.path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                if not name.startswith("."):
                    yield (Path(folder) / name).relative_to(self.path).as_posix()

    def _file(self, key: str) -> Path:
        parts = key.split("/")
        if any(not part or part.startswith(".") or "\\" in part for part in parts):
            raise UsageError(
                f"Expected a key of names separated by /, none of which begins with a dot, got "
                f"{key!r}."
            )
        return self.path.joinpath(*parts)


class TakenError(UsageError):
    """A store holds another value at a key."""


def _check_same(key: str, held: bytes, value: bytes) -> None:
    if held != value:
        raise TakenError(
            f"The store holds another value at {key}. What replicas have written there is never "
            "changed: give each store to one search, and each replica a name of its own."
        )
