"""Prior moments of a basis's weights as functions of the kernel's hyperparameters.

Differentiable without differentiating an eigendecomposition.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from bo_stream.bases.grid.interpolation import GridBasis, InterpolationBasis, node_correlation
from bo_stream.bases.grid.kernel import GridKernel, KernelFactors
from bo_stream.bases.grid.mesh import ravel


def expected_log_prior(basis: GridBasis, kernel: GridKernel, second_moment: Tensor) -> Tensor:
    """Compute −E log p(w) up to a constant, to first order in the hyperparameters, ``... x m``.

    The weights' prior is N(0, I + H(θ)) with ``H = Λ^{-½} Eᵀ (K(θ) − K) E Λ^{-½}`` and H = 0 at the
    hyperparameters that ``basis`` was built from, so the gradient is ``½ tr((I − E[w wᵀ]) dH)``: by
    Fisher's identity that of the negative log marginal likelihood. K is a Kronecker product, or
    several side by side, hence dH couples kept products of one part that differ in one dimension
    only. Cost O(r² d + Σ g³).

    Args:
        basis: Built from ``kernel`` at its present values.
        kernel: The kernel, differentiable.
        second_moment: ``E[w wᵀ] = Σ + w wᵀ``, ``... x m x r x r``.
    """
    sensitivity, values = 0.5 * (torch.eye(basis.rank).to(second_moment) - second_moment), []
    for part, factors, block in zip(
        basis.parts, kernel.parts, basis.own_blocks(sensitivity), strict=True
    ):
        trace = block.diagonal(dim1=-2, dim2=-1).sum(-1)
        total = trace * (factors.scale() / part.scale)
        for i in range(part.grid.dim):
            perturbed = _whitened_correlation(part, factors, i)
            gathered = _gathered(part, block, i, perturbed.shape[-1])
            total = total + (gathered * perturbed).sum((-2, -1))
        values.append(total)
    return torch.stack(values).sum(0)


def prior_covariance(basis: GridBasis, kernel: GridKernel) -> Tensor:
    """Compute the prior covariance of the weights under another kernel, ``... x m x r x r``.

    ``Λ^{-½} Eᵀ K(θ) E Λ^{-½}``, differentiable in the hyperparameters: the identity where the basis
    was built, else the kernel K(θ) as far as the basis spans it. Cost O(r² d + Σ g³).
    """
    rows, start, width = [], 0, basis.rank
    for part, factors in zip(basis.parts, kernel.parts, strict=True):
        scale = (factors.scale() / part.scale)[..., None, None]
        block = scale.expand(*part.scale.shape, 1, 1)
        for i, whitening in enumerate(part.product_whitenings):
            correlation = node_correlation(factors, part.grid, i)
            block = block * (whitening.mT @ correlation @ whitening)
        end = start + part.rank
        rows.append(pad(block, (start, width - end)))
        start = end
    return basis.in_order(torch.cat(rows, -2))


def prior_variance(basis: GridBasis, kernel: GridKernel) -> Tensor:
    """Compute the diagonal of :func:`prior_covariance`, ``... x m x r``. Cost O(r d + Σ g³)."""
    values = []
    for part, factors in zip(basis.parts, kernel.parts, strict=True):
        shape = (*part.scale.shape, part.rank)
        result = (factors.scale() / part.scale).unsqueeze(-1).expand(shape)
        for i in range(part.grid.dim if part.rank > 0 else 0):
            line = _whitened_correlation(part, factors, i).diagonal(dim1=-2, dim2=-1)
            result = result * line.index_select(-1, part.index[:, i])
        values.append(result)
    return basis.joined(values)


def node_variances(basis: GridBasis) -> Tensor:
    """Compute the mean prior variance of each feature over the nodes, ``... x m x r``."""
    found = []
    for part in basis.parts:
        result = part.scale.unsqueeze(-1).expand(*part.scale.shape, part.rank)
        for i, values in enumerate(part.eigenvalues):
            result = result * values[..., part.index[:, i]] / part.grid.size[i]
        found.append(result)
    return basis.joined(found)


def variance_outside(basis: GridBasis, kernel: GridKernel) -> Tensor:
    """Compute the mean over the nodes of the prior variance outside the span, ``... x m``.

    ``scale · (1 − tr(Eᵀ K E) / p)`` of each part, E its kept eigenvectors. Cost O(r d + Σ g³).
    """
    found = []
    for part, factors in zip(basis.parts, kernel.parts, strict=True):
        inside = torch.ones(*part.scale.shape, 1).to(part.scale)
        for i, vectors in enumerate(part.eigenvectors):
            moved = node_correlation(factors, part.grid, i) @ vectors
            line = (vectors * moved).sum(-2) / part.grid.size[i]
            inside = inside * line.index_select(-1, part.index[:, i])
        found.append(factors.scale() * (1.0 - inside.sum(-1)).clamp_min(0.0))
    return torch.stack(found).sum(0)


def _whitened_correlation(
    basis: InterpolationBasis, factors: KernelFactors, dimension: int
) -> Tensor:
    """Compute one dimension's ``Λ^{-½} Eᵀ K(θ) E Λ^{-½}`` of kept eigenvectors, ``... x k x k``."""
    whitening = basis.whitenings[dimension]
    return whitening.mT @ node_correlation(factors, basis.grid, dimension) @ whitening


def _gathered(basis: InterpolationBasis, sensitivity: Tensor, dimension: int, kept: int) -> Tensor:
    """Sum sensitivities of products that agree in all other dimensions, ``... x k x k``."""
    others = [i for i in range(basis.grid.dim) if i != dimension]
    own, key = basis.index[:, dimension], torch.zeros_like(basis.index[:, 0])
    if others:
        key = ravel(basis.index[:, others], [basis.grid.size[i] for i in others])
    rows, columns = pairs_within_groups(key)
    flat = own[rows] * kept + own[columns]
    batch = sensitivity.shape[:-2]
    result = sensitivity.new_zeros(*batch, kept * kept)
    result.index_add_(-1, flat, sensitivity[..., rows, columns])
    return result.unflatten(-1, (kept, kept))


def pairs_within_groups(key: Tensor) -> tuple[Tensor, Tensor]:
    """List all ordered pairs of positions with equal keys, without comparing all with all."""
    order = key.argsort()
    _, group, sizes = key[order].unique_consecutive(return_inverse=True, return_counts=True)
    starts = sizes.cumsum(0) - sizes
    partners = sizes[group]
    rows = torch.arange(len(key), device=key.device).repeat_interleave(partners)
    before = (partners.cumsum(0) - partners).repeat_interleave(partners)
    nth = torch.arange(len(rows), device=key.device) - before
    return order[rows], order[starts[group[rows]] + nth]
