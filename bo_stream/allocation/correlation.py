"""Correlations of a kernel: what OIPS compares with its threshold."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from torch import Tensor


@torch.no_grad()
def correlation(kernel: Kernel, A: Tensor, B: Tensor) -> Tensor:
    """``k(a, b) / √(k(a, a) k(b, b))``, ``n x d`` and ``m x d`` to ``n x m``.

    Of a batch of kernels the least: points are alike only if they are so to every kernel. A point
    without prior variance is correlated with nothing. Cost O(n m d) a kernel.
    """
    raw: Tensor = kernel(A, B).to_dense()
    scale = (_variance(kernel, A).unsqueeze(-1) * _variance(kernel, B).unsqueeze(-2)).sqrt()
    values = torch.where(scale > 0.0, raw / scale, torch.zeros_like(raw))
    return values.flatten(0, -3).amin(0) if values.ndim > 2 else values


def _variance(kernel: Kernel, X: Tensor) -> Tensor:
    variance: Tensor = kernel(X, diag=True)
    return variance
