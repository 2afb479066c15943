"""Linear functions of a process at points, as many as there are data, and their features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel, ScaleKernel
from torch import Tensor

from bo_stream.bases.inducing import KernelBasis
from bo_stream.bases.kernels import SquaredExponential, stacked_kernel, stacked_variance
from bo_stream.linalg import solve_lower
from bo_stream.tensors import map_tensors


@dataclass(frozen=True)
class FunctionBasis(KernelBasis):
    """Whitened features ``z(x) = F⁻¹ Lᵀ k(β, x)`` of inducing functions β.

    Either of their values, ``F Fᵀ = K_β`` and L = I; or of combinations of them, the columns of L,
    ``F Fᵀ = Lᵀ K_β L``; or of noisy ones, ``F Fᵀ = I + Lᵀ K_β L``: observed with precision
    ``B = L Lᵀ``.

    Attributes:
        kernel: Any.
        functions: β, different for every batch element and output.
        outputs: Number m of outputs.
        factor: F, ``... x m x M x M``, lower triangular.
        combination: L, ``... x m x S x M`` for S functions β, or None for I.
    """

    kernel: Kernel
    functions: InducingFunctions
    outputs: int
    factor: Tensor
    combination: Tensor | None

    @property
    def rank(self) -> int:
        """Number M of features."""
        return self.factor.shape[-1]

    def features(self, X: Tensor) -> Tensor:
        """Compute ``F⁻¹ Lᵀ k(β, x)``. Cost O(n (S d + S M + M²))."""
        return self.whitened(self.functions.with_values(self.kernel, X, self.outputs))

    def whitened(self, covariance: Tensor) -> Tensor:
        """Compute features from a covariance with β, ``... x m x S x n -> ... x m x n x M``."""
        if self.combination is not None:
            covariance = self.combination.mT @ covariance
        return solve_lower(self.factor, covariance).mT


@dataclass(frozen=True)
class InducingFunctions:
    """M linear functions of the process for each batch element and output.

    Values at points; or, with factors, averages around them, whose covariance is that of a
    squared-exponential kernel of another lengthscale and the same variance: with ``l = c s``

        ``k(i, j) = ρ² Π_d √(2 l_i l_j / (l_i² + l_j²)) exp(−(z_i − z_j)² / (l_i² + l_j²))``,

    the covariance with a value that of ``c = 1``. [Cheng2017, eq. 19]

    Attributes:
        points: Z, ``... x m x M x d``.
        log_factors: ``log c``, of the same shape; None for values, of any kernel.
    """

    points: Tensor
    log_factors: Tensor | None = None

    def __len__(self) -> int:
        return self.points.shape[-2]

    def rows(self, which: slice | Tensor) -> InducingFunctions:
        """Select some of the functions."""
        return map_tensors(self, lambda tensor: tensor[..., which, :])

    def followed_by(self, points: Tensor) -> InducingFunctions:
        """Append values at further points."""
        factors = self.log_factors
        if factors is not None:
            factors = torch.cat((factors, torch.zeros_like(points)), -2)
        return InducingFunctions(torch.cat((self.points, points), -2), factors)

    def with_values(self, kernel: Kernel, X: Tensor, outputs: int) -> Tensor:
        """Compute the covariance with values, ``... x n x d -> ... x m x M x n``. Cost O(n M d)."""
        return self.with_functions(kernel, InducingFunctions(X.unsqueeze(-3)), outputs)

    def with_functions(self, kernel: Kernel, others: InducingFunctions, outputs: int) -> Tensor:
        """Compute the covariance with other functions, ``... x m x M x M'``. Cost O(M M' d)."""
        if self.log_factors is None:
            return _values(kernel, self.points, others.points, outputs)
        scale, lengthscale = _squared_exponential(kernel, outputs)
        mine = lengthscale * self.log_factors.exp()
        if others.log_factors is None:
            weight = (mine.square() + lengthscale.square()).reciprocal()
            Z, X = self.points, others.points
            distance = (weight * Z.square()).sum(-1, keepdim=True) + weight @ X.square().mT
            distance = distance - 2.0 * (weight * Z) @ X.mT
            log_size = 0.5 * (2.0 * mine * lengthscale * weight).log().sum(-1, keepdim=True)
            return scale * (log_size - distance.clamp_min(0.0)).exp()
        theirs = lengthscale * others.log_factors.exp()
        log_value = self.points.new_zeros(())
        for d in range(self.points.shape[-1]):
            l1, z1 = (values[..., d].unsqueeze(-1) for values in (mine, self.points))
            l2, z2 = (values[..., d].unsqueeze(-2) for values in (theirs, others.points))
            total = l1.square() + l2.square()
            log_size = 0.5 * (2.0 * l1 * l2 / total).log()
            log_value = log_value + log_size - (z1 - z2).square() / total
        return scale * log_value.exp()

    def weighted_values(
        self, kernel: Kernel, X: Tensor, outputs: int, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute :meth:`weighted_functions` of values at X, ``... x n x d``."""
        return self.weighted_functions(kernel, InducingFunctions(X.unsqueeze(-3)), outputs, weights)

    def weighted_functions(
        self, kernel: Kernel, others: InducingFunctions, outputs: int, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute ``Σ_i w_i cov(f_i, f'_j)``, ``... x m x M'``, and the covariances, detached.

        First derivatives only. Cost O(M M' d).
        """
        known = SquaredExponential.of(kernel, outputs) if self.log_factors is None else None
        if known is not None:
            return known.weighted(self.points, others.points, weights)
        covariance = self.with_functions(kernel, others, outputs)
        return (weights.unsqueeze(-2) @ covariance).squeeze(-2), covariance.detach()

    def variance(self, kernel: Kernel, outputs: int) -> Tensor:
        """Compute the prior variance, ``... x m x M``: that of values, whatever the factors."""
        return stacked_variance(kernel, self.points, outputs)


def check_factors(kernel: Kernel) -> None:
    """Check that a kernel is a squared-exponential one: others have no lengthscale factors."""
    if SquaredExponential.of(kernel, 1) is None:
        base = kernel.base_kernel if isinstance(kernel, ScaleKernel) else kernel
        raise UnsupportedError(
            "Expected covar_module to be an RBFKernel of all inputs, or a ScaleKernel of one, got "
            f"{type(base).__name__}: only its inducing functions have lengthscale factors. Leave "
            "out lengthscale_factors."
        )


def _values(kernel: Kernel, A: Tensor, B: Tensor, outputs: int) -> Tensor:
    """Compute the kernel matrix of points; gpytorch's kernels fail where there are none."""
    known = SquaredExponential.of(kernel, outputs)
    if known is not None:
        return known.matrix(A, B)
    if A.shape[-2] > 0 and B.shape[-2] > 0:
        return stacked_kernel(kernel, A, B, outputs)
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    return A.new_zeros(*batch, A.shape[-2], B.shape[-2])


def _squared_exponential(kernel: Kernel, outputs: int) -> tuple[Tensor, Tensor]:
    """Return the output scale, ``... x m x 1 x 1``, and the lengthscales, ``... x m x 1 x d``."""
    scaled = isinstance(kernel, ScaleKernel)
    lengthscale = (kernel.base_kernel if scaled else kernel).lengthscale
    scale = kernel.outputscale if scaled else torch.ones_like(lengthscale[..., 0, 0])
    if outputs == 1:
        scale, lengthscale = scale.unsqueeze(-1), lengthscale.unsqueeze(-3)
    return scale[..., None, None], lengthscale
