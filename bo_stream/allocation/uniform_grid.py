"""A grid over the box that the inputs span."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.allocation.numbers import checked_number

LIMIT = 10_000
"""More points than this are refused: a model needs the square of them."""


class UniformGrid(Allocator):
    """``size`` points per dimension over the box of all inputs seen, moved as the box grows.

    For one to three dimensions. The box is that of Z and the new inputs, so that Z remembers it. A
    dimension of no extent has one point. Cost O(size^d).
    """

    def __init__(self, size: int) -> None:
        """Set the size.

        Args:
            size: Points per dimension, at least 2.

        Raises:
            ValueError: The size is too small.
        """
        self.size = checked_number("size", size, least=2)

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        pool = torch.cat((Z, X_new))
        if len(pool) == 0:
            return pool
        low, high = pool.amin(0), pool.amax(0)
        self._check(pool.shape[-1])
        steps = torch.linspace(0.0, 1.0, self.size, dtype=pool.dtype, device=pool.device)
        lines = [
            a + (b - a) * steps if b > a else a.unsqueeze(0) for a, b in zip(low, high, strict=True)
        ]
        return torch.cartesian_prod(*lines).reshape(-1, pool.shape[-1])

    def _check(self, dimensions: int) -> None:
        if self.size**dimensions > LIMIT:
            raise ValueError(
                f"Expected a grid of at most {LIMIT:,} points, got {self.size} in each of "
                f"{dimensions} dimensions, {self.size**dimensions:,}. Take a smaller size or OIPS."
            )
