"""Some of a model's outputs: their indices, modules and moments of optimisers."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from gpytorch import Module
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.priors import Prior
from torch import Tensor

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP

M = TypeVar("M", bound="StreamingGP")


def check_outputs_exist(outputs: list[int], of: int, name: str = "idcs") -> None:
    """Check indices of outputs.

    Raises:
        UnsupportedError: An index is out of range or repeated, or there are none.
    """
    if not outputs or len(set(outputs)) != len(outputs) or not all(0 <= i < of for i in outputs):
        raise UnsupportedError(
            f"Expected {name} to hold distinct outputs in 0 to {of - 1}, got {outputs}."
        )


def chosen_outputs(output_indices: list[int], of: int) -> list[int] | None:
    """Count the outputs that a posterior is asked for from the first; None: all, in their order.

    Raises:
        UnsupportedError: An index is out of range or repeated.
    """
    chosen = [i + of if -of <= i < 0 else i for i in output_indices]
    check_outputs_exist(chosen, of, "output_indices")
    return None if chosen == list(range(of)) else chosen


def subset_module(
    module: torch.nn.Module, batch_shape: torch.Size, of: int, outputs: list[int]
) -> torch.nn.Module:
    """Copy a gpytorch module of batch shape ``batch_shape x of`` for some outputs.

    A module that all outputs share is copied as it is.
    """
    copied = deepcopy(module)
    if of == 1:
        return copied
    old = torch.Size((*batch_shape, of))
    new = torch.Size((*batch_shape, *([len(outputs)] if len(outputs) > 1 else [])))
    for part in copied.modules():
        if isinstance(part, Kernel) and part.batch_shape != old:
            continue  # shared by all outputs
        if isinstance(part, InputTransform) or not isinstance(part, Module | Prior | Interval):
            continue  # a transform or a layer of a network: its values are not of outputs
        _subset_tensors(part, old, outputs)
        for name in ("batch_shape", "_batch_shape"):
            if part.__dict__.get(name) == old:
                part.__dict__[name] = new
    return copied


def subset_moments(
    moments: dict[str, Any], batch_shape: torch.Size, of: int, outputs: list[int]
) -> dict[str, Any]:
    """Copy Adam's state for the parameters that :func:`subset_module` leaves."""
    copied = deepcopy(moments)
    old = torch.Size((*batch_shape, of))
    for state in copied["state"].values() if of > 1 else ():
        for name, value in state.items():
            if value.shape[: len(old)] == old:
                state[name] = _pick(value, len(old) - 1, outputs)
    return copied


def _subset_tensors(part: torch.nn.Module, old: torch.Size, outputs: list[int]) -> None:
    for parameter in part._parameters.values():
        if parameter is not None and parameter.shape[: len(old)] == old:
            parameter.data = _pick(parameter.data, len(old) - 1, outputs)
    for store in (part._buffers, part.__dict__):
        for name, value in store.items():
            if name == "active_dims":
                continue  # as many as inputs, not as outputs
            if isinstance(value, Tensor) and value.shape[: len(old)] == old:
                store[name] = _pick(value, len(old) - 1, outputs)


def _pick(value: Tensor, dimension: int, outputs: list[int]) -> Tensor:
    chosen = value.index_select(dimension, torch.tensor(outputs, device=value.device))
    return chosen.squeeze(dimension) if len(outputs) == 1 else chosen
