"""The bound of a posterior of many weights on all data, a part of it at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bo_stream.bases.sampled_basis import SampledBasis
from bo_stream.linalg import safe_cholesky
from bo_stream.models.function_process import FunctionProcess
from bo_stream.models.weight_posterior import ChevronPosterior, Slice
from bo_stream.variational import ExpectedLogProb

DETERMINED = 4096
"""Up to this many functions the determinant of an S that is not diagonal is computed."""

_PART = 4096


def log_precision(basis: SampledBasis) -> Tensor | None:
    """``log |S|``, ``m``; None where S is diagonal. Cost O(p³).

    Beyond ``DETERMINED`` functions 0: bounds are then too small by half of it, which is a constant.
    """
    if basis.is_diagonal:
        return None
    index = torch.arange(basis.size)
    if basis.size > DETERMINED:
        return basis.precision_diagonal(index[:1]).new_zeros(1)
    factor = safe_cholesky(basis.precision(index, index))
    return 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def full_divergence(
    basis: SampledBasis, posterior: ChevronPosterior, measured: Tensor | None
) -> Tensor:
    """``KL(q ‖ p)``, ``m``, in float64. Cost O(p), or O(p²) where S is not diagonal.

    Args:
        basis: For S.
        posterior: q.
        measured: Its diagonal where Proposition 1 gives it, ``m x p``, else None.
    """
    parts = torch.arange(basis.size, device=posterior.coefficients.device).split(_PART)
    slices = [(index, _slice(posterior, index, measured)) for index in parts]
    total = basis.precision_diagonal(parts[0][:0]).sum(-1)
    for index, weights in slices:
        own, columns = basis.precision_diagonal(index), weights.columns
        terms = own * weights.scale.square() - 2.0 * weights.log_diagonal - 1.0
        if basis.is_diagonal:
            terms = terms + own * columns.square().sum(-1) - own.log()
        else:
            terms = terms + (columns * _applied(basis, index, slices)).sum(-1)
        total = total + 0.5 * terms.sum(-1)
    determinant = log_precision(basis)
    return total if determinant is None else total - 0.5 * determinant


def _applied(basis: SampledBasis, index: Tensor, slices: list[tuple[Tensor, Slice]]) -> Tensor:
    """Rows of S times mean and dense columns of all, ``m x k x (1 + columns)``."""
    products = [basis.precision(index, others) @ weights.columns for others, weights in slices]
    return torch.stack(products).sum(0)


def _slice(posterior: ChevronPosterior, index: Tensor, measured: Tensor | None) -> Slice:
    return Slice.of(
        index,
        posterior.coefficients[:, index].double(),
        posterior.learned_scale(index).double(),
        None if measured is None else measured[:, index].double(),
    )


def full_bound(
    process: FunctionProcess,
    batches: Iterable[tuple[Tensor, ExpectedLogProb]],
    weight: float,
    apart: Tensor,
) -> Tensor:
    """``Σ E log p(y | f) − KL``, ``m``. Cost O(n p).

    Differentiable where the process is, in O(n + p) memory.

    Args:
        process: Of the posterior, not augmented.
        batches: Inputs with the likelihood of their outcomes.
        weight: How many of the data each input stands for.
        apart: The divergence, ``m``.
    """
    total = -apart
    for X, expected in batches:
        total = total + weight * expected(*process.marginals(X)).sum(-1)
    return total
