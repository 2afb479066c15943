"""A kernel's values in another dtype, differentiable in its parameters."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

Rule = Callable[[Kernel], Tensor]


class _Asked(torch.nn.Module):
    """A kernel as a module that is called with what to ask it."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, rule: Rule) -> Tensor:
        return rule(self.kernel)


def in_dtype(kernel: Kernel, dtype: torch.dtype, rule: Rule) -> Tensor:
    """What a rule makes of a copy of the kernel in a dtype, with the same parameters."""
    still = _Asked(deepcopy(kernel).to(dtype).eval())
    parameters = {f"kernel.{name}": p.to(dtype) for name, p in kernel.named_parameters()}
    value: Tensor = torch.func.functional_call(still, parameters, (rule,))
    return value
