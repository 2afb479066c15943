"""The lengthscales that a kernel is made of."""

from __future__ import annotations

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel
from torch import Tensor


def lengthscales(kernel: Kernel) -> list[Tensor]:
    """Of a kernel and its parts."""
    return [
        part.lengthscale.detach()
        for part in kernel.modules()
        if isinstance(part, Kernel) and part.has_lengthscale
    ]


def shortest_lengthscale(kernel: Kernel) -> Tensor:
    """The least of all lengthscales in a kernel and its parts, a scalar.

    Raises:
        UnsupportedError: It has none.
    """
    found = [lengthscale.min() for lengthscale in lengthscales(kernel)]
    if not found:
        raise UnsupportedError(
            f"{type(kernel).__name__} has no lengthscale that a resolution could follow. Leave out "
            "per_lengthscale and give the resolution in units of the inputs."
        )
    return torch.stack(found).min()
