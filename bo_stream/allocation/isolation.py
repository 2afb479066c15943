"""Which points are too far from all others to deserve an inducing point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.allocation.correlation import correlation


@dataclass(frozen=True)
class Isolation:
    """A point is isolated if it is unlike even those that are most like it.

    The points compared with are the inducing points and the others of its batch, so a new region is
    entered by ``nearest`` points of one batch, an outlier never. (The outlook of Galy-Fajou and
    Opper (2021), section 5.)

    Attributes:
        below: Correlation below which a point is isolated, in (0, 1).
        nearest: How many of the points most like it are looked at.
        statistic: Of their correlations.
    """

    below: float = 0.1
    nearest: int = 3
    statistic: Literal["median", "mean"] = "median"

    def __post_init__(self) -> None:
        if not 0.0 < self.below < 1.0:
            raise ValueError(f"Expected below in (0, 1), a correlation, got {self.below}.")
        if self.nearest < 1:
            raise ValueError(f"Expected nearest to be at least 1, got {self.nearest}.")
        if self.statistic not in ("median", "mean"):
            raise ValueError(f"Expected statistic 'median' or 'mean', got {self.statistic!r}.")

    def of(self, X: Tensor, Z: Tensor, batch: Tensor, kernel: Kernel) -> Tensor:
        """Which points are isolated, ``n``. Cost O(n (M + rows of the batch)).

        With nothing to compare with, none is.

        Args:
            X: ``n x d``, rows of ``batch``.
            Z: Inducing points, ``M x d``.
            batch: ``b x d``.
            kernel: Of the correlations.
        """
        others = len(Z) + len(batch) - 1
        if others == 0 or len(X) == 0:
            return torch.zeros(len(X), dtype=torch.bool, device=X.device)
        values = correlation(kernel, X, torch.cat((Z, batch)))
        nearest = values.topk(min(self.nearest, others) + 1).values[:, 1:]
        typical = nearest.median(-1).values if self.statistic == "median" else nearest.mean(-1)
        return typical < self.below
