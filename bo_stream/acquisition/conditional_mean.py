"""The posterior mean given values drawn at points, as one function of all inputs.

For a process f and values v drawn from ``N(m(C), Σ)`` at points C, with m the mean and Σ the
covariance there, ``E[f(x) | f(C) = v] = m(x) + cov(f(x), f(C)) w`` with ``w = Σ⁻¹ (v − m(C))``.
(Rasmussen and Williams, 2006, eq. 2.19) With ``L Lᵀ = Σ`` and normal e, ``v = m(C) + L e`` and
``w = L⁻ᵀ e``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, singledispatch

import torch
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.acquisition.feature_nipv import in_weight_space
from bo_stream.bases.inducing import InducingBasis
from bo_stream.bases.spectral import KernelFunctions, RandomDraws
from bo_stream.linalg import (
    cholesky_with_nugget,
    independent_rows,
    row_product,
    solve_columns,
    solve_columns_transposed,
    stack_rows,
)
from bo_stream.models.auto.exact import KernelPrior
from bo_stream.models.decoupled.posterior import ShiftedProcess
from bo_stream.models.quadruply_stochastic.function_process import FunctionProcess
from bo_stream.observation_space import ObservationSpacePrior, ObservationSpaceProcess
from bo_stream.process import (
    ConditionedProcess,
    Points,
    PosteriorProcess,
    SelectedProcess,
    WeightSpaceProcess,
)
from bo_stream.tensors import zip_tensors

NUGGET = 1e-9
"""Added to the variances in Σ, as a share of them: points that lie close together have weights of
no more than its inverse root, so that rounding errors of covariances stay below what they mean."""


def is_weighted_sum(process: PosteriorProcess) -> bool:
    """Tell whether functions of a process are sums of finitely many known ones, with weights."""
    while isinstance(process, ConditionedProcess | SelectedProcess | ShiftedProcess):
        process = process.base
    if isinstance(process, FunctionProcess):
        return process.noise is None or not isinstance(process.basis, KernelFunctions)
    return in_weight_space(process)


def drawn_weights(covariance: Tensor, draws: RandomDraws) -> Tensor:
    """Draw ``w = L⁻ᵀ e``, of covariance Σ⁻¹, ``sample_shape x batch_shape x m x N x 1``.

    Where rounding leaves Σ no factor, as at noiseless observations, only points that the others do
    not determine have a weight. Cost O(N³ + n N²) for n draws.

    Args:
        covariance: Σ, ``batch_shape x m x N x N``.
        draws: Random numbers.
    """
    normal = draws.normal(covariance.shape[-1], 1)
    try:
        return solve_columns_transposed(cholesky_with_nugget(covariance, NUGGET), normal)
    except NotPSDError:
        rows = independent_rows(covariance)
        factor = cholesky_with_nugget(covariance[..., rows[:, None], rows], NUGGET)
        some = solve_columns_transposed(factor, normal[..., rows, :])
        return torch.zeros_like(normal).index_copy(-2, rows, some)


@singledispatch
def conditional_mean(
    process: PosteriorProcess, points: Points, weights: Tensor
) -> tuple[Callable[..., Tensor], Tensor]:
    """Return the function ``m(x) + cov(f(x), f(C)) w`` in two parts, ``rule`` and ``drawn``.

    Its values at inputs ``... x n x d`` are ``rule(drawn, X)``, ``... x m x n``, differentiable in
    X. Cost as of n covariances with N points, unless there is a rule of its own for the process.

    Args:
        process: f.
        points: C, evaluated by the process, N of them.
        weights: w, ``... x batch_shape x m x N x 1``.

    Returns:
        A function or method of a module, or a ``partial`` of one, and a tensor of the leading
        dimensions of the weights.
    """
    return partial(_regression, process, points), weights


@conditional_mean.register
def _(
    process: ConditionedProcess, points: Points, weights: Tensor
) -> tuple[Callable[..., Tensor], Tensor]:
    """Take hypothetical observations for further points of the base.

    With F and i their factor and whitened innovation, ``w' = F⁻ᵀ (i − F⁻¹ cov(f(X'), f(C)) w)``.
    """
    known, factor = process.points, process.factor
    explained = row_product(process.base.cross_covariance(known, points), weights)
    missing = process.whitened_innovation - solve_columns(factor, explained)
    own = solve_columns_transposed(factor, missing)
    both = zip_tensors(stack_rows, points, known)
    return conditional_mean(process.base, both, stack_rows(weights, own))


@conditional_mean.register
def _(
    process: ObservationSpaceProcess, points: Points, weights: Tensor
) -> tuple[Callable[..., Tensor], Tensor]:
    """Weight prior covariances with the observations X and with C. Cost O(n (M + N) d).

    With F the factor and r the whitened residual of the M observations, those of X have the weights
    ``F⁻ᵀ (r − F⁻¹ k(X, C) w)``.
    """
    explained = row_product(points.posterior.mT, weights)
    own = solve_columns_transposed(process.factor, process.whitened - explained)
    images = stack_rows(process.images, process.prior.images(points.prior))
    return partial(_prior_regression, process.prior, images), stack_rows(own, weights)


@conditional_mean.register
def _(
    process: WeightSpaceProcess, points: Points, weights: Tensor
) -> tuple[Callable[..., Tensor], Tensor]:
    """Weight prior covariances with inducing points Z and with C. Cost O(n (M + N) d).

    With features ``z(x) = L⁻¹ k(Z, x)`` of weights ``N(μ, S Sᵀ)``, those of Z have the weights
    ``L⁻ᵀ (μ + (S Sᵀ − I) z(C)ᵀ w)``.
    """
    basis = process.basis
    if not isinstance(basis, InducingBasis) or basis.rank == 0:
        return partial(_regression, process, points), weights
    of_points = row_product(points.prior.mT, weights)
    root = process.weights.root
    moved = row_product(root, row_product(root.mT, of_points)) - of_points
    own = solve_columns_transposed(basis.root, process.weights.mean + moved)
    prior = KernelPrior(basis.kernel, process.prior_mean)
    images = stack_rows(basis.Z.unsqueeze(-3), points.X.unsqueeze(-3))
    return partial(_prior_regression, prior, images), stack_rows(own, weights)


def _regression(process: PosteriorProcess, points: Points, weights: Tensor, X: Tensor) -> Tensor:
    """Evaluate ``m(x) + Σ_i w_i cov(f(x), f(c_i))`` of a process."""
    here = process.at(X)
    update = row_product(process.cross_covariance(here, points), weights)
    return process.mean_at(here) + update.squeeze(-1)


def _prior_regression(
    prior: ObservationSpacePrior, images: Tensor, weights: Tensor, X: Tensor
) -> Tensor:
    """Evaluate ``prior mean + Σ_i w_i k(x, x_i)``."""
    covariance = prior.covariance(prior.coordinates(X), images)
    return prior.mean + row_product(covariance, weights).squeeze(-1)
