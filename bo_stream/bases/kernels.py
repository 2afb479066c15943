"""Kernel matrices with a dimension of outputs: any kernel's, and the squared-exponential one's.

A kernel has batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs. Points are
``... x m x n x d``, with 1 for m where outputs share them; their leading dimensions broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from botorch.models.transforms.input import InputTransform
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.priors import LogNormalPrior
from torch import Size, Tensor
from torch.autograd.function import once_differentiable


def stacked_kernel(kernel: Kernel, A: Tensor, B: Tensor, outputs: int) -> Tensor:
    """Compute ``k(A, B)``, ``... x m x n x d`` and ``... x m x n' x d`` to ``... x m x n x n'``."""
    if outputs == 1:
        matrix: Tensor = kernel(A.squeeze(-3), B.squeeze(-3)).to_dense()
        return matrix.unsqueeze(-3)
    batch = (*A.shape[:-3], outputs)
    return kernel(A.expand(*batch, *A.shape[-2:]), B).to_dense()


def stacked_correlation(kernel: Kernel, A: Tensor, B: Tensor, outputs: int) -> Tensor:
    """Compute ``k(a, b) / √(k(a, a) k(b, b))``, 0 at a point without prior variance."""
    raw = stacked_kernel(kernel, A, B, outputs)
    first, second = (stacked_variance(kernel, X, outputs) for X in (A, B))
    square = first.unsqueeze(-1) * second.unsqueeze(-2)
    return raw / torch.where(square > 0.0, square, torch.inf).sqrt()


def stacked_variance(kernel: Kernel, X: Tensor, outputs: int) -> Tensor:
    """Compute ``k(x, x)``, ``... x m x n x d -> ... x m x n``."""
    if outputs == 1:
        variance: Tensor = kernel(X.squeeze(-3), diag=True)
        return variance.unsqueeze(-2)
    return kernel(X.expand(*X.shape[:-3], outputs, *X.shape[-2:]), diag=True)


UNIT_WIDTH = 1e-5
"""Difference from 1 up to which the sides of a box are those of the unit cube: rounding."""


def default_kernel(dim: int, batch_shape: Size, box: Tensor | None = None) -> RBFKernel:
    """Build BoTorch's default kernel for inputs in a box, whatever the units of its sides.

    Lengthscales, their prior and their lower bound are those of BoTorch's
    ``get_covar_module_with_dim_scaled_prior``, relative to the widths of the box: a model of inputs
    ``low + width * u`` is that of u, and in the unit cube the kernel is BoTorch's.

    Args:
        dim: Number of inputs d.
        batch_shape: Of the hyperparameters.
        box: ``2 x d``, lower and upper sides. Default: the unit cube.
    """
    kernel = get_covar_module_with_dim_scaled_prior(dim, batch_shape=batch_shape)
    widths = torch.ones(1, dim) if box is None else (box[1:] - box[:1]).double()
    if bool(((widths - 1.0).abs() <= UNIT_WIDTH).all()):
        return kernel
    prior, constraint = kernel.lengthscale_prior, kernel.raw_lengthscale_constraint
    scale = torch.full_like(widths, float(prior.scale))
    return RBFKernel(
        ard_num_dims=dim,
        batch_shape=batch_shape,
        lengthscale_prior=LogNormalPrior(prior.loc + widths.log(), scale),
        lengthscale_constraint=RelativeGreaterThan(
            constraint.lower_bound, prior.mode, widths.repeat(*batch_shape, 1, 1)
        ),
    )


class RelativeGreaterThan(GreaterThan):
    """Constraint ``value >= lower * unit`` on ``value = raw * unit``, for an optimiser to keep.

    What is optimised, ``raw``, is of order 1 whatever the unit of the value.
    """

    def __init__(self, lower: Tensor, initial: Tensor, unit: Tensor) -> None:
        """Constrain a parameter of the shape of ``unit``.

        Args:
            lower: Least value, relative to ``unit``.
            initial: First value, relative to ``unit``.
            unit: Of the values, positive.
        """
        super().__init__(lower, transform=None)
        self.lower_bound = lower * unit
        self.register_buffer("unit", unit)
        self._initial_value = torch.zeros_like(unit) + initial  # of raw

    def transform(self, tensor: Tensor) -> Tensor:
        """Compute the value from ``raw``."""
        return tensor * self.unit

    def inverse_transform(self, transformed_tensor: Tensor) -> Tensor:
        """Compute ``raw`` from a value."""
        return transformed_tensor / self.unit


class TransformedKernel(Kernel):
    """Kernel ``k(t(x), t(x'))`` with an input transform t whose parameters are its own.

    A memory of untransformed inputs then follows a learned transform as it follows a lengthscale.
    The transform, one row of each row, is in evaluation mode always: it learns no bounds.
    """

    def __init__(self, base_kernel: Kernel, input_transform: InputTransform) -> None:
        super().__init__()
        self.base_kernel = base_kernel
        self.input_transform = input_transform.eval()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all but the transform."""
        super().train(mode)
        self.input_transform.eval()
        return self

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        """Evaluate the base kernel at transformed inputs."""
        transform = self.input_transform.transform
        return self.base_kernel(transform(x1), transform(x2), diag=diag, **params)


FAR = 100.0
"""Median distances from the median beyond which points are evaluated apart from the others."""

Matrix = Callable[[Tensor, Tensor], Tensor]
"""``k(A, B)``, ``n x d`` and ``n' x d`` to ``... x n x n'``."""


def matrix_between(matrix: Matrix, A: Tensor, B: Tensor) -> Tensor:
    """Compute ``k(A, B)``, ``... x n x n'``, by blocks of points about as far from the median of B.

    gpytorch squares distances from the mean of the points: one that is far from the others spoils
    all their values, in float32 from some thousand lengthscales on. Without such a point it is one
    block, and also where both A and B differ in batches. Cost O(n n' d).
    """
    if B.ndim > 2:
        return matrix(A, B) if A.ndim > 2 else matrix_between(matrix, B, A).mT
    groups = _groups(B)
    if A is B:
        return matrix(B, B) if len(groups) < 2 else _in_blocks(matrix, B, groups)
    if len(groups) < 2:
        return matrix(B, A).mT
    columns = torch.cat([matrix(B[group], A).mT for group in groups], -1)
    return columns[..., torch.cat(groups).argsort()]


def _in_blocks(matrix: Matrix, Z: Tensor, groups: list[Tensor]) -> Tensor:
    """Compute ``k(Z, Z)`` between groups of Z, symmetric."""
    blocks: dict[tuple[int, int], Tensor] = {}
    for i, one in enumerate(groups):
        for j, other in enumerate(groups[i:], i):
            blocks[i, j] = matrix(Z[one], Z[other])
            blocks[j, i] = blocks[i, j].mT
    rows = [torch.cat([blocks[i, j] for j in range(len(groups))], -1) for i in range(len(groups))]
    places = torch.cat(groups).argsort()
    return torch.cat(rows, -2)[..., places, :][..., places]


def _groups(Z: Tensor) -> list[Tensor]:
    """List the points near the median, then of the others those near their median, and so on.

    Points that are not finite are near, so that each round takes some.
    """
    groups, left = [], torch.arange(len(Z), device=Z.device)
    while len(left) > 0:
        away = torch.linalg.vector_norm(Z[left] - Z[left].median(0).values, dim=-1)
        near = ~(away > FAR * away.median())
        groups.append(left[near])
        left = left[~near]
    return groups


@dataclass(frozen=True)
class SquaredExponential:
    """Kernel ``ρ² exp(−½ |(x − x') / l|²)`` of each output.

    Attributes:
        log_scale: ``log ρ²``, ``... x m x 1 x 1``.
        lengthscale: l, ``... x m x 1 x d`` or, isotropic, ``... x m x 1 x 1``.
    """

    log_scale: Tensor
    lengthscale: Tensor

    @classmethod
    def of(cls, kernel: Kernel, outputs: int) -> SquaredExponential | None:
        """Take over a kernel's hyperparameters, differentiable; None if it is of another kind."""
        base = kernel.base_kernel if type(kernel) is ScaleKernel else kernel
        chosen = kernel.active_dims is not None or base.active_dims is not None
        if type(base) is not RBFKernel or chosen:
            return None
        lengthscale, scaled = base.lengthscale, base is not kernel
        log_scale = kernel.outputscale.log() if scaled else torch.zeros_like(lengthscale[..., 0, 0])
        if outputs == 1:
            log_scale, lengthscale = log_scale.unsqueeze(-1), lengthscale.unsqueeze(-3)
        return cls(log_scale[..., None, None], lengthscale)

    def matrix(self, A: Tensor, B: Tensor) -> Tensor:
        """Compute ``k(A, B)``, ``... x m x n x n'``, from points ``... x m x n x d``.

        The exponent ``log ρ² + a b − ½ |a|² − ½ |b|²`` is one product of d + 2 columns. (2,048 x
        1,024, d = 9: 0.6 of the time of gpytorch's kernel, 0.3 to 0.4 with gradients.)
        """
        return _exponential(*self._columns(A, B), self.log_scale.detach(), A is B)

    def weighted(self, A: Tensor, B: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Compute ``wᵀ k(A, B)``, ``... x m x n'``, w ``... x m x n``, and the matrix, detached.

        The sum's gradient takes two products with the matrix and nothing of its size.
        """
        left, right = self._columns(A, B)
        batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2], weights.shape[:-1])
        wide = (left.expand(*batch, *left.shape[-2:]), right.expand(*batch, *right.shape[-2:]))
        total, matrix = _WeightedSum.apply(  # type: ignore[no-untyped-call]
            *wide, weights.expand(*batch, -1), self.log_scale.detach()
        )
        return total, matrix

    def _columns(self, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors L and R of the exponent ``L Rᵀ``, ``... x m x n x (d + 2)``."""
        centre = A.detach().mean(-2, keepdim=True) if A.shape[-2] else 0.0
        a, b = ((points - centre) / self.lengthscale for points in (A, B))
        left = torch.cat((a, _half_square(a) + self.log_scale, torch.ones_like(a[..., :1])), -1)
        right = torch.cat((b, torch.ones_like(b[..., :1]), _half_square(b)), -1)
        return left, right


class _WeightedSum(torch.autograd.Function):
    """Function ``wᵀ exp(L Rᵀ)`` and the exponential; first derivatives of the sum alone."""

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
    """Compute ``exp(L Rᵀ)`` with exponents of at most ``most``, a bound that rounding may exceed.

    Exact on the diagonal where rows and columns are the ``same`` points.
    """
    exponent = left @ right.mT
    found = exponent.detach()
    torch.minimum(found, most, out=found)
    if same:
        found.diagonal(dim1=-2, dim2=-1).copy_(most.squeeze(-1))
    return exponent.exp_()


def _half_square(points: Tensor) -> Tensor:
    return -0.5 * points.square().sum(-1, keepdim=True)
