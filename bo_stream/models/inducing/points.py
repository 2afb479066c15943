"""Inducing points: the basis at them, and checks of points and of allocators."""

from __future__ import annotations

from dataclasses import replace

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from gpytorch.kernels import Kernel
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.bases.inducing import InducingBasis, central, frozen, kernel_matrix
from bo_stream.linalg import check_memory, independent_rows
from bo_stream.models.checks import check_finite, check_floating_point

MEMORY_LIMIT_GIB = 4.0
"""Of all matrices over the inducing points together."""

MATRICES = 3
"""As many of them are held for each output: the kernel's root, the gram, the posterior's root."""


@torch.no_grad()
def basis_of_independent(kernel: Kernel, Z: Tensor, outputs: int) -> InducingBasis:
    """Return the basis at Z, or at fewer points where even the largest jitter gives none.

    Kernel values can be so wrong that no jitter helps: gpytorch squares distances from the mean of
    the points, and one that is 1e8 lengthscales away leaves none of the others' digits. So points
    beyond ``FAR`` go first; if that is not enough, those that the others determine. NotPSDError:
    the kernel's values are NaN or infinite.
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


def check_points(name: str, Z: Tensor, dim: int, most: int) -> None:
    """Check that a tensor holds finite points of ``dim`` inputs, ``most`` of them or fewer."""
    check_floating_point(name, Z)
    if Z.ndim != 2 or Z.shape[-1] != dim:
        raise BotorchTensorDimensionError(
            f"Expected {name} of shape `M x {dim}`, shared by batch elements and outputs, got "
            f"{tuple(Z.shape)}."
        )
    check_finite(name, Z)
    if most < len(Z):
        raise ValueError(
            f"Expected max_points of at least {len(Z)}, the inducing points given, got {most}."
        )


def check_allocator(allocator: object) -> None:
    """Check that an allocator is one of a stream, or None."""
    if allocator is not None and not isinstance(allocator, Allocator):
        name = getattr(allocator, "__name__", type(allocator).__name__)
        raise UnsupportedError(
            "Expected allocator to be one of bo_stream.allocation, such as OIPS(0.8), or None, got "
            f"{name}. BoTorch's allocators know no stream: for its GreedyVarianceReduction take "
            "GreedyVariance(max_points)."
        )


def check_points_fit(points: int, outputs: int) -> None:
    """Check that matrices over M points fit into memory, for outputs of all batch elements."""
    check_memory(
        f"{points:,} inducing points",
        MATRICES * outputs * points**2,
        MEMORY_LIMIT_GIB,
        "Take a smaller max_points, or an allocator that takes fewer.",
    )


def checked_allocation(Z: object, X: Tensor) -> Tensor:
    """Check what an allocator returned, and bring it to the dtype and device of X."""
    fits = isinstance(Z, Tensor) and Z.ndim == 2 and Z.shape[-1] == X.shape[-1] and len(Z) > 0
    if not isinstance(Z, Tensor) or not fits or not bool(torch.isfinite(Z).all()):
        shape = tuple(Z.shape) if isinstance(Z, Tensor) else Z
        raise InputDataError(
            f"Expected allocator to return finite inducing points of shape `M x {X.shape[-1]}`, at "
            f"least one, got {shape}."
        )
    return Z.detach().to(X)
