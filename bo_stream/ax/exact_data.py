"""Outcomes in Ax's storage with all their digits."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd
from ax.core.data import Data


def data_as_json(data: Data) -> dict[str, Any]:
    """What Ax's JSON storage is given for data, in Ax's format."""
    frame = {"__type": "DataFrame", "value": frame_as_json(data.full_df)}
    return {"__type": type(data).__name__, "df": frame}


def frame_as_json(frame: pd.DataFrame) -> str:
    """As ``frame.to_json()``, which writes ten decimals: of an outcome of 1e-12 nothing is left.

    Args:
        frame: Of numbers and strings; what is not finite is written as null, as pandas does.
    """
    columns = frame.astype(object).to_dict()
    return json.dumps(
        {
            name: {row: _finite(value) for row, value in column.items()}
            for name, column in columns.items()
        }
    )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
