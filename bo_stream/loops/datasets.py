"""Data sets: read from a file, or simulated."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import Cells
from bo_stream.loops.survey.columns import given_column
from bo_stream.loops.survey.tables import SUFFIXES, read_table

_MIN_ROWS = 20
"""Fewest rows that can be split into points to choose from and points to score on."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Dataset:
    """A map to be sampled: inputs and a target, all known.

    Attributes:
        X: Inputs in the units of their source, ``n x d``.
        y: Target, ``n``.
        columns: Names of the d inputs.
        target: Name of the target.
        source: Name of the source, for messages and records.
    """

    X: Array
    y: Array
    columns: tuple[str, ...]
    target: str
    source: str

    def __post_init__(self) -> None:
        """Raise a ``UsageError`` for wrong shapes, few rows, NaN, infinity, a constant column."""
        if self.X.ndim != 2 or self.y.shape != self.X.shape[:1]:
            raise UsageError(
                f"{self.source}: expected inputs of shape n x d and a target of shape n, got "
                f"{self.X.shape} and {self.y.shape}."
            )
        if len(self.y) < _MIN_ROWS:
            raise UsageError(
                f"{self.source} has {len(self.y)} rows, expected at least {_MIN_ROWS}: some to "
                "choose from and some to score on."
            )
        names = (*self.columns, self.target)
        for name, values in zip(names, (*self.X.T, self.y), strict=True):
            column, bad = f"{self.source}: column {name!r}", np.flatnonzero(~np.isfinite(values))
            if bad.size:
                raise UsageError(
                    f"{column} holds NaN or infinity in {bad.size} of {values.size} rows (first: "
                    f"row {bad[0]}). Drop those rows first."
                )
            if values.min() == values.max():
                raise UsageError(
                    f"{column} is {values[0]:g} in every row: nothing to learn from it."
                )

    @property
    def bounds(self) -> Array:
        """Least and largest value of each input, ``2 x d``."""
        return np.stack((self.X.min(0), self.X.max(0)))

    @property
    def unit_X(self) -> Array:
        """Inputs scaled to the unit cube by their box, ``n x d``."""
        low, high = self.bounds
        scaled: Array = (self.X - low) / (high - low)
        return scaled.clip(0.0, 1.0)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of values and names, which does not depend on the file they came from."""
        digest = hashlib.sha256("\x1f".join((*self.columns, self.target)).encode())
        for values in (self.X, self.y):
            digest.update(np.ascontiguousarray(values, dtype="<f8").tobytes())
        return digest.hexdigest()


def read_dataset(path: str | Path, x: Sequence[str] | None = None, y: str | None = None) -> Dataset:
    """Read a data set from a file.

    Args:
        path: ``.npz`` with arrays X (``n x d``), y (``n``) and, if there are any, the names
            ``columns`` and ``target``; or a table with a header, of the types and separators that
            :func:`~bo_stream.loops.survey.tables.read_table` reads.
        x: Names of the input columns; required for a table; default of ``.npz``: all columns of X.
        y: Name of the target column; required for a table; an array of ``.npz``, default y.

    Raises:
        UsageError: The file cannot be read, lacks a column, or holds values that cannot be used.
    """
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"Expected a file, but {str(path)!r} is a folder. Name a file in it.")
    if not path.is_file():
        raise UsageError(f"No such file: {path}.")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UsageError(
            f"{path} is of unknown type {path.suffix or '(no suffix)'!r}. Expected one of "
            f"{', '.join(_READERS)}."
        )
    return reader(path, x, y)


def _read_npz(path: Path, x: Sequence[str] | None, y: str | None) -> Dataset:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is no .npz file of plain arrays: {error}") from error
    for name in ("X", y or "y"):
        if name not in arrays:
            raise UsageError(f"{path} has no array {name!r}. It has: {', '.join(sorted(arrays))}.")
    _check_named_once(x or ())
    X = _numeric(arrays["X"], f"{path}: array X")
    X = X.reshape(-1, 1) if X.ndim == 1 else X
    if X.ndim != 2:
        raise UsageError(f"{path}: expected array X of shape n x d, got {X.shape}.")
    names = [f"x{i}" for i in range(X.shape[-1])]
    if "columns" in arrays:
        names = [str(name) for name in arrays["columns"].ravel()]
    if len(names) != X.shape[-1]:
        raise UsageError(
            f"{path}: expected {X.shape[-1]} names in array columns, got {len(names)}."
        )
    chosen = names if x is None else x
    for name in chosen:
        if names.count(name) != 1:
            fault = "has no" if name not in names else "has more than one"
            raise UsageError(f"{path} {fault} column {name!r}. Its columns: {', '.join(names)}.")
    target = _numeric(arrays[y or "y"], f"{path}: array {y or 'y'}")
    label = str(arrays["target"]) if y is None and "target" in arrays else (y or "y")
    columns = [names.index(name) for name in chosen]
    return Dataset(X[:, columns], target, tuple(chosen), label, path.name)


def _check_named_once(columns: Sequence[str]) -> None:
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"Column {twice!r} is named twice among x and y. Name each column once.")


def _numeric(values: NDArray[np.generic], name: str) -> Array:
    if values.dtype.kind not in "fiub":
        raise UsageError(f"{name} is not numeric (its type is {values.dtype}).")
    return values.astype(np.float64)


def _read_table(path: Path, x: Sequence[str] | None, y: str | None) -> Dataset:
    cells = Cells(read_table(path), str(path))
    names = cells.names
    if not x or y is None:
        raise UsageError(
            f"Say which columns of {path} are inputs and which is the target, as in "
            f"--x lon lat --y prevalence. Its columns: {', '.join(names)}."
        )
    _check_named_once((*x, y))
    for name, option in (*((name, "--x") for name in x), (y, "--y")):
        given_column(names, name, str(path), option)
    values = [cells.numbers(name) for name in (*x, y)]
    for name, column in zip((*x, y), values, strict=True):
        cells.refuse(
            np.isnan(column),
            name,
            f"it is empty, as {np.isnan(column).sum():,} of {len(column):,} cells are. Fill them "
            "in, or drop those rows.",
        )
    return Dataset(np.stack(values[:-1], axis=-1), values[-1], tuple(x), y, path.name)


_READERS = {".npz": _read_npz, **dict.fromkeys(SUFFIXES, _read_table)}


def simulated_prevalence(seed: int = 2020) -> Dataset:
    """Simulate a smooth prevalence in [0, 1] on some 4,000 pixels of a made-up country.

    The logit is a Gaussian process with a Matérn-5/2 kernel, drawn by random Fourier features, and
    a small independent part. The same seed gives the same map.
    """
    generator = np.random.default_rng(seed)
    ticks = (np.arange(100) + 0.5) / 100
    north, east = np.meshgrid(ticks[::-1], ticks, indexing="ij")
    pixels = np.stack((east.ravel(), north.ravel()), axis=-1)

    # the country's border: its radius is a random periodic function of the angle
    offset = pixels - 0.5
    angle = np.arctan2(offset[:, 1], offset[:, 0])
    waves = np.arange(2, 9)
    phase = generator.uniform(0.0, 2.0 * np.pi, waves.size)
    size = generator.uniform(0.5, 1.0, waves.size) * 0.08 / np.sqrt(waves)
    border = 0.36 + (size * np.cos(np.multiply.outer(angle, waves) + phase)).sum(-1)
    sites = pixels[np.hypot(offset[:, 0], offset[:, 1]) < border]

    # a Matérn-5/2 process of unit variance, whose frequencies are t with 5 degrees of freedom
    features, lengthscale = 400, 0.11
    directions = generator.standard_normal((2, features))
    stretch = np.sqrt(5.0 / generator.chisquare(5.0, features))
    shift = generator.uniform(0.0, 2.0 * np.pi, features)
    angles = sites @ (directions * stretch) / lengthscale + shift
    field = np.sqrt(2.0 / features) * np.cos(angles).sum(-1)
    logit = -1.1 + 0.85 * field + 0.12 * generator.standard_normal(len(sites))
    return Dataset(
        sites * 1000.0,
        1.0 / (1.0 + np.exp(-logit)),
        ("easting (km)", "northing (km)"),
        "simulated prevalence (proportion)",
        "simulated prevalence map",
    )
