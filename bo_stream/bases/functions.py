"""Kernel functions at points, as many as there are data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream.bases.basis import Basis
from bo_stream.bases.inducing import kernel_matrix, kernel_variance
from bo_stream.bases.kernels import SquaredExponential, stacked_kernel, stacked_variance
from bo_stream.bases.sampled import SampledBasis
from bo_stream.linalg import solve_lower


@dataclass(frozen=True)
class InducingFunctions:
    """M linear functions of the process of each batch element and output.

    Values at points; or, with factors, averages around them that a squared-exponential kernel of
    another lengthscale has as its own, of the same variance: with ``l = c s``

        ``k(i, j) = ρ² Π_d √(2 l_i l_j / (l_i² + l_j²)) exp(−(z_i − z_j)² / (l_i² + l_j²))``,

    the covariance with a value that of ``c = 1``. [Cheng2017, eq. 19]

    Attributes:
        points: Z, ``... x m x M x d``.
        log_factors: ``log c``, of the same shape; None: 0, values, of any kernel.
    """

    points: Tensor
    log_factors: Tensor | None = None

    def __len__(self) -> int:
        return self.points.shape[-2]

    def map(self, rule: Callable[[Tensor], Tensor]) -> InducingFunctions:
        """A rule for the tensors."""
        factors = None if self.log_factors is None else rule(self.log_factors)
        return InducingFunctions(rule(self.points), factors)

    def rows(self, which: slice | Tensor) -> InducingFunctions:
        """Some of them."""
        return self.map(lambda tensor: tensor[..., which, :])

    def followed_by(self, points: Tensor) -> InducingFunctions:
        """With values at further points."""
        factors = self.log_factors
        if factors is not None:
            factors = torch.cat((factors, torch.zeros_like(points)), -2)
        return InducingFunctions(torch.cat((self.points, points), -2), factors)

    def with_values(self, kernel: Kernel, X: Tensor, outputs: int) -> Tensor:
        """Covariance with values at inputs, ``... x n x d -> ... x m x M x n``. Cost O(n M d).

        Args:
            kernel: Of batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs.
            X: Leading dimensions broadcast against ``batch_shape``.
            outputs: m.
        """
        X = X.unsqueeze(-3)
        if self.log_factors is None:
            return _values(kernel, self.points, X, outputs)
        scale, lengthscale = _squared_exponential(kernel, outputs)
        own = lengthscale * self.log_factors.exp()
        weight = (own.square() + lengthscale.square()).reciprocal()
        Z = self.points
        distance = (weight * Z.square()).sum(-1, keepdim=True) + weight @ X.square().mT
        distance = distance - 2.0 * (weight * Z) @ X.mT
        log_size = 0.5 * (2.0 * own * lengthscale * weight).log().sum(-1, keepdim=True)
        return scale * (log_size - distance.clamp_min(0.0)).exp()

    def weighted_values(
        self, kernel: Kernel, X: Tensor, outputs: int, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``Σ_i w_i cov(f_i, f(x))``, ``... x m x n``, and the covariances without gradients.

        First derivatives only. Cost O(n M d).

        Args:
            kernel: As for :meth:`with_values`.
            X: Likewise.
            outputs: m.
            weights: w, ``... x m x M``.
        """
        known = SquaredExponential.of(kernel, outputs) if self.log_factors is None else None
        if known is not None:
            return known.weighted(self.points, X.unsqueeze(-3), weights)
        return _weighted(weights, self.with_values(kernel, X, outputs))

    def with_functions(self, kernel: Kernel, others: InducingFunctions, outputs: int) -> Tensor:
        """Covariance with other functions of this kind, ``... x m x M x M'``. Cost O(M M' d)."""
        if self.log_factors is None or others.log_factors is None:
            return _values(kernel, self.points, others.points, outputs)
        scale, lengthscale = _squared_exponential(kernel, outputs)
        mine, theirs = (lengthscale * f.exp() for f in (self.log_factors, others.log_factors))
        log_value = self.points.new_zeros(())
        for d in range(self.points.shape[-1]):
            l1, l2 = mine[..., d].unsqueeze(-1), theirs[..., d].unsqueeze(-2)
            z1, z2 = self.points[..., d].unsqueeze(-1), others.points[..., d].unsqueeze(-2)
            total = l1.square() + l2.square()
            log_size = 0.5 * (2.0 * l1 * l2 / total).log()
            log_value = log_value + log_size - (z1 - z2).square() / total
        return scale * log_value.exp()

    def weighted_functions(
        self, kernel: Kernel, others: InducingFunctions, outputs: int, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`weighted_values`, with other functions of this kind. Cost O(M M' d)."""
        values = self.log_factors is None or others.log_factors is None
        known = SquaredExponential.of(kernel, outputs) if values else None
        if known is not None:
            return known.weighted(self.points, others.points, weights)
        return _weighted(weights, self.with_functions(kernel, others, outputs))

    def variance(self, kernel: Kernel, outputs: int) -> Tensor:
        """Prior variance, ``... x m x M``: that of values, whatever the factors."""
        return stacked_variance(kernel, self.points, outputs)


def check_factors(kernel: Kernel) -> None:
    """Check that inducing functions with factors can be had with a kernel.

    Raises:
        UnsupportedError: It is no squared-exponential one of all inputs.
    """
    base = kernel.base_kernel if isinstance(kernel, ScaleKernel) else kernel
    if not isinstance(base, RBFKernel) or base.active_dims is not None:
        raise UnsupportedError(
            "Expected covar_module to be an RBFKernel of all inputs, or a ScaleKernel of one, got "
            f"{type(base).__name__}: only its inducing functions have lengthscale factors. Leave "
            "out lengthscale_factors."
        )


def _weighted(weights: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    return (weights.unsqueeze(-2) @ covariance).squeeze(-2), covariance.detach()


def _values(kernel: Kernel, A: Tensor, B: Tensor, outputs: int) -> Tensor:
    """Of none an empty matrix: gpytorch's kernels take the mean of their inputs."""
    known = SquaredExponential.of(kernel, outputs)
    if known is not None:
        return known.matrix(A, B)
    if A.shape[-2] > 0 and B.shape[-2] > 0:
        return stacked_kernel(kernel, A, B, outputs)
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    return A.new_zeros(*batch, A.shape[-2], B.shape[-2])


def _squared_exponential(kernel: Kernel, outputs: int) -> tuple[Tensor, Tensor]:
    """Output scale, ``... x m x 1 x 1``, and lengthscales, ``... x m x 1 x d``."""
    scaled = isinstance(kernel, ScaleKernel)
    lengthscale = (kernel.base_kernel if scaled else kernel).lengthscale
    scale = kernel.outputscale if scaled else torch.ones_like(lengthscale[..., 0, 0])
    scale = scale[..., None, None]
    if outputs > 1:
        return scale, lengthscale
    return scale.unsqueeze(-3), lengthscale.unsqueeze(-3)


@dataclass(frozen=True)
class FunctionBasis(Basis):
    """Whitened features ``z(x) = F⁻¹ Lᵀ k(β, x)``, whose residual ``k − zᵀ z`` is a covariance.

    Either of the values at β, ``F Fᵀ = K_β`` and L = I; or of combinations of them, the columns of
    L, ``F Fᵀ = Lᵀ K_β L``; or of noisy ones, ``F Fᵀ = I + Lᵀ K_β L``: observed with precision
    ``B = L Lᵀ``.

    Attributes:
        kernel: Any.
        functions: β, of every batch element and output its own.
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
        """``F⁻¹ Lᵀ k(β, x)``, ``... x n x d -> ... x m x n x M``. Cost O(n (S d + S M + M²))."""
        return self.whitened(self.functions.with_values(self.kernel, X, self.outputs))

    def whitened(self, covariance: Tensor) -> Tensor:
        """Features of what has a covariance with β, ``... x m x S x n -> ... x m x n x M``."""
        if self.combination is not None:
            covariance = self.combination.mT @ covariance
        return solve_lower(self.factor, covariance).mT

    def residual_covariance(
        self,
        X: Tensor,
        X2: Tensor,
        features: Tensor | None = None,
        features2: Tensor | None = None,
    ) -> Tensor:
        """``k − z zᵀ``, ``... x m x n x n'``. Cost O(n n' M), and O(n M²) for features."""
        own = self.features(X) if features is None else features
        others = self.features(X2) if features2 is None else features2
        return kernel_matrix(self.kernel, X, X2, self.outputs) - own @ others.mT

    def residual_variance(self, X: Tensor, features: Tensor | None = None) -> Tensor:
        """``k − |z|²``, ``... x m x n``, never negative. Cost O(n M), and O(n M²) for features."""
        own = self.features(X) if features is None else features
        variance = kernel_variance(self.kernel, X, self.outputs)
        return (variance - own.square().sum(-1)).clamp_min(0.0)


_CHUNK = 4096


@dataclass(frozen=True)
class KernelFunctions(SampledBasis):
    """``φ_r(x) = k(x, z_r)``, whatever their prior.

    Attributes:
        kernel: Any, of batch shape ``m`` for m > 1 outputs, or none.
        Z: ``p x d``.
        outputs: m.
    """

    kernel: Kernel
    Z: Tensor
    outputs: int

    def with_kernel(self, kernel: Kernel, outputs: int) -> Self:
        """At the same points."""
        return replace(self, kernel=kernel, outputs=outputs)

    @property
    def size(self) -> int:
        """Number p of points."""
        return len(self.Z)

    def functions(self, X: Tensor, index: Tensor) -> Tensor:
        """``... x n x d`` and ``k`` to ``... x m x n x k``."""
        return kernel_matrix(self.kernel, X, self.Z[index].to(X), self.outputs)

    def mean_squares(self, X: Tensor) -> Tensor:
        """At the inputs themselves, some points at a time. Cost O(n p)."""
        parts = torch.arange(self.size, device=X.device).split(_CHUNK)
        return torch.cat([self.functions(X, part).square().mean(-2) for part in parts], -1)


@dataclass(frozen=True)
class PointBasis(KernelFunctions):
    """With ``S = K_ZZ``: inducing points, and the exact prior at them.

    With Z = X the posterior mean of the exact GP is among what it can be. [Evans2020, section I.2]
    """

    @property
    def is_diagonal(self) -> bool:
        """Never."""
        return False

    def precision(self, index: Tensor, others: Tensor) -> Tensor:
        """``k(Z[index], Z[others])``, ``m x k x k'``."""
        return kernel_matrix(self.kernel, self.Z[index], self.Z[others], self.outputs)

    def precision_diagonal(self, index: Tensor) -> Tensor:
        """``k(z, z)``, ``m x k``."""
        return kernel_variance(self.kernel, self.Z[index], self.outputs)


@dataclass(frozen=True)
class RelevanceBasis(KernelFunctions):
    """With ``S = diag(s)``: each function has a precision of its own.

    [Tipping2001; Evans2020, section I.3]

    Attributes:
        precisions: s, ``m x p``.
    """

    precisions: Tensor

    @property
    def is_diagonal(self) -> bool:
        """Always."""
        return True

    def precision(self, index: Tensor, others: Tensor) -> Tensor:
        """``S[index, others]``, ``m x k x k'``."""
        same = index.unsqueeze(-1) == others
        return self.precisions[:, index].unsqueeze(-1) * same

    def precision_diagonal(self, index: Tensor) -> Tensor:
        """s, ``m x k``."""
        return self.precisions[:, index]
