"""The files of a run at rest: an index in JSON, and models, which the index names and describes."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from bo_stream.loops.errors import UsageError
from bo_stream.models.base import StreamingGP
from bo_stream.storage import atomic_write

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


_DAMAGE = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
_CURE = "Restore the folder from a copy, or start anew in another folder."


@contextmanager
def read_or_say_damaged(path: Path) -> Iterator[None]:
    """Turn what goes wrong while an index is read into one line.

    Raises:
        UsageError: The index is damaged.
    """
    try:
        yield
    except UsageError:
        raise
    except (*_DAMAGE, RecursionError) as error:
        raise UsageError(f"{path} is damaged or no checkpoint ({error!r}). {_CURE}") from error


def write_index(path: Path, file_format: int, content: Mapping[str, Any]) -> None:
    """Write an index with what it takes to see whether it is whole.

    Args:
        path: Of the file, which is replaced in one move.
        file_format: Of the content.
        content: Plain values.

    Raises:
        OSError: The file cannot be written; the old one stands.
    """
    head = {"format": file_format, "bo_stream": package_version("bo-stream")}
    whole = {**head, "sha256": _digest_of_content(content), **content}
    with atomic_write(path) as file:
        file.write(json.dumps(whole).encode())


def read_index(path: Path, file_format: int) -> dict[str, Any]:
    """The content of an index that this version wrote.

    Raises:
        UsageError: The file is damaged or was changed since, or another version wrote it.
    """
    with read_or_say_damaged(path):
        whole: dict[str, Any] = json.loads(path.read_text())
        check_written_by_this(whole, path, file_format)
        content = {name: value for name, value in whole.items() if name not in _HEAD}
        digest = _digest_of_content(content)
        if digest != whole["sha256"]:
            raise ValueError(f"its SHA-256 is not {str(whole['sha256'])[:12]}... as it was written")
    return content


_HEAD = ("format", "bo_stream", "sha256")


def _digest_of_content(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class ModelFile:
    """A model's file as an index names it.

    Attributes:
        name: Of the file, in the folder of the index.
        sha256: Digest of its bytes, in hexadecimal digits.
        observations: That the model has seen.
    """

    name: str
    sha256: str
    observations: int

    @classmethod
    def write(cls, folder: Path, stem: str, model: StreamingGP) -> Self:
        """Write a model to a new file ``stem-*.pt``, beside those that are there.

        Raises:
            OSError: The folder cannot be written, or the disk is full.
        """
        path = folder / f"{stem}-{uuid4().hex[:8]}.pt"
        model.save(path)
        return cls(path.name, _digest(path), round(model.num_observations))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """From plain values, as JSON gives them back."""
        return cls(str(record["name"]), str(record["sha256"]), int(record["observations"]))

    def read(self, folder: Path, kind: type[StreamingGP], device: str) -> StreamingGP:
        """The model, of a class and on a device.

        Raises:
            UsageError: The file lies elsewhere, is missing or damaged, was replaced, or holds
                another model.
        """
        path = folder / self.name
        if Path(self.name).name != self.name:
            raise UsageError(
                f"The checkpoint in {folder} names the model {self.name!r}: expected the name of a "
                f"file in that folder. {_CURE}"
            )
        try:
            self._check_digest(path)
            model = kind.load(path, map_location=device)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{path}, part of the checkpoint, cannot be read: {error} {_CURE}"
            ) from error
        found = round(model.num_observations)
        if found != self.observations:
            raise UsageError(
                f"{path} holds a model of {found:,} observations, the checkpoint says "
                f"{self.observations:,}. {_CURE}"
            )
        return model

    def _check_digest(self, path: Path) -> None:
        found = _digest(path)
        if found != self.sha256:
            raise ValueError(
                f"it is not the file that was written (SHA-256 {self.sha256[:12]}..., got "
                f"{found[:12]}...)."
            )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
