"""From what a user names to its fragments: files, data sets, iterables, Dask's and Ray's tables."""

from __future__ import annotations

import glob
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from bo_stream.distributed.fragments import (
    BatchFragment,
    Columns,
    FileFragment,
    Fragment,
    LazyFragment,
    batch_of,
)
from bo_stream.errors import UsageError
from bo_stream.storage.archive import one_line

Format: TypeAlias = Literal["parquet", "csv"]

_SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".csv.gz": "csv",
}  # fmt: skip
_UNITS = (b"unit", b"units")
_WILD = "*?["


@dataclass(frozen=True)
class Fault:
    """A fragment that cannot be taken in.

    Attributes:
        key: Its name: a file, of a parquet file with the number of the row group after ``#``.
        reason: What is wrong, and in which row or column if that is known.
    """

    key: str
    reason: str

    @classmethod
    def of(cls, key: str, error: BaseException) -> Fault:
        """Name a fragment and the error that it gave."""
        return cls(key, str(error) if isinstance(error, UsageError) else one_line(error))

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


@dataclass(frozen=True)
class Listing:
    """The fragments of a source whose fragments are known before any is read.

    Attributes:
        fragments: Those that can be read, in the source's order.
        faults: Those that cannot.
    """

    fragments: tuple[Fragment, ...]
    faults: tuple[Fault, ...] = ()


def listed(source: Any, columns: Columns, file_format: Format | None = None) -> Listing | None:
    """List the fragments of files, a data set or a Dask DataFrame; None for other sources.

    Of a parquet file the footer is read, of a text file the first block.

    Args:
        source: A file, a folder, a pattern such as ``"data/*.parquet"``, several files, a data set
            of ``pyarrow.dataset``, or a Dask DataFrame.
        columns: That each fragment must have.
        file_format: Of files; None: by their names.

    Raises:
        UsageError: There are no files, or files of several formats.
    """
    import pyarrow.dataset as ds

    if _is_of(source, "dask", "to_delayed"):
        if _is_persisted(source):
            return None
        return Listing(tuple(_dask_fragments(source, columns)))
    if isinstance(source, ds.Dataset):
        if not hasattr(source, "files"):
            raise UsageError(
                f"Expected a data set of files, got a {type(source).__name__}. Pass its batches: "
                "source=dataset.to_batches()."
            )
        return _of_parts(source.get_fragments(), "", columns)
    if isinstance(source, str | Path) or _are_paths(source):
        return _of_files(source, columns, file_format)
    return None


def streamed(source: Any, columns: Columns) -> Iterator[Fragment]:
    """Draw the fragments of an iterable of batches, or of a Ray Dataset, one after another.

    A Dask DataFrame whose partitions are in the memory of a cluster is fetched in the same way.

    Raises:
        UsageError: The source is no iterable, or a batch is none.
    """
    for number, table in enumerate(_tables(source)):
        key = f"batch {number}"
        try:
            batch = batch_of(table, columns)
        except UsageError as error:
            raise UsageError(f"{key}: {error}") from error
        yield BatchFragment(key, batch.size, len(batch), batch)


def _tables(source: Any) -> Iterable[Any]:
    if _is_of(source, "ray", "iter_batches"):
        tables: Iterable[Any] = source.iter_batches(batch_size=100_000, batch_format="pyarrow")
        return tables
    if _is_of(source, "dask", "to_delayed"):
        return (part.compute() for part in source.to_delayed())
    if hasattr(source, "column_names") or hasattr(source, "iloc"):  # one table
        return [source]
    if not isinstance(source, Iterable):
        raise UsageError(
            "Expected source to be files, a folder, a pattern, a data set of pyarrow, a Dask "
            f"DataFrame, a Ray Dataset or an iterable of batches, got a {type(source).__name__}."
        )
    return source


def _is_of(source: object, package: str, method: str) -> bool:
    return type(source).__module__.partition(".")[0] == package and hasattr(source, method)


def _are_paths(source: object) -> bool:
    several = isinstance(source, list | tuple) and len(source) > 0
    return several and all(isinstance(each, str | Path) for each in source)  # type: ignore[attr-defined]


# --- files --------------------------------------------------------------------------------------


def _of_files(source: Any, columns: Columns, file_format: Format | None) -> Listing:
    import pyarrow.dataset as ds
    from pyarrow import fs

    root, files = _files(source)
    formats = {file_format} if file_format else {_format_of(name) for name in files}
    if len(formats) != 1 or None in formats:
        raise UsageError(
            f"Expected files of one format, .parquet or .csv, got {source}. Name them by a pattern "
            "such as 'folder/*.parquet', or give file_format."
        )
    (kind,) = formats
    if isinstance(source, str) and "://" in source:  # of a file system that Arrow knows
        return _of_parts(ds.dataset(source, format=kind).get_fragments(), root, columns)
    form = ds.ParquetFileFormat() if kind == "parquet" else ds.CsvFileFormat()
    disk = fs.LocalFileSystem()
    return _of_parts((form.make_fragment(file, disk) for file in files), root, columns)


def _files(source: Any) -> tuple[str, list[str]]:
    """Return the folder that names of files are relative to, and the files in order."""
    if not isinstance(source, str | Path):
        return "", [each if "://" in str(each) else str(Path(each).absolute()) for each in source]
    text, path = str(source), Path(source)
    if path.is_dir():
        found = sorted(str(each) for each in path.rglob("*") if _format_of(str(each)))
        return _checked(text, found, f"{path}/")
    if path.is_file() or "://" in text:
        return "", [text]
    found = sorted(glob.glob(text, recursive=True)) if set(text) & set(_WILD) else []  # noqa: PTH207
    fixed = text[: min(text.find(sign) for sign in _WILD if sign in text)] if found else ""
    return _checked(text, found, fixed[: fixed.rfind("/") + 1])


def _checked(source: str, found: list[str], root: str) -> tuple[str, list[str]]:
    if not found:
        raise UsageError(f"There are no files of {source}, .parquet or .csv.")
    return root, found


def _format_of(name: str) -> Format | None:
    return next((kind for end, kind in _SUFFIXES.items() if name.lower().endswith(end)), None)


def _relative(file: str, root: str) -> str:
    absolute = str(Path(root).resolve()) + "/"
    return file.removeprefix(root) if file.startswith(root) else file.removeprefix(absolute)


def _of_parts(parts: Iterable[Any], root: str, columns: Columns) -> Listing:
    """List the fragments of ``pyarrow.dataset``, each row group of a parquet file apart."""
    fragments, faults, units = list[Fragment](), list[Fault](), dict[str, Any]()
    for part in parts:
        name = _relative(str(part.path), root)
        try:
            schema = part.physical_schema
            _check_schema(schema, columns, units, _is_text(part))
            fragments += _row_groups(part, name, columns)
        except (OSError, ValueError, TypeError) as error:
            faults.append(Fault.of(name, error))
    keys = Counter(each.key for each in fragments)
    twice = [key for key, number in keys.items() if number > 1]
    if twice:
        raise UsageError(f"Expected each file once, got {twice[0]} more than once.")
    return Listing(tuple(fragments), tuple(faults))


def _is_text(part: Any) -> bool:
    return not hasattr(part, "row_groups")


def _check_schema(schema: Any, columns: Columns, units: dict[str, Any], is_text: bool) -> None:
    """Check the columns of a file, and that units which it names are those of the files before.

    Raises:
        UsageError: A column is missing, is not of numbers or of another unit.
    """
    import pyarrow.types as types

    for name in columns.all:
        if name not in schema.names:
            raise UsageError(f"it has no column {name!r}, but {sorted(schema.names)}")
        field = schema.field(name)
        numeric = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean)
        if not is_text and not any(rule(field.type) for rule in numeric):
            raise UsageError(f"column {name!r} is of type {field.type}, expected numbers")
        said = next((v for k, v in (field.metadata or {}).items() if k.lower() in _UNITS), None)
        if said is not None and units.setdefault(name, said) != said:
            raise UsageError(
                f"column {name!r} is in {said.decode()!r}, in files before in "
                f"{units[name].decode()!r}"
            )


def _row_groups(part: Any, name: str, columns: Columns) -> Iterator[Fragment]:
    if _is_text(part):
        size = int(part.filesystem.get_file_info(part.path).size)
        yield FileFragment(name, size, None, part)
        return
    footer = part.metadata
    for group in part.split_by_row_group():
        number = group.row_groups[0].id
        about = footer.row_group(number).to_dict()
        read = [each for each in about["columns"] if each["path_in_schema"] in columns.all]
        size = sum(each["total_compressed_size"] for each in read)
        yield FileFragment(f"{name}#{number}", size, about["num_rows"], group)


# --- Dask ---------------------------------------------------------------------------------------


def _is_persisted(frame: Any) -> bool:
    """Say whether partitions are in a cluster's memory, where only its client can ask for them."""
    distributed = sys.modules.get("distributed")
    return distributed is not None and bool(distributed.futures_of(frame))


def _dask_fragments(frame: Any, columns: Columns) -> Iterator[Fragment]:
    import cloudpickle

    names = list(map(str, frame.columns))
    missing = [name for name in columns.all if name not in names]
    if missing:
        raise UsageError(f"The Dask DataFrame has no column {missing[0]!r}, but {sorted(names)}.")
    for number, part in enumerate(frame[list(columns.all)].to_delayed()):
        key = f"partition {number}"
        yield LazyFragment(key, 0, None, cloudpickle.dumps(part), str(part.key))


def refuse(faults: Sequence[Fault]) -> None:
    """Raise a ``UsageError`` that names fragments which cannot be taken in, if there are any."""
    if faults:
        more = f" And {len(faults) - 1:,} more." if len(faults) > 1 else ""
        raise UsageError(
            f"{str(faults[0]).rstrip('.')}.{more} Mend or remove it, or pass on_error='skip' to "
            "leave out what cannot be taken in. The model is as it was."
        )
