"""Outcomes in Ax's storage with all their digits."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd
from ax.core.data import Data, DataRow


def data_as_json(data: Data) -> dict[str, Any]:
    """What Ax's JSON storage is given for data, in Ax's format.

    Ax stores each trial's data by themselves, and its frames take milliseconds each: rows without
    times are written as they are, which is four times as fast for a whole experiment.
    """
    rows = data._data_rows
    is_plain = rows and all(row.start_time is None and row.end_time is None for row in rows)
    value = _rows_as_json(rows) if is_plain else frame_as_json(data.full_df)
    return {"__type": type(data).__name__, "df": {"__type": "DataFrame", "value": value}}


def _rows_as_json(rows: list[DataRow]) -> str:
    """As :func:`frame_as_json` of the frame that Ax makes of them, in the rows' own order."""
    columns: dict[str, list[Any]] = {
        "trial_index": [row.trial_index for row in rows],
        "arm_name": [row.arm_name for row in rows],
        "metric_name": [row.metric_name for row in rows],
        "metric_signature": [row.metric_signature for row in rows],
        "mean": [float(row.mean) for row in rows],
        "sem": [float(row.se) for row in rows],
        "step": [row.step for row in rows],
        "n": [row.n for row in rows],
    }
    optional = {name for name in ("step", "n") if all(each is None for each in columns[name])}
    return json.dumps(
        {
            name: {str(row): _finite(value) for row, value in enumerate(values)}
            for name, values in columns.items()
            if name not in optional
        }
    )


def frame_as_json(frame: pd.DataFrame) -> str:
    """As ``frame.to_json()``, which writes ten decimals: of an outcome of 1e-12 nothing is left.

    Args:
        frame: Of numbers, strings and times; what is not finite is written as null, as pandas does.
    """
    columns = frame.astype(object).to_dict()
    return json.dumps(
        {
            name: {row: _finite(value) for row, value in column.items()}
            for name, column in columns.items()
        }
    )


def _finite(value: Any) -> Any:
    if value is pd.NaT:
        return None
    if isinstance(value, pd.Timestamp):
        return value.value // 1_000_000  # milliseconds, as pandas writes and reads them
    return None if isinstance(value, float) and not math.isfinite(value) else value
