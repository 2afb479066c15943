"""Features of inducing functions: what a process is where it is known by a few of these."""

from __future__ import annotations

from dataclasses import dataclass

from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.basis import Basis
from bo_stream.bases.inducing import kernel_matrix, kernel_variance
from bo_stream.bases.inducing_functions import InducingFunctions
from bo_stream.linalg import solve_lower


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
