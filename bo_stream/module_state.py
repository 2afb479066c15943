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
    """Whether two states are equal in shape, device and value.

    On a device the host waits for each comparison, so that there one serves all tensors.
    """
    elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if a.shape != b.shape or a.device != b.device:
            return False
        if not a.is_cpu:
            elsewhere.append((a, b))
        elif not torch.equal(a, b):
            return False
    return not elsewhere or _are_equal(elsewhere)


@torch.no_grad()
def _are_equal(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether tensors of equal shapes are equal, by one comparison of each dtype."""
    if any(a.dtype != b.dtype for a, b in pairs):
        return False
    dtypes = {a.dtype for a, _ in pairs}
    together = [[(a.flatten(), b.flatten()) for a, b in pairs if a.dtype == t] for t in dtypes]
    return all(torch.equal(*map(torch.cat, zip(*some, strict=True))) for some in together)
