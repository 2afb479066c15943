"""Allocators of inducing points: the interface, simple ones, and how a model selects."""

from __future__ import annotations

import math
from abc import abstractmethod
from copy import copy
from typing import Any, Self

import numpy as np
import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, InputDataError, UnsupportedError
from botorch.models.utils.inducing_point_allocators import (
    InducingPointAllocator,
    QualityFunction,
    UnitQualityFunction,
)
from gpytorch.kernels import Kernel
from gpytorch.module import Module
from linear_operator.utils.errors import NotPSDError
from scipy.cluster.vq import kmeans2
from torch import Tensor

from bo_stream.bases.inducing import kernel_matrix, kernel_variance, members
from bo_stream.errors import check_whole
from bo_stream.linalg import safe_cholesky, solve_lower
from bo_stream.tensors import map_tensors


class Allocator(InducingPointAllocator):
    """Online selection of inducing points Z.

    :meth:`update` is the whole interface; ``allocate_inducing_points`` makes every allocator one
    for BoTorch's ``SingleTaskVariationalGP``.
    """

    _memory: Any = None  # of the inputs seen; replaced, not changed, for copies share it

    def update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        """Select inducing points for the inputs seen so far and X_new; arguments are not changed.

        Args:
            Z: Present inducing points, ``M x d``; M may be 0.
            X_new: ``n x d``; n may be 0.
            kernel: With its present hyperparameters; a batch of kernels (one an output) shares Z.

        Returns:
            ``M' x d``.

        Raises:
            BotorchTensorDimensionError: Z or X_new is not a matrix, or their widths differ.
            InputDataError: Dtypes or devices differ, or there is NaN or infinity.
        """
        check_points("Z", Z, Z)
        check_points("X_new", X_new, Z)
        with torch.no_grad():
            return self._update(Z.detach(), X_new.detach(), kernel)

    @abstractmethod
    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        """Select points as :meth:`update` does, of checked arguments."""

    def fresh(self) -> Self:
        """Return an allocator of the same settings that has observed nothing."""
        twin = copy(self)
        twin._memory = None
        return twin

    def to(self, like: Tensor) -> Self:
        """Return an allocator with the same memory on a tensor's device."""
        twin = copy(self)
        twin._memory = map_tensors(self._memory, lambda tensor: tensor.to(like.device))
        return twin

    def allocate_inducing_points(
        self,
        inputs: Tensor,
        covar_module: Module,
        num_inducing: int,
        input_batch_shape: torch.Size,
    ) -> Tensor:
        """Select at most ``num_inducing`` points for all inputs at once: BoTorch's interface.

        If the allocator selects more, greedy variance thins them. Points of a batch are selected
        for each of its elements; if their numbers differ, greedy variance tops up the fewer from
        the inputs.

        Args:
            inputs: ``(batch_shape) x n x d``.
            covar_module: The kernel.
            num_inducing: Largest number M of points.
            input_batch_shape: Batch shape of the inputs without outputs.

        Returns:
            ``(batch_shape) x M x d``.
        """
        kernel: Kernel = covar_module.to(inputs.device)
        batch = inputs.shape[:-2] if inputs.ndim > 2 else input_batch_shape
        rows = inputs.expand(*batch, *inputs.shape[-2:]).reshape(-1, *inputs.shape[-2:])
        points = [self.fresh().update(X[:0], X, kernel) for X in rows]
        points = [
            Z if len(Z) <= num_inducing else greedy_points(Z, kernel, num_inducing) for Z in points
        ]
        most = max(len(Z) for Z in points)
        filled = [
            Z if len(Z) == most else greedy_points(X, kernel, most, first=Z)
            for Z, X in zip(points, rows, strict=True)
        ]
        return torch.stack(filled).reshape(*batch, most, inputs.shape[-1])

    def _get_quality_function(self) -> QualityFunction:
        """Return the weights of variances in BoTorch's greedy allocators; ours have none."""
        return UnitQualityFunction()


def check_points(name: str, X: Tensor, like: Tensor) -> None:
    """Check that points are a finite matrix of the width, dtype and device of a tensor.

    Raises:
        BotorchTensorDimensionError: They are no matrix, or of another width.
        InputDataError: Another dtype or device, whole numbers, NaN or infinity.
    """
    if X.ndim != 2 or X.shape[-1] != like.shape[-1]:
        width = "d" if like is X else like.shape[-1]
        raise BotorchTensorDimensionError(
            f"Expected {name} of shape `n x {width}`, got {tuple(X.shape)}."
        )
    if X.dtype != like.dtype or X.device != like.device or not X.is_floating_point():
        raise InputDataError(
            f"Expected {name} of a floating dtype, as the other points {like.dtype} on "
            f"{like.device}, got {X.dtype} on {X.device}."
        )
    if not bool(X.isfinite().all()):
        raise InputDataError(f"Expected finite {name}, got NaN or infinity. Drop those rows.")


# --- selection of points by a kernel -------------------------------------------------------------


TOLERANCE = 1e-10
"""Fraction of the prior variance below which a point adds nothing beyond rounding errors."""

BETTER = 2.0
"""Least ratio of the conditional variances of a point that enters and the one that it replaces."""

SWAPS = 32
"""Most points replaced at a time."""


@torch.no_grad()
def correlation(kernel: Kernel, A: Tensor, B: Tensor) -> Tensor:
    """Compute ``k(a, b) / √(k(a, a) k(b, b))``, ``n x d`` and ``m x d`` to ``n x m``.

    For a batch of kernels the least: points are similar only if they are so to every kernel. A
    point without prior variance is correlated with nothing. Cost O(n m d) a kernel.
    """
    raw = kernel_matrix(kernel, A, B, 1).squeeze(-3)
    first, second = (kernel_variance(kernel, X, 1).squeeze(-2) for X in (A, B))
    scale = (first.unsqueeze(-1) * second.unsqueeze(-2)).sqrt()
    values = torch.where(scale > 0.0, raw / scale, torch.zeros_like(raw))
    return values.flatten(0, -3).amin(0) if values.ndim > 2 else values


def first_unlike(alike: Tensor) -> Tensor:
    """Select rows in order, each similar to none selected before it, and return their indices.

    ``alike``, ``n x n`` and symmetric, is True for similar pairs. Only rows that are similar to
    others are visited one by one, on the CPU.
    """
    device, alike = alike.device, alike.cpu()
    free = (alike & ~torch.eye(len(alike), dtype=torch.bool)).any(-1)
    accepted = ~free
    while bool(free.any()):
        i = int(free.to(torch.uint8).argmax())
        accepted[i] = True
        free &= ~alike[i]
        free[i] = False
    return torch.nonzero(accepted).flatten().to(device, non_blocking=True)


@torch.no_grad()
def greedy_points(
    X: Tensor,
    kernel: Kernel,
    count: int,
    first: Tensor | None = None,
    tolerance: float = TOLERANCE,
) -> Tensor:
    """Select the pivots of a partial Cholesky factorisation of prior correlations, ``M x d``.

    Each next point is where the previous points leave the largest fraction of the point's own prior
    variance, in the mean over a batch of kernels. BoTorch's ``GreedyVarianceReduction`` compares
    the variances themselves: without given points it makes the same choice where the prior variance
    is the same everywhere. Cost O(n M²) time, O(n M) memory; on a device the host waits once.
    [Chen2018, algorithm 1; Burt2020, section 4]

    Args:
        X: Candidates, ``n x d``.
        kernel: Of the covariance.
        count: Largest number M, given points included.
        first: Given points, ``k x d``; they come first in the result.
        tolerance: Stop when no candidate keeps this fraction of its prior variance.
    """
    given = X[:0] if first is None else first
    pool = torch.cat((given, X))
    if len(pool) == 0:
        return pool
    variance = kernel_variance(kernel, pool, 1).reshape(-1, len(pool))
    left = torch.ones_like(variance)
    root = variance.new_zeros(len(variance), count, len(pool))
    before = torch.arange(len(given), device=pool.device)
    chosen, going = [before[:0]], [torch.ones_like(before[:count], dtype=torch.bool)]
    for i in range(min(count, len(pool))):
        pivot = before[i : i + 1] if i < len(given) else left.mean(0).argmax(0, keepdim=True)
        own = left.index_select(1, pivot)
        if i >= len(given):
            going.append(own.mean(0) > tolerance)
            if going[-1].is_cpu and not bool(going[-1]):
                break
        chosen.append(pivot)
        covariance = kernel(pool[pivot], pool).to_dense().reshape(variance.shape)
        scale = (variance * variance.index_select(1, pivot)).sqrt()
        known = root[:, :i].index_select(2, pivot).mT @ root[:, :i]
        row = covariance / scale - known.squeeze(-2)
        row = torch.where(own > TOLERANCE, row / own.clamp_min(TOLERANCE).sqrt(), 0.0)
        root[:, i] = row
        left = (left - row.square()).clamp_min(0.0).index_fill(1, pivot, 0.0)
    number = int(torch.cat(going).cumprod(0).sum())  # where nothing was left the rest is not chosen
    return pool[torch.cat(chosen)[:number]]


@torch.no_grad()
def capped(Z: Tensor, wanted: Tensor, kernel: Kernel, cap: int) -> Tensor:
    """Select at most ``cap`` of the points that an allocator wants, ``M' x d``, given the old ones.

    Old points that are still wanted stay, then new ones enter while there is room. Beyond that a
    new point enters only in place of the old one that the others explain best, and only if its own
    conditional variance is more than ``BETTER`` times the variance of the old one. Cost O(M³) once
    where the cap binds, and O(M²) an exchange.
    """
    if len(wanted) <= cap:
        return wanted
    old = members(wanted, Z)
    kept, new = wanted[old][:cap], torch.cat((wanted[old][cap:], wanted[~old]))
    room = cap - len(kept)
    kept, new = torch.cat((kept, new[:room])), new[room:]
    try:
        factor = safe_cholesky(correlation(kernel, kept, kept))
    except NotPSDError:  # values too wrong to compare points by
        return kept
    return _exchanged(kept, new, factor, kernel)


def _exchanged(points: Tensor, waiting: Tensor, factor: Tensor, kernel: Kernel) -> Tensor:
    """Exchange selected points for waiting ones, ``M x d``; the entered ones come last.

    ``factor`` is the root of the selected points' correlation matrix, whose inverse changes by rank
    two an exchange. Cost O(M³ + M² n), and O(M² + M n) an exchange.
    """
    points, order = points.clone(), list(range(len(points)))
    inverse, cross = torch.cholesky_inverse(factor), correlation(kernel, points, waiting)
    left = 1.0 - solve_lower(factor, cross).square().sum(-2)  # conditional variances of the waiting
    for _ in range(min(SWAPS, len(waiting))):
        own = inverse.diagonal().reciprocal()
        i, j = int(own.argmin()), int(left.argmax())
        if not float(left[j]) > BETTER * float(own[i]):
            break
        column, precision = inverse[i].clone(), float(inverse[i, i])  # i leaves
        left += (column @ cross).square() / precision
        inverse.addr_(column, column, alpha=-1.0 / precision)
        inverse[i] = inverse[:, i] = 0.0
        cross[i] = 0.0
        gain, variance = inverse @ cross[:, j], float(left[j])  # j enters in its place
        alike = correlation(kernel, waiting[j : j + 1], waiting)[0]
        left -= (alike - gain @ cross).square() / variance
        left[j] = -math.inf
        inverse.addr_(gain, gain, alpha=1.0 / variance)
        inverse[i] = inverse[:, i] = -gain / variance
        inverse[i, i] = 1.0 / variance
        cross[i], points[i] = alike, waiting[j]
        order.remove(i)
        order.append(i)
    return points[order]


def shortest_lengthscale(kernel: Kernel) -> Tensor:
    """Return the least of all lengthscales in a kernel and its parts, a scalar.

    Raises:
        UnsupportedError: It has none.
    """
    least = [
        part.lengthscale.detach().min()
        for part in kernel.modules()
        if isinstance(part, Kernel) and part.has_lengthscale
    ]
    if not least:
        raise UnsupportedError(
            f"{type(kernel).__name__} has no lengthscale that a resolution could follow. Leave out "
            "per_lengthscale and give the resolution in units of the inputs."
        )
    return torch.stack(least).min()


# --- simple allocators: greedy variance, k-means, reservoir sampling, a uniform grid -------------


_LIMIT = 10_000
"""More points than this are refused: a model needs the square of them."""

_ITERATIONS = 20


class GreedyVariance(Allocator):
    """Greedy variance: at most ``max_points`` of the present ones and the new inputs, chosen again.

    Each choice is the candidate of which the earlier ones leave the largest fraction of its own
    prior variance: partial pivoted Cholesky of the correlations (Burt, Rasmussen and van der Wilk,
    2020). Where the prior variance is the same everywhere BoTorch's ``GreedyVarianceReduction``
    makes the same choice. Cost O((M + n) M²) an update.

    Args:
        max_points: Largest number M.
        tolerance: Stop where no candidate keeps this part of its prior variance, in [0, 1).

    Raises:
        ValueError: The number is not positive, or the tolerance not in [0, 1).
    """

    def __init__(self, max_points: int, tolerance: float = TOLERANCE) -> None:
        self.max_points = check_whole("max_points", max_points)
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
        self.max_points = check_whole("max_points", max_points)
        self.seed = seed
        self._memory: Tensor | None = None  # numbers of inputs

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        counts = self._memory
        if counts is None or len(counts) != len(Z):
            counts = Z.new_ones(len(Z))
        if len(Z) >= self.max_points:  # each input moves its nearest mean
            if len(X_new) == 0:
                return Z
            centre = Z.mean(0)  # far from the origin norms lose their digits
            nearest = torch.cdist(X_new - centre, Z - centre).argmin(-1)
            new = torch.bincount(nearest, minlength=len(Z)).to(Z)
            total = counts.to(Z) + new
            sums = torch.zeros_like(Z).index_add(0, nearest, X_new)
            self._memory = total
            share = (new / total).unsqueeze(-1)
            return Z + share * (sums / new.clamp_min(1.0).unsqueeze(-1) - Z)
        pool, places = torch.unique(torch.cat((Z, X_new)), dim=0, return_inverse=True)
        each = torch.cat((counts.to(Z), Z.new_ones(len(X_new))))
        sizes = Z.new_zeros(len(pool)).index_add(0, places, each)
        if len(pool) <= self.max_points:
            self._memory = sizes
            return pool
        start = np.random.default_rng(self.seed)
        _, found = kmeans2(
            pool.cpu().numpy(), self.max_points, iter=_ITERATIONS, minit="++", seed=start
        )
        labels = torch.as_tensor(found, dtype=torch.long, device=pool.device)
        total = Z.new_zeros(self.max_points).index_add(0, labels, sizes)
        sums = Z.new_zeros(self.max_points, Z.shape[-1])
        sums = sums.index_add(0, labels, sizes.unsqueeze(-1) * pool)
        filled = total > 0.0
        self._memory = total[filled]
        return sums[filled] / self._memory.unsqueeze(-1)


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
        self.max_points = check_whole("max_points", max_points)
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
            index = int(torch.randint(seen, (), generator=generator))
            if index < len(kept):
                kept[index] = row
        self._memory = seen, generator.get_state()
        return kept


class UniformGrid(Allocator):
    """Grid of ``size`` points per dimension over the box of all inputs seen, which may grow.

    For one to three dimensions. The box is around Z and the new inputs, so that Z remembers it. A
    dimension of no extent has one point. Cost O(size^d).

    Args:
        size: Points per dimension, at least 2.

    Raises:
        ValueError: The size is too small.
    """

    def __init__(self, size: int) -> None:
        self.size = check_whole("size", size, least=2)

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        pool = torch.cat((Z, X_new))
        if len(pool) == 0:
            return pool
        low, high, dimensions = pool.amin(0), pool.amax(0), pool.shape[-1]
        if self.size**dimensions > _LIMIT:
            raise ValueError(
                f"Expected a grid of at most {_LIMIT:,} points, got {self.size} in each of "
                f"{dimensions} dimensions, {self.size**dimensions:,}. Take a smaller size or OIPS."
            )
        steps = torch.linspace(0.0, 1.0, self.size, dtype=pool.dtype, device=pool.device)
        lines = [
            a + (b - a) * steps if b > a else a.unsqueeze(0) for a, b in zip(low, high, strict=True)
        ]
        return torch.cartesian_prod(*lines).reshape(-1, dimensions)
