"""The posterior mean given values drawn at points, as one function of all inputs.

For a process f and values v drawn from ``N(m(C), Σ)`` at points C, with m the mean and Σ the
covariance there, ``E[f(x) | f(C) = v] = m(x) + cov(f(x), f(C)) w`` with ``w = Σ⁻¹ (v − m(C))``.
(Rasmussen and Williams, 2006, eq. 2.19) With ``L Lᵀ = Σ`` and normal e, ``v = m(C) + L e`` and
``w = L⁻ᵀ e``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from linear_operator.utils.errors import NotPSDError
from torch import Tensor
from torch.autograd.function import once_differentiable

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

NUGGET = 1e-8
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
    return kernel_sum(process.prior, images, stack_rows(own, weights))


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
    return kernel_sum(prior, images, stack_rows(own, weights))


def _regression(process: PosteriorProcess, points: Points, weights: Tensor, X: Tensor) -> Tensor:
    """Evaluate ``m(x) + Σ_i w_i cov(f(x), f(c_i))`` of a process."""
    here = process.at(X)
    update = row_product(process.cross_covariance(here, points), weights)
    return process.mean_at(here) + update.squeeze(-1)


# --- sums of a kernel at known points -------------------------------------------------------------


def kernel_sum(
    prior: ObservationSpacePrior, images: Tensor, weights: Tensor
) -> tuple[Callable[..., Tensor], Tensor]:
    """Return the function ``prior mean + Σ_i w_i k(x, x_i)`` as :func:`conditional_mean` does.

    Args:
        prior: Of mean and kernel.
        images: Of the points x_i, ``... x m x N x c``, with 1 for m where outputs share them.
        weights: w, ``... x batch_shape x m x N x 1``.
    """
    known = None
    if isinstance(prior, KernelPrior):
        known = RadialKernel.of(prior.kernel, images, prior.mean.shape[-2])
    if known is None:
        return partial(_regression_on_prior, prior, images), weights
    return partial(_regression_on_radial, prior.mean, known), known.scale * weights


def _regression_on_prior(
    prior: ObservationSpacePrior, images: Tensor, weights: Tensor, X: Tensor
) -> Tensor:
    covariance = prior.covariance(prior.coordinates(X), images)
    return prior.mean + row_product(covariance, weights).squeeze(-1)


def _regression_on_radial(mean: Tensor, kernel: RadialKernel, weights: Tensor, X: Tensor) -> Tensor:
    return mean + row_product(kernel.correlations(X), weights).squeeze(-1)


@dataclass(frozen=True)
class RadialKernel:
    """A kernel ``ρ² c(|x − z| / l)`` of the distance to N known points z, whose scaling is stored.

    c is squared-exponential, or Matérn with ν = 3/2 or 5/2. (Rasmussen and Williams, 2006,
    eq. 4.9 and 4.17) 10 functions of 800 points at a point each, with gradients: 0.5 of the time of
    gpytorch's Matérn kernel in 20 inputs, 0.25 in 100.

    Attributes:
        nu: ν; infinite: squared-exponential.
        scale: ρ², ``... x m x 1 x 1``.
        lengthscale: l, ``... x m x 1 x d``, as all below with 1 for m or without m where outputs
            share it.
        centre: Subtracted from points before they are scaled, ``... x 1 x 1 x d``.
        points: ``(z − centre) / l``, ``... x m x N x d``.
        squares: Their ``|·|²``, ``... x m x 1 x N``.
    """

    nu: float
    scale: Tensor
    lengthscale: Tensor
    centre: Tensor
    points: Tensor
    squares: Tensor

    @classmethod
    def of(cls, kernel: Kernel, Z: Tensor, outputs: int) -> RadialKernel | None:
        """Scale points, ``... x m x N x d``; None of another kernel, or of some of the inputs."""
        base = kernel.base_kernel if type(kernel) is ScaleKernel else kernel
        nu = math.inf if type(base) is RBFKernel else base.nu if type(base) is MaternKernel else 0.5
        if nu == 0.5 or kernel.active_dims is not None or base.active_dims is not None:
            return None
        lengthscale = base.lengthscale
        scale = (
            kernel.outputscale if base is not kernel else torch.ones_like(lengthscale[..., 0, 0])
        )
        if outputs == 1:
            scale, lengthscale = scale.unsqueeze(-1), lengthscale.unsqueeze(-3)
        centre = Z.mean(-2, keepdim=True)
        points = (Z - centre) / lengthscale
        squares = points.square().sum(-1).unsqueeze(-2)
        return cls(nu, scale[..., None, None], lengthscale, centre, points, squares)

    def correlations(self, X: Tensor) -> Tensor:
        """Compute ``c(|x − z| / l)`` at inputs ``... x n x d``, ``... x m x n x N``.

        First derivatives only, finite at the points themselves. Cost O(n N d).
        """
        scaled = (X.unsqueeze(-3) - self.centre) / self.lengthscale
        values: Tensor = _Correlation.apply(scaled, self)  # type: ignore[no-untyped-call]
        return values


class _Correlation(torch.autograd.Function):
    """Correlations as a function of scaled inputs u; first derivatives only.

    With ``h = ½ |u − z|²`` the gradient of each is ``c'(h) (u − z)``: no distance is divided by.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, kernel: RadialKernel) -> Tensor:
        square = row_product(inputs, kernel.points.mT).mul_(-2.0).add_(kernel.squares)
        square.add_(inputs.square().sum(-1, keepdim=True)).clamp_min_(0.0)
        if kernel.nu == math.inf:
            value = slope = square.mul_(-0.5).exp_()
        else:
            r = square.mul_(2.0 * kernel.nu).sqrt_()
            value = r.neg().exp_()
            if kernel.nu == 1.5:
                value, slope = value * (1.0 + r), value * 3.0
            else:
                first = value * (1.0 + r)
                value, slope = value.mul_(r.square_()).div_(3.0).add_(first), first * (5.0 / 3.0)
        ctx.save_for_backward(inputs, kernel.points, slope)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        inputs, points, slope = ctx.saved_tensors
        slope = slope * gradient
        moved = row_product(slope, points) - slope.sum(-1, keepdim=True) * inputs
        return moved.sum_to_size(inputs.shape), None
