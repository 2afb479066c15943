"""A kernel's values in another dtype, differentiable in its parameters."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Generic, TypeVar

import torch
from torch import Tensor

M = TypeVar("M", bound=torch.nn.Module)


class _Asked(torch.nn.Module, Generic[M]):
    """A module as one that is called with what to ask it."""

    def __init__(self, module: M) -> None:
        super().__init__()
        self.module = module

    def forward(self, rule: Callable[[M], Tensor]) -> Tensor:
        return rule(self.module)


def in_dtype(module: M, dtype: torch.dtype, rule: Callable[[M], Tensor]) -> Tensor:
    """What a rule makes of a copy of a kernel, or of modules, in a dtype, with its parameters."""
    still = _Asked(deepcopy(module).to(dtype).eval())
    parameters = {f"module.{name}": p.to(dtype) for name, p in module.named_parameters()}
    value: Tensor = torch.func.functional_call(still, parameters, (rule,))
    return value
