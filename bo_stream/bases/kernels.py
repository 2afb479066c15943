"""Kernels: defaults, parts and gradients, and Matérn kernels that are products over inputs.

A kernel has batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs. Points are
``... x m x n x d``, with 1 for m where outputs share them; their leading dimensions broadcast.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.priors import LogNormalPrior
from torch import Size, Tensor

from bo_stream.bases.radial import RadialKernel
from bo_stream.tensors import broadcast_shapes, first_derivatives_only


def stacked_kernel(kernel: Kernel, A: Tensor, B: Tensor, outputs: int) -> Tensor:
    """Compute ``k(A, B)``, ``... x m x n x d`` and ``... x m x n' x d`` to ``... x m x n x n'``."""
    if outputs == 1:
        return evaluated(kernel, A.squeeze(-3), B.squeeze(-3)).unsqueeze(-3)
    batch = (*A.shape[:-3], outputs)
    return evaluated(kernel, A.expand(*batch, *A.shape[-2:]), B)


def evaluated(kernel: Kernel, A: Tensor, B: Tensor) -> Tensor:
    """Compute ``k(A, B)`` by gpytorch, ``... x n x n'``; its gradients are 0 where n or n' is.

    gpytorch's are NaN there, by distances from the mean of no points, and some kernels fail.
    """
    if A.shape[-2] > 0 and B.shape[-2] > 0:
        matrix: Tensor = kernel(A, B).to_dense()
        return matrix
    empty = A[..., :1] @ B[..., :1].mT
    batch = broadcast_shapes(kernel.batch_shape, empty.shape[:-2])
    return empty.expand(*batch, *empty.shape[-2:])


def stacked_correlation(kernel: Kernel, A: Tensor, B: Tensor, outputs: int) -> Tensor:
    """Compute ``k(a, b) / √(k(a, a) k(b, b))``, 0 at a point without prior variance."""
    raw = stacked_kernel(kernel, A, B, outputs)
    first, second = (stacked_variance(kernel, X, outputs) for X in (A, B))
    square = first.unsqueeze(-1) * second.unsqueeze(-2)
    return raw / torch.where(square > 0.0, square, torch.inf).sqrt()


def stacked_variance(kernel: Kernel, X: Tensor, outputs: int) -> Tensor:
    """Compute ``k(x, x)``, ``... x m x n x d -> ... x m x n``."""
    known = RadialKernel.variance_of(kernel, outputs, X[..., 0, :, :])
    if known is not None:
        return known
    if outputs == 1:
        return diagonal(kernel, X.squeeze(-3)).unsqueeze(-2)
    return diagonal(kernel, X.expand(*X.shape[:-3], outputs, *X.shape[-2:]))


def diagonal(kernel: Kernel, X: Tensor) -> Tensor:
    """Compute ``k(x, x)`` by gpytorch, ``... x n x d -> ... x n``.

    X is given all dimensions of the kernel's batch: of ``n x d``, gpytorch would take the diagonals
    ``n x n`` of n batch elements for a covariance matrix.
    """
    batch = broadcast_shapes(X.shape[:-2], kernel.batch_shape)
    variance: Tensor = kernel(X.expand(*batch, *X.shape[-2:]), diag=True)
    return variance


_UNIT_WIDTH = 1e-5
"""Difference from 1 up to which the sides of a box count as 1: rounding."""


def default_kernel(dim: int, batch_shape: Size, box: Tensor | None = None) -> RBFKernel:
    """Build BoTorch's default kernel for inputs in a box, in any units of its sides.

    Lengthscales, their prior and their lower bound are taken from BoTorch's
    ``get_covar_module_with_dim_scaled_prior``, relative to the widths of the box: a model of inputs
    ``low + width * u`` equals the model of u, and in the unit cube the kernel is BoTorch's.

    Args:
        dim: Number of inputs d.
        batch_shape: Of the hyperparameters.
        box: ``2 x d``, lower and upper sides. Default: the unit cube.
    """
    kernel = get_covar_module_with_dim_scaled_prior(dim, batch_shape=batch_shape)
    widths = torch.ones(1, dim) if box is None else (box[1:] - box[:1]).double()
    if bool(((widths - 1.0).abs() <= _UNIT_WIDTH).all()):
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
    """Constraint ``value >= lower * unit`` on ``value = raw * unit``, enforced by the optimiser.

    The optimised parameter ``raw`` is of order 1 for any unit of the value.
    """

    def __init__(self, lower: Tensor, initial: Tensor, unit: Tensor) -> None:
        """Constrain a parameter of the shape of ``unit``.

        Args:
            lower: Least value, relative to ``unit``.
            initial: First value, relative to ``unit``.
            unit: Unit of the values, positive.
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
"""Distance beyond which points are evaluated apart from the others, in units of the median of the
points' distances from their median."""

_Matrix = Callable[[Tensor, Tensor], Tensor]
"""``k(A, B)``, ``n x d`` and ``n' x d`` to ``... x n x n'``."""


def matrix_between(matrix: _Matrix, A: Tensor, B: Tensor) -> Tensor:
    """Compute ``k(A, B)``, ``... x n x n'``, by blocks of points about as far from the median of B.

    gpytorch squares distances from the mean of the points: one that is far from the others spoils
    all their values, in float32 from some thousand lengthscales on. Without such a point it is one
    block, and also where both A and B differ in batches. Cost O(n n' d).
    """
    if B.ndim > 2:
        return matrix(A, B) if A.ndim > 2 else matrix_between(matrix, B, A).mT
    # Groups: the points near the median, then among the others the points near their median, and so
    # on. Points that are not finite are near, so that each round takes some.
    groups, left = [], torch.arange(len(B), device=B.device)
    while len(left) > 0:
        away = torch.linalg.vector_norm(B[left] - B[left].median(0).values, dim=-1)
        near = ~(away > FAR * away.median())
        groups.append(left[near])
        left = left[~near]
    if len(groups) < 2:
        return matrix(B, B) if A is B else matrix(B, A).mT
    order = torch.cat(groups).argsort()
    if A is not B:
        return torch.cat([matrix(B[group], A).mT for group in groups], -1)[..., order]
    blocks: dict[tuple[int, int], Tensor] = {}
    for i, one in enumerate(groups):
        for j, other in enumerate(groups[i:], i):
            blocks[i, j] = matrix(B[one], B[other])
            blocks[j, i] = blocks[i, j].mT
    rows = [torch.cat([blocks[i, j] for j in range(len(groups))], -1) for i in range(len(groups))]
    return torch.cat(rows, -2)[..., order, :][..., order]


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
        """Take over a kernel's hyperparameters, differentiable; None for another kind."""
        known = RadialKernel.of(kernel, outputs)
        if known is None or known.nu is not None:
            return None
        lengthscale, scale = known.lengthscale, known.scale
        ones = torch.ones_like(lengthscale[..., :1]) if scale is None else scale
        return cls(ones.log(), lengthscale)

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
        batch = broadcast_shapes(left.shape[:-2], right.shape[:-2], weights.shape[:-1])
        wide = (left.expand(*batch, *left.shape[-2:]), right.expand(*batch, *right.shape[-2:]))
        total, matrix = _WeightedExponential.apply(  # type: ignore[no-untyped-call]
            *wide, weights.expand(*batch, -1), self.log_scale.detach()
        )
        return total, matrix

    def _columns(self, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors L and R of the exponent ``L Rᵀ``, ``... x m x n x (d + 2)``."""
        centre = A.detach().mean(-2, keepdim=True) if A.shape[-2] else 0.0
        a, b = ((points - centre) / self.lengthscale for points in (A, B))
        half_a, half_b = (-0.5 * points.square().sum(-1, keepdim=True) for points in (a, b))
        left = torch.cat((a, half_a + self.log_scale, torch.ones_like(half_a)), -1)
        right = torch.cat((b, torch.ones_like(half_b), half_b), -1)
        return left, right


class _WeightedExponential(torch.autograd.Function):
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
    @first_derivatives_only
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
    values = exponent.detach()
    torch.minimum(values, most, out=values)
    if same:
        values.diagonal(dim1=-2, dim2=-1).copy_(most.squeeze(-1))
    return exponent.exp_()


# --- Matérn kernels that are products over inputs ------------------------------------------------
# gpytorch's ``MaternKernel`` is a function of the distance, ``k(|x − x'|)``: in several inputs no
# product of one-dimensional kernels, as a grid needs it and the squared-exponential kernel is one.


class ProductMatern(Kernel):
    """Product ``k(x, x') = Π_i c(|x_i − x'_i| / l_i)`` of one-dimensional Matérn correlations c.

    With ``s = √(2 ν) r``: ``c(r) = exp(−s)`` for ν = 1/2, ``(1 + s) exp(−s)`` for 3/2 and
    ``(1 + s + s² / 3) exp(−s)`` for 5/2 (Rasmussen and Williams, 2006, section 4.2.1). In one input
    it is gpytorch's ``MaternKernel``, which is ``c(√(Σ_i r_i²))`` in several. Both have the same
    hyperparameters under the same names: the state dict of one fits the other.

    Where to take which: a grid (:class:`~bo_stream.WISKI`) represents products only. For ν = 5/2,
    two inputs and one lengthscale in each the correlation is 0.275, and 0.317 of the radial kernel.

    Cost O(n n' d), memory O(n n').

    Args:
        nu: Smoothness ν: 0.5, 1.5 or 2.5.
        **kwargs: As of gpytorch's ``Kernel``: ``ard_num_dims`` for a lengthscale per input,
            ``batch_shape``, ``active_dims``, ``lengthscale_prior``, ``lengthscale_constraint``.

    Raises:
        RuntimeError: Another ν.

    Example:
        >>> kernel = ScaleKernel(ProductMatern(nu=2.5, ard_num_dims=2))
        >>> model = WISKI(train_X, train_Y, covar_module=kernel)
    """

    has_lengthscale = True

    def __init__(self, nu: float = 2.5, **kwargs: Any) -> None:
        if nu not in (0.5, 1.5, 2.5):
            raise RuntimeError(f"Expected nu to be 0.5, 1.5 or 2.5, got {nu}.")
        super().__init__(**kwargs)
        self.nu = nu

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Tensor:
        """Evaluate at ``... x n x d`` and ``... x n' x d``: ``... x n x n'``, or the diagonal.

        Raises:
            UnsupportedError: ``last_dim_is_batch``: give a kernel for each input instead.
        """
        if last_dim_is_batch:
            raise UnsupportedError("Expected no last_dim_is_batch with ProductMatern.")
        a, b = (x * (math.sqrt(2.0 * self.nu) / self.lengthscale) for x in (x1, x2))
        if not diag:
            a, b = a.unsqueeze(-2), b.unsqueeze(-3)
        distances = [(p - q).abs() for p, q in zip(a.unbind(-1), b.unbind(-1), strict=True)]
        correlation = sum(distances[1:], distances[0]).neg().exp()
        for s in distances:
            if self.nu == 1.5:
                correlation = correlation * (s + 1.0)
            elif self.nu == 2.5:
                correlation = correlation * ((s / 3.0 + 1.0) * s + 1.0)
        return correlation


@dataclass(frozen=True)
class RadialPart:
    """A Matérn kernel of the distance between points of several inputs, as a part of a kernel.

    Attributes:
        kernel: The part.
        inputs: Which of the inputs it acts on.
    """

    kernel: MaternKernel
    inputs: tuple[int, ...]

    def correlations(self) -> tuple[float, float]:
        """Compute the correlation one lengthscale away in every input, of the part and a product.

        The part, a function of the distance, has ``c(√d)`` there, a :class:`ProductMatern`
        ``c(1)^d``.
        """
        d = len(self.inputs)
        points = torch.tensor([[0.0] * d, [1.0] * d], dtype=torch.float64)
        values = []
        for kind in (MaternKernel, ProductMatern):
            kernel = kind(nu=self.kernel.nu).double().requires_grad_(False)
            kernel.lengthscale = 1.0
            values.append(float(kernel(points).to_dense()[0, 1]))
        return values[0], values[1]


def radial_parts(kernel: object, dim: int) -> list[RadialPart]:
    """Find the Matérn kernels of several inputs in sums, products and multiples of kernels.

    Args:
        kernel: A kernel of ``dim`` inputs; any other object has none.
        dim: Number of inputs.
    """
    found: list[RadialPart] = []
    left: list[tuple[object, tuple[int, ...]]] = [(kernel, tuple(range(dim)))]
    while left:
        part, inputs = left.pop()
        if not isinstance(part, Kernel):
            continue
        active: Tensor | None = part.active_dims
        if active is not None:
            inputs = tuple(inputs[i] for i in active.tolist() if i < len(inputs))
        while isinstance(part, ScaleKernel):  # has its base's active_dims
            part = part.base_kernel
        if isinstance(part, AdditiveKernel | ProductKernel):
            left += [(each, inputs) for each in reversed(list(part.kernels))]
        elif isinstance(part, MaternKernel) and type(part).forward is MaternKernel.forward:
            found += [RadialPart(part, inputs)] * (len(inputs) > 1)
    return found


def as_product(kernel: Kernel, dim: int) -> Kernel:
    """Copy a kernel of ``dim`` inputs with a :class:`ProductMatern` for each of its radial parts.

    Hyperparameters, priors, constraints, active dimensions and names stay. One without such parts
    is returned itself.
    """
    if not radial_parts(kernel, dim):
        return kernel
    copy = deepcopy(kernel)
    for part in radial_parts(copy, dim):
        part.kernel.__class__ = ProductMatern  # both are a Kernel with nu and no more
    return copy


# --- learned projections (stems) of many inputs to the one to three of a grid --------------------


_MAX_STEM_DIM = 3
"""Most dimensions that a stem projects to."""

LEAST_POINTS = 2
"""Fewest points on which a stem can be calibrated."""

_LEAST_SPREAD = 1e-6


class Stem(torch.nn.Module, ABC):
    """A projection ``h(x)`` of d inputs to k coordinates in the unit cube.

    ``h(x) = (1 + tanh(gain ∘ (project(x) − centre) / spread + offset)) / 2``: a batch norm and a
    tanh. [Stanton2021, section 5.1] Centre and spread describe the points that the stem was
    calibrated on and stay until it is calibrated again, in training and evaluation mode alike.

    Cost of one point: O(d k), or one evaluation of the network.

    Args:
        d: Number of inputs.
        k: Number of coordinates, 1 to 3.
    """

    gain: Tensor
    offset: Tensor
    centre: Tensor
    spread: Tensor
    calibrated: Tensor

    def __init__(self, d: int, k: int) -> None:
        super().__init__()
        if not isinstance(k, int) or not 1 <= k <= min(_MAX_STEM_DIM, d):
            raise UnsupportedError(
                f"Expected a stem to project to k from 1 to {min(_MAX_STEM_DIM, d)} of {d} inputs, "
                f"a whole number, got {k}."
            )
        self.d, self.k = d, k
        self.gain = torch.nn.Parameter(torch.ones(k, dtype=torch.float64))
        self.offset = torch.nn.Parameter(torch.zeros(k, dtype=torch.float64))
        self.register_buffer("centre", torch.zeros(k, dtype=torch.float64))
        self.register_buffer("spread", torch.ones(k, dtype=torch.float64))
        self.register_buffer("calibrated", torch.tensor(False))

    @abstractmethod
    def project(self, X: Tensor) -> Tensor:
        """Project inputs, ``... x d -> ... x k``, before normalisation."""

    def forward(self, X: Tensor) -> Tensor:
        """Compute coordinates in the unit cube, ``... x d -> ... x k``, differentiable."""
        return self._squashed(self.project(X), self.centre, self.spread)

    def _squashed(self, projected: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
        normal = (projected - centre) / spread
        return 0.5 * (1.0 + torch.tanh(self.gain * normal + self.offset))

    def calibrate(self, X: Tensor) -> Self:
        """Put centre and spread where the projections of ``n x d`` points, two or more, lie."""
        with torch.no_grad():
            self.calibrated_forward(X)
        return self

    def calibrated_forward(self, X: Tensor) -> Tensor:
        """Calibrate on ``n x d`` points and project them; gradients flow through both."""
        projected = self.project(X)
        points = projected.reshape(-1, self.k)
        if points.shape[0] < LEAST_POINTS:
            raise InputDataError(
                f"Expected at least {LEAST_POINTS} points to calibrate a stem on, got "
                f"{points.shape[0]}. Give train_X more rows, or call stem.calibrate(X) before."
            )
        spread, centre = torch.std_mean(points, dim=0)
        spread = spread.clamp_min(_LEAST_SPREAD)
        self.centre, self.spread = centre.detach().clone(), spread.detach().clone()
        self.calibrated = torch.ones_like(self.calibrated)
        return self._squashed(projected, centre, spread)


class LinearStem(Stem):
    """``project(x) = W x`` with a learned W, ``k x d``; the stem of the WISKI paper's regressions.

    W starts as k random orthonormal directions, drawn by ``seed``.

    Example:
        >>> model = WISKI(train_X, train_Y, stem=LinearStem(d=18, k=2), grid_size=16)
        >>> pretrain(model, train_X, train_Y)
    """

    def __init__(self, d: int, k: int, seed: int = 0) -> None:
        super().__init__(d, k)
        self.weight = torch.nn.Parameter(_orthonormal_rows(d, k, seed))

    def project(self, X: Tensor) -> Tensor:
        """Compute ``W x``."""
        return X @ self.weight.mT


class MLPStem(Stem):
    """A multilayer perceptron with GELU between its layers, of the ``hidden`` widths.

    Weights start at random, drawn by ``seed``, with the variance of He et al. (2015).
    """

    def __init__(self, d: int, hidden: int | Sequence[int], k: int, seed: int = 0) -> None:
        super().__init__(d, k)
        widths = [hidden] if isinstance(hidden, int) else list(hidden)
        if not widths or min(widths) < 1:
            raise ValueError(f"Expected hidden widths of at least 1, got {hidden}.")
        generator = torch.Generator().manual_seed(seed)
        self.layers = torch.nn.ModuleList()
        for inputs, outputs in zip([d, *widths], [*widths, k], strict=True):
            layer = torch.nn.Linear(inputs, outputs, dtype=torch.float64)
            with torch.no_grad():
                layer.weight.normal_(0.0, (2.0 / inputs) ** 0.5, generator=generator)
                layer.bias.zero_()
            self.layers.append(layer)

    def project(self, X: Tensor) -> Tensor:
        """Apply the network."""
        for layer in self.layers[:-1]:
            X = torch.nn.functional.gelu(layer(X))
        projected: Tensor = self.layers[-1](X)
        return projected


class RandomProjection(Stem):
    """k random orthonormal directions, drawn by ``seed``, that stay (Delbridge et al., 2020)."""

    weight: Tensor

    def __init__(self, d: int, k: int, seed: int) -> None:
        super().__init__(d, k)
        self.register_buffer("weight", _orthonormal_rows(d, k, seed))
        self.requires_grad_(False)

    def project(self, X: Tensor) -> Tensor:
        """Compute ``W x``."""
        return X @ self.weight.mT


def _orthonormal_rows(d: int, k: int, seed: int) -> Tensor:
    """Draw random orthonormal rows, ``k x d``, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, k, generator=generator, dtype=torch.float64)).Q.mT
