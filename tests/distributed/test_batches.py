"""Batches in memory: which of their values are numbers, and which are missing."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from bo_stream.distributed import ingest, sources
from bo_stream.distributed.sources import ColumnNames
from bo_stream.errors import UsageError
from tests.distributed.streams import COLUMNS, assert_same, grid_model, streamed, table
from tests.support.problems import Observations

NUMBERS: dict[str, Any] = {
    "pandas, integers": pd.Series([1, 0, 3, None], dtype="Int64"),
    "pandas, floats": pd.Series([1.0, 0.0, 3.0, None], dtype="Float64"),
    "pandas, categories": pd.Categorical([1, 0, 3, None]),
    "decimals": pd.Series([Decimal(1), Decimal(0), Decimal(3), None], dtype=object),
    "integers and None": pd.Series([1, 0, 3, None], dtype=object),
    "of any kind": pd.Series([True, np.bool_(False), np.float32(3.0), pd.NaT], dtype=object),
    "Arrow, integers": pa.array([1, 0, 3, None]),
    "Arrow, half": pa.array(np.array([1, 0, 3, math.nan], dtype=np.float16)),
    "Arrow, decimals": pa.array([Decimal(1), Decimal(0), Decimal(3), None]),
    "Arrow, a dictionary": pa.array([1, 0, 3, None]).dictionary_encode(),
    "masked": np.ma.array([1, 0, 3, 999], mask=[False, False, False, True]),
    "masked objects": np.ma.array([1, 0, 3, "?"], mask=[0, 0, 0, 1], dtype=object),
    "a tensor": torch.tensor([1.0, 0.0, 3.0, math.nan], dtype=torch.float16),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_any_kind_are_read_and_what_is_missing_is_nan(kind: str) -> None:
    values, columns = NUMBERS[kind], ColumnNames.of("a", None, None)
    batch: Any = pd.DataFrame({"a": values}) if isinstance(values, pd.Series) else (values, values)
    if isinstance(values, pa.Array):
        batch = pa.table({"a": values})
    (fragment,) = sources.streamed([batch], columns)
    (read,) = fragment.batches(columns)
    np.testing.assert_array_equal(read.X[:, 0], [1.0, 0.0, 3.0, math.nan])


def _with(values: Any) -> Callable[[Observations], Any]:
    """A table with other outcomes, of Arrow where these are."""
    if isinstance(values, pa.Array):
        return lambda part: table(part[:3]).set_column(2, "value", values)
    return lambda part: table(part[:3]).to_pandas().assign(value=values)


NO_NUMBERS: dict[str, tuple[Callable[[Observations], Any], str]] = {
    "pandas, durations": (_with(pd.to_timedelta([1, 2, None], unit="s")), "got timedelta64"),
    "pandas, times": (_with(pd.to_datetime(["2026", None, "2027"], utc=True)), "got Timestamp"),
    "pandas, texts": (_with(pd.Series(["1", "2", "3"])), "column 'value', got '1'"),
    "Arrow, durations": (_with(pa.array([1, 2, None], pa.duration("s"))), "got timedelta64"),
    "Arrow, times": (_with(pa.array([1, 2, 3], pa.timestamp("us"))), "got datetime64"),
    "Arrow, texts": (_with(pa.array(["1", "2", None])), "got '1'"),
    "times": (lambda part: (part.X, part.Y.numpy().astype("m8[s]")), "arrays .* got timedelta64"),
    "texts": (lambda part: (part.X.numpy().astype(str), part.Y), "arrays of numbers, got str"),
    "complex": (lambda part: (part.X, part.Y + 1j), "arrays of numbers, got complex128"),
    "conjugate": (lambda part: (part.X, (part.Y + 1j).conj()), "arrays of numbers, got a Tensor"),
    "objects": (lambda part: (part.X[:2], [[Decimal(1)], [np.complex128(1j)]]), "got .*1j"),
}


@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_what_float_makes_of_no_numbers_is_not_taken(kind: str, parts: list[Observations]) -> None:
    """Nanoseconds of times, of which those missing were -9.2e18, or real parts."""
    spoil, said = NO_NUMBERS[kind]
    model, batches = grid_model(), [spoil(parts[0]), table(parts[1])]
    with pytest.raises(UsageError, match=f"batch 0: Expected .*{said}"):
        ingest(model, batches, **COLUMNS)
    done = ingest(model, batches, **COLUMNS, on_error="skip")
    assert [fault.key for fault in done.skipped] == ["batch 0"]
    assert_same(model, streamed(grid_model(), [parts[1]]), parts[0].X[:5])


def test_masked_outcomes_are_missing(parts: list[Observations]) -> None:
    Y = np.ma.array(parts[0].Y.numpy())
    Y[7] = np.ma.masked
    with pytest.raises(UsageError, match=r"batch 0: column 'Y' holds NaN, .* in row 7"):
        ingest(grid_model(), [(parts[0].X, Y)])


@pytest.mark.parametrize("kind", ["Arrow", "pandas"])
def test_a_batch_with_a_column_twice_is_named(kind: str, parts: list[Observations]) -> None:
    twice, model = table(parts[1]), grid_model()
    twice = twice.append_column("a", twice["b"])
    if kind == "pandas":
        twice = twice.rename_columns(["a", "b", "value", "c"]).to_pandas()
        twice.columns = ["a", "b", "value", "a"]
    batches = [table(parts[0]), twice]
    with pytest.raises(UsageError, match=r"batch 1: it has 2 columns 'a', expected one: rename"):
        ingest(model, batches, **COLUMNS)
    assert ingest(model, batches, **COLUMNS, on_error="skip").skipped[0].key == "batch 1"
    assert model.num_observations == len(parts[0].X)
