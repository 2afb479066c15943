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
    sensitivity = 0.5 * (torch.eye(basis.rank).to(second_moment) - second_moment)
    blocks = zip(basis.parts, kernel.parts, basis.own_blocks(sensitivity), strict=True)
    return torch.stack([_part_log_prior(*block) for block in blocks]).sum(0)


def _part_log_prior(
    basis: InterpolationBasis, factors: KernelFactors, sensitivity: Tensor
) -> Tensor:
    trace = sensitivity.diagonal(dim1=-2, dim2=-1).sum(-1)
    total = trace * (factors.scale() / basis.scale)
    for i in range(basis.grid.dim):
        perturbed = _whitened_correlation(basis, factors, i)
        gathered = _gathered(basis, sensitivity, i, perturbed.shape[-1])
        total = total + (gathered * perturbed).sum((-2, -1))
    return total


def prior_covariance(basis: GridBasis, kernel: GridKernel) -> Tensor:
    """Compute the prior covariance of the weights under another kernel, ``... x m x r x r``.

    ``Λ^{-½} Eᵀ K(θ) E Λ^{-½}``, differentiable in the hyperparameters: the identity where the basis
    was built, else the kernel K(θ) as far as the basis spans it. Cost O(r² d + Σ g³).
    """
    pairs = zip(basis.parts, kernel.parts, strict=True)
    blocks = [_part_covariance(part, factors) for part, factors in pairs]
    width, start, rows = sum(block.shape[-1] for block in blocks), 0, []
    for block in blocks:
        end = start + block.shape[-1]
        rows.append(pad(block, (start, width - end)))
        start = end
    return basis.in_order(torch.cat(rows, -2))


def _part_covariance(basis: InterpolationBasis, factors: KernelFactors) -> Tensor:
    scale = (factors.scale() / basis.scale)[..., None, None]
    result = scale.expand(*basis.scale.shape, 1, 1)
    for i, whitening in enumerate(basis.product_whitenings):
        correlation = node_correlation(factors, basis.grid, i)
        result = result * (whitening.mT @ correlation @ whitening)
    return result


def prior_variance(basis: GridBasis, kernel: GridKernel) -> Tensor:
    """Compute the diagonal of :func:`prior_covariance`, ``... x m x r``. Cost O(r d + Σ g³)."""
    pairs = zip(basis.parts, kernel.parts, strict=True)
    return basis.joined([_part_variance(part, factors) for part, factors in pairs])


def _part_variance(basis: InterpolationBasis, factors: KernelFactors) -> Tensor:
    result = (factors.scale() / basis.scale).unsqueeze(-1).expand(*basis.scale.shape, basis.rank)
    for i in range(basis.grid.dim if basis.rank > 0 else 0):
        line = _whitened_correlation(basis, factors, i).diagonal(dim1=-2, dim2=-1)
        result = result * line.index_select(-1, basis.index[:, i])
    return result


def node_variances(basis: GridBasis) -> Tensor:
    """Compute the mean prior variance of each feature over the nodes, ``... x m x r``."""
    return basis.joined([_part_node_variances(part) for part in basis.parts])


def _part_node_variances(basis: InterpolationBasis) -> Tensor:
    result = basis.scale.unsqueeze(-1).expand(*basis.scale.shape, basis.rank)
    for i, values in enumerate(basis.eigenvalues):
        result = result * values[..., basis.index[:, i]] / basis.grid.size[i]
    return result


def variance_outside(basis: GridBasis, kernel: GridKernel) -> Tensor:
    """Compute the mean over the nodes of the prior variance outside the span, ``... x m``."""
    pairs = zip(basis.parts, kernel.parts, strict=True)
    return torch.stack([_part_outside(part, factors) for part, factors in pairs]).sum(0)


def _part_outside(basis: InterpolationBasis, factors: KernelFactors) -> Tensor:
    """Compute ``scale · (1 − tr(Eᵀ K E) / p)`` with E the kept eigenvectors. Cost O(r d + Σ g³)."""
    inside = torch.ones(*basis.scale.shape, 1).to(basis.scale)
    for i, vectors in enumerate(basis.eigenvectors):
        moved = node_correlation(factors, basis.grid, i) @ vectors
        line = (vectors * moved).sum(-2) / basis.grid.size[i]
        inside = inside * line.index_select(-1, basis.index[:, i])
    return factors.scale() * (1.0 - inside.sum(-1)).clamp_min(0.0)


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
