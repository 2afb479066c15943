"""Natural-gradient steps of a decoupled posterior, from one draw of its bound."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bo_stream.linalg import safe_cholesky
from bo_stream.models.decoupled_bound import Draw
from bo_stream.models.decoupled_posterior import DecoupledPosterior, HybridSpread
from bo_stream.variational import ExpectedLogProb, Sites, local_sites

_DAMPING = 1e-5
"""Of a block of the mean's Hessian, relative to its mean diagonal."""

_ROUNDING = 1e-6
"""The same, relative to the prior variance: what the remainder of a kernel may be wrong by."""


@torch.no_grad()
def natural_step(
    draw: Draw, expected: ExpectedLogProb, rate: float, mean: bool
) -> DecoupledPosterior:
    """The posterior after a step of size ``rate`` towards what a minibatch asks for.

    β's weights move along the natural gradient (Hensman et al., 2013; for any likelihood Khan and
    Lin, 2017). The mean's coefficients move by a Newton step in the block J of the draw's columns:
    the gradient there needs no others of K_α, and is exact but for the minibatch.

    Args:
        draw: Of the bound; its gradients are not used.
        expected: Of the minibatch's outcomes.
        rate: In (0, 1].
        mean: Whether to move the mean's coefficients.
    """
    there, posterior = draw.there, draw.expanded.posterior.map(torch.detach)
    sites, _ = local_sites(expected, there.mean.detach(), there.variance.detach())
    if isinstance(posterior.spread, HybridSpread):
        spread = _moved_weights(draw, posterior.spread, sites, rate)
        posterior = replace(posterior, spread=spread)
    if not mean or len(draw.columns) == 0:
        return posterior
    return replace(posterior, coefficients=_moved_coefficients(draw, posterior, sites, rate))


def _moved_weights(draw: Draw, spread: HybridSpread, sites: Sites, rate: float) -> HybridSpread:
    """``(1 − rate)`` times the natural parameters and ``rate`` times those of the minibatch."""
    z, there = draw.there.features.detach(), draw.there
    v, _ = draw.expanded.weights
    others = there.mean.detach() - (z @ v.detach()).squeeze(-1)  # the mean without these weights
    weighted = draw.weight * z * sites.precision.unsqueeze(-1)
    pull = draw.weight * (sites.shift - sites.precision * others)
    return HybridSpread(
        torch.lerp(spread.moment, z.mT @ pull.unsqueeze(-1), rate),
        torch.lerp(spread.gram, z.mT @ weighted, rate),
    )


def _moved_coefficients(
    draw: Draw, posterior: DecoupledPosterior, sites: Sites, rate: float
) -> Tensor:
    """A damped Newton step in the block J: ``a_J − rate H_JJ⁻¹ g_J``. Cost O(b c² + c³ + c M_α)."""
    index, there = draw.columns, draw.there
    inner, slope_of_mean, gradient = _block(draw)
    slope = sites.shift - sites.precision * there.mean.detach()
    gradient = gradient - draw.weight * (slope_of_mean @ slope.unsqueeze(-1))
    curvature = draw.weight * sites.precision.unsqueeze(-2)
    hessian = inner + (slope_of_mean * curvature) @ slope_of_mean.mT
    damping = _DAMPING * _mean_diagonal(hessian) + _ROUNDING * _mean_diagonal(
        draw.rows.detach()[..., index]
    )
    hessian.diagonal(dim1=-2, dim2=-1).add_(damping)
    change = rate * torch.cholesky_solve(gradient, safe_cholesky(hessian)).squeeze(-1)
    if posterior.jacobi:
        expanded = draw.expanded
        scale = posterior.alpha.variance(expanded.kernel, expanded.outputs).detach()
        change = change * scale.expand_as(posterior.coefficients)[..., index]
    return posterior.coefficients.index_add(-1, index, -change)


def _block(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Of the block J: the divergence's Hessian, the mean's slopes ``... x c x b``, its gradient."""
    index, rows, expanded = draw.columns, draw.rows.detach(), draw.expanded
    inner, slopes = rows[..., index], draw.there.cross[..., index, :]
    gradient = expanded.slopes(index, rows).detach().unsqueeze(-1)
    if expanded.alpha_features is None:
        return inner, slopes, gradient
    own = expanded.alpha_features.detach()[..., index, :]
    return inner - own @ own.mT, slopes - own @ draw.there.features.detach().mT, gradient


def _mean_diagonal(matrix: Tensor) -> Tensor:
    """``... x n x n -> ... x 1``."""
    return matrix.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
