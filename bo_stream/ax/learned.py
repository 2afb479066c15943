"""What a model has learned, as plain values that Ax stores with each generator run."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from gpytorch.constraints import Interval
from gpytorch.priors import Prior
from torch import Tensor

from bo_stream.models.streaming_gp import StreamingGP

INPUTS = "input_transform."
"""Prefix of what the search space gives."""


class Record(TypedDict):
    """Hyperparameters and standardisation as a refit left them.

    Attributes:
        count: Number of observations at that refit.
        bounds: Of the search space then.
        unit: In which the model had the outcomes.
        floor: What known noise variances are raised to.
        values: By name in ``state_dict``, nested lists; bounds and priors are not among them, for
            they are not learned.
    """

    count: int
    bounds: list[list[float]]
    unit: float
    floor: float
    values: dict[str, Any]


def values_of(model: StreamingGP) -> dict[str, Any]:
    """What a model has learned, as a record has it."""
    return {name: value.tolist() for name, value in _state(model).items()}


def restore(model: StreamingGP, record: Record) -> bool:
    """Give a new model what one of the same shape had learned; whether it has that shape.

    Args:
        model: Changed in place.
        record: Of another model.
    """
    state, former = _state(model), record["values"]
    if former.keys() != state.keys():
        return False
    values = {name: _read(former[name], value) for name, value in state.items()}
    if any(values[name].shape != value.shape for name, value in state.items()):
        return False
    model.load_state_dict({**model.state_dict(), **values})
    return True


def _state(model: StreamingGP) -> dict[str, Tensor]:
    given = (INPUTS, *_bounds_and_priors(model))
    return {name: v for name, v in model.state_dict().items() if not name.startswith(given)}


def _bounds_and_priors(model: StreamingGP) -> list[str]:
    modules = model.named_modules()
    return [f"{name}." for name, part in modules if isinstance(part, Interval | Prior)]


def _read(value: Any, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=like.dtype, device=like.device)
