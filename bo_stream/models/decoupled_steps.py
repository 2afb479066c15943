"""Natural-gradient steps of a decoupled posterior, from one draw of its bound."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bo_stream.linalg import safe_cholesky
from bo_stream.models.decoupled_bound import Columns, Draw
from bo_stream.models.decoupled_posterior import DecoupledPosterior, HybridSpread
from bo_stream.variational import ExpectedLogProb, Sites, local_sites

_DAMPING = 1e-5
"""Of a block of the mean's Hessian, relative to its mean diagonal."""

_ROUNDING = 1e-6
"""The same, relative to the prior variance: what the remainder of a kernel may be wrong by."""


@torch.no_grad()
def natural_step(
    draw: Draw, expected: ExpectedLogProb, rate: float, mean_rate: float | None
) -> DecoupledPosterior:
    """The posterior after a step towards what a minibatch asks for.

    β's weights move along the natural gradient (Hensman et al., 2013; for any likelihood Khan and
    Lin, 2017). The mean's coefficients move by a Newton step in the block J of the draw's columns:
    the gradient there needs no others of K_α, and is exact but for the minibatch.

    Args:
        draw: Of the bound; its gradients are not used.
        expected: Of the minibatch's outcomes.
        rate: Size of the step of β's weights, in (0, 1].
        mean_rate: Of the mean's coefficients; None: they stay.
    """
    there, posterior = draw.there, draw.expanded.posterior.map(torch.detach)
    sites, _ = local_sites(expected, there.mean.detach(), there.variance.detach())
    if isinstance(posterior.spread, HybridSpread):
        spread = _moved_weights(draw, posterior.spread, sites, rate)
        posterior = replace(posterior, spread=spread)
    if mean_rate is None or len(draw.columns.index) == 0:
        return posterior
    return replace(posterior, coefficients=_moved_coefficients(draw, posterior, sites, mean_rate))


def _moved_weights(draw: Draw, spread: HybridSpread, sites: Sites, rate: float) -> HybridSpread:
    """``(1 − rate)`` times the natural parameters and ``rate`` times those of the minibatch."""
    z, there = draw.there.features.detach(), draw.there
    v, _ = draw.expanded.weights
    others = there.mean.detach() - (z @ v.detach()).squeeze(-1)  # the mean without these weights
    weighted = draw.weight * z * sites.precision.unsqueeze(-1)
    pull = draw.weight * (sites.shift - sites.precision * others)
    return replace(
        spread,
        moment=torch.lerp(spread.moment, z.mT @ pull.unsqueeze(-1), rate),
        gram=torch.lerp(spread.gram, z.mT @ weighted, rate),
    )


def _moved_coefficients(
    draw: Draw, posterior: DecoupledPosterior, sites: Sites, rate: float
) -> Tensor:
    """A damped Newton step in the block J: ``a_J − rate H_JJ⁻¹ g_J``.

    The data's part of H is that of the minibatch and of as many of α, which are inputs too: of the
    minibatch alone it would be of one accident with g, and steps would end where ``H⁻¹ g`` is zero
    on average instead of g. Cost O(b c² + c³ + c M_α + b S M_β).
    """
    columns, there = draw.columns, draw.there
    inner, gradient = _divergence_block(columns)
    slopes = _less(there.cross[..., columns.index, :], columns.features, there.features)
    slope = sites.shift - sites.precision * there.mean.detach()
    gradient = gradient - draw.weight * (slopes @ slope.unsqueeze(-1))
    hessian = inner + _curvature(draw, slopes, sites.precision)
    damping = _DAMPING * _mean_diagonal(hessian) + _ROUNDING * _mean_diagonal(
        columns.cross[..., columns.index, :]
    )
    hessian.diagonal(dim1=-2, dim2=-1).add_(damping)
    change = rate * torch.cholesky_solve(gradient, safe_cholesky(hessian)).squeeze(-1)
    if posterior.jacobi:
        expanded = draw.expanded
        scale = posterior.alpha.variance(expanded.kernel, expanded.outputs).detach()
        change = change * scale.expand_as(posterior.coefficients)[..., columns.index]
    return posterior.coefficients.index_add(-1, columns.index, -change)


def _divergence_block(columns: Columns) -> tuple[Tensor, Tensor]:
    """The mean's divergence in the block: its Hessian, ``... x c x c``, and its gradient."""
    inner = columns.cross[..., columns.index, :]
    return _less(inner, columns.features, columns.features), columns.slopes.detach().unsqueeze(-1)


def _less(covariance: Tensor, mine: Tensor | None, theirs: Tensor | None) -> Tensor:
    """What β's features leave of a covariance, ``... x c x n``; all where they have no mean."""
    if mine is None or theirs is None:
        return covariance
    return covariance - mine.detach() @ theirs.detach().mT


def _curvature(draw: Draw, slopes: Tensor, precision: Tensor) -> Tensor:
    """``Σ p k k ᵀ`` over all data, from a minibatch and some of α, ``... x m x c x c``."""
    size, total = precision.shape[-1], draw.weight * precision.shape[-1]
    others = _others(draw.columns.index, len(draw.expanded.posterior.alpha), size)
    seen = (slopes * precision.unsqueeze(-2)) @ slopes.mT
    if len(others) > 0:
        more = _less(
            draw.columns.cross[..., others, :],
            draw.expanded.alpha_features(others),
            draw.columns.features,
        )
        seen = seen + precision.mean(-1)[..., None, None] * (more.mT @ more)
    return total / (size + len(others)) * seen


def _others(index: Tensor, total: int, most: int) -> Tensor:
    """Some places that are not among those given, evenly from first to last."""
    free = torch.ones(total, dtype=torch.bool, device=index.device)
    free[index] = False
    places = torch.nonzero(free).flatten()
    return places[:: max(-(-len(places) // most), 1)]


def _mean_diagonal(matrix: Tensor) -> Tensor:
    """``... x n x n -> ... x 1``."""
    return matrix.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
