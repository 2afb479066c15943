"""Cluster centres that follow the stream."""

from __future__ import annotations

from copy import copy

import numpy as np
import torch
from gpytorch.kernels import Kernel
from scipy.cluster.vq import kmeans2
from torch import Tensor

from bo_stream.allocation.allocator import Allocator
from bo_stream.allocation.numbers import checked_number

ITERATIONS = 20


class KMeans(Allocator):
    """At most ``max_points`` means: k-means++ and Lloyd's steps at first, then running means.

    Until there are more inputs than means, every distinct input is one. Afterwards each new input
    moves its nearest mean by the share that it has in it. It counts the inputs of each mean, so one
    allocator serves one stream. Cost O(n M d) an update. Source: Arthur and Vassilvitskii (2007)
    for the start, MacQueen (1967) for the stream.
    """

    def __init__(self, max_points: int, seed: int = 0) -> None:
        """Set the number.

        Args:
            max_points: Largest number M.
            seed: Of the start.

        Raises:
            ValueError: The number is not positive.
        """
        self.max_points = checked_number("max_points", max_points)
        self.seed = seed
        self._counts: Tensor | None = None

    def fresh(self) -> KMeans:
        """An allocator of the same settings that has seen nothing."""
        return KMeans(self.max_points, self.seed)

    def to(self, like: Tensor) -> KMeans:
        """An allocator of the same memory, in a tensor's dtype and on its device."""
        moved = copy(self)
        moved._counts = None if self._counts is None else self._counts.to(like)
        return moved

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        if len(Z) >= self.max_points:
            return self._followed(Z, X_new)
        pool = torch.unique(torch.cat((Z, X_new)), dim=0)
        if len(pool) <= self.max_points:
            return pool
        start = np.random.default_rng(self.seed)
        means, labels = kmeans2(
            pool.cpu().numpy(), self.max_points, iter=ITERATIONS, minit="++", seed=start
        )
        counts = torch.bincount(torch.as_tensor(labels), minlength=self.max_points)
        filled = counts > 0
        self._counts = counts[filled].to(pool)
        return torch.as_tensor(means).to(pool)[filled.to(pool.device)]

    def _followed(self, Z: Tensor, X_new: Tensor) -> Tensor:
        if self._counts is None or len(self._counts) != len(Z):
            self._counts = Z.new_ones(len(Z))
        if len(X_new) == 0:
            return Z
        nearest = torch.cdist(X_new, Z).argmin(-1)
        new = torch.bincount(nearest, minlength=len(Z)).to(Z)
        total = self._counts + new
        sums = torch.zeros_like(Z).index_add(0, nearest, X_new)
        self._counts = total
        share = (new / total).unsqueeze(-1)
        return Z + share * (sums / new.clamp_min(1.0).unsqueeze(-1) - Z)
