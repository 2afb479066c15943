"""The kernel at the centres of clusters, wherever they are."""

from __future__ import annotations

from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.far_points import matrix_between
from bo_stream.bases.inducing import kernel_matrix
from bo_stream.models.kernel_copy import in_dtype


def cross_matrix(kernel: Kernel, A: Tensor, B: Tensor, outputs: int) -> Tensor:
    """``k(A, B)``, ``... x m x n x n'``; see :func:`matrix_between`.

    Args:
        kernel: Of batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs.
        A: ``... x n x d``, in the kernel's dtype.
        B: ``... x n' x d``.
        outputs: m.
    """
    return matrix_between(lambda A, B: kernel_matrix(kernel, A, B, outputs), A, B)


def centre_matrix(kernel: Kernel, Z: Tensor, outputs: int) -> Tensor:
    """``k(Z, Z)`` of centres ``M x d``, ``... x m x M x M``."""
    return cross_matrix(kernel, Z, Z, outputs)


def differentiable_centre_matrix(kernel: Kernel, Z: Tensor, outputs: int) -> Tensor:
    """The same, in the dtype of Z, differentiable in the kernel's parameters."""
    return in_dtype(kernel, Z.dtype, lambda copy: centre_matrix(copy, Z, outputs))
