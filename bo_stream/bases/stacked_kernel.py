"""A kernel at inputs that differ between outputs."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from torch import Tensor


def stacked_kernel(kernel: Kernel, A: Tensor, B: Tensor, outputs: int) -> Tensor:
    """``k(A, B)``, ``... x m x n x d`` and ``... x m x n' x d`` to ``... x m x n x n'``.

    Args:
        kernel: Of batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs.
        A: Leading dimensions broadcast; of one output its dimension too.
        B: The same.
        outputs: m.
    """
    if outputs == 1:
        matrix: Tensor = kernel(A.squeeze(-3), B.squeeze(-3)).to_dense()
        return matrix.unsqueeze(-3)
    batch = (*A.shape[:-3], outputs)
    return kernel(A.expand(*batch, *A.shape[-2:]), B).to_dense()


def stacked_correlation(kernel: Kernel, A: Tensor, B: Tensor, outputs: int) -> Tensor:
    """``k(a, b) / √(k(a, a) k(b, b))``, differentiable; arguments as :func:`stacked_kernel`.

    A point without prior variance is correlated with nothing.
    """
    raw = stacked_kernel(kernel, A, B, outputs)
    first, second = (stacked_variance(kernel, X, outputs) for X in (A, B))
    square = first.unsqueeze(-1) * second.unsqueeze(-2)
    return raw / torch.where(square > 0.0, square, torch.inf).sqrt()


def stacked_variance(kernel: Kernel, X: Tensor, outputs: int) -> Tensor:
    """``k(x, x)``, ``... x m x n x d -> ... x m x n``; arguments as :func:`stacked_kernel`."""
    if outputs == 1:
        variance: Tensor = kernel(X.squeeze(-3), diag=True)
        return variance.unsqueeze(-2)
    return kernel(X.expand(*X.shape[:-3], outputs, *X.shape[-2:]), diag=True)
