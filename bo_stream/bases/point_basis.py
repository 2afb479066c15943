"""Kernel functions at points, as many as there are data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.inducing import kernel_matrix, kernel_variance
from bo_stream.bases.sampled_basis import SampledBasis

_CHUNK = 4096


@dataclass(frozen=True)
class KernelFunctions(SampledBasis):
    """``φ_r(x) = k(x, z_r)``, whatever their prior.

    Attributes:
        kernel: Any, of batch shape ``m`` for m > 1 outputs, or none.
        Z: ``p x d``.
        outputs: m.
    """

    kernel: Kernel
    Z: Tensor
    outputs: int

    def with_kernel(self, kernel: Kernel, outputs: int) -> Self:
        """At the same points."""
        return replace(self, kernel=kernel, outputs=outputs)

    @property
    def size(self) -> int:
        """Number p of points."""
        return len(self.Z)

    def functions(self, X: Tensor, index: Tensor) -> Tensor:
        """``... x n x d`` and ``k`` to ``... x m x n x k``."""
        return kernel_matrix(self.kernel, X, self.Z[index].to(X), self.outputs)

    def mean_squares(self, X: Tensor) -> Tensor:
        """At the inputs themselves, some points at a time. Cost O(n p)."""
        parts = torch.arange(self.size, device=X.device).split(_CHUNK)
        return torch.cat([self.functions(X, part).square().mean(-2) for part in parts], -1)


@dataclass(frozen=True)
class PointBasis(KernelFunctions):
    """With ``S = K_ZZ``: inducing points, and the exact prior at them.

    With Z = X the posterior mean of the exact GP is among what it can be. [Evans2020, section I.2]
    """

    @property
    def is_diagonal(self) -> bool:
        """Never."""
        return False

    def precision(self, index: Tensor, others: Tensor) -> Tensor:
        """``k(Z[index], Z[others])``, ``m x k x k'``."""
        return kernel_matrix(self.kernel, self.Z[index], self.Z[others], self.outputs)

    def precision_diagonal(self, index: Tensor) -> Tensor:
        """``k(z, z)``, ``m x k``."""
        return kernel_variance(self.kernel, self.Z[index], self.outputs)


@dataclass(frozen=True)
class RelevanceBasis(KernelFunctions):
    """With ``S = diag(s)``: each function has a precision of its own.

    [Tipping2001; Evans2020, section I.3]

    Attributes:
        precisions: s, ``m x p``.
    """

    precisions: Tensor

    @property
    def is_diagonal(self) -> bool:
        """Always."""
        return True

    def precision(self, index: Tensor, others: Tensor) -> Tensor:
        """``S[index, others]``, ``m x k x k'``."""
        same = index.unsqueeze(-1) == others
        return self.precisions[:, index].unsqueeze(-1) * same

    def precision_diagonal(self, index: Tensor) -> Tensor:
        """s, ``m x k``."""
        return self.precisions[:, index]
