"""Sources of observations as fragments: pieces of a table that any process reads, one at a time."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import pickle
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from bo_stream.errors import UsageError, as_real
from bo_stream.storage.archive import one_line

Array = NDArray[np.float64]

Format: TypeAlias = Literal["parquet", "csv"]

READ_ROWS = 65_536
"""Rows that are decoded at a time: a worker's memory does not depend on the size of a fragment."""

_HASHED = 1 << 20
"""Bytes that are hashed at a time."""

_SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".csv.gz": "csv",
}  # fmt: skip

_UNITS = (b"unit", b"units")


@dataclass(frozen=True)
class ColumnNames:
    """Names of the columns of inputs, outcomes and noise variances.

    Attributes:
        x: Names of the d inputs.
        y: Names of the m outcomes, or of the labels.
        yvar: Names of the noise variances of the outcomes, or none.
    """

    x: tuple[str, ...]
    y: tuple[str, ...]
    yvar: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        x: str | Sequence[str] | None,
        y: str | Sequence[str] | None,
        yvar: str | Sequence[str] | None,
    ) -> ColumnNames:
        """Check names as a user gives them.

        Raises:
            UsageError: One is named twice, or there are other numbers of y and yvar.
        """
        groups = list[tuple[str, ...]]()
        for argument, value in (("x", x), ("y", y), ("yvar", yvar)):
            names = () if value is None else (value,) if isinstance(value, str) else tuple(value)
            if not all(isinstance(name, str) for name in names):
                raise UsageError(f"Expected {argument} to be names of columns, got {value!r}.")
            groups.append(names)
        named = cls(*groups)
        twice = sorted({name for name in named.all if named.all.count(name) > 1})
        if twice:
            raise UsageError(f"Expected each column once in x, y and yvar, got {twice} twice.")
        if named.yvar and len(named.yvar) != len(named.y):
            raise UsageError(
                f"Expected yvar to name a column for each of y, {list(named.y)}, got "
                f"{list(named.yvar)}."
            )
        return named

    @property
    def all(self) -> tuple[str, ...]:
        """All names."""
        return (*self.x, *self.y, *self.yvar)


@dataclass(frozen=True)
class Fault:
    """A fragment that cannot be used.

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


def refuse(faults: Sequence[Fault]) -> None:
    """Raise a ``UsageError`` that names fragments which cannot be taken in, if there are any."""
    if faults:
        more = f" And {len(faults) - 1:,} more." if len(faults) > 1 else ""
        raise UsageError(
            f"{str(faults[0]).rstrip('.')}.{more} Mend or remove it, or pass on_error='skip' to "
            "leave out what cannot be taken in. The model is as it was."
        )


@dataclass(frozen=True)
class FragmentListing:
    """The fragments of a source whose fragments are known before any is read.

    Attributes:
        fragments: Those that can be read, in the source's order.
        faults: Those that cannot.
    """

    fragments: tuple[Fragment, ...]
    faults: tuple[Fault, ...] = ()


def listed(
    source: Any, columns: ColumnNames, file_format: Format | None = None
) -> FragmentListing | None:
    """List the fragments of files, a data set or a Dask DataFrame; None for other sources.

    The footer of a parquet file is read, and the first block of a text file.

    Args:
        source: A file, a folder, a pattern such as ``"data/*.parquet"``, several files, a data set
            of ``pyarrow.dataset``, or a Dask DataFrame.
        columns: Columns that each fragment must have.
        file_format: Format of the files; None: by their names.

    Raises:
        UsageError: There are no files, or files of several formats.
    """
    import pyarrow.dataset as ds
    from pyarrow import fs

    if _is_of(source, "dask", "to_delayed"):
        import cloudpickle

        distributed = sys.modules.get("distributed")
        if distributed is not None and distributed.futures_of(source):
            return None  # it is in the memory of a cluster, which only its client can ask for it
        _check_names(source.columns, columns, "The Dask DataFrame")
        parts = enumerate(source[list(columns.all)].to_delayed())
        return FragmentListing(
            tuple(
                LazyFragment(f"partition {number}", 0, None, cloudpickle.dumps(part), str(part.key))
                for number, part in parts
            )
        )
    if isinstance(source, ds.Dataset):
        try:
            pieces = source.get_fragments() if hasattr(source, "files") else None
        except ValueError:  # it is filtered
            pieces = None
        if pieces is None:
            raise UsageError(
                f"Expected a data set of files without a filter, got a {type(source).__name__}. "
                "Pass its batches: source=dataset.to_batches()."
            )
        return _of_parts(pieces, "", columns)
    paths = source if isinstance(source, list | tuple) and len(source) > 0 else [source]
    if not all(isinstance(each, str | Path) for each in paths):
        return None
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


def streamed(source: Any, columns: ColumnNames) -> Iterator[Fragment]:
    """Draw the fragments of an iterable of batches, or of a Ray Dataset, one after another.

    A Dask DataFrame whose partitions are in the memory of a cluster is fetched in the same way.

    Raises:
        UsageError: The source is no iterable.
    """
    tables: Iterable[Any]
    if _is_of(source, "ray", "iter_batches"):
        tables = source.iter_batches(batch_size=100_000, batch_format="pyarrow")
    elif _is_of(source, "dask", "to_delayed"):
        tables = (part.compute() for part in source.to_delayed())
    elif hasattr(source, "column_names") or hasattr(source, "iloc"):  # one table
        tables = [source]
    elif isinstance(source, Iterable):
        tables = source
    else:
        raise UsageError(
            "Expected source to be files, a folder, a pattern, a data set of pyarrow, a Dask "
            f"DataFrame, a Ray Dataset or an iterable of batches, got a {type(source).__name__}."
        )
    for number, table in enumerate(tables):
        key = f"batch {number}"
        try:
            batch = _batch_of(table, columns)
        except UsageError as error:
            yield BatchFragment(key, 0, 0, error)
            continue
        size = sum(each.nbytes for each in (batch.X, batch.Y, batch.Yvar) if each is not None)
        yield BatchFragment(key, size, len(batch), batch)


def _floats(values: Any, expected: str = "batches of arrays of numbers") -> Array:
    """Convert an array, a tensor or a column to float64; missing and masked numbers are NaN."""
    import pandas as pd
    import pyarrow as pa

    try:
        if isinstance(values, torch.Tensor):
            values = values.detach().cpu()
        elif isinstance(getattr(values, "type", None), pa.DictionaryType):
            values = values.cast(values.type.value_type)  # NumPy's would have numbers for nulls
        given = np.asanyarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"Expected {expected}, got a {type(values).__name__}: {error}.") from error
    if given.dtype.kind in "fiub":
        return np.asarray(np.ma.filled(given.astype(float, copy=False), np.nan))
    came = given.dtype.name
    if given.dtype.kind == "O":
        filled = np.ma.filled(given, np.nan)
        objects = np.where(pd.isna(filled), np.nan, filled).ravel()
        numbers = [float(v) if isinstance(v, bool | np.bool_) else as_real(v) for v in objects]
        if None not in numbers:
            return np.array(numbers, dtype=float).reshape(given.shape)
        came = f"{objects[numbers.index(None)]!r:.40}"
    raise UsageError(f"Expected {expected}, got {came}.")


def _is_of(source: object, package: str, method: str) -> bool:
    return type(source).__module__.partition(".")[0] == package and hasattr(source, method)


# --- fragments, and the batches that are read from them -------------------------------------------


@dataclass(frozen=True)
class TableBatch:
    """Rows of a table as arrays in float64; missing numbers are NaN.

    Attributes:
        X: Inputs, ``n x d``.
        Y: Outcomes, ``n x m``; m = 0 where only inputs are read.
        Yvar: Noise variances, ``n x m``, or None.
    """

    X: Array
    Y: Array
    Yvar: Array | None

    def __len__(self) -> int:
        return len(self.X)

    def rows(self, start: int, stop: int) -> TableBatch:
        """Select rows."""
        Yvar = None if self.Yvar is None else self.Yvar[start:stop]
        return TableBatch(self.X[start:stop], self.Y[start:stop], Yvar)


@dataclass(frozen=True)
class Fragment(ABC):
    """A piece of a source; it can be pickled, and has rows in memory only if it has no file.

    Attributes:
        key: Name of the fragment in its source, always the same.
        size: Bytes, for a progress bar; 0 where unknown.
        num_rows: Number of rows; None where unknown.
    """

    key: str
    size: int
    num_rows: int | None

    @abstractmethod
    def batches(self, columns: ColumnNames) -> Iterator[TableBatch]:
        """Read the rows in order, some at a time.

        Raises:
            Exception: Any error of the reader for content that cannot be read.
        """

    @abstractmethod
    def digest(self, columns: ColumnNames) -> str:
        """Return a digest of the content: it costs reading and hashing all of its bytes."""

    def stamp(self) -> object:
        """Return a value that changes when a file is written, at no cost; None without a file."""
        return None

    def box(self, columns: ColumnNames) -> Array | None:
        """Return least and largest inputs, ``2 x d``, where they are known without reading."""
        return None


@dataclass(frozen=True)
class FileFragment(Fragment):
    """A row group of a parquet file, or another file.

    Attributes:
        part: Fragment of ``pyarrow.dataset``.
    """

    part: Any

    def batches(self, columns: ColumnNames) -> Iterator[TableBatch]:
        """Read only the named columns; columns of a text file are parsed as numbers."""
        import pyarrow as pa
        import pyarrow.dataset as ds

        options = None
        if isinstance(self.part, ds.ParquetFileFragment):  # pages that have checksums are verified
            options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        numbers = pa.schema([(name, pa.float64()) for name in columns.all])
        scanner = self.part.scanner(
            schema=numbers,
            columns=list(columns.all),
            batch_size=READ_ROWS,
            batch_readahead=1,
            fragment_readahead=1,
            fragment_scan_options=options,
            use_threads=False,
        )
        for batch in scanner.to_batches():
            yield _batch_of(batch, columns)

    def digest(self, columns: ColumnNames) -> str:
        """Return a digest of all bytes that are read.

        For a row group these are the bytes of its columns, their types, and their entries in the
        footer without the offsets; for another file all bytes. Neither name nor time counts.
        """
        with self.part.filesystem.open_input_file(self.part.path) as file:
            if not getattr(self.part, "row_groups", None):
                return digest_of(_hashed(file, 0, file.size()))
            group = self.part.metadata.row_group(self.part.row_groups[0].id).to_dict()
            chunks = [each for each in group["columns"] if each["path_in_schema"] in columns.all]
            content = []
            for chunk in chunks:
                start = chunk["data_page_offset"]
                start = min(chunk["dictionary_page_offset"] or start, start)
                content.append(_hashed(file, start, chunk["total_compressed_size"]))
        about = [{k: v for k, v in each.items() if "offset" not in k} for each in chunks]
        schema = self.part.physical_schema
        types = [str(schema.field(each["path_in_schema"]).type) for each in chunks]
        return digest_of([group["num_rows"], about, types, content])

    def stamp(self) -> object:
        """Return the size and the time of the file; a time may be set back, so neither is trusted.

        They tell whether to hash a file once more that may have changed while it was read.
        """
        about = self.part.filesystem.get_file_info(self.part.path)
        return about.size, about.mtime_ns

    def box(self, columns: ColumnNames) -> Array | None:
        """Return the least and the largest inputs from the footer of a parquet file."""
        groups = getattr(self.part, "row_groups", None)
        if not groups:
            return None
        try:
            statistics = groups[0].statistics or {}
        except ValueError:  # of a column in float16, whichever it is
            return None
        ends = [statistics.get(name, {}) for name in columns.x]
        if not all("min" in each and "max" in each for each in ends):
            return None
        box = np.array([[each[side] for each in ends] for side in ("min", "max")], dtype=float)
        return box if np.isfinite(box).all() else None


@dataclass(frozen=True)
class BatchFragment(Fragment):
    """A batch of an iterable.

    Attributes:
        batch: Its rows, or why there are none: it is no batch, or has other columns.
    """

    batch: TableBatch | UsageError

    def digest(self, columns: ColumnNames) -> str:
        """Return a digest of the rows."""
        if isinstance(self.batch, UsageError):
            return digest_of(str(self.batch))
        arrays = [self.batch.X, self.batch.Y, self.batch.Yvar]
        return digest_of([None if a is None else (a.shape, a.tobytes()) for a in arrays])

    def batches(self, columns: ColumnNames) -> Iterator[TableBatch]:
        """Return the rows.

        Raises:
            UsageError: There are none.
        """
        if isinstance(self.batch, UsageError):
            raise self.batch
        yield self.batch


@dataclass(frozen=True)
class LazyFragment(Fragment):
    """A partition of a Dask DataFrame, computed where it is read.

    Attributes:
        pickled: The partition as a delayed value, pickled as Dask pickles.
        name: Dask's key of the partition, which is a digest of how it is made.
    """

    pickled: bytes
    name: str

    def digest(self, columns: ColumnNames) -> str:
        """Return a digest of how the partition is made, not of its content."""
        return digest_of(self.name)

    def batches(self, columns: ColumnNames) -> Iterator[TableBatch]:
        """Compute the partition in this process."""
        table = pickle.loads(self.pickled).compute(scheduler="synchronous")
        yield _batch_of(table, columns)


def digest_of(content: object) -> str:
    """Return a short digest of plain values and bytes."""

    def plain(value: object) -> str:
        return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else repr(value)

    return hashlib.sha256(json.dumps(content, default=plain).encode()).hexdigest()[:32]


def _hashed(file: Any, start: int, size: int) -> str:
    """Hash a part of a file in blocks."""
    digest, buffer, left = hashlib.sha256(), memoryview(bytearray(_HASHED)), size
    file.seek(start)
    while left > 0 and (read := file.readinto(buffer[: min(left, _HASHED)])) > 0:
        digest.update(buffer[:read])
        left -= read
    return digest.hexdigest()


def _batch_of(table: Any, columns: ColumnNames) -> TableBatch:
    """Make a batch of a table or of arrays.

    Args:
        table: A table of Arrow or pandas; or arrays or tensors ``(X, Y)`` or ``(X, Y, Yvar)``,
            whose columns have no names.
        columns: Names of the columns to take from a table.

    Raises:
        UsageError: It is neither, has not each column once, or has values that are not numbers.
    """
    if isinstance(table, tuple | list):
        if len(table) not in (2, 3):
            raise UsageError(
                "Expected batches of arrays to be (X, Y) or (X, Y, Yvar), got "
                f"{len(table)} of them."
            )
        X, Y, *rest = map(_floats, table[: 2 if table[-1] is None else 3])
        matrices = [each[:, None] if each.ndim == 1 else each for each in (X, Y, *rest)]
        if any(each.ndim != 2 or len(each) != len(X) for each in matrices):
            shapes = [each.shape for each in (X, Y, *rest)]
            raise UsageError(f"Expected batches of shapes n x d and n x m, got {shapes}.")
        return TableBatch(matrices[0], matrices[1], matrices[2] if rest else None)
    names = getattr(table, "column_names", getattr(table, "columns", None))  # Arrow's, pandas's
    if names is None:
        raise UsageError(
            "Expected batches to be tables of Arrow or pandas, or arrays (X, Y) or (X, Y, Yvar), "
            f"got a {type(table).__name__}."
        )
    _check_names(names, columns)
    arrays = list[Array]()
    for group in (columns.x, columns.y, columns.yvar):
        values = np.empty((len(table), len(group)))
        for i, name in enumerate(group):
            values[:, i] = _floats(table[name], f"numbers in column {name!r}")
        arrays.append(values)
    return TableBatch(arrays[0], arrays[1], arrays[2] if columns.yvar else None)


def _check_names(names: Iterable[object], columns: ColumnNames, it: str = "it") -> None:
    """Check that columns of these names have each wanted one, once."""
    there = Counter(names)
    for name in columns.all:
        if not there[name]:
            raise UsageError(f"{it} has no column {name!r}, but {sorted(map(str, names))}")
        if there[name] > 1:
            raise UsageError(f"{it} has {there[name]} columns {name!r}, expected one: rename them")


# --- files ----------------------------------------------------------------------------------------


def _files(source: Any) -> tuple[str, list[str]]:
    """Return the folder that names of files are relative to, and the files in order."""
    if not isinstance(source, str | Path):
        return "", [
            each if "://" in str(each) else os.path.normpath(Path(each).absolute())
            for each in source
        ]
    text, path = str(source), Path(source)
    root, files = "", list[str]()
    if path.is_dir():
        root = f"{path}/"
        files = sorted(
            str(each)
            for each in path.rglob("*")
            if _format_of(str(each))
            and not any(part.startswith((".", "_")) for part in each.relative_to(path).parts)
        )
    elif path.is_file() or "://" in text:
        files = [text]
    elif signs := set(text) & set("*?["):
        fixed = text[: min(map(text.find, signs))]
        root = fixed[: fixed.rfind("/") + 1]
        files = sorted(glob.glob(text, recursive=True))  # noqa: PTH207
    if not files:
        raise UsageError(f"There are no files of {text}, .parquet or .csv.")
    return root, files


def _format_of(name: str) -> Format | None:
    return next((kind for end, kind in _SUFFIXES.items() if name.lower().endswith(end)), None)


def _of_parts(parts: Iterable[Any], root: str, columns: ColumnNames) -> FragmentListing:
    """List the fragments of ``pyarrow.dataset``, each row group of a parquet file apart."""
    fragments, faults, units = list[Fragment](), list[Fault](), dict[str, Any]()
    absolute = f"{Path(root).resolve()}/"
    for part in parts:
        path = str(part.path)
        name = path.removeprefix(root if path.startswith(root) else absolute)
        try:
            schema = part.physical_schema
            is_text = not hasattr(part, "row_groups")
            _check_schema(schema, columns, units, is_text)
            if is_text:
                size = int(part.filesystem.get_file_info(part.path).size)
                fragments.append(FileFragment(name, size, None, part))
                continue
            footer = part.metadata
            for group in part.split_by_row_group():
                number = group.row_groups[0].id
                about = footer.row_group(number).to_dict()
                read = [each for each in about["columns"] if each["path_in_schema"] in columns.all]
                size = sum(each["total_compressed_size"] for each in read)
                fragments.append(FileFragment(f"{name}#{number}", size, about["num_rows"], group))
        except (OSError, ValueError, TypeError) as error:
            faults.append(Fault.of(name, error))
    keys = Counter(each.key for each in fragments)
    twice = [key for key, number in keys.items() if number > 1]
    if twice:
        raise UsageError(f"Expected each file once, got {twice[0]} more than once.")
    return FragmentListing(tuple(fragments), tuple(faults))


def _check_schema(schema: Any, columns: ColumnNames, units: dict[str, Any], is_text: bool) -> None:
    """Check the columns of a file, and that its units are the same as in the files before.

    Raises:
        UsageError: A column is missing or twice, is not of numbers or of another unit.
    """
    import pyarrow.types as types

    _check_names(schema.names, columns)
    for name in columns.all:
        field = schema.field(name)
        numeric = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean)
        if not is_text and not any(rule(field.type) for rule in numeric):
            raise UsageError(f"column {name!r} is of type {field.type}, expected numbers")
        unit = next((v for k, v in (field.metadata or {}).items() if k.lower() in _UNITS), None)
        if unit is not None and units.setdefault(name, unit) != unit:
            raise UsageError(
                f"column {name!r} is in {unit.decode()!r}, in files before in "
                f"{units[name].decode()!r}"
            )
