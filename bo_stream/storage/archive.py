"""Files of bo_stream: written whole or not at all, with a header and a digest.

A model's file is one of ``safetensors``, so that other programs can read its tensors. The index of
a checkpoint is one object in JSON, and so is a snapshot of Ax. All begin with what
:func:`describe_file` returns, and have the SHA-256 of everything else in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from uuid import uuid4

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:  # a header is read without torch
    from torch import Tensor

_HEAD = ("format", "version", "bo_stream", "sha256")
_TEXTS = ("format", "bo_stream", "sha256", "class", "dtype")
_DAMAGE = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
    MemoryError, SafetensorError,
)  # fmt: skip


_DRAFT = re.compile(r"\.(.+)\.[0-9a-f]{32}").fullmatch


def draft_of(name: str) -> str | None:
    """Return the name of the file that a draft of :func:`atomic_write` is of; None: it is none.

    Of a name it has the first 50 characters.
    """
    found = _DRAFT(name)
    return None if found is None else found[1]


@contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces the one at ``path`` when the block succeeds.

    It is in the same folder. A symbolic link stays, and the file that it leads to is replaced.

    Raises:
        OSError: The disk is full or the folder cannot be written; the old file stays.
    """
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name[:50]}.{uuid4().hex}")
    try:
        with draft.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


class AppendOnlyFile:
    """A file of lines that only grows, by lines that are on the disk before a method returns.

    A process that is killed leaves whole lines and at most one that is cut short, which was never
    confirmed to anyone: it is not read as a line, and the next lines take its position.

    Attributes:
        path: Path of the file.
        end: Number of bytes of the lines that were written, or read and accepted.
    """

    def __init__(self, path: Path, torn: Path | None = None) -> None:
        """Prepare to read or write; the file need not exist yet.

        Args:
            path: Path of the file.
            torn: File to which a line that was cut short goes before it is overwritten, if any.
        """
        self.path, self.end, self._torn = path, 0, torn

    def write(self, lines: bytes) -> None:
        """Replace the file by one of these lines, whole or not at all.

        Raises:
            OSError: The disk is full or the file cannot be written; an old one stays.
        """
        with atomic_write(self.path) as file:
            file.write(lines)
        self.end = len(lines)

    def append(self, lines: bytes) -> None:
        """Add lines behind ``end``.

        Raises:
            OSError: The disk is full or the file cannot be written; the file ends as before.
        """
        # A buffer would be written later, after the error was raised.
        with self.path.open("r+b", buffering=0) as file:
            file.seek(self.end)
            if self._torn is not None and (rest := file.readall()):
                with self._torn.open("ab") as aside:
                    aside.write(rest + b"\n")
                    aside.flush()
                    os.fsync(aside.fileno())
            file.truncate(self.end)
            try:
                file.seek(self.end)
                left = memoryview(lines)
                while len(left) > 0:  # the last bytes before a disk is full go without an error
                    left = left[file.write(left) or 0 :]
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(self.end)
                raise
        self.end += len(lines)

    def read(self) -> tuple[list[bytes], bytes]:
        """Return the whole lines behind ``end``, without their ends, and a last one cut short.

        Raises:
            EOFError: The file is shorter than ``end``.
        """
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self.end:
                raise EOFError(f"{self.path} has become shorter")
            file.seek(self.end)
            *lines, rest = file.read().split(b"\n")
        return lines, rest


@cache
def package_version(name: str) -> str:
    """Return the installed version of a package, ``unknown`` if it runs from a source tree."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


class OtherVersionError(ValueError):
    """Another version of bo_stream wrote the file, and this one does not read it."""


@dataclass(frozen=True)
class FileFormat:
    """A kind of file.

    Attributes:
        name: Name of the format, which is in each of its files.
        version: Grows whenever older files can no longer be read.
        only_by_its_writer: Whether no other version of bo_stream reads a file.
    """

    name: str
    version: int
    only_by_its_writer: bool = False

    def head(self) -> dict[str, Any]:
        """Return the entries at the beginning of every file of the format."""
        return {
            "format": self.name,
            "version": self.version,
            "bo_stream": package_version("bo-stream"),
        }

    def check(self, path: Path | str, about: Mapping[str, Any]) -> None:
        """Check by the description of a file that it is of this format and version.

        Raises:
            ValueError: It is of another format.
            OtherVersionError: It is of another version.
        """
        if about["format"] != self.name:
            raise ValueError(f"{path} holds a {about['format']}, expected a {self.name}.")
        mine, writer = package_version("bo-stream"), about["bo_stream"]
        if about["version"] != self.version or (self.only_by_its_writer and writer != mine):
            raise OtherVersionError(
                f"{path} was written by bo_stream {writer} (version {about['version']} of the "
                f"format); this is {mine} (version {self.version}). Read it with that version of "
                "bo_stream."
            )


def describe_file(path: str | Path) -> dict[str, Any]:
    """Read the description of a file, before anything is built from it.

    Args:
        path: Path of a model's file, of the index of a checkpoint, or of a snapshot of Ax.

    Returns:
        ``format``, ``version`` of the format, ``bo_stream`` (the version that wrote the file) and
        ``sha256`` of the rest; of a model also ``class``, ``dtype``, ``observations``, ``outputs``
        and ``dimensions`` (of X), of a checkpoint ``models``. The digest is not compared with the
        content here, but when the file is loaded.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is no file of bo_stream, or was cut short.

    Example:
        >>> describe_file("model.safetensors")["class"]
        'WISKI'
    """
    path = Path(path)
    with path.open("rb") as file:
        if file.read(2) == b'{"':
            whole = _parsed(path, path.read_bytes())
            return {name: whole[name] for name in (*_HEAD, "models") if name in whole}
    return _opened(path, "np")[0]


# --- one object in JSON ------------------------------------------------------------------------


def write_index(path: Path, kind: FileFormat, content: Mapping[str, Any]) -> None:
    """Write plain values with a header and a digest.

    Raises:
        OSError: The file cannot be written; an old one stays.
    """
    whole = {**kind.head(), **content}
    sealed = {**kind.head(), "sha256": _digest(whole).hexdigest(), **content}
    with atomic_write(path) as file:
        file.write(json.dumps(sealed).encode())


def read_index(path: Path, kind: FileFormat) -> dict[str, Any]:
    """Read the plain values that :func:`write_index` wrote.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is of another format or version, or damaged.
    """
    whole = _parsed(path, path.read_bytes())
    kind.check(path, whole)
    written = whole.pop("sha256")
    _check_digest(path, written, _digest(whole).hexdigest())
    return {name: value for name, value in whole.items() if name not in _HEAD}


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    """Parse the object of a file."""
    try:
        whole: dict[str, Any] = json.loads(content)
        _check_head(whole)
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged or no checkpoint: {one_line(error)}.") from error
    return whole


# --- arrays behind a header --------------------------------------------------------------------


MODEL_FILE = FileFormat("bo_stream model", 1)


def archive_bytes(
    about: Mapping[str, Any], arrays: dict[str, Tensor], kind: FileFormat = MODEL_FILE
) -> bytes:
    """Return arrays with a header and a digest, as the bytes of a file.

    Args:
        about: Further entries of the header: texts, numbers.
        arrays: Arrays by name; contiguous, in main memory, none shares memory with another.
        kind: Format of the file.
    """
    from safetensors.torch import save

    header = {**kind.head(), **about}
    header["sha256"] = _archive_digest(header, arrays)
    texts = {name: v if name in _TEXTS else json.dumps(v) for name, v in header.items()}
    return save(arrays, texts)


def read_archive(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header and the arrays of a model's file, which :func:`archive_bytes` returned.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is of another format or version, or damaged.
    """
    about, file = _opened(path, "pt")
    MODEL_FILE.check(path, about)
    try:  # copies, in memory that torch aligns and nobody else writes to
        arrays = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged: {one_line(error)}.") from error
    _check_archive(path, about, arrays)
    return about, arrays


def read_archive_bytes(
    content: bytes, name: str, kind: FileFormat = MODEL_FILE
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header and the arrays from the bytes of :func:`archive_bytes`.

    Args:
        content: The bytes.
        name: Name of the content, for messages.
        kind: Expected format.

    Raises:
        ValueError: They are of another format or version, or damaged.
    """
    from safetensors.torch import load

    try:
        head = content[8 : 8 + int.from_bytes(content[:8], "little")]
        about = _described(json.loads(head)["__metadata__"])
        arrays = load(content)
    except _DAMAGE as error:
        raise _damaged(name, content[:9], error) from error
    kind.check(name, about)
    _check_archive(name, about, arrays)
    return about, arrays


def _opened(path: Path, framework: str) -> tuple[dict[str, Any], Any]:
    """Open an archive: the entries of its header that describe it, and safetensors' reader."""
    with path.open("rb") as plain:
        start = plain.read(9)
    try:
        file = safe_open(path, framework=framework)
        return _described(file.metadata() or {}), file
    except _DAMAGE as error:
        raise _damaged(path, start, error) from error


def _described(texts: Mapping[str, str]) -> dict[str, Any]:
    """Parse the entries of a header that describe the file; safetensors has them in any order."""
    about = {name: v if name in _TEXTS else json.loads(v) for name, v in sorted(texts.items())}
    _check_head(about)
    return about


def _damaged(path: Path | str, start: bytes, error: BaseException) -> ValueError:
    """Return an error for an archive that cannot be opened, by its first nine bytes."""
    if start[8:] == b"{":  # it has a header
        why = one_line(error)
    elif not start:
        why = "it is empty"
    elif start.startswith(b"PK"):
        why = "it is a zip archive, as torch.save writes it, not one of StreamingGP.save"
    elif start.startswith(b"\x80"):
        why = "it is a pickle, which is never loaded"
    elif not start.strip(b"\0"):
        why = "it begins with zeros"
    else:
        why = f"expected the header of a safetensors file, got {start[:8]!r}"
    return ValueError(f"{path} is damaged, cut short or no model file: {why}.")


# --- digests -----------------------------------------------------------------------------------


def _digest(content: object) -> Any:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode())


def _archive_digest(about: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> str:
    import torch

    shapes = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
    digest = _digest((about, shapes))
    for name in sorted(arrays):
        digest.update(arrays[name].reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _check_archive(
    path: Path | str, about: Mapping[str, Any], arrays: Mapping[str, Tensor]
) -> None:
    rest = {name: value for name, value in about.items() if name != "sha256"}
    _check_digest(path, about["sha256"], _archive_digest(rest, arrays))


def _check_digest(path: Path | str, written: object, actual: str) -> None:
    if written != actual:
        raise ValueError(
            f"{path} is damaged: its SHA-256 is {actual[:12]}..., it was {str(written)[:12]}... "
            "when it was written."
        )


def _check_head(about: Mapping[str, Any]) -> None:
    if not {*_HEAD} <= about.keys():
        raise ValueError(f"it does not say its {' or '.join(_HEAD)}")


def one_line(error: BaseException) -> str:
    """Return an error's class and text in one line."""
    try:
        text = " ".join(str(error).split())[:500].rstrip(".")
    except Exception:  # an error of the user's own may be broken
        text = "an error without words"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
