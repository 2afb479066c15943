"""What a kernel says of values that are remembered: the prior that learning moves."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Generic, TypeVar

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.inducing import KnownValues, kernel_matrix

M = TypeVar("M", bound=torch.nn.Module)


class _Asked(torch.nn.Module, Generic[M]):
    """A module as one that is called with what to ask it."""

    def __init__(self, module: M) -> None:
        super().__init__()
        self.module = module

    def forward(self, rule: Callable[[M], Tensor]) -> Tensor:
        return rule(self.module)


def in_dtype(module: M, dtype: torch.dtype, rule: Callable[[M], Tensor]) -> Tensor:
    """Apply a rule to a copy of a module in a dtype, differentiable in the module's parameters."""
    still = _Asked(deepcopy(module).to(dtype).eval())
    parameters = {f"module.{name}": p.to(dtype) for name, p in module.named_parameters()}
    value: Tensor = torch.func.functional_call(still, parameters, (rule,))
    return value


def differentiable_matrix(kernel: Kernel, A: Tensor, B: Tensor, outputs: int) -> Tensor:
    """``k(A, B)``, ``... x m x n x n'``, differentiable in the kernel's parameters.

    Args:
        kernel: Of batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs.
        A: ``... x n x d``, in the dtype to compute in, whatever the kernel's.
        B: ``... x n' x d``.
        outputs: m.
    """
    return in_dtype(kernel, A.dtype, lambda copy: kernel_matrix(copy, A, B, outputs))


def prior_of_values(kernel: Kernel, values: KnownValues, outputs: int) -> Tensor:
    """Covariance of the weights v under a kernel, where ``f(Z) = L v``: ``... x m x M x M``.

    ``L⁻¹ k(Z, Z) L⁻ᵀ``, in float64 whatever the kernel's dtype, differentiable in its parameters;
    the identity for the kernel that L is the whole root of. Cost O(M³).
    """
    K = differentiable_matrix(kernel, values.Z, values.Z, outputs)
    return values.weights(values.weights(K).mT)
