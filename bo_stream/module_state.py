"""The state of a module at some time, to see later whether it has changed."""

from __future__ import annotations

import torch

State = tuple[torch.Tensor, ...]


def state_of(module: torch.nn.Module) -> State:
    """A copy of all parameters and buffers."""
    return tuple(tensor.detach().clone() for tensor in _tensors(module))


def is_in(module: torch.nn.Module, state: State) -> bool:
    """Whether a module's parameters and buffers are what they were."""
    return is_same(_tensors(module), state)


def _tensors(module: torch.nn.Module) -> State:
    return (*module.parameters(), *module.buffers())


def is_same(first: State, second: State) -> bool:
    """Whether two states are equal in shape, device and value."""
    return len(first) == len(second) and all(
        a.shape == b.shape and a.device == b.device and torch.equal(a, b)
        for a, b in zip(first, second, strict=True)
    )
