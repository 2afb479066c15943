"""Kernels of gpytorch taken apart into products of one stationary kernel per dimension."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import singledispatch
from itertools import product
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

from bo_stream.bases.factor import Factor, weighted_sum
from bo_stream.bases.formulas import (
    MATERN,
    PERIODIC,
    SPECTRAL_COMPONENT,
    SQUARED_EXPONENTIAL,
    Formula,
)
from bo_stream.bases.grid_kernel import LEAST, GridKernel, KernelFactors, KernelSum

SUPPORTED = (
    "RBFKernel, MaternKernel (nu 0.5, 1.5, 2.5), PeriodicKernel, SpectralMixtureKernel, and "
    "ScaleKernel, ProductKernel and AdditiveKernel of these"
)

Terms = tuple[KernelFactors, ...]
"""Products whose sum a kernel is, in the inputs' own dimensions."""


def kernel_factors(kernel: Kernel, dim: int) -> GridKernel:
    """Take a kernel over ``dim`` inputs apart. Matérn kernels are products over dimensions here.

    A spectral mixture in several dimensions is what gpytorch computes: the product over dimensions
    of the mixtures in one dimension (not the mixture of products of Wilson and Adams, 2013), with
    the prior variance ``(Σ weights)^d``. A sum of products over different dimensions is a
    :class:`KernelSum`; products of sums are multiplied out.

    Raises:
        UnsupportedError: The kernel is no sum of products of one-dimensional stationary kernels.
    """
    if not isinstance(kernel, Kernel):
        raise _unsupported(kernel)
    terms = _terms(kernel, _active(kernel, tuple(range(dim))))
    return terms[0] if len(terms) == 1 else KernelSum.of(terms)


def _active(kernel: Kernel, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """The inputs that a kernel sees, of those that it is given."""
    dims = kernel.active_dims
    positions = range(len(inputs)) if dims is None else [int(i) for i in dims]
    if positions and max(positions) >= len(inputs):
        raise UnsupportedError(
            f"covar_module has active_dims {tuple(positions)}, but the inputs have {len(inputs)} "
            "dimension(s)."
        )
    return tuple(inputs[i] for i in positions)


def _terms(kernel: Kernel, active: tuple[int, ...]) -> Terms:
    """Take a kernel apart, unless a class derived from a supported one computes another one."""
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
def _(kernel: RBFKernel, active: tuple[int, ...]) -> Terms:
    return (_of_columns(kernel, active, SQUARED_EXPONENTIAL, kernel.lengthscale),)


@_terms_of.register
def _(kernel: MaternKernel, active: tuple[int, ...]) -> Terms:
    return (_of_columns(kernel, active, MATERN[kernel.nu], kernel.lengthscale),)


@_terms_of.register
def _(kernel: PeriodicKernel, active: tuple[int, ...]) -> Terms:
    frequency = kernel.period_length.to(torch.float64).reciprocal()
    return (_of_columns(kernel, active, PERIODIC, frequency, kernel.lengthscale),)


@_terms_of.register
def _(kernel: SpectralMixtureKernel, active: tuple[int, ...]) -> Terms:
    weights = kernel.mixture_weights.unbind(-1)
    means, scales = kernel.mixture_means.unbind(-3), kernel.mixture_scales.unbind(-3)
    components = [
        _of_columns(kernel, active, SPECTRAL_COMPONENT, *parameters).factors
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
    return _joined(t for part in kernel.kernels for t in _terms(part, _active(part, active)))


def _joined(terms: Iterable[KernelFactors]) -> Terms:
    """Terms in which those that act on one and the same single dimension are one."""
    same: dict[object, list[KernelFactors]] = {}
    for i, term in enumerate(terms):
        key = term.dims if len(term.dims) == 1 else i
        same.setdefault(key, []).append(term)
    return tuple(own[0] if len(own) == 1 else _line_sum(own) for own in same.values())


def _line_sum(terms: Sequence[KernelFactors]) -> KernelFactors:
    (dimension,) = terms[0].dims
    return _sum(dimension, [t.scale() for t in terms], [t.factors for t in terms])


def _product(parts: Iterable[KernelFactors]) -> KernelFactors:
    known = list(parts)
    return KernelFactors(
        tuple(scale for part in known for scale in part.scales),
        tuple(factor for part in known for factor in part.factors),
    )


def _sum(
    dimension: int, scales: Sequence[Tensor], parts: Sequence[Sequence[Factor]]
) -> KernelFactors:
    """``Σ scale_j Π part_j`` in one dimension: the sum of scales times one correlation."""
    total = torch.stack(torch.broadcast_tensors(*scales)).to(torch.float64).sum(0)
    weights = [scale.to(torch.float64) / total for scale in scales]
    return KernelFactors((total,), (weighted_sum(dimension, weights, parts),))


def _of_columns(
    kernel: Kernel, active: tuple[int, ...], formula: Formula, *parameters: Tensor
) -> KernelFactors:
    """A product over dimensions; each parameter is ``batch x 1 x d``, or ``batch x 1 x 1``."""
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
