"""The state of a module at some time, to see later whether it has changed."""

from __future__ import annotations

import torch

State = tuple[torch.Tensor, ...]


def state_of(module: torch.nn.Module) -> State:
    """A copy of all parameters and buffers."""
    tensors = (*module.parameters(), *module.buffers())
    return tuple(tensor.detach().clone() for tensor in tensors)


def is_same(first: State, second: State) -> bool:
    """Whether two states are equal in shape, device and value."""
    return len(first) == len(second) and all(
        a.shape == b.shape and a.device == b.device and torch.equal(a, b)
        for a, b in zip(first, second, strict=True)
    )
