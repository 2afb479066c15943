"""A basis at inducing points, whatever they are: those that others determine are left out."""

from __future__ import annotations

from dataclasses import replace

import torch
from gpytorch.kernels import Kernel
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.bases.inducing import InducingBasis, frozen, kernel_matrix
from bo_stream.bases.members import central
from bo_stream.linalg import independent_rows
from bo_stream.models.streaming_gp import StreamingGP


@torch.no_grad()
def basis_of_independent(kernel: Kernel, Z: Tensor, outputs: int) -> InducingBasis:
    """A basis at Z, or at fewer points where even the largest jitter does not make it one.

    Kernel values can be so wrong that no jitter helps: gpytorch squares distances from the mean of
    the points, and one that is 1e8 lengthscales away leaves none of the others' digits. So points
    beyond ``FAR`` go first; if that is not enough, those that the others determine.

    Args:
        kernel: As in :meth:`InducingBasis.of`.
        Z: ``M x d``.
        outputs: m.

    Raises:
        NotPSDError: The kernel's values are NaN or infinite.
    """
    try:
        return InducingBasis.of(kernel, Z, outputs)
    except NotPSDError:
        basis = _of_some(kernel, Z[central(Z)], outputs)
        return replace(basis, left_out=len(Z) - basis.rank)


def _of_some(kernel: Kernel, near: Tensor, outputs: int) -> InducingBasis:
    try:
        return InducingBasis.of(kernel, near, outputs)
    except NotPSDError:
        matrix = kernel_matrix(frozen(kernel), near, near, outputs)
        if not bool(matrix.isfinite().all()):
            raise
        return InducingBasis.of(kernel, near[independent_rows(matrix)], outputs)


def log_basis(model: StreamingGP, basis: InducingBasis) -> None:
    """Put on a model's record what a basis took."""
    if basis.left_out > 0:
        model.log_event("inducing points left out", basis.rank + basis.left_out)
    if basis.jitter > 0.0:
        model.log_event("jitter on the kernel matrix of inducing points", basis.rank, basis.jitter)
