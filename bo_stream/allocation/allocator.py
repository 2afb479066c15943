"""The interface of allocators, in a stream and in BoTorch's models."""

from __future__ import annotations

import math
from abc import abstractmethod
from copy import copy
from numbers import Real
from typing import Any, Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError
from botorch.models.utils.inducing_point_allocators import (
    InducingPointAllocator,
    QualityFunction,
    UnitQualityFunction,
)
from gpytorch.kernels import Kernel
from gpytorch.module import Module
from torch import Tensor

from bo_stream.allocation.selection import greedy_points
from bo_stream.tensors import map_tensors


class Allocator(InducingPointAllocator):
    """Online selection of inducing points Z.

    :meth:`update` is the whole interface; ``allocate_inducing_points`` makes every allocator one
    for BoTorch's ``SingleTaskVariationalGP``.
    """

    _memory: Any = None  # of the inputs seen; replaced, not changed, for copies share it

    def update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        """Select inducing points for the inputs seen so far and X_new; arguments are not changed.

        Args:
            Z: Present inducing points, ``M x d``; M may be 0.
            X_new: ``n x d``; n may be 0.
            kernel: With its present hyperparameters; a batch of kernels (one an output) shares Z.

        Returns:
            ``M' x d``.

        Raises:
            BotorchTensorDimensionError: Z or X_new is not a matrix, or their widths differ.
            InputDataError: Dtypes or devices differ, or there is NaN or infinity.
        """
        check_points("Z", Z, Z)
        check_points("X_new", X_new, Z)
        with torch.no_grad():
            return self._update(Z.detach(), X_new.detach(), kernel)

    @abstractmethod
    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        """Select points as :meth:`update` does, of checked arguments."""

    def fresh(self) -> Self:
        """Return an allocator of the same settings that has seen nothing."""
        twin = copy(self)
        twin._memory = None
        return twin

    def to(self, like: Tensor) -> Self:
        """Return an allocator with the same memory on a tensor's device."""
        twin = copy(self)
        twin._memory = map_tensors(self._memory, lambda tensor: tensor.to(like.device))
        return twin

    def allocate_inducing_points(
        self,
        inputs: Tensor,
        covar_module: Module,
        num_inducing: int,
        input_batch_shape: torch.Size,
    ) -> Tensor:
        """Select at most ``num_inducing`` points for all inputs at once: BoTorch's interface.

        If the allocator selects more, greedy variance thins them. Points of a batch are selected
        for each of its elements; if their numbers differ, greedy variance tops up the fewer from
        the inputs.

        Args:
            inputs: ``(batch_shape) x n x d``.
            covar_module: The kernel.
            num_inducing: Largest number M of points.
            input_batch_shape: Batch shape of the inputs without outputs.

        Returns:
            ``(batch_shape) x M x d``.
        """
        kernel: Kernel = covar_module.to(inputs.device)
        batch = inputs.shape[:-2] if inputs.ndim > 2 else input_batch_shape
        rows = inputs.expand(*batch, *inputs.shape[-2:]).reshape(-1, *inputs.shape[-2:])
        found = [self.fresh().update(X[:0], X, kernel) for X in rows]
        found = [
            Z if len(Z) <= num_inducing else greedy_points(Z, kernel, num_inducing) for Z in found
        ]
        most = max(len(Z) for Z in found)
        filled = [
            Z if len(Z) == most else greedy_points(X, kernel, most, first=Z)
            for Z, X in zip(found, rows, strict=True)
        ]
        return torch.stack(filled).reshape(*batch, most, inputs.shape[-1])

    def _get_quality_function(self) -> QualityFunction:
        """Return the weights of variances in BoTorch's greedy allocators; ours have none."""
        return UnitQualityFunction()


def check_points(name: str, X: Tensor, like: Tensor) -> None:
    """Check that points are a finite matrix of the width, dtype and device of others or their own.

    Raises:
        BotorchTensorDimensionError: They are no matrix, or of another width.
        InputDataError: Another dtype or device, whole numbers, NaN or infinity.
    """
    if X.ndim != 2 or X.shape[-1] != like.shape[-1]:
        width = "d" if like is X else like.shape[-1]
        raise BotorchTensorDimensionError(
            f"Expected {name} of shape `n x {width}`, got {tuple(X.shape)}."
        )
    if X.dtype != like.dtype or X.device != like.device or not X.is_floating_point():
        raise InputDataError(
            f"Expected {name} of a floating dtype, as the other points {like.dtype} on "
            f"{like.device}, got {X.dtype} on {X.device}."
        )
    if not bool(X.isfinite().all()):
        raise InputDataError(f"Expected finite {name}, got NaN or infinity. Drop those rows.")


def checked_number(name: str, value: object, least: int = 1) -> int:
    """Check that an argument is a whole number of at least ``least``, and return it.

    Raises:
        ValueError: It is not.
    """
    number = float(value) if isinstance(value, Real) else math.nan
    if not number >= least or number % 1.0 != 0.0:
        raise ValueError(
            f"Expected {name} to be a whole number of at least {least}, got {value!r}."
        )
    return int(number)
