"""What a kernel says of values that are remembered: the prior that learning moves."""

from __future__ import annotations

from copy import deepcopy

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.inducing import KnownValues, kernel_matrix
from bo_stream.linalg import solve_lower


class _Dense(torch.nn.Module):
    """A kernel as a function that returns numbers, not something lazy."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, Z: Tensor, outputs: int) -> Tensor:
        return kernel_matrix(self.kernel, Z, Z, outputs)


def prior_of_values(kernel: Kernel, values: KnownValues, outputs: int) -> Tensor:
    """Covariance of the weights v under a kernel, where ``f(Z) = L v``: ``... x m x M x M``.

    ``L⁻¹ k(Z, Z) L⁻ᵀ``, in float64 whatever the kernel's dtype, differentiable in its parameters;
    the identity for the kernel that L is the root of. Cost O(M³).
    """
    still = _Dense(deepcopy(kernel).double().eval())
    parameters = {f"kernel.{name}": p.double() for name, p in kernel.named_parameters()}
    K = torch.func.functional_call(still, parameters, (values.Z, outputs))
    half = solve_lower(values.root, K)
    return solve_lower(values.root, half.mT)
