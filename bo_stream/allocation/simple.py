"""Simple allocators: greedy variance, k-means, reservoir sampling, a uniform grid."""

from __future__ import annotations

import numpy as np
import torch
from gpytorch.kernels import Kernel
from scipy.cluster.vq import kmeans2
from torch import Tensor

from bo_stream.allocation.allocator import Allocator, checked_number
from bo_stream.allocation.selection import TOLERANCE, greedy_points

LIMIT = 10_000
"""More points than this are refused: a model needs the square of them."""

ITERATIONS = 20


class GreedyVariance(Allocator):
    """Greedy variance: at most ``max_points`` of the present ones and the new inputs, chosen anew.

    Each choice is the candidate with the largest prior variance given those before it: partial
    pivoted Cholesky (Burt, Rasmussen and van der Wilk, 2020). Cost O((M + n) M²) an update.

    Args:
        max_points: Largest number M.
        tolerance: Stop where no candidate keeps this part of its prior variance, in [0, 1).

    Raises:
        ValueError: The number is not positive, or the tolerance not in [0, 1).
    """

    def __init__(self, max_points: int, tolerance: float = TOLERANCE) -> None:
        self.max_points = checked_number("max_points", max_points)
        if not 0.0 <= tolerance < 1.0:
            raise ValueError(f"Expected tolerance in [0, 1), got {tolerance}.")
        self.tolerance = tolerance

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        pool = torch.cat((Z, X_new))
        return greedy_points(pool, kernel, self.max_points, tolerance=self.tolerance)


class KMeans(Allocator):
    """Streaming k-means: at most ``max_points`` means, first by k-means++ and Lloyd's steps.

    Until there are more inputs than means, every distinct input is one. Afterwards each new input
    moves its nearest mean by its share in it. It counts the inputs of each mean, so one allocator
    serves one stream. Cost O(n M d) an update. Source: Arthur and Vassilvitskii (2007) for the
    start, MacQueen (1967) for the stream.

    Args:
        max_points: Largest number M.
        seed: Of the start.

    Raises:
        ValueError: The number is not positive.
    """

    def __init__(self, max_points: int, seed: int = 0) -> None:
        self.max_points = checked_number("max_points", max_points)
        self.seed = seed
        self._memory: Tensor | None = None  # numbers of inputs

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
        self._memory = counts[filled].to(pool)
        return torch.as_tensor(means).to(pool)[filled.to(pool.device)]

    def _followed(self, Z: Tensor, X_new: Tensor) -> Tensor:
        counts = self._memory
        if counts is None or len(counts) != len(Z):
            counts = Z.new_ones(len(Z))
        if len(X_new) == 0:
            return Z
        nearest = torch.cdist(X_new, Z).argmin(-1)
        new = torch.bincount(nearest, minlength=len(Z)).to(Z)
        total = counts.to(Z) + new
        sums = torch.zeros_like(Z).index_add(0, nearest, X_new)
        self._memory = total
        share = (new / total).unsqueeze(-1)
        return Z + share * (sums / new.clamp_min(1.0).unsqueeze(-1) - Z)


class Random(Allocator):
    """Reservoir sampling: at most ``max_points``, every input seen with equal probability.

    It counts the inputs seen, so one allocator serves one stream. Cost O(n) an update. Source:
    Vitter (1985), algorithm R.

    Args:
        max_points: Largest number M.
        seed: Of the draws.

    Raises:
        ValueError: The number is not positive.
    """

    def __init__(self, max_points: int, seed: int = 0) -> None:
        self.max_points = checked_number("max_points", max_points)
        self.seed = seed
        self._memory: tuple[int, Tensor] | None = None  # number of inputs, state of a generator

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        room = max(0, self.max_points - len(Z))
        kept = torch.cat((Z, X_new[:room]))
        seen, state = self._memory or (0, torch.Generator().manual_seed(self.seed).get_state())
        seen = max(seen, len(Z)) + min(room, len(X_new))
        generator = torch.Generator()
        generator.set_state(state.cpu())
        for row in X_new[room:]:
            seen += 1
            place = int(torch.randint(seen, (), generator=generator))
            if place < len(kept):
                kept[place] = row
        self._memory = seen, generator.get_state()
        return kept


class UniformGrid(Allocator):
    """Grid of ``size`` points per dimension over the box of all inputs seen, which may grow.

    For one to three dimensions. The box is that of Z and the new inputs, so that Z remembers it. A
    dimension of no extent has one point. Cost O(size^d).

    Args:
        size: Points per dimension, at least 2.

    Raises:
        ValueError: The size is too small.
    """

    def __init__(self, size: int) -> None:
        self.size = checked_number("size", size, least=2)

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        pool = torch.cat((Z, X_new))
        if len(pool) == 0:
            return pool
        low, high, dimensions = pool.amin(0), pool.amax(0), pool.shape[-1]
        if self.size**dimensions > LIMIT:
            raise ValueError(
                f"Expected a grid of at most {LIMIT:,} points, got {self.size} in each of "
                f"{dimensions} dimensions, {self.size**dimensions:,}. Take a smaller size or OIPS."
            )
        steps = torch.linspace(0.0, 1.0, self.size, dtype=pool.dtype, device=pool.device)
        lines = [
            a + (b - a) * steps if b > a else a.unsqueeze(0) for a, b in zip(low, high, strict=True)
        ]
        return torch.cartesian_prod(*lines).reshape(-1, dimensions)
