"""What the constructor of a model with inducing points checks and chooses."""

from __future__ import annotations

from copy import deepcopy

import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.utils.types import _DefaultType
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.allocation.numbers import checked_number
from bo_stream.linalg import check_memory
from bo_stream.models.validation import check_finite, check_floating_point, check_type

MEMORY_LIMIT_GIB = 4.0
"""Of all matrices over the inducing points together."""

MATRICES = 3
"""As many of them are held for each output: the kernel's root, the gram, the posterior's root."""


def first_points(
    inducing_points: Tensor | None,
    allocator: Allocator | _DefaultType | None,
    default: Allocator,
    X: Tensor,
) -> tuple[Tensor, Allocator | None]:
    """The points to begin with, ``M x d`` in units of X, and a copy of the allocator.

    Raises:
        ValueError: Neither is given.
        BotorchTensorDimensionError: Points of another shape.
        InputDataError: Points of another dtype or device, or not finite.
        UnsupportedError: An allocator of another kind.
    """
    if isinstance(allocator, _DefaultType):
        allocator = default if inducing_points is None else None
    check_allocator(allocator)
    if inducing_points is None:
        if allocator is None:
            raise ValueError(
                "Expected inducing_points or an allocator, got neither: nothing could be learned."
            )
        return X.new_zeros(0, X.shape[-1]), deepcopy(allocator)
    check_points("inducing_points", inducing_points, X.shape[-1])
    check_type("inducing_points", inducing_points, X)
    return inducing_points.detach().clone(), deepcopy(allocator)


def check_points(name: str, Z: Tensor, dim: int) -> None:
    """Refuse what are no points of ``dim`` inputs.

    Raises:
        BotorchTensorDimensionError: Another shape than ``M x dim``.
        InputDataError: No floating-point tensor, NaN or infinity.
    """
    check_floating_point(name, Z)
    if Z.ndim != 2 or Z.shape[-1] != dim:
        raise BotorchTensorDimensionError(
            f"Expected {name} of shape `M x {dim}`, shared by batch elements and outputs, got "
            f"{tuple(Z.shape)}."
        )
    check_finite(name, Z)


def check_allocator(allocator: object) -> None:
    """Refuse what is no allocator of a stream.

    Raises:
        UnsupportedError: So it is.
    """
    if allocator is not None and not isinstance(allocator, Allocator):
        name = getattr(allocator, "__name__", type(allocator).__name__)
        raise UnsupportedError(
            "Expected allocator to be one of bo_stream.allocation, such as OIPS(0.8), or None, got "
            f"{name}. BoTorch's allocators know no stream: for its GreedyVarianceReduction take "
            "GreedyVariance(max_points)."
        )


def checked_cap(max_points: int, Z: Tensor) -> int:
    """The cap, if the first points fit under it.

    Raises:
        ValueError: They do not, or it is not a positive whole number.
    """
    max_points = checked_number("max_points", max_points)
    if max_points < len(Z):
        raise ValueError(
            f"Expected max_points of at least {len(Z)}, the inducing points given, got "
            f"{max_points}."
        )
    return max_points


def check_points_fit(points: int, outputs: int) -> None:
    """Refuse more inducing points than memory holds matrices of, before one is made.

    Args:
        points: Their number M.
        outputs: Of all batch elements together.

    Raises:
        ValueError: Too many.
    """
    check_memory(
        f"{points:,} inducing points",
        MATRICES * outputs * points**2,
        MEMORY_LIMIT_GIB,
        "Take a smaller max_points, or an allocator that takes fewer.",
    )


def checked_allocation(Z: object, X: Tensor) -> Tensor:
    """What an allocator returned, if it is some finite points.

    Raises:
        InputDataError: It is not, or there is none.
    """
    fits = isinstance(Z, Tensor) and Z.ndim == 2 and Z.shape[-1] == X.shape[-1] and len(Z) > 0
    if not isinstance(Z, Tensor) or not fits or not bool(torch.isfinite(Z).all()):
        shape = tuple(Z.shape) if isinstance(Z, Tensor) else Z
        raise InputDataError(
            f"Expected allocator to return finite inducing points of shape `M x {X.shape[-1]}`, at "
            f"least one, got {shape}."
        )
    return Z.detach().to(X)
