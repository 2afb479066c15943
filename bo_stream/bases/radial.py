"""Kernels of the distance between points, with gradients of their matrix in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream.tensors import first_derivatives_only


@dataclass(frozen=True)
class RadialKernel:
    """Kernel ``ρ² c(r)`` of each output with ``r = |(x − x') / l|``.

    The correlation c is ``exp(−½ r²)``, or a Matérn one with ``s = √(2 ν) r``: ``exp(−s)`` for
    ν = 1/2, ``(1 + s) exp(−s)`` for 3/2, ``(1 + s + s² / 3) exp(−s)`` for 5/2. [Rasmussen and
    Williams, 2006, eq. 4.9 and section 4.2.1]

    Attributes:
        nu: Smoothness ν; None for the squared-exponential kernel.
        scale: ``ρ²``, ``... x m x 1 x 1``; None for 1.
        lengthscale: l, ``... x m x 1 x d`` or, isotropic, ``... x m x 1 x 1``.
    """

    nu: float | None
    scale: Tensor | None
    lengthscale: Tensor

    @classmethod
    def of(cls, kernel: Kernel, outputs: int, dtype: torch.dtype | None = None) -> Self | None:
        """Take over a kernel's hyperparameters, differentiable; None for another kind.

        Args:
            kernel: Of batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs.
            outputs: Number m of outputs.
            dtype: In which constraints are applied to the parameters; default: the kernel's.
        """
        base = kernel.base_kernel if type(kernel) is ScaleKernel else kernel
        chosen = kernel.active_dims is not None or base.active_dims is not None
        if type(base) not in (RBFKernel, MaternKernel) or chosen:
            return None
        lengthscale = base.raw_lengthscale_constraint.transform(base.raw_lengthscale.to(dtype))
        scale = None
        if base is not kernel:
            scale = kernel.raw_outputscale_constraint.transform(kernel.raw_outputscale.to(dtype))
            scale = (scale.unsqueeze(-1) if outputs == 1 else scale)[..., None, None]
        return cls(
            base.nu if type(base) is MaternKernel else None,
            scale,
            lengthscale.unsqueeze(-3) if outputs == 1 else lengthscale,
        )

    def matrix(self, X: Tensor) -> Tensor:
        """Compute ``k(X, X)``, ``... x m x n x n``, from points ``... x m x n x d``.

        First derivatives only, in O(n² d): the gradient passes through no n x n x d tensor.
        """
        centre = X.detach().mean(-2, keepdim=True)
        points, scale = (X - centre) / self.lengthscale, self.scale
        if scale is not None:
            batch = torch.broadcast_shapes(points.shape[:-2], scale.shape[:-2])
            points, scale = points.expand(*batch, -1, -1), scale.expand(*batch, 1, 1)
        matrix: Tensor = _RadialMatrix.apply(points, scale, self.nu)  # type: ignore[no-untyped-call]
        return matrix


class _RadialMatrix(torch.autograd.Function):
    """Function ``K_ij = ρ² c(r_ij)`` of points z, ``r_ij = |z_i − z_j|``; first derivatives only.

    With the slope ``D = −dK / d(½ r²)``, a gradient G in K and ``W = (G + Gᵀ) ∘ D`` that in z_i is
    ``−Σ_j W_ij (z_i − z_j)``, and that in ρ² is ``Σ_ij G_ij K_ij / ρ²``.
    """

    @staticmethod
    def forward(ctx: Any, points: Tensor, scale: Tensor | None, nu: float | None) -> Tensor:
        matrix, slope, ctx.factor = _radial(points, scale, nu)
        ctx.save_for_backward(points, scale, matrix, slope)
        return matrix

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        points, scale, matrix, slope = ctx.saved_tensors
        of_points, of_scale = None, None
        if ctx.needs_input_grad[1]:
            of_scale = (gradient * matrix).sum((-2, -1), keepdim=True) / scale
        if ctx.needs_input_grad[0]:
            weights = gradient * slope
            weights = weights + weights.mT
            total = weights.sum(-1, keepdim=True)
            # W is symmetric, and a product with few rows is twice as fast as one with few columns
            of_points = ctx.factor * ((points.mT @ weights).mT - total * points)
        return of_points, of_scale, None


def _radial(points: Tensor, scale: Tensor | None, nu: float | None) -> tuple[Tensor, Tensor, float]:
    """Compute K, its slope ``−dK / d(½ r²)`` divided by a number, and that number.

    At r = 0 the kernel of ν = 1/2 has a kink, and its slope is infinite. It counts as 0 there: the
    distance between equal points depends on no lengthscale.
    """
    squares = points.square().sum(-1, keepdim=True)
    ones = torch.ones_like(squares)
    # −½ r² or (2 ν) r², by one product of d + 2 columns
    factor = -0.5 if nu is None else 2.0 * nu
    left = torch.cat((-2.0 * points, squares, ones), -1) * factor
    exponent = left @ torch.cat((points, ones, squares), -1).mT
    exponent.diagonal(dim1=-2, dim2=-1).mul_(0.0)  # NaN stays NaN, as it would elsewhere
    if nu is None:
        matrix = exponent.clamp_max_(0.0).exp_()
        matrix = matrix if scale is None else matrix.mul_(scale)
        return matrix, matrix, 1.0
    equal = None
    if nu == 0.5:  # r² of equal points is no more than rounding, but its root is
        bound = points.shape[-1] + 2.0
        rounding = bound * torch.finfo(points.dtype).eps * squares
        equal = exponent <= rounding + rounding.mT
        exponent.masked_fill_(equal, 0.0)
    s = exponent.clamp_min_(0.0).sqrt_()
    decay = s.neg().exp_()
    decay = decay if scale is None else decay.mul_(scale)
    if equal is not None:
        return decay, (decay / s).masked_fill_(equal, 0.0), 1.0
    linear = torch.addcmul(decay, s, decay)  # (1 + s) exp(−s)
    if nu == 1.5:
        return linear, decay, 3.0
    return torch.addcmul(linear, s.square_(), decay, value=1.0 / 3.0), linear, 5.0 / 3.0
