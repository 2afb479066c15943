"""What the constructor of a model with inducing points checks and chooses."""

from __future__ import annotations

from copy import deepcopy

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.utils.types import _DefaultType
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.models.validation import check_finite, check_type


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
    """
    if isinstance(allocator, _DefaultType):
        allocator = default if inducing_points is None else None
    if inducing_points is None:
        if allocator is None:
            raise ValueError(
                "Expected inducing_points or an allocator, got neither: nothing could be learned."
            )
        return X.new_zeros(0, X.shape[-1]), deepcopy(allocator)
    if inducing_points.ndim != 2 or inducing_points.shape[-1] != X.shape[-1]:
        raise BotorchTensorDimensionError(
            f"Expected inducing_points of shape `M x {X.shape[-1]}`, shared by batch elements and "
            f"outputs, got {tuple(inducing_points.shape)}."
        )
    check_type("inducing_points", inducing_points, X)
    check_finite("inducing_points", inducing_points)
    return inducing_points.detach().clone(), deepcopy(allocator)


def checked_cap(max_points: int, Z: Tensor) -> int:
    """The cap, if the first points fit under it.

    Raises:
        ValueError: They do not, or it is not positive.
    """
    if max_points < max(1, len(Z)):
        raise ValueError(
            f"Expected max_points of at least {max(1, len(Z))}, the inducing points given, got "
            f"{max_points}."
        )
    return max_points


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
