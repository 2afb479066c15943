"""Gradients in the kernel's hyperparameters, without differentiating an eigendecomposition."""

from __future__ import annotations

import torch
from torch import Tensor

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
    kept = int(basis.index[:, dimension].max()) + 1
    values = basis.eigenvalues[dimension][..., None, :kept]
    whitening = basis.eigenvectors[dimension][..., :kept] / values.sqrt()
    perturbed = whitening.mT @ node_correlation(factors, basis.grid, dimension) @ whitening
    return (_gathered(basis, sensitivity, dimension, kept) * perturbed).sum((-2, -1))


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
    rows, columns = (key.unsqueeze(-1) == key).nonzero(as_tuple=True)
    return rows, columns
