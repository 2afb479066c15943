"""Bases of features: the interface, and features of inducing points and inducing functions.

A kernel has batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel, ScaleKernel
from torch import Tensor

from bo_stream.bases.kernels import (
    SquaredExponential,
    TransformedKernel,
    diagonal,
    evaluated,
    stacked_kernel,
    stacked_variance,
)
from bo_stream.bases.radial import WIDE, RadialKernel, RadialSums
from bo_stream.linalg import (
    cholesky_with_jitter,
    row_product,
    safe_cholesky,
    solve_lower,
    stack_columns,
    stack_rows,
)
from bo_stream.tensors import cached_for_autograd, map_tensors, none_set


class Basis(ABC):
    """Features z of a Gaussian process with ``k(x, x') = z(x)ᵀ z(x') + residual(x, x')``.

    Whitened: the prior over weights is N(0, I), the prior root is folded into the features.

    Attributes:
        has_residual: Whether there is a residual; without one, functions of the process are
            combinations of the features.
    """

    has_residual: ClassVar[bool] = False

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number r of features."""

    @abstractmethod
    def features(self, X: Tensor) -> Tensor:
        """Compute the features, ``... x n x d -> ... x m x n x r``, differentiable in X."""

    def residual_covariance(
        self, X: Tensor, X2: Tensor, features: Tensor, features2: Tensor
    ) -> Tensor | None:
        """Compute ``k − z zᵀ``, ``... x m x n x n'``, from the features at both; None is zero."""
        return None

    def residual_variance(self, X: Tensor, features: Tensor | None = None) -> Tensor | None:
        """Compute the diagonal of the residual covariance, ``... x m x n``; None is zero."""
        return None


# --- features of inducing points -----------------------------------------------------------------


T = TypeVar("T", bound=torch.nn.Module)

MOST_PLACES = 32
"""Places apart that kernel values are computed by, one after the other: with more of them
lengthscales are short beside the distances of most points."""


class KernelBasis(Basis):
    """Basis of a known kernel of m outputs, with the residual ``k − zᵀ z``."""

    has_residual: ClassVar[bool] = True

    kernel: Kernel
    outputs: int

    def residual_covariance(
        self, X: Tensor, X2: Tensor, features: Tensor, features2: Tensor
    ) -> Tensor:
        """Compute ``k − z zᵀ``, ``... x m x n x n'``, from the features at both. O(n n' M)."""
        covariance = kernel_matrix(self.kernel, X, X2, self.outputs, self.radial)
        return covariance - row_product(features, features2.mT)

    def residual_variance(self, X: Tensor, features: Tensor | None = None) -> Tensor:
        """Compute ``k − |z|²``, ``... x m x n``, at least 0. Cost O(n M), and the features."""
        own = self.features(X) if features is None else features
        variance = kernel_variance(self.kernel, X, self.outputs)
        return (variance - own.square().sum(-1)).clamp_min(0.0)

    @cached_for_autograd
    def radial(self) -> RadialKernel | None:
        """Read the kernel's hyperparameters once; None if they are learned, or it is not radial."""
        learned = any(parameter.requires_grad for parameter in self.kernel.parameters())
        return None if learned else RadialKernel.of(self.kernel, self.outputs)


@dataclass(frozen=True)
class InducingBasis(KernelBasis):
    """Whitened features ``z(x) = L⁻¹ k(Z, x)`` of inducing points Z, with ``L Lᵀ = K_ZZ``.

    Attributes:
        kernel: Frozen, in float64; see :func:`frozen`.
        Z: ``M x d``, the same for every batch element and output; M may be 0.
        outputs: Number m of outputs.
        root: L, ``... x m x M x M``.
        jitter: Jitter in the factorisation of K_ZZ, relative to its diagonal; 0 is none.
        left_out: Number of points that were requested and are not among Z.
    """

    kernel: Kernel
    Z: Tensor
    outputs: int
    root: Tensor
    jitter: float = 0.0
    left_out: int = 0

    @classmethod
    def of(cls, kernel: Kernel, Z: Tensor, outputs: int, live: bool = False) -> InducingBasis:
        """Make the basis of a copy of a kernel, in O(M³); NotPSDError: no jitter was enough.

        Of the kernel itself if ``live``: differentiable in it and in Z.
        """
        kernel = kernel if live else frozen(kernel)
        root, jitter = cholesky_with_jitter(kernel_matrix(kernel, Z, Z, outputs))
        return cls(kernel, Z, outputs, root, jitter)

    @property
    def rank(self) -> int:
        """Number M of inducing points."""
        return len(self.Z)

    def features(self, X: Tensor) -> Tensor:
        """Compute ``L⁻¹ k(Z, x)``, ``... x n x d -> ... x m x n x M``. Cost O(n M²).

        Where all batch elements share the root, they are the columns of one triangular solve.
        """
        is_shared = self.root.ndim <= 3
        rows = X.reshape(-1, X.shape[-1]) if is_shared else X
        moves = torch.is_grad_enabled() and (X.requires_grad or self.Z.requires_grad)
        if moves or self._of_points is None:
            cross = kernel_matrix(self.kernel, self.Z, rows, self.outputs, self.radial)
        else:
            cross = self._of_points.covariance(rows)
        features = solve_lower(self.root, cross).mT
        return features.unflatten(-2, X.shape[:-1]).movedim(0, -3) if is_shared else features

    def to(self, device: torch.device) -> InducingBasis:
        """Move the basis to a device."""
        moved = map_tensors(self, lambda tensor: tensor.to(device))
        return replace(moved, kernel=deepcopy(self.kernel).to(device))

    def grown(self, X: Tensor, features: Tensor | None = None) -> InducingBasis:
        """Append points ``n x d``, whose features may be known; the features of the others stay.

        Cost O(n M² + n³). NotPSDError: The others determine a point.
        """
        cross = self.features(X) if features is None else features
        corner = safe_cholesky(self.residual_covariance(X, X, cross, cross))
        above = torch.nn.functional.pad(self.root, (0, len(X)))
        root = stack_rows(above, stack_columns(cross, corner))
        return replace(self, Z=torch.cat((self.Z, X)), root=root, left_out=0)

    def continued(self, X: Tensor, features: Tensor) -> Tensor:
        """Extend the known features of the first points to all M. Cost O(n M g) for g others."""
        M = features.shape[-1]
        covariance = kernel_matrix(self.kernel, self.Z[M:], X, self.outputs)
        left = covariance - self.root[..., M:, :M] @ features.mT
        return stack_columns(features, solve_lower(self.root[..., M:, M:], left).mT)

    def missed(self, older: KnownValues, features: Tensor) -> Tensor:
        """Compute the covariance of the older weights given these, ``... x m x M' x M'``.

        ``L_older⁻¹ (k − zᵀ z)(Z_older, Z_older) L_older⁻ᵀ``, where only points that are not among Z
        have a residual. Cost O(M² g) for g of them.
        """
        gone = torch.nonzero(~members(older.Z, self.Z)).flatten()
        Z, own = older.Z[gone], features[..., gone, :]
        units = torch.eye(len(older.Z), dtype=features.dtype, device=features.device)[:, gone]
        half = solve_lower(older.root, units)
        return half @ self.residual_covariance(Z, Z, own, own) @ half.mT

    @cached_for_autograd
    def _of_points(self) -> RadialSums | None:
        """Return the kernel between Z and other points, Z scaled once; None if it cannot be."""
        return RadialSums.of(self.radial, self.Z.unsqueeze(-3))

    @property
    def values(self) -> KnownValues:
        """The weights as values of the process at Z."""
        return KnownValues(self.Z, self.root)


@dataclass(frozen=True)
class KnownValues:
    """Weights v that are values of the process at some points, ``f(Z) = L v``.

    Attributes:
        Z: ``... x M x d``.
        root: L, ``... x m x M x M``; if it has fewer rows, the other points' weights are values.
    """

    Z: Tensor
    root: Tensor

    def prior(self, kernel: Kernel, outputs: int) -> Tensor:
        """Compute the covariance of v under a kernel, ``L⁻¹ k(Z, Z) L⁻ᵀ``, ``... x m x M x M``.

        In float64 for any dtype of the kernel, differentiable in its parameters; the identity for
        the kernel whose whole root is L. Cost O(M³).
        """
        K = differentiable_matrix(kernel, self.Z, self.Z, outputs)
        return self._weights(self._weights(K).mT)

    def _weights(self, values: Tensor) -> Tensor:
        whitened = self.root.shape[-1]
        first = solve_lower(self.root, values[..., :whitened, :])
        return torch.cat((first, values[..., whitened:, :]), -2)


def kernel_matrix(
    kernel: Kernel, A: Tensor, B: Tensor, outputs: int, known: RadialKernel | None = None
) -> Tensor:
    """Compute ``k(A, B)``, ``... x n x d`` and ``... x n' x d`` to ``... x m x n x n'``.

    Where nothing is differentiated, by :meth:`RadialKernel.values` if it can be: GPyTorch's way
    through a lazy tensor takes longer than the arithmetic of few points. ``known`` is a kernel
    without gradients whose hyperparameters were read before.
    """
    used = (A, B) if known is not None else (A, B, *kernel.parameters())
    learned = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in used)
    if known is None and not learned:
        known = RadialKernel.of(kernel, outputs)
    if known is not None and not learned:
        first = A.unsqueeze(-3)
        return known.values(first, first if B is A else B.unsqueeze(-3))
    if outputs == 1:
        return _by_places(kernel, A, B).unsqueeze(-3)
    matrix = _by_places(kernel, A.unsqueeze(-3), B.unsqueeze(-3))
    return matrix.expand(*matrix.shape[:-3], outputs, *matrix.shape[-2:])


def _by_places(kernel: Kernel, A: Tensor, B: Tensor) -> Tensor:
    """Compute ``k(A, B)`` as gpytorch does, from rows of A that are within ``WIDE`` at a time.

    gpytorch computes distances from norms about the mean of A: a point that is far from the others
    costs all their values digits. Where both A and B differ in batches it is one product.
    """
    shared = next((X for X in (A, B) if X.shape[:-2].numel() == 1), None)
    places = [] if shared is None else _places(kernel, shared.reshape(shared.shape[-2:]))
    if len(places) < 2:
        return evaluated(kernel, A, B)
    if shared is not A:
        return _by_places(kernel, B, A).mT
    blocks = [evaluated(kernel, A[..., rows, :], B) for rows in places]
    return torch.cat(blocks, -2)[..., torch.cat(places).argsort(), :]


@torch.no_grad()
def _places(kernel: Kernel, X: Tensor) -> list[Tensor]:
    """Return rows of points ``n x d``, group by group, each within ``WIDE`` of its mean.

    One group where all are, or where there were more than ``MOST_PLACES``. Points that are not
    finite are near, so that each round takes some.
    """
    left = torch.arange(len(X), device=X.device)
    if len(X) < 2 or none_set(_norms(kernel, X, _mean) > WIDE, is_worth_a_wait=False):
        return [left]
    groups = list[Tensor]()
    while len(left) > 0:
        if len(groups) == MOST_PLACES:
            return [torch.arange(len(X), device=X.device)]
        away = _norms(kernel, X[left], lambda own: own[..., :1, :])
        near = ~(away > 0.5 * WIDE)
        groups.append(left[near])
        left = left[~near]
    return groups


def largest_norm(kernel: Kernel, X: Tensor) -> float:
    """Compute the largest distance of points ``n x d`` from their mean, in lengthscales.

    Over all parts of the kernel that have a lengthscale, of their own inputs; 0 without such parts.
    """
    return float(_norms(kernel, X, _mean).max())


def _mean(X: Tensor) -> Tensor:
    return X.mean(-2, keepdim=True)


def _norms(kernel: Kernel, X: Tensor, centre: Callable[[Tensor], Tensor]) -> Tensor:
    """Compute distances of points from a centre in lengthscales, the most of all parts, ``n``."""
    norms = [X.new_zeros(1, len(X))]
    for own, lengthscale in inputs_of_parts(kernel, X):
        offsets = (own - centre(own)) / lengthscale
        norms.append(torch.atleast_2d(torch.linalg.vector_norm(offsets, dim=-1)).flatten(0, -2))
    return torch.cat(norms).amax(0)


def inputs_of_parts(
    module: torch.nn.Module, X: Tensor, are_selected: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return what each part of a kernel with a lengthscale sees of points, and the lengthscale.

    A part selects its inputs, ``active_dims``, from those that the kernel around it has selected. A
    ``ScaleKernel`` selects once for itself and its base. Parts that a kernel of another kind gives
    inputs of its own choice are left out where their widths show it.
    """
    if isinstance(module, Kernel):
        if module.active_dims is not None and not are_selected:
            X = X[..., module.active_dims]
        if module.has_lengthscale:
            lengthscale = module.lengthscale.detach()
            if lengthscale.shape[-1] in (1, X.shape[-1]):
                yield X, lengthscale
        if isinstance(module, TransformedKernel):
            X = module.input_transform.transform(X)
    for part in module.children():
        if isinstance(part, Kernel | torch.nn.ModuleList):
            yield from inputs_of_parts(part, X, isinstance(module, ScaleKernel))


def kernel_variance(kernel: Kernel, X: Tensor, outputs: int) -> Tensor:
    """Compute ``k(x, x)``, ``... x n x d -> ... x m x n``."""
    known = RadialKernel.variance_of(kernel, outputs, X)
    if known is not None:
        return known
    if outputs == 1:
        return diagonal(kernel, X).unsqueeze(-2)
    variance = diagonal(kernel, X.unsqueeze(-3))
    return variance.expand(*variance.shape[:-2], outputs, variance.shape[-1])


def frozen(module: T, dtype: torch.dtype = torch.float64) -> T:
    """Copy a kernel or a network in evaluation mode, without gradients."""
    return deepcopy(module).to(dtype).eval().requires_grad_(False)


def as_read(module: T, dtype: torch.dtype = torch.float64) -> T:
    """Return a module in a dtype, to be read at once and without gradients.

    Itself, or a copy if it has another dtype: a copy costs more than the kernel of few points.
    """
    return module if _is_in_dtype(module, dtype) else frozen(module, dtype)


def _is_in_dtype(module: torch.nn.Module, dtype: torch.dtype) -> bool:
    return all(parameter.dtype == dtype for parameter in module.parameters())


class _Applied(torch.nn.Module, Generic[T]):
    """A module that applies a rule to another: the form that ``functional_call`` takes."""

    def __init__(self, module: T) -> None:
        super().__init__()
        self.module = module

    def forward(self, rule: Callable[[T], Tensor]) -> Tensor:
        return rule(self.module)


def in_dtype(module: T, dtype: torch.dtype, rule: Callable[[T], Tensor]) -> Tensor:
    """Apply a rule to a module in a dtype, differentiable in the module's parameters.

    The module is copied only if it has another dtype, as by :func:`as_read`.
    """
    if _is_in_dtype(module, dtype):
        return rule(module)
    copy = _Applied(deepcopy(module).to(dtype).eval())
    parameters = {f"module.{name}": p.to(dtype) for name, p in module.named_parameters()}
    value: Tensor = torch.func.functional_call(copy, parameters, (rule,))
    return value


def differentiable_matrix(kernel: Kernel, A: Tensor, B: Tensor, outputs: int) -> Tensor:
    """Compute ``k(A, B)`` in the dtype of A, differentiable in the kernel's parameters.

    Once, where A is B: see :meth:`RadialKernel.matrix`, by which it is computed if it can be.
    """
    known = RadialKernel.of(kernel, outputs, A.dtype) if A is B else None
    if known is not None:
        return known.matrix(A.unsqueeze(-3))
    return in_dtype(kernel, A.dtype, lambda copy: kernel_matrix(copy, A, B, outputs))


def members(points: Tensor, others: Tensor) -> Tensor:
    """Return which rows of ``n x d`` are among ``n' x d`` others, ``n``. Memory O(n n')."""
    return equal_rows(points, others).any(-1)


def equal_rows(A: Tensor, B: Tensor) -> Tensor:
    """Compare rows, ``... x n x d`` and ``... x n' x d`` to ``... x n x n'``."""
    same = torch.ones(*A.shape[:-1], B.shape[-2], dtype=torch.bool, device=A.device)
    for a, b in zip(A.unbind(-1), B.unbind(-1), strict=True):
        same &= a.unsqueeze(-1) == b.unsqueeze(-2)
    return same


# --- features of linear functions of the process -------------------------------------------------


@dataclass(frozen=True)
class FunctionBasis(KernelBasis):
    """Whitened features ``z(x) = F⁻¹ Lᵀ k(β, x)`` of inducing functions β.

    The features represent either the functions' values, ``F Fᵀ = K_β`` and L = I; or combinations
    of them, the columns of L, ``F Fᵀ = Lᵀ K_β L``; or noisy values, ``F Fᵀ = I + Lᵀ K_β L``:
    observed with precision ``B = L Lᵀ``. K_β is the covariance of the functions.

    Attributes:
        kernel: Any kernel.
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
    squared-exponential kernel of another lengthscale and the same variance: with ``l = c s``, s the
    kernel's lengthscale and ρ² its variance,

        ``k(i, j) = ρ² Π_d √(2 l_i l_j / (l_i² + l_j²)) exp(−(z_i − z_j)² / (l_i² + l_j²))``,

    and a value has ``c = 1``. [Cheng2017, eq. 19]

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
            Z, X = self.points, others.points
            exponential = SquaredExponential.of(kernel, outputs)
            if exponential is not None:
                return exponential.matrix(Z, X)
            return stacked_kernel(kernel, Z, X, outputs)
        known = RadialKernel.of(kernel, outputs)
        assert known is not None  # noqa: S101 (check_factors has seen it)
        scale, lengthscale = 1.0 if known.scale is None else known.scale, known.lengthscale
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
        """Compute the prior variance, ``... x m x M``: the same for all factors."""
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
