"""A grid's polynomial moments seen by products of one-dimensional functions, without p x r work."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.bases.grid.gram import line_congruence, pair_polynomials
from bo_stream.linalg import check_memory

_LIMIT_GIB = 8.0
_BUCKETS = 12


def contract(moments: Tensor, roots: list[Tensor], index: Tensor) -> Tensor:
    """``C[α, α'] = Σ moments Π_i (f_{α_i} f_{α'_i})`` for r products α of functions.

    Dimensions are summed out from the last to the first. After each, only those pairs of functions
    are kept that some pair of products needs: with products chosen by size (a hyperbolic cross)
    these are few. Cost about O((7 g)^d g²), without any power of r.

    Args:
        moments: ``(cells_1 · 7) x ... x (cells_d · 7)``.
        roots: Per dimension, node values of its functions, ``g_i x r_i``.
        index: The products, ``r x d``.
    """
    if len(roots) == 1:
        line = line_congruence(moments, roots[0])
        return line[index, index.mT]
    level = _Level(
        moments.reshape(1, -1),
        torch.zeros(1, 1, dtype=torch.long, device=index.device),
        torch.zeros_like(index[:, 0]),
    )
    for i in reversed(range(1, len(roots))):
        level = _sum_out(level, pair_polynomials(roots[i]), index[:, i:])
    return _last(level, pair_polynomials(roots[0]), index[:, 0])


@dataclass(frozen=True)
class _Level:
    """Sums over the dimensions behind some dimension.

    Attributes:
        sums: One row for each pair of tails that differs in its functions, ``pairs x rest``.
        position: Row of each pair of tails, ``tails x tails``.
        tail: The tail of each product, ``r``.
    """

    sums: Tensor
    position: Tensor
    tail: Tensor


def _sum_out(level: _Level, polynomials: Tensor, tails: Tensor) -> _Level:
    """Sum out one more dimension, the first column of ``tails``."""
    distinct, tail = tails.unique(dim=0, return_inverse=True)
    own = distinct[:, 0]
    parent = torch.empty_like(own).scatter(0, tail, level.tail)
    pair = pair_position(own.unsqueeze(-1), own)
    size = polynomials.shape[-1]
    code = level.position[parent.unsqueeze(-1), parent] * size + pair
    needed, position = code.unique(return_inverse=True)
    sums = _multiply(level.sums, polynomials, _extents(level, parent, own))
    rest = sums.shape[-2]
    chosen = sums.transpose(-1, -2).reshape(-1, rest)[needed]
    return _Level(chosen, position, tail)


def _last(level: _Level, polynomials: Tensor, own: Tensor) -> Tensor:
    """Sum out the first dimension and read off every pair of products, ``r x r``."""
    sums = _multiply(level.sums, polynomials, _extents(level, level.tail, own)).squeeze(-2)
    rows = level.position[level.tail.unsqueeze(-1), level.tail]
    return sums.reshape(-1)[rows * sums.shape[-1] + pair_position(own.unsqueeze(-1), own)]


def _extents(level: _Level, parent: Tensor, own: Tensor) -> Tensor:
    """How many functions of the next dimension each row of sums is multiplied with."""
    tails = level.position.shape[0]
    most = own.new_zeros(tails).scatter_reduce(0, parent, own + 1, "amax")
    both = torch.maximum(most.unsqueeze(-1), most).reshape(-1)
    rows = own.new_zeros(level.sums.shape[0])
    return rows.scatter_reduce(0, level.position.reshape(-1), both, "amax")


def _multiply(sums: Tensor, polynomials: Tensor, extents: Tensor) -> Tensor:
    """``sums[k, rest, D] @ polynomials[D, pairs]``, as many pairs as row k needs."""
    rows, pairs = sums.shape[0], polynomials.shape[-1]
    folded = sums.reshape(rows, -1, polynomials.shape[0])
    check_memory("The gram in feature space", rows * folded.shape[1] * pairs, _LIMIT_GIB)
    result = sums.new_empty(rows, folded.shape[1], pairs)
    order = extents.argsort()
    for bucket in order.chunk(min(_BUCKETS, max(1, rows // 64))):
        count = math.comb(int(extents[bucket].max()) + 1, 2)
        result[bucket, :, :count] = folded[bucket] @ polynomials[:, :count]
    return result


def pair_position(first: Tensor, second: Tensor) -> Tensor:
    """Position of an unordered pair of functions among all, those of small index first."""
    high = torch.maximum(first, second)
    return high * (high + 1) // 2 + torch.minimum(first, second)
