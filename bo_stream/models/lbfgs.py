"""L-BFGS with a line search, on torch's tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def climb(bound: Callable[[], Tensor], variables: list[Tensor], maxiter: int) -> None:
    """Move tensors to where a bound is at a local maximum, or on the way there; in place.

    Args:
        bound: A differentiable scalar of them.
        variables: Leaves that require gradients.
        maxiter: Most iterations.
    """
    optimizer = torch.optim.LBFGS(variables, max_iter=maxiter, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -bound()
        value.backward()
        return value.detach()

    optimizer.step(loss)
