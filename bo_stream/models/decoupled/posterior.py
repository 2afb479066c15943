"""The variational posterior of a decoupled model in its two bases, and the process it gives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.functions import FunctionBasis, InducingFunctions
from bo_stream.linalg import (
    cholesky_with_nugget,
    inverse_root,
    row_product,
    safe_cholesky,
    solve_lower,
)
from bo_stream.process.process import Joint, Points, PosteriorProcess

NUGGET = 1e-9
"""Noise of the values at β, in parts of their variance: without any, features of points that lie
close together have rounding errors larger than what they leave of the kernel.
"""


@dataclass(frozen=True)
class DirectCovariance:
    """Noisy values at β of precision ``B = L Lᵀ``, as in [Cheng2017, eq. 8 and 9].

    ``k − k_xβ (B⁻¹ + K_β)⁻¹ k_βx = k − |z|²`` with ``z = F⁻¹ Lᵀ k_βx`` and ``F Fᵀ = I + Lᵀ K_β L``.

    Attributes:
        root: L, ``... x m x M x M``; with a preconditioner ``diag(K_β) L``.
        jacobi: Whether it is so preconditioned. [Cheng2017, A.1]
    """

    root: Tensor
    jacobi: bool = False

    def basis(self, kernel: Kernel, beta: InducingFunctions, outputs: int) -> FunctionBasis:
        """Return features of noisy values, differentiable in everything. Cost O(M³)."""
        root = self.root
        if self.jacobi:
            root = root / beta.variance(kernel, outputs).unsqueeze(-1)
        inner = root.mT @ beta.with_functions(kernel, beta, outputs) @ root
        return FunctionBasis(kernel, beta, outputs, safe_cholesky(inner + _eye(inner)), root)

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return mean and root of the features' weights, ``... x m x M x 1`` and ``x M``: zeros.

        The features say all there is.
        """
        return self.root.new_zeros(*self.root.shape[:-1], 1), torch.zeros_like(self.root)

    def divergence(self, basis: FunctionBasis) -> Tensor:
        """Compute the KL of q from the prior, ``... x m``, were their means equal.

        That is ``½ log |H| − ½ tr(I − H⁻¹)``, ``H = F Fᵀ``: the last two terms of eq. 9.
        """
        factor = basis.factor
        inverse = solve_lower(factor, _eye(factor).expand_as(factor))
        trace = (1.0 - inverse.square().sum(-2)).sum(-1)
        return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * trace

    def widened(
        self, kernel: Kernel, functions: InducingFunctions, outputs: int
    ) -> DirectCovariance:
        """Add functions, as if observed with noise of the prior's variance; 0 would never leave."""
        variance = functions.variance(kernel, outputs).expand(functions.points.shape[:-1])
        new = variance.sqrt() if self.jacobi else variance.rsqrt()
        return replace(self, root=_block_diagonal(self.root, torch.diag_embed(new)))


@dataclass(frozen=True)
class HybridCovariance:
    """Values at β with a posterior of their own, of [Cheng2017, eq. 11 to 14].

    Whitened weights ``v = F⁻¹ f(β)``, ``F Fᵀ = K_β`` with ``NUGGET``, in natural parameters, along
    which natural gradients are straight: ``v ~ N(Q⁻¹ moment, Q⁻¹)``, ``Q = I + gram``.

    Attributes:
        moment: ``... x m x M x 1``.
        gram: ``... x m x M x M``.
    """

    moment: Tensor
    gram: Tensor

    def basis(self, kernel: Kernel, beta: InducingFunctions, outputs: int) -> FunctionBasis:
        """Return features of values, differentiable in everything. Cost O(M³)."""
        inner = beta.with_functions(kernel, beta, outputs)
        return FunctionBasis(kernel, beta, outputs, cholesky_with_nugget(inner, NUGGET), None)

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return ``Q⁻¹ moment`` and a root of ``Q⁻¹``, ``... x m x M x 1`` and ``x M``."""
        root = inverse_root(self.gram + _eye(self.gram))
        return root @ (root.mT @ self.moment), root

    def divergence(self, basis: FunctionBasis) -> Tensor:
        """Compute ``½ (tr Q⁻¹ − M + log |Q|)``: eq. 14 with its ``−log |K⁻¹ S|`` halved."""
        _, root = self.weights()
        log_precision = -2.0 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return 0.5 * (root.square().sum((-2, -1)) - root.shape[-1] + log_precision)

    def widened(
        self, kernel: Kernel, functions: InducingFunctions, outputs: int
    ) -> HybridCovariance:
        """Add weights as before any data; the others stay, for F grows at its lower end."""
        more = functions.points[..., :1]
        empty = torch.zeros_like(more @ more.mT)
        return HybridCovariance(
            torch.cat((self.moment, torch.zeros_like(more)), -2),
            _block_diagonal(self.gram, empty),
        )


@dataclass(frozen=True)
class SpectralCovariance(HybridCovariance):
    """A hybrid covariance of combinations of the values at β, the first functions of α.

    Attributes:
        combination: L, ``... x m x S x M``; a function a column.
    """

    combination: Tensor

    def basis(self, kernel: Kernel, beta: InducingFunctions, outputs: int) -> FunctionBasis:
        """Return features of combinations. Cost O(S² (d + M) + M³)."""
        left = self.combination
        inner = left.mT @ beta.with_functions(kernel, beta, outputs) @ left
        return FunctionBasis(kernel, beta, outputs, cholesky_with_nugget(inner, NUGGET), left)


VariationalCovariance = DirectCovariance | HybridCovariance
"""The variational parameters of the process's covariance, one entry a function of β."""


@dataclass(frozen=True)
class DecoupledPosterior:
    """``m(x) = k(x, α) a`` beside the mean of β's weights, if these have one; β's covariance.

    Attributes:
        alpha: α, ``M_α`` functions.
        coefficients: a, ``... x m x M_α``; with a preconditioner ``diag(K_α) a``.
        beta: β, ``M_β`` functions.
        covariance: The covariance.
        jacobi: Whether a is so preconditioned. [Cheng2017, A.1]
    """

    alpha: InducingFunctions
    coefficients: Tensor
    beta: InducingFunctions
    covariance: VariationalCovariance
    jacobi: bool = False

    def with_expansion(self, a: Tensor, kernel: Kernel, outputs: int) -> DecoupledPosterior:
        """Set another a, ``... x m x M_α``."""
        if self.jacobi:
            a = a * self.alpha.variance(kernel, outputs)
        return replace(self, coefficients=a)

    def with_mean_values(self, points: Tensor) -> DecoupledPosterior:
        """Add values at further points, ``... x m x k x d``, to α; the mean stays."""
        zero = torch.zeros_like(points[..., 0])
        return replace(
            self,
            alpha=self.alpha.followed_by(points),
            coefficients=torch.cat((self.coefficients, zero), -1),
        )

    def with_covariance_values(
        self, points: Tensor, kernel: Kernel, outputs: int
    ) -> DecoupledPosterior:
        """Add values at further points, ``... x m x k x d``, to β."""
        beta = self.beta.followed_by(points)
        new = beta.rows(slice(len(self.beta), None))
        return replace(self, beta=beta, covariance=self.covariance.widened(kernel, new, outputs))


@dataclass(frozen=True)
class KernelExpansion:
    """A function ``x ↦ k(x, α) a`` of each output.

    Attributes:
        kernel: Any.
        functions: α.
        weights: a, ``... x m x M``.
    """

    kernel: Kernel
    functions: InducingFunctions
    weights: Tensor

    def __call__(self, X: Tensor) -> Tensor:
        """Evaluate at inputs ``... x n x d``, ``... x m x n``. Cost O(n M d)."""
        cross = self.functions.with_values(self.kernel, X, self.weights.shape[-2])
        return row_product(self.weights.unsqueeze(-2), cross).squeeze(-2)


@dataclass(frozen=True)
class ShiftedProcess(PosteriorProcess):
    """A process with a function added to its mean; covariances are the base's.

    Attributes:
        base: The process before.
        shift: The function.
    """

    base: PosteriorProcess
    shift: KernelExpansion

    def at(self, X: Tensor) -> Points:
        """Evaluate the base's features."""
        return self.base.at(X)

    def mean_at(self, points: Points) -> Tensor:
        """Add the function to the base's."""
        return self.base.mean_at(points) + self.shift(points.X)

    def cross_covariance(self, points: Points, others: Points) -> Tensor:
        """Return the base's."""
        return self.base.cross_covariance(points, others)

    def variance_at(self, points: Points) -> Tensor:
        """Return the base's."""
        return self.base.variance_at(points)

    def joint_at(self, points: Points) -> Joint:
        """Return the base's factors around another mean."""
        base = self.base.joint_at(points)
        return replace(base, mean=base.mean + self.shift(points.X))


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _block_diagonal(first: Tensor, second: Tensor) -> Tensor:
    n, k = first.shape[-1], second.shape[-1]
    result = first.new_zeros(*first.shape[:-2], n + k, n + k)
    result[..., :n, :n] = first
    result[..., n:, n:] = second
    return result
