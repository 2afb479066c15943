"""Kernels that grids can represent: a product over dimensions, or a sum of products."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from bo_stream.bases.factor import Factor

Groups = tuple[tuple[int, ...], ...]
"""The input dimensions that each part of a sum acts on."""

LEAST = 1e-100
"""Lengthscales and prior variances that an optimiser lets underflow are taken as this, not 0."""


class GridKernel(ABC):
    """A sum of one or more product kernels, each over a few input dimensions of its own."""

    @property
    @abstractmethod
    def parts(self) -> tuple[KernelFactors, ...]:
        """The products, each in the dimensions of its own grid."""

    @abstractmethod
    def groups(self, dim: int) -> Groups:
        """The input dimensions that each part's grid covers, of ``dim``."""

    @abstractmethod
    def scale(self) -> Tensor:
        """The prior variance, one per batch element."""

    @abstractmethod
    def spread(self, widths: Sequence[float]) -> Self:
        """A kernel whose span holds also the derivatives in frequencies, for a box's widths."""

    @abstractmethod
    def for_single_output(self) -> Self:
        """The same kernel with an output dimension of one behind its batch shape."""

    @abstractmethod
    def detached(self) -> Self:
        """The kernel at its present hyperparameters, which stays when these change."""


@dataclass(frozen=True)
class KernelFactors(GridKernel):
    """``k(x, x') = Π scales · Π factors``: what a grid can represent as a Kronecker product.

    Attributes:
        scales: Output scales, each one number per batch element.
        factors: One-dimensional kernels; several may share a dimension.
    """

    scales: tuple[Tensor, ...]
    factors: tuple[Factor, ...]

    @property
    def parts(self) -> tuple[KernelFactors, ...]:
        """This kernel alone."""
        return (self,)

    def groups(self, dim: int) -> Groups:
        """All dimensions: one grid covers them."""
        return (tuple(range(dim)),)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions that a factor acts on."""
        return tuple(sorted({factor.dimension for factor in self.factors}))

    def scale(self) -> Tensor:
        """The prior variance, one per batch element."""
        scale = torch.ones((), dtype=torch.float64)
        for factor in self.scales:
            scale = scale.to(factor.device) * factor.to(torch.float64)
        return scale.clamp_min(LEAST)

    def correlation(self, dimension: int, x: Tensor, x2: Tensor) -> Tensor:
        """One dimension's correlation matrix, ``batch x g x g'``, differentiable."""
        distance = (x.unsqueeze(-1) - x2.unsqueeze(-2)).abs()
        matrix = torch.ones_like(distance)
        for factor in self.factors:
            if factor.dimension == dimension:
                matrix = matrix * factor(distance)
        return matrix

    @property
    def smoothness(self) -> float:
        """The roughest factor's smoothness ν."""
        return min((factor.formula.smoothness for factor in self.factors), default=math.inf)

    @property
    def device(self) -> torch.device | None:
        """Where the factors' parameters are."""
        return next((p.device for factor in self.factors for p in factor.parameters), None)

    def spread(self, widths: Sequence[float]) -> KernelFactors:
        """A kernel whose span holds also the derivatives in frequencies, for a box's widths."""
        spread = (factor.spread(widths[factor.dimension]) for factor in self.factors)
        return KernelFactors(self.scales, tuple(spread))

    def for_single_output(self) -> KernelFactors:
        """The same kernel with an output dimension of one behind its batch shape."""
        return KernelFactors(
            tuple(scale.unsqueeze(-1) for scale in self.scales),
            tuple(
                replace(factor, parameters=tuple(p.unsqueeze(-1) for p in factor.parameters))
                for factor in self.factors
            ),
        )

    def detached(self) -> KernelFactors:
        """The kernel at its present hyperparameters, which stays when these change."""
        return KernelFactors(
            tuple(scale.detach().clone() for scale in self.scales),
            tuple(
                replace(factor, parameters=tuple(p.detach().clone() for p in factor.parameters))
                for factor in self.factors
            ),
        )

    def in_own_dims(self) -> KernelFactors:
        """The same kernel of those inputs only that it acts on."""
        position = {dimension: i for i, dimension in enumerate(self.dims)}
        moved = (replace(factor, dimension=position[factor.dimension]) for factor in self.factors)
        return KernelFactors(self.scales, tuple(moved))


@dataclass(frozen=True)
class KernelSum(GridKernel):
    """``k(x, x') = Σ_g k_g(x_g, x'_g)``, each part a product over its own group of inputs.

    Attributes:
        terms: The parts, each in the dimensions of its group.
        dims: The groups; they may overlap.
    """

    terms: tuple[KernelFactors, ...]
    dims: Groups

    @classmethod
    def of(cls, terms: Sequence[KernelFactors]) -> KernelSum:
        """The sum of products in the inputs' own dimensions."""
        return cls(tuple(term.in_own_dims() for term in terms), tuple(term.dims for term in terms))

    @property
    def parts(self) -> tuple[KernelFactors, ...]:
        """The terms."""
        return self.terms

    def groups(self, dim: int) -> Groups:
        """The inputs of each term."""
        return self.dims

    def scale(self) -> Tensor:
        """The prior variance, one per batch element: the sum of the parts'."""
        scales = (term.scale().to(self.terms[0].device) for term in self.terms)
        return torch.stack(torch.broadcast_tensors(*scales)).sum(0)

    def spread(self, widths: Sequence[float]) -> KernelSum:
        """See :class:`GridKernel`."""
        own = ([widths[i] for i in group] for group in self.dims)
        spread = (term.spread(w) for term, w in zip(self.terms, own, strict=True))
        return replace(self, terms=tuple(spread))

    def for_single_output(self) -> KernelSum:
        """See :class:`GridKernel`."""
        return replace(self, terms=tuple(term.for_single_output() for term in self.terms))

    def detached(self) -> KernelSum:
        """See :class:`GridKernel`."""
        return replace(self, terms=tuple(term.detached() for term in self.terms))
