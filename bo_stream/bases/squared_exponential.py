"""The squared-exponential kernel's matrices as one product and one exponential."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class SquaredExponential:
    """``ρ² exp(−½ |(x − x') / l|²)`` of each output.

    Attributes:
        log_scale: ``log ρ²``, ``... x m x 1 x 1``.
        lengthscale: l, ``... x m x 1 x d`` or, the same for all inputs, ``... x m x 1 x 1``.
    """

    log_scale: Tensor
    lengthscale: Tensor

    @classmethod
    def of(cls, kernel: Kernel, outputs: int) -> SquaredExponential | None:
        """A kernel's own, differentiable in its hyperparameters; None if it is another one.

        Args:
            kernel: Of batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs.
            outputs: m.
        """
        base = kernel.base_kernel if type(kernel) is ScaleKernel else kernel
        chosen = kernel.active_dims is not None or base.active_dims is not None
        if type(base) is not RBFKernel or chosen:
            return None
        lengthscale = base.lengthscale
        log_scale = torch.zeros_like(lengthscale[..., 0, 0])
        if base is not kernel:
            log_scale = kernel.outputscale.log()
        log_scale = log_scale[..., None, None]
        if outputs > 1:
            return cls(log_scale, lengthscale)
        return cls(log_scale.unsqueeze(-3), lengthscale.unsqueeze(-3))

    def matrix(self, A: Tensor, B: Tensor) -> Tensor:
        """``k(A, B)``, ``... x m x n x d`` and ``... x m x n' x d`` to ``... x m x n x n'``.

        The exponent ``log ρ² + a b − ½ |a|² − ½ |b|²`` is one product of d + 2 columns: values take
        two more passes over the matrix, gradients one and two products. (2,048 x 1,024, d = 9: 0.6
        of the time of gpytorch's kernel, 0.3 to 0.4 with gradients.) Cost O(n n' d).
        """
        most = self.log_scale.detach()
        return _exponential(*self._columns(A, B), most, A is B)

    def weighted(self, A: Tensor, B: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """``wᵀ k(A, B)``, ``... x m x n'``, and the matrix, which has no gradient.

        The sum's gradient takes two products with the matrix and nothing of its size.

        Args:
            A: ``... x m x n x d``.
            B: ``... x m x n' x d``.
            weights: w, ``... x m x n``.
        """
        left, right = self._columns(A, B)
        batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2], weights.shape[:-1])
        wide = (left.expand(*batch, *left.shape[-2:]), right.expand(*batch, *right.shape[-2:]))
        total, matrix = _WeightedSum.apply(  # type: ignore[no-untyped-call]
            *wide, weights.expand(*batch, -1), self.log_scale.detach()
        )
        return total, matrix

    def _columns(self, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of the exponent, ``... x m x n x (d + 2)`` and ``... x m x n' x (d + 2)``."""
        centre = A.detach().mean(-2, keepdim=True) if A.shape[-2] else 0.0
        a, b = ((points - centre) / self.lengthscale for points in (A, B))
        left = torch.cat((a, _half_square(a) + self.log_scale, torch.ones_like(a[..., :1])), -1)
        right = torch.cat((b, torch.ones_like(b[..., :1]), _half_square(b)), -1)
        return left, right


class _WeightedSum(torch.autograd.Function):
    """``wᵀ exp(L Rᵀ)`` and the exponential; first derivatives of the sum alone."""

    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, weights: Tensor, most: Tensor
    ) -> tuple[Tensor, Tensor]:
        matrix = _exponential(left, right, most, same=False)
        ctx.save_for_backward(left, right, weights, matrix)
        ctx.mark_non_differentiable(matrix)
        return (weights.unsqueeze(-2) @ matrix).squeeze(-2), matrix

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        left, right, weights, matrix = ctx.saved_tensors
        w, s = weights.unsqueeze(-1), slope.unsqueeze(-1)
        needed = ctx.needs_input_grad
        return (
            w * (matrix @ (s * right)) if needed[0] else None,
            s * (matrix.mT @ (w * left)) if needed[1] else None,
            (matrix @ s).squeeze(-1) if needed[2] else None,
            None,
        )


def _exponential(left: Tensor, right: Tensor, most: Tensor, same: bool) -> Tensor:
    """``exp(L Rᵀ)``, mended where rounding far from the centre makes what no kernel has.

    Args:
        left: L.
        right: R.
        most: Of an exponent.
        same: Whether rows and columns are the same points.
    """
    exponent = left @ right.mT
    found = exponent.detach()
    torch.minimum(found, most, out=found)
    if same:
        found.diagonal(dim1=-2, dim2=-1).copy_(most.squeeze(-1))
    return exponent.exp_()


def _half_square(points: Tensor) -> Tensor:
    return -0.5 * points.square().sum(-1, keepdim=True)
