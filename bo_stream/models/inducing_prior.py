"""What a kernel says of values that are remembered: the prior that learning moves."""

from __future__ import annotations

from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.inducing import KnownValues, kernel_matrix
from bo_stream.linalg import solve_lower
from bo_stream.models.double_kernel import in_double


def prior_of_values(kernel: Kernel, values: KnownValues, outputs: int) -> Tensor:
    """Covariance of the weights v under a kernel, where ``f(Z) = L v``: ``... x m x M x M``.

    ``L⁻¹ k(Z, Z) L⁻ᵀ``, in float64 whatever the kernel's dtype, differentiable in its parameters;
    the identity for the kernel that L is the root of. Cost O(M³).
    """
    K = in_double(kernel, lambda still: kernel_matrix(still, values.Z, values.Z, outputs))
    half = solve_lower(values.root, K)
    return solve_lower(values.root, half.mT)
