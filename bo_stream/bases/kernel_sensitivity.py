"""Gradients in the kernel's hyperparameters, without differentiating an eigendecomposition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bo_stream.bases.cell_gram import ravel
from bo_stream.bases.interpolation import InterpolationBasis, node_correlation
from bo_stream.bases.kernel_factors import KernelFactors


def expected_log_prior(
    basis: InterpolationBasis, factors: KernelFactors, second_moment: Tensor
) -> Tensor:
    """−E log p(w) up to a constant, to first order in the hyperparameters, ``... x m``.

    The weights' prior is N(0, I + H(θ)) with ``H = Λ^{-½} Eᵀ (K(θ) − K) E Λ^{-½}`` and H = 0 at the
    hyperparameters that ``basis`` was built from, so the gradient is ``½ tr((I − E[w wᵀ]) dH)``: by
    Fisher's identity that of the negative log marginal likelihood. K is a Kronecker product, hence
    dH couples kept products that differ in one dimension only. Cost O(r² d + Σ g³).

    Args:
        basis: Built from ``factors`` at their present values.
        factors: The kernel, differentiable.
        second_moment: ``E[w wᵀ] = Σ + w wᵀ``, ``... x m x r x r``.
    """
    sensitivity = 0.5 * (torch.eye(basis.rank).to(second_moment) - second_moment)
    trace = sensitivity.diagonal(dim1=-2, dim2=-1).sum(-1)
    total = trace * (factors.scale() / basis.scale)
    for i in range(basis.grid.dim):
        total = total + _one_dimension(basis, factors, sensitivity, i)
    return total


def _one_dimension(
    basis: InterpolationBasis, factors: KernelFactors, sensitivity: Tensor, dimension: int
) -> Tensor:
    perturbed = _whitened_correlation(basis, factors, dimension)
    gathered = _gathered(basis, sensitivity, dimension, perturbed.shape[-1])
    return (gathered * perturbed).sum((-2, -1))


def prior_covariance(basis: InterpolationBasis, factors: KernelFactors) -> Tensor:
    """Prior covariance of a basis's weights under another kernel, ``... x m x r x r``.

    ``Λ^{-½} Eᵀ K(θ) E Λ^{-½}``, differentiable in the hyperparameters: the identity where the basis
    was built, else the kernel K(θ) as far as the basis spans it. Cost O(r² d + Σ g³).
    """
    scale = (factors.scale() / basis.scale)[..., None, None]
    result = scale.expand(*basis.scale.shape, 1, 1)
    for i in range(basis.grid.dim):
        line = _whitened_correlation(basis, factors, i)
        choice = one_hot(basis.index[:, i], line.shape[-1]).to(line)  # faster than indexing
        result = result * (choice @ line @ choice.mT)
    return result


def prior_variance(basis: InterpolationBasis, factors: KernelFactors) -> Tensor:
    """Diagonal of :func:`prior_covariance`, ``... x m x r``. Cost O(r d + Σ g³)."""
    result = (factors.scale() / basis.scale).unsqueeze(-1).expand(*basis.scale.shape, basis.rank)
    for i in range(basis.grid.dim if basis.rank > 0 else 0):
        line = _whitened_correlation(basis, factors, i).diagonal(dim1=-2, dim2=-1)
        result = result * line.index_select(-1, basis.index[:, i])
    return result


def _whitened_correlation(
    basis: InterpolationBasis, factors: KernelFactors, dimension: int
) -> Tensor:
    """``Λ^{-½} Eᵀ K(θ) E Λ^{-½}`` of one dimension's kept eigenvectors, ``... x m x k x k``."""
    kept = int(basis.index[:, dimension].max()) + 1
    values = basis.eigenvalues[dimension][..., None, :kept]
    inverse_root = torch.where(values > 0, values.rsqrt(), 0.0)  # where it is 0, so is the feature
    whitening = basis.eigenvectors[dimension][..., :kept] * inverse_root
    return whitening.mT @ node_correlation(factors, basis.grid, dimension) @ whitening


def _gathered(basis: InterpolationBasis, sensitivity: Tensor, dimension: int, kept: int) -> Tensor:
    """Sums of sensitivities over products that agree in all other dimensions, ``... x k x k``."""
    rows, columns = _partners(basis, dimension)
    own = basis.index[:, dimension]
    flat = own[rows] * kept + own[columns]
    batch = sensitivity.shape[:-2]
    result = sensitivity.new_zeros(*batch, kept * kept)
    result.index_add_(-1, flat, sensitivity[..., rows, columns])
    return result.unflatten(-1, (kept, kept))


def _partners(basis: InterpolationBasis, dimension: int) -> tuple[Tensor, Tensor]:
    """All ordered pairs of kept products that differ at most in one dimension."""
    others = [i for i in range(basis.grid.dim) if i != dimension]
    if not others:
        key = torch.zeros_like(basis.index[:, 0])
    else:
        key = ravel(basis.index[:, others], [basis.grid.size[i] for i in others])
    return pairs_within_groups(key)


def pairs_within_groups(key: Tensor) -> tuple[Tensor, Tensor]:
    """All ordered pairs of positions with equal keys, without comparing all keys with all."""
    order = key.argsort()
    _, group, sizes = key[order].unique_consecutive(return_inverse=True, return_counts=True)
    starts = sizes.cumsum(0) - sizes
    partners = sizes[group]
    rows = torch.arange(len(key), device=key.device).repeat_interleave(partners)
    before = (partners.cumsum(0) - partners).repeat_interleave(partners)
    nth = torch.arange(len(rows), device=key.device) - before
    return order[rows], order[starts[group[rows]] + nth]
