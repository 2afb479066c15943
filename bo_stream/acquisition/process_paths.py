"""Functions drawn from a posterior process: one from its prior, and the update that data make.

Pathwise conditioning (Matheron's rule): for jointly normal (f, u), ``f(·) + cov(f(·), u)
cov(u, u)⁻¹ (u' − u)`` has the law of f given that u has the law of u'. [Wilson2020, eq. 11 and 13]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import singledispatch
from typing import Any

import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Size, Tensor

from bo_stream.acquisition.path_terms import (
    Augmented,
    Constant,
    Expansion,
    Features,
    KernelSum,
    PathTerm,
    Prior,
    Selected,
    Update,
    WeightedFunctions,
    sum_of,
)
from bo_stream.bases.basis import Basis
from bo_stream.bases.functions import FunctionBasis
from bo_stream.bases.grid.interpolation import GridBasis
from bo_stream.bases.inducing import InducingBasis, kernel_variance
from bo_stream.bases.sampled import KernelFunctions
from bo_stream.bases.spectral import RandomDraws, draw_prior
from bo_stream.linalg import solve_lower
from bo_stream.models.clustered.solver import ClusteredProcess
from bo_stream.models.decoupled.process import KernelExpansion, ShiftedProcess
from bo_stream.models.local.process import LocalProcess
from bo_stream.models.quadruply_stochastic.function_process import FunctionProcess
from bo_stream.models.wiski.observation_space import ObservationSpaceProcess
from bo_stream.process.process import (
    ConditionedProcess,
    PosteriorProcess,
    SelectedProcess,
    WeightSpaceProcess,
)

Terms = tuple[PathTerm, ...]


def shape_of(process: Any) -> Size:
    """``batch_shape x m`` of a process."""
    if isinstance(process, ConditionedProcess):
        return torch.broadcast_shapes(shape_of(process.base), process.whitened_surprise.shape[:-2])
    if isinstance(process, SelectedProcess):
        return Size((*shape_of(process.base)[:-1], len(process.outputs)))
    if isinstance(process, ShiftedProcess):
        return shape_of(process.base)
    return process.prior_mean.shape[:-1]


@singledispatch
def draw_terms(process: PosteriorProcess, draws: RandomDraws) -> Terms:
    """Draw functions from a process; their values are the sums of the terms.

    Args:
        process: What ``model.process`` returned.
        draws: Random numbers, whose shape ends in the process's own ``batch_shape x m``.

    Raises:
        UnsupportedError: The process or its kernel has no functions in closed form.
    """
    raise UnsupportedError(
        f"Functions cannot be drawn from a {type(process).__name__}: draw values at points by "
        "model.posterior(X).rsample()."
    )


@draw_terms.register
def _(process: LocalProcess, draws: RandomDraws) -> Terms:
    raise UnsupportedError(
        "LocalGP has no functions to draw, for its nearest models change abruptly from place to "
        "place: draw values at points by model.posterior(X).rsample(), or take OSGPR, ClusteredGP "
        "or WISKI."
    )


@draw_terms.register
def _(process: WeightSpaceProcess, draws: RandomDraws) -> Terms:
    """Weights from their posterior, and what the basis leaves out from its prior."""
    mean, root = process.weights.mean, process.weights.root
    weights = mean + _times(root, draws.normal(root.shape[-1], 1))
    return Constant(process.prior_mean), *_of_weights(process.basis, weights, draws)


@draw_terms.register
def _(process: ObservationSpaceProcess, draws: RandomDraws) -> Terms:
    """Those of the same process in the weights of its features."""
    return draw_terms(process.in_weights, draws)


@singledispatch
def _of_weights(basis: Basis, weights: Tensor, draws: RandomDraws) -> Terms:
    """``z(x)ᵀ w`` with weights ``... x m x r x 1``, and a draw of the residual."""
    raise UnsupportedError(
        f"Functions cannot be drawn in a {type(basis).__name__}: draw values at points by "
        "model.posterior(X).rsample()."
    )


@_of_weights.register
def _(basis: GridBasis, weights: Tensor, draws: RandomDraws) -> Terms:
    return (Features(basis, weights),)


@_of_weights.register
def _(basis: InducingBasis, weights: Tensor, draws: RandomDraws) -> Terms:
    """``g(x) + k(x, Z) L⁻ᵀ (w − L⁻¹ (g(Z) + e))`` with g from the prior, e the jitter's noise."""
    prior = draw_prior(basis.kernel, basis.Z.shape[-1], basis.outputs, draws)
    if basis.rank == 0:
        return (Prior(prior),)
    own = _noise_in(basis.root, kernel_variance(basis.kernel, basis.Z, basis.outputs))
    values = prior(basis.Z) + own.sqrt() * draws.normal(basis.rank)
    missing = weights - _solve(basis.root, values.unsqueeze(-1))
    return Prior(prior), KernelSum(
        basis.kernel, basis.Z, basis.outputs, _solve_transposed(basis.root, missing)
    )


@_of_weights.register
def _(basis: FunctionBasis, weights: Tensor, draws: RandomDraws) -> Terms:
    """As with inducing points, for functions β, combinations of them, and noisy ones."""
    kernel, outputs = basis.kernel, basis.outputs
    prior = draw_prior(kernel, basis.functions.points.shape[-1], outputs, draws)
    if basis.rank == 0:
        return (Prior(prior),)
    values = prior.of(basis.functions, kernel, outputs).unsqueeze(-1)
    covariance = basis.functions.with_functions(kernel, basis.functions, outputs)
    if basis.combination is not None:
        values = _times(basis.combination.mT, values)
        covariance = basis.combination.mT @ covariance @ basis.combination
    own = _noise_in(basis.factor, covariance.diagonal(dim1=-2, dim2=-1))
    values = values + (own.sqrt() * draws.normal(basis.rank)).unsqueeze(-1)
    missing = weights - _solve(basis.factor, values)
    a = _solve_transposed(basis.factor, missing)
    a = a if basis.combination is None else _times(basis.combination, a)
    return Prior(prior), Expansion(KernelExpansion(kernel, basis.functions, a.squeeze(-1)), True)


@draw_terms.register
def _(process: ClusteredProcess, draws: RandomDraws) -> Terms:
    """``g(x) + k(x, Z) (K + Λ)⁻¹ (u − g(Z) − ε)``, by square roots of precisions."""
    prior = draw_prior(process.kernel, process.Z.shape[-1], process.outputs, draws)
    terms = Constant(process.prior_mean), Prior(prior)
    if len(process.Z) == 0:
        return terms
    noisy = process.root.mT * prior(process.Z.double()).unsqueeze(-1)
    noisy = noisy + draws.normal(len(process.Z), 1)
    batch = process.solution.ndim - 2
    surprise = _by_columns(process.solver.solve, noisy.to(process.solution), batch)
    weights = process.root.mT * (process.solution - surprise)
    return *terms, KernelSum(process.kernel, process.Z, process.outputs, weights)


@draw_terms.register
def _(process: ShiftedProcess, draws: RandomDraws) -> Terms:
    """The base's functions and the shift."""
    return *draw_terms(process.base, draws), Expansion(process.shift, False)


@draw_terms.register
def _(process: FunctionProcess, draws: RandomDraws) -> Terms:
    """Weights from their posterior; the augmentation's part from its prior."""
    moments = process.weights
    weights = moments.mean + moments.scale * draws.normal(moments.mean.shape[-1])
    columns = _times(moments.rows.double(), draws.normal(moments.rows.shape[-1], 1))
    terms = (
        Constant(process.prior_mean),
        WeightedFunctions(process, weights.double() + columns.squeeze(-1)),
    )
    extra, basis = process.augmentation, process.basis
    if extra is None or not isinstance(basis, KernelFunctions):
        return terms
    prior = draw_prior(extra.kernel, basis.Z.shape[-1], extra.outputs, draws)
    return *terms, Augmented(process, prior)


@draw_terms.register
def _(process: ConditionedProcess, draws: RandomDraws) -> Terms:
    """``f(x) + cov(x, X) C⁻¹ (Y − f(X) − ε)`` with f a function of the base, ``C = F Fᵀ``."""
    base, points, factor = process.base, process.points, process.factor
    terms = draw_terms(base, draws)
    own = _noise_in(factor, base.variance_at(points))
    values = sum_of(terms, points.X.double()) - base.mean_at(points)
    values = (values + own.sqrt() * draws.normal(factor.shape[-1])).unsqueeze(-1)
    missing = process.whitened_surprise - _solve(factor, values)
    return *terms, Update(base, points, _solve_transposed(factor, missing))


@draw_terms.register
def _(process: SelectedProcess, draws: RandomDraws) -> Terms:
    """Functions of all outputs of the base, of which some are kept."""
    shape = Size((*draws.shape[:-1], shape_of(process.base)[-1]))
    terms = draw_terms(process.base, replace(draws, shape=shape))
    return (Selected(terms, process.outputs),)


def _noise_in(factor: Tensor, variance: Tensor) -> Tensor:
    """Diagonal of ``F Fᵀ`` beyond a variance: noise and jitter in it, ``... x m x n``."""
    return (factor.square().sum(-1) - variance).clamp_min(0.0)


def _times(matrix: Tensor, columns: Tensor) -> Tensor:
    """A product, leading dimensions broadcast without copies."""
    return torch.einsum("...rs,...sk->...rk", matrix, columns)


def _solve(factor: Tensor, columns: Tensor) -> Tensor:
    """``F⁻¹ columns`` for a lower triangular F."""
    return _by_columns(lambda right: solve_lower(factor, right), columns, factor.ndim - 2)


def _solve_transposed(factor: Tensor, columns: Tensor) -> Tensor:
    """``F⁻ᵀ columns`` for a lower triangular F."""
    return _by_columns(
        lambda right: torch.linalg.solve_triangular(factor.mT, right, upper=True),
        columns,
        factor.ndim - 2,
    )


def _by_columns(rule: Callable[[Tensor], Tensor], columns: Tensor, batch: int) -> Tensor:
    """A linear rule for columns, draws side by side: its matrix is not copied for each.

    Args:
        rule: From ``... x n x k`` to as many.
        columns: ``ahead x batch x n x 1``.
        batch: Number of dimensions of the rule's own batch.
    """
    ahead = columns.shape[: columns.ndim - 2 - batch]
    together = columns.squeeze(-1).reshape(ahead.numel(), *columns.shape[len(ahead) : -1])
    return rule(together.movedim(0, -1)).movedim(-1, 0).reshape(columns.shape)
