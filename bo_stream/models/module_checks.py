"""Checks of the modules that a model is built with: kernel, mean, likelihood and transforms."""

from __future__ import annotations

from types import UnionType
from typing import get_args

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel


def check_instance(name: str, value: object, kind: type | UnionType, example: str) -> None:
    """Check that an argument is an instance of a class, or of one of several.

    Args:
        name: Of the argument.
        value: That was given.
        kind: The class, or a union of classes.
        example: What to pass, as code.

    Raises:
        UnsupportedError: It is none, or a class instead of an instance of it.
    """
    if not isinstance(value, kind):
        kinds = " or ".join(one.__name__ for one in get_args(kind) or (kind,))
        raise UnsupportedError(
            f"Expected {name} to be an instance of {kinds}, such as {example}, got "
            f"{spelled(value)}."
        )


def spelled(value: object) -> str:
    """What was given in place of an instance, for a message."""
    return f"the class {value.__name__}" if isinstance(value, type) else repr(value)


def check_kernel(kernel: Kernel, dim: int, shape: torch.Size) -> None:
    """Check that a kernel is one of a model's inputs and outputs.

    Args:
        kernel: That was given as ``covar_module``.
        dim: Number of inputs as the kernel has them.
        shape: ``batch_shape (x m if m > 1)`` of the model.

    Raises:
        UnsupportedError: It is no kernel, or one of another number of inputs or batch shape.
    """
    check_instance("covar_module", kernel, Kernel, "ScaleKernel(RBFKernel(ard_num_dims=d))")
    check_batch_shape("covar_module", kernel.batch_shape, shape)
    _check_active(kernel, dim)


def check_batch_shape(name: str, given: torch.Size, shape: torch.Size) -> None:
    """Check that a module's batch shape broadcasts to a model's.

    Raises:
        UnsupportedError: It does not.
    """
    fits = len(given) <= len(shape) and all(
        own in (1, size) for own, size in zip(reversed(given), reversed(shape), strict=False)
    )
    if not fits:
        raise UnsupportedError(
            f"Expected {name} of batch shape {tuple(shape)}, `batch_shape x m` without m if that "
            f"is 1, or of none, got {tuple(given)}."
        )


def _check_active(kernel: Kernel, width: int) -> None:
    """Check a kernel that chooses its active inputs among ``width``."""
    active: torch.Tensor | None = kernel.active_dims
    if active is not None and int(active.max()) >= width:
        raise UnsupportedError(
            f"Expected active_dims of {type(kernel).__name__} below {width}, the number of inputs "
            f"that it gets, got {active.tolist()}."
        )
    _check_width(kernel, width if active is None else len(active))


def _check_width(kernel: Kernel, width: int) -> None:
    """Check a kernel of ``width`` active inputs, and those that it is known to be made of."""
    if kernel.ard_num_dims not in (None, width):
        raise UnsupportedError(
            f"Expected ard_num_dims={width} of {type(kernel).__name__}, the number of inputs that "
            f"it gets, got {kernel.ard_num_dims}."
        )
    if isinstance(kernel, ScaleKernel):
        _check_width(kernel.base_kernel, width)  # whose active inputs it has chosen itself
    elif isinstance(kernel, AdditiveKernel | ProductKernel):
        for part in kernel.kernels:
            _check_active(part, width)
