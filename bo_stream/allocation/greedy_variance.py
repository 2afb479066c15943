"""Greedy variance over old and new points."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.allocation.greedy import TOLERANCE, greedy_points
from bo_stream.allocation.numbers import checked_number


class GreedyVariance(Allocator):
    """At most ``max_points``, chosen anew each time among the present ones and the new inputs.

    Each choice is the candidate with the largest prior variance given those before it: partial
    pivoted Cholesky (Burt, Rasmussen and van der Wilk, 2020). Cost O((M + n) M²) an update.
    """

    def __init__(self, max_points: int, tolerance: float = TOLERANCE) -> None:
        """Set the number.

        Args:
            max_points: Largest number M.
            tolerance: Stop where no candidate keeps this part of its prior variance.

        Raises:
            ValueError: The number is not positive, or the tolerance not in [0, 1).
        """
        self.max_points = checked_number("max_points", max_points)
        if not 0.0 <= tolerance < 1.0:
            raise ValueError(f"Expected tolerance in [0, 1), got {tolerance}.")
        self.tolerance = tolerance

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        pool = torch.cat((Z, X_new))
        return greedy_points(pool, kernel, self.max_points, tolerance=self.tolerance)
