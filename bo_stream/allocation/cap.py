"""No more inducing points than a cap: which of them go."""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.allocation.correlation import correlation
from bo_stream.linalg import safe_cholesky, solve_lower

BETTER = 2.0
"""A new point takes an old one's place if the others leave this many times more of it unknown."""

SWAPS = 8
"""Most points that change place at a time."""


@torch.no_grad()
def capped(Z: Tensor, wanted: Tensor, kernel: Kernel, cap: int) -> Tensor:
    """At most ``cap`` of the points that an allocator wants, given those of before.

    Old points that are still wanted stay, then new ones enter while there is room. Beyond that a
    new point enters only in place of the old one that the others explain best, and only if its own
    conditional variance is more than ``BETTER`` times that one's. Cost O(M³) where the cap binds.

    Args:
        Z: Points of before, ``M x d``.
        wanted: ``M' x d``.
        kernel: Of the variances.
        cap: Largest number.
    """
    if len(wanted) <= cap:
        return wanted
    old = members(wanted, Z)
    kept, new = wanted[old][:cap], torch.cat((wanted[old][cap:], wanted[~old]))
    room = cap - len(kept)
    kept, new = torch.cat((kept, new[:room])), new[room:]
    for _ in range(min(SWAPS, len(new))):
        swap = _best_swap(kept, new, kernel)
        if swap is None:
            break
        leaves, enters = swap
        kept = torch.cat((kept[:leaves], kept[leaves + 1 :], new[enters : enters + 1]))
        new = torch.cat((new[:enters], new[enters + 1 :]))
    return kept


def members(points: Tensor, others: Tensor) -> Tensor:
    """Which rows are among others, ``n``."""
    if len(others) == 0:
        return torch.zeros(len(points), dtype=torch.bool, device=points.device)
    return (points.unsqueeze(-2) == others).all(-1).any(-1)


def _best_swap(kept: Tensor, new: Tensor, kernel: Kernel) -> tuple[int, int] | None:
    """Indices of the point to leave and of that to enter, or None where no exchange pays.

    None does either where the kernel's values are too wrong to be factorised.
    """
    try:
        factor = safe_cholesky(correlation(kernel, kept, kept))
    except NotPSDError:
        return None
    own = torch.cholesky_inverse(factor).diagonal().reciprocal()
    features = solve_lower(factor, correlation(kernel, kept, new))
    left = 1.0 - features.square().sum(-2)
    leaves, enters = int(own.argmin()), int(left.argmax())
    return (leaves, enters) if float(left[enters]) > BETTER * float(own[leaves]) else None
