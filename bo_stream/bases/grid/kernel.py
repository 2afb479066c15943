"""Kernels on a grid's nodes, and how fine a grid an interpolation error needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from itertools import chain, product
from typing import Any

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from torch import Tensor

from bo_stream.bases.grid.mesh import Grid, Groups, Mesh, Sizes
from bo_stream.bases.kernels import ProductMatern
from bo_stream.tensors import map_tensors

Correlation = Callable[..., Tensor]

LEAST = 1e-100
"""Least lengthscale and prior variance; an optimiser may let them underflow to 0."""

SPREAD = 0.02
"""Shift of frequencies by :meth:`Factor.spread`, in cycles over the box."""

SUPPORTED = (
    "RBFKernel, ProductMatern (or a MaternKernel of one input), PeriodicKernel, "
    "SpectralMixtureKernel, and "
    "ScaleKernel, ProductKernel and AdditiveKernel of these"
)


@dataclass(frozen=True)
class GridKernel:
    """Sum ``k(x, x') = Σ_g k_g(x_g, x'_g)`` of one or more products over groups of inputs.

    Attributes:
        parts: The products, each in the dimensions of its group.
        dims: The groups, which may overlap; None for one product of all inputs.
    """

    parts: tuple[KernelFactors, ...]
    dims: Groups | None = None

    def groups(self, dim: int) -> Groups:
        """Return the input dimensions that each part's grid covers, of ``dim``."""
        return (tuple(range(dim)),) if self.dims is None else self.dims

    def scale(self) -> Tensor:
        """Compute the prior variance, one per batch element: the sum of the parts'."""
        if len(self.parts) == 1:
            return self.parts[0].scale()
        scales = (part.scale().to(self.parts[0].device) for part in self.parts)
        return torch.stack(torch.broadcast_tensors(*scales)).sum(0)

    def spread(self, widths: Sequence[float]) -> GridKernel:
        """Return a kernel whose span includes derivatives in frequencies, for a box's widths."""
        parts = []
        for part, group in zip(self.parts, self.groups(len(widths)), strict=True):
            spread = (factor.spread(widths[group[factor.dimension]]) for factor in part.factors)
            parts.append(replace(part, factors=tuple(spread)))
        return replace(self, parts=tuple(parts))

    def for_single_output(self) -> GridKernel:
        """Return the kernel with an output dimension of one behind its batch shape."""
        return map_tensors(self, lambda value: value.unsqueeze(-1))

    def detached(self) -> GridKernel:
        """Return the kernel at its present hyperparameters, which stays when these change."""
        return map_tensors(self, lambda value: value.detach().clone())


@dataclass(frozen=True)
class KernelFactors:
    """Product ``k(x, x') = Π scales · Π factors``, a Kronecker product on a grid.

    Attributes:
        scales: Output scales, each one number per batch element.
        factors: One-dimensional kernels; several may share a dimension.
    """

    scales: tuple[Tensor, ...]
    factors: tuple[Factor, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions that a factor acts on."""
        return tuple(sorted({factor.dimension for factor in self.factors}))

    def scale(self) -> Tensor:
        """Compute the prior variance, one per batch element."""
        scale = torch.ones((), dtype=torch.float64)
        for factor in self.scales:
            scale = scale.to(factor.device) * factor.to(torch.float64)
        return scale.clamp_min(LEAST)

    def correlation(self, dimension: int, x: Tensor, x2: Tensor) -> Tensor:
        """Compute one dimension's correlation matrix, ``batch x g x g'``, differentiable."""
        distance = (x.unsqueeze(-1) - x2.unsqueeze(-2)).abs()
        matrix = torch.ones_like(distance)
        for factor in self.factors:
            if factor.dimension == dimension:
                matrix = matrix * factor(distance)
        return matrix

    @property
    def device(self) -> torch.device | None:
        """Device of the factors' parameters."""
        return next((p.device for factor in self.factors for p in factor.parameters), None)


@dataclass(frozen=True)
class Factor:
    """Stationary one-dimensional kernel, ``correlation(|x − x'|, *parameters)``, 1 at 0.

    Attributes:
        dimension: Input dimension that it acts on.
        formula: The correlation.
        parameters: Positive numbers whose logarithms tell how far the kernel has moved
            (lengthscales, frequencies, relative weights), each one per batch element.
    """

    dimension: int
    formula: Formula
    parameters: tuple[Tensor, ...]

    def __call__(self, distance: Tensor) -> Tensor:
        """Compute correlations at ``g x g'`` distances, ``batch x g x g'``."""
        return self.formula.correlation(distance, *(p[..., None, None] for p in self.parameters))

    def spread(self, width: float) -> Factor:
        """Average the kernel and two with frequencies ``SPREAD / width`` above and below.

        A kernel with a few sharp frequencies has few eigenvectors, and these do not span its
        derivative in a frequency. Those of the mean do.
        """
        if not self.formula.frequencies:
            return self
        frequencies, parts = self.formula.frequencies, []
        for shift in (-SPREAD / width, 0.0 / width, SPREAD / width):
            moved = [p + shift if i in frequencies else p for i, p in enumerate(self.parameters)]
            parts.append([replace(self, parameters=tuple(moved))])
        third = torch.full_like(self.parameters[0], 1.0 / len(parts))
        return _weighted_sum(self.dimension, [third] * len(parts), parts)


@dataclass(frozen=True)
class Formula:
    """Correlation as a function of the distance, 1 at 0, with its properties.

    Attributes:
        correlation: ``correlation(distance, *parameters)``, which broadcast.
        smoothness: ν of a Matérn kernel, infinite where all derivatives exist.
        frequencies: Positions of the parameters that are frequencies, in cycles per unit of input.
    """

    correlation: Correlation
    smoothness: float
    frequencies: tuple[int, ...] = ()


def _weighted_sum(
    dimension: int, weights: Sequence[Tensor], parts: Sequence[Sequence[Factor]]
) -> Factor:
    """Make one factor of a weighted sum of products of factors, all of one dimension.

    The weights, each one per batch element, sum to one.
    """
    factors = [factor for part in parts for factor in part]
    parameters, frequencies = list(weights), list[int]()
    for factor in factors:
        frequencies += [len(parameters) + i for i in factor.formula.frequencies]
        parameters += factor.parameters
    terms = tuple(tuple((f.formula.correlation, len(f.parameters)) for f in p) for p in parts)
    smoothness = min(factor.formula.smoothness for factor in factors)
    formula = Formula(_WeightedSum(terms), smoothness, tuple(frequencies))
    return Factor(dimension, formula, tuple(parameters))


@dataclass(frozen=True)
class _WeightedSum:
    """Correlation ``Σ_j weight_j Π correlations_j``; all weights come before the other parameters.

    Attributes:
        terms: Per part its correlations, each with the number of its parameters.
    """

    terms: tuple[tuple[tuple[Correlation, int], ...], ...]

    def __call__(self, distance: Tensor, *parameters: Tensor) -> Tensor:
        weights, own = parameters[: len(self.terms)], iter(parameters[len(self.terms) :])
        total = torch.zeros_like(distance)
        for weight, correlations in zip(weights, self.terms, strict=True):
            product = weight
            for correlation, count in correlations:
                product = product * correlation(distance, *(next(own) for _ in range(count)))
            total = total + product
        return total


def _squared_exponential(distance: Tensor, lengthscale: Tensor) -> Tensor:
    return torch.exp(-0.5 * (distance / lengthscale).square())


def _matern12(distance: Tensor, lengthscale: Tensor) -> Tensor:
    return torch.exp(-distance / lengthscale)


def _matern32(distance: Tensor, lengthscale: Tensor) -> Tensor:
    scaled = math.sqrt(3.0) * distance / lengthscale
    return (1.0 + scaled) * torch.exp(-scaled)


def _matern52(distance: Tensor, lengthscale: Tensor) -> Tensor:
    scaled = math.sqrt(5.0) * distance / lengthscale
    return (1.0 + scaled + scaled.square() / 3.0) * torch.exp(-scaled)


def _periodic(distance: Tensor, frequency: Tensor, lengthscale: Tensor) -> Tensor:
    # gpytorch's lengthscale: dimensionless and not squared
    return torch.exp(-2.0 * torch.sin(math.pi * frequency * distance).square() / lengthscale)


def _spectral_component(distance: Tensor, frequency: Tensor, scale: Tensor) -> Tensor:
    # spectral density: normal, mirrored at 0 [Wilson and Adams, 2013, eq. 11]
    decay = torch.exp(-2.0 * (math.pi * scale * distance).square())
    return decay * torch.cos(2.0 * math.pi * frequency * distance)


_SQUARED_EXPONENTIAL = Formula(_squared_exponential, math.inf)
_MATERN: dict[float, Formula] = {
    0.5: Formula(_matern12, 0.5),
    1.5: Formula(_matern32, 1.5),
    2.5: Formula(_matern52, 2.5),
}
_PERIODIC = Formula(_periodic, math.inf, frequencies=(0,))
_SPECTRAL_COMPONENT = Formula(_spectral_component, math.inf, frequencies=(0,))

Terms = tuple[KernelFactors, ...]  # of a sum of products, in the inputs' own dimensions


def kernel_factors(kernel: Kernel, dim: int) -> GridKernel:
    """Decompose a kernel over ``dim`` inputs.

    A spectral mixture in several dimensions is what gpytorch computes: the product over dimensions
    of the mixtures in one dimension (not the mixture of products of Wilson and Adams, 2013), with
    the prior variance ``(Σ weights)^d``. Products of sums are multiplied out.

    Raises:
        UnsupportedError: The kernel is no sum of products of one-dimensional stationary kernels.
    """
    if not isinstance(kernel, Kernel):
        raise _unsupported(kernel)
    terms = _terms(kernel, _active(kernel, tuple(range(dim))))
    if len(terms) == 1:
        return GridKernel(terms)
    parts = []  # in their own dimensions, numbered by their order
    for term in terms:
        moved = (replace(f, dimension=term.dims.index(f.dimension)) for f in term.factors)
        parts.append(replace(term, factors=tuple(moved)))
    return GridKernel(tuple(parts), tuple(term.dims for term in terms))


def _active(kernel: Kernel, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the inputs that a kernel sees, of those that it is given."""
    dims = kernel.active_dims
    positions = range(len(inputs)) if dims is None else [int(i) for i in dims]
    if positions and max(positions) >= len(inputs):
        raise UnsupportedError(
            f"covar_module has active_dims {tuple(positions)}, but the inputs have {len(inputs)} "
            "dimension(s)."
        )
    return tuple(inputs[i] for i in positions)


def _terms(kernel: Kernel, active: tuple[int, ...]) -> Terms:
    """Decompose a kernel, unless a class derived from a supported one computes another one."""
    known: Any = next(kind for kind in type(kernel).__mro__ if kind in _terms_of.registry)
    if known is not object and type(kernel).forward is not known.forward:
        raise _unsupported(kernel)
    return _terms_of(kernel, active)


def _unsupported(kernel: object) -> UnsupportedError:
    return UnsupportedError(
        f"covar_module of type {type(kernel).__name__} is not a sum of products over dimensions "
        f"that a grid can represent. Expected one of: {SUPPORTED}."
    )


@singledispatch
def _terms_of(kernel: Kernel, active: tuple[int, ...]) -> Terms:
    raise _unsupported(kernel)


@_terms_of.register
def _(kernel: RBFKernel | MaternKernel | ProductMatern, active: tuple[int, ...]) -> Terms:
    if isinstance(kernel, MaternKernel) and len(active) > 1:
        raise UnsupportedError(
            f"A grid represents products of one-dimensional kernels, and a MaternKernel of inputs "
            f"{active}, a function of the distance, is none. Give bo_stream.ProductMatern in its "
            "place, of the same arguments, or take a model without a grid, such as OSGPR."
        )
    formula = _SQUARED_EXPONENTIAL if isinstance(kernel, RBFKernel) else _MATERN[kernel.nu]
    return (_of_columns(kernel, active, formula, kernel.lengthscale),)


@_terms_of.register
def _(kernel: PeriodicKernel, active: tuple[int, ...]) -> Terms:
    frequency = kernel.period_length.to(torch.float64).reciprocal()
    return (_of_columns(kernel, active, _PERIODIC, frequency, kernel.lengthscale),)


@_terms_of.register
def _(kernel: SpectralMixtureKernel, active: tuple[int, ...]) -> Terms:
    weights = kernel.mixture_weights.unbind(-1)
    means, scales = kernel.mixture_means.unbind(-3), kernel.mixture_scales.unbind(-3)
    components = [
        _of_columns(kernel, active, _SPECTRAL_COMPONENT, *parameters).factors
        for parameters in zip(means, scales, strict=True)
    ]
    lines = (
        _sum(dimension, weights, [(factor,) for factor in mixture])
        for dimension, mixture in zip(active, zip(*components, strict=True), strict=True)
    )
    return (_product(lines),)


@_terms_of.register
def _(kernel: ScaleKernel, active: tuple[int, ...]) -> Terms:
    # takes over its base kernel's active_dims, which gpytorch does not apply a second time
    inner = _terms(kernel.base_kernel, active)
    return tuple(KernelFactors((kernel.outputscale, *t.scales), t.factors) for t in inner)


@_terms_of.register
def _(kernel: ProductKernel, active: tuple[int, ...]) -> Terms:
    sums = [_terms(part, _active(part, active)) for part in kernel.kernels]
    return tuple(_product(choice) for choice in product(*sums))


@_terms_of.register
def _(kernel: AdditiveKernel, active: tuple[int, ...]) -> Terms:
    if len(kernel.kernels) == 0:
        raise UnsupportedError(
            "Expected an AdditiveKernel in covar_module to have parts, got none."
        )
    terms = [t for part in kernel.kernels for t in _terms(part, _active(part, active))]
    same: dict[object, list[KernelFactors]] = {}  # one entry for all that share a single dimension
    for i, term in enumerate(terms):
        key = term.dims if len(term.dims) == 1 else i
        same.setdefault(key, []).append(term)
    return tuple(
        own[0]
        if len(own) == 1
        else _sum(own[0].dims[0], [t.scale() for t in own], [t.factors for t in own])
        for own in same.values()
    )


def _of_columns(
    kernel: Kernel, active: tuple[int, ...], formula: Formula, *parameters: Tensor
) -> KernelFactors:
    """Build a product over dimensions; each parameter is ``batch x 1 x d`` or ``batch x 1 x 1``."""
    if kernel.ard_num_dims not in (None, len(active)):
        raise UnsupportedError(
            f"covar_module has a {type(kernel).__name__} with ard_num_dims={kernel.ard_num_dims} "
            f"that acts on {len(active)} dimension(s) {active}. Expected ard_num_dims="
            f"{len(active)}, or active_dims that choose {kernel.ard_num_dims}."
        )
    rows = (parameter.to(torch.float64).squeeze(-2).clamp_min(LEAST) for parameter in parameters)
    columns = [row.expand(*row.shape[:-1], len(active)).unbind(-1) for row in rows]
    factors = (
        Factor(dimension, formula, tuple(own))
        for dimension, *own in zip(active, *columns, strict=True)
    )
    return KernelFactors((), tuple(factors))


def _product(parts: Iterable[KernelFactors]) -> KernelFactors:
    """Multiply terms: scales and factors of all."""
    known = list(parts)
    scales, factors = ([part.scales for part in known], [part.factors for part in known])
    return KernelFactors(tuple(chain(*scales)), tuple(chain(*factors)))


def _sum(
    dimension: int, scales: Sequence[Tensor], parts: Sequence[Sequence[Factor]]
) -> KernelFactors:
    """Compute ``Σ scale_j Π part_j`` in one dimension: the sum of scales times one correlation."""
    total = torch.stack(torch.broadcast_tensors(*scales)).to(torch.float64).sum(0)
    weights = [scale.to(torch.float64) / total for scale in scales]
    return KernelFactors((total,), (_weighted_sum(dimension, weights, parts),))


# --- interpolation error of a kernel on a grid, and the grid size that an error needs ------------


DEFAULT_SIZES: dict[str, dict[int, int]] = {
    "smooth": {1: 128, 2: 36, 3: 20, 4: 12},
    "rough": {1: 192, 2: 60, 3: 26, 4: 12},
}
"""Nodes per dimension by the kernel's smoothness (rough: any Matérn) and the number d of inputs."""

_LARGEST_SUGGESTION = 2048
_PROBES = (0.25, 0.5, 0.618033988749895, 0.75)  # in cells; no period divides all their distances
_NEAR, _APART = 8, 48
"""Cells that are probed with the first: the nearest, and as many more over the whole line."""


def default_grid_size(kernel: GridKernel, dim: int) -> Sizes:
    """Return nodes per dimension of each grid, as ``benchmarks/accuracy/accuracy.py`` measures.

    By smoothness only: a grid is chosen before the hyperparameters are learned. A period or the
    inverse of a mixture's frequency shorter than about six cells needs a finer grid than this;
    :func:`interpolation_error` tells whether, and :func:`sufficient_grid_size` which.
    """
    smoothness = ((factor.formula.smoothness for factor in part.factors) for part in kernel.parts)
    kinds = ("smooth" if all(map(math.isinf, own)) else "rough" for own in smoothness)
    pairs = zip(kinds, map(len, kernel.groups(dim)), strict=True)
    return tuple((DEFAULT_SIZES[kind][d],) * d for kind, d in pairs)


def interpolation_error(kernel: GridKernel, mesh: Mesh) -> float:
    """Bound ``|k − k̃|`` relative to the prior variance, from probes inside the cells.

    A part of the kernel is a product of factors of at most one, hence its error is at most the sum
    of the errors of its dimensions, which are probed at points between the nodes. Cost O(Σ g²).
    """
    total, bound = kernel.scale().detach(), 0.0
    for factors, grid in zip(kernel.parts, mesh.parts, strict=True):
        error = sum(float(_dimension_error(factors, grid, i).max()) for i in range(grid.dim))
        bound += float((factors.scale().detach().to(total) / total).max()) * error
    return bound


def _dimension_error(factors: KernelFactors, grid: Grid, dimension: int) -> Tensor:
    """Return the largest error of one dimension's interpolated correlation, ``...``.

    Kernel and nodes are the same everywhere, so that the error depends on the distance of two cells
    and the positions in them: the first cell is probed with others at all distances.
    """
    with torch.no_grad():
        offsets = torch.tensor(_PROBES, dtype=torch.float64)
        nodes, last = grid.nodes(dimension), grid.cells[dimension] - 1
        spread = torch.linspace(0, last, min(_APART, last + 1)).round().long()
        cells = torch.cat((torch.arange(min(_NEAR, last + 1)), spread)).unique()
        points = nodes[cells + 1, None] + offsets * grid.spacing[dimension]
        x, others = points[0].to(factors.device), points.flatten().to(factors.device)
        nodes = nodes.to(factors.device)
        left, right = (grid.interpolation_matrix(dimension, each) for each in (x, others))
        approximate = left @ factors.correlation(dimension, nodes, nodes) @ right.mT
        return (approximate - factors.correlation(dimension, x, others)).abs().amax((-2, -1))


def sufficient_grid_size(kernel: GridKernel, mesh: Mesh, tolerance: float) -> Sizes | None:
    """Find the smallest grids over the same boxes, growing by a quarter, of at most this error.

    Returns:
        Nodes per dimension of each, or None where more than ``2048`` a side would be needed.
    """
    result: list[tuple[int, ...]] = []
    for factors, grid in zip(kernel.parts, mesh.parts, strict=True):
        sufficient = []
        for i, size in enumerate(grid.size):
            while size <= _LARGEST_SUGGESTION:
                sizes = tuple(size if j == i else n for j, n in enumerate(grid.size))
                finer = Grid.over(grid.bounds, sizes)
                if float(_dimension_error(factors, finer, i).max()) <= tolerance / grid.dim:
                    break
                size = math.ceil(1.25 * size)
            else:
                return None
            sufficient.append(size)
        result.append(tuple(sufficient))
    return tuple(result)
