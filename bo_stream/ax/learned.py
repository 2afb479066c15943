"""What a model has learned, as plain values that Ax stores with each generator run."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from bo_stream.models.streaming_gp import StreamingGP

INPUTS = "input_transform."
"""Prefix of what the search space gives."""


class Record(TypedDict):
    """Hyperparameters and standardisation as a refit left them.

    Attributes:
        count: Number of observations at that refit.
        bounds: Of the search space then.
        floor: What known noise variances are raised to.
        values: By name in ``state_dict``, nested lists.
    """

    count: int
    bounds: list[list[float]]
    floor: float
    values: dict[str, Any]


def recorded(
    model: StreamingGP, count: int, bounds: list[tuple[float, float]], floor: float
) -> Record:
    """The record of a refit.

    Args:
        model: Just refitted.
        count: Its number of observations.
        bounds: A pair per input.
        floor: Of noise variances.
    """
    values = {name: value.tolist() for name, value in _state(model).items()}
    pairs = [list(pair) for pair in bounds]
    return Record(count=count, bounds=pairs, floor=floor, values=values)


def restore(model: StreamingGP, record: Record) -> bool:
    """Give a new model what one of the same shape had learned; whether it has that shape.

    Args:
        model: Changed in place.
        record: Of another model.
    """
    state = _state(model)
    former = {name: torch.tensor(value) for name, value in record["values"].items()}
    if {name: value.shape for name, value in former.items()} != {
        name: value.shape for name, value in state.items()
    }:
        return False
    values = {name: _read(record["values"][name], value) for name, value in state.items()}
    model.load_state_dict({**model.state_dict(), **values})
    return True


def _state(model: StreamingGP) -> dict[str, Tensor]:
    return {name: v for name, v in model.state_dict().items() if not name.startswith(INPUTS)}


def _read(value: Any, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=like.dtype, device=like.device)
