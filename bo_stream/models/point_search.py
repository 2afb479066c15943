"""Inducing points moved by the gradient of a bound."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bo_stream.models.lbfgs import climb


def moved_points(bound: Callable[[Tensor], Tensor], Z: Tensor, maxiter: int) -> Tensor:
    """Points that are at a local maximum of a bound, or on the way there after ``maxiter`` steps.

    By L-BFGS with a line search, from where they are; never worse than there.

    Args:
        bound: A differentiable scalar of ``M x d`` points.
        Z: Where to begin, ``M x d``.
        maxiter: Most iterations.
    """
    start = Z.detach().clone()
    points = start.clone().requires_grad_(True)
    climb(lambda: bound(points), [points], maxiter)
    reached = points.detach()
    with torch.no_grad():
        better = bool(reached.isfinite().all()) and bool(bound(reached) >= bound(start))
    return reached if better else start
