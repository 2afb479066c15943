"""Files of bo_stream: written whole or not at all, described by a header, sealed by a digest.

A model's file is laid out as ``safetensors`` defines it, so that other programs can read its
tensors: eight bytes with the length of a header, the header in JSON, then the arrays. The index of
a checkpoint is one object in JSON, and so is a snapshot of Ax. All begin with what
:func:`describe_file` returns, and hold the SHA-256 of everything else in them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, TypeAlias
from uuid import uuid4

DTYPES = {
    "F64": 8, "I64": 8, "C64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1,
    "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of a number of each dtype that an archive may hold, by its name in safetensors."""

_METADATA = "__metadata__"
_HEAD = ("format", "version", "bo_stream", "sha256")
_TEXTS = ("format", "bo_stream", "sha256", "class", "dtype")
_ALIGNMENT = 8
_DAMAGE = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError
)  # fmt: skip


@contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside ``path`` that replaces it when the block ends without error.

    Raises:
        OSError: The disk is full or the folder cannot be written; the old file stays.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.{uuid4().hex}")
    try:
        with draft.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


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
        name: Its name, as files of it say it.
        version: Grows whenever older files can no longer be read.
        only_by_its_writer: Whether no other version of bo_stream reads a file.
    """

    name: str
    version: int
    only_by_its_writer: bool = False

    def head(self) -> dict[str, Any]:
        """Return what every file of the format begins with."""
        return {
            "format": self.name,
            "version": self.version,
            "bo_stream": package_version("bo-stream"),
        }

    def check(self, path: Path, about: Mapping[str, Any]) -> None:
        """Check that a file is of this format and version.

        Args:
            path: Of the file, for messages.
            about: What :func:`describe_file` returns of it.

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
    """Read what a file says about itself, before anything is built from it.

    Args:
        path: Of a model's file, of the index of a checkpoint, or of a snapshot of Ax.

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
        return _about(path, _header(path, file)[0])


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
    """Read what :func:`write_index` wrote.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is of another format or version, or damaged.
    """
    whole = _parsed(path, path.read_bytes())
    kind.check(path, whole)
    said = whole.pop("sha256")
    _check_digest(path, said, _digest(whole).hexdigest())
    return {name: value for name, value in whole.items() if name not in _HEAD}


def _parsed(path: Path, content: bytes) -> dict[str, Any]:
    """Parse the object of a file."""
    try:
        whole: dict[str, Any] = json.loads(content)
        if not {*_HEAD} <= whole.keys():
            raise ValueError(f"it does not say its {' or '.join(_HEAD)}")
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged or no checkpoint: {_line(error)}.") from error
    return whole


# --- arrays behind a header --------------------------------------------------------------------


Buffer: TypeAlias = memoryview | bytes | bytearray


@dataclass(frozen=True)
class Array:
    """Numbers of one dtype.

    Attributes:
        dtype: One of ``DTYPES``.
        shape: Sizes of the dimensions.
        data: The bytes, row by row, in little-endian order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


def write_archive(
    path: str | Path, kind: FileFormat, about: Mapping[str, Any], arrays: Mapping[str, Array]
) -> None:
    """Write arrays with a header and a digest.

    Args:
        path: Of the file.
        kind: Its format.
        about: Further entries of the header: texts, numbers.
        arrays: By name.

    Raises:
        OSError: The file cannot be written; an old one stays.
    """
    said = {**kind.head(), **about}
    texts = {name: v if name in _TEXTS else json.dumps(v) for name, v in said.items()}
    header: dict[str, Any] = {_METADATA: texts}
    ordered = sorted(arrays, key=lambda name: -DTYPES[arrays[name].dtype])
    at = 0  # the largest dtypes come first, so that each array is aligned
    for name in ordered:
        array = arrays[name]
        end = at + math.prod(array.shape) * DTYPES[array.dtype]
        header[name] = {"dtype": array.dtype, "shape": array.shape, "data_offsets": (at, end)}
        at = end
    digest = _digest(header)
    for name in ordered:
        digest.update(arrays[name].data)
    texts["sha256"] = digest.hexdigest()
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _ALIGNMENT)
    with atomic_write(path) as file:
        file.write(len(content).to_bytes(_ALIGNMENT, "little"))
        file.write(content)
        for name in ordered:
            file.write(arrays[name].data)


def read_archive(
    path: str | Path, kind: FileFormat, **expected: str
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read what :func:`write_archive` wrote.

    Args:
        path: Of the file.
        kind: Its format.
        expected: Entries of the header that must be so.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is of another format or version, says something else than is expected, or is
            damaged.
    """
    path = Path(path)
    with path.open("rb") as file:
        header, size = _header(path, file)
        about = _about(path, header)
        kind.check(path, about)
        for name, value in expected.items():
            if about.get(name) != value:
                raise ValueError(f"{path} holds a {about.get(name)}, expected a {value}.")
        said = header[_METADATA].pop("sha256")
        digest, arrays = _digest(header), {}
        for name, dtype, shape, length in _layout(path, header, size):
            data = bytearray(length)
            if file.readinto(data) != length:
                raise ValueError(f"{path} is damaged: it was cut short.")
            digest.update(data)
            arrays[name] = Array(dtype, shape, data)
    _check_digest(path, said, digest.hexdigest())
    return about, arrays


def _header(path: Path, file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """Read the header of an archive; and the number of bytes that follow it."""
    whole = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(_ALIGNMENT)
    length = int.from_bytes(start, "little")
    if whole <= _ALIGNMENT or not 2 <= length <= 2**32 or file.read(1) != b"{":
        raise ValueError(f"{path} is damaged or no model file: {_found(start)}.")
    if length > whole - _ALIGNMENT:
        raise ValueError(f"{path} is damaged: it was cut short.")
    file.seek(_ALIGNMENT)
    try:
        header: dict[str, Any] = json.loads(file.read(length))
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged or no model file: {_line(error)}.") from error
    return header, whole - _ALIGNMENT - length


def _found(start: bytes) -> str:
    """Name what a file without our header begins with."""
    if not start:
        return "it is empty"
    if start.startswith(b"PK"):
        return "it is a zip archive, as torch.save writes it, not one of StreamingGP.save"
    if start.startswith(b"\x80"):
        return "it is a pickle, which is never loaded"
    if not start.strip(b"\0"):
        return "it begins with zeros"
    return f"expected the header of a safetensors file, got {start!r}"


def _about(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a header that describe the file."""
    try:
        texts: dict[str, str] = header[_METADATA]
        about = {name: v if name in _TEXTS else json.loads(v) for name, v in texts.items()}
        if not {*_HEAD} <= about.keys():
            raise ValueError(f"it does not say its {' or '.join(_HEAD)}")
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged or no model file: {_line(error)}.") from error
    return about


def _layout(
    path: Path, header: Mapping[str, Any], size: int
) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Return name, dtype, shape and length of each array; together they fill the file."""
    try:
        rest = {name: each for name, each in header.items() if name != _METADATA}
        found, at = [], 0
        for name, each in sorted(rest.items(), key=lambda pair: pair[1]["data_offsets"]):
            dtype, shape = str(each["dtype"]), tuple(map(int, each["shape"]))
            length = math.prod(shape) * DTYPES[dtype]
            if each["data_offsets"] != [at, at + length] or any(n < 0 for n in shape):
                raise ValueError(f"array {name[:80]!r} is not where it should be")
            found.append((name, dtype, shape, length))
            at += length
        if at != size:
            raise ValueError(f"expected {at:,} bytes of arrays, got {size:,}")
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged: {_line(error)}.") from error
    return found


# --- digests -----------------------------------------------------------------------------------


def _digest(content: Mapping[str, Any]) -> Any:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode())


def _check_digest(path: Path, said: object, found: str) -> None:
    if said != found:
        raise ValueError(
            f"{path} is damaged: its SHA-256 is {found[:12]}..., it was {str(said)[:12]}... when "
            "it was written."
        )


def _line(error: BaseException) -> str:
    """Say an error in one line."""
    text = " ".join(str(error).split())[:200].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
