"""The subspace in which hyperparameters are learned, kept while they move a little."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.bases.interpolation import InterpolationBasis, interpolation_basis
from bo_stream.bases.kernel_factors import KernelFactors
from bo_stream.models.memory import WhitenedMemory
from bo_stream.models.stream_memory import StreamMemory

LEARNING_RANK = 640
"""Most features in which hyperparameters are learned."""

RADIUS = 0.25
"""How far a log lengthscale may move before the subspace is chosen anew."""

_LEAST_TOLERANCE = 1e-11


@dataclass(frozen=True)
class LearningSpace:
    """The largest eigenvectors of the kernel at some hyperparameters, with the memory in them.

    The kernel of other hyperparameters is restricted to this space, so that an optimiser sees a
    smooth function with its exact gradient, and the grid's statistics are visited only when the
    lengthscales have moved by more than ``RADIUS``.

    Attributes:
        basis: At the centre.
        memory: In its weights.
        centre: Log lengthscales of the kernel's factors.
    """

    basis: InterpolationBasis
    memory: WhitenedMemory
    centre: tuple[Tensor, ...]

    @classmethod
    @torch.no_grad()
    def around(
        cls, factors: KernelFactors, memory: StreamMemory, tolerance: float, max_rank: int
    ) -> LearningSpace:
        """Centred at a kernel's present lengthscales."""
        basis = interpolation_basis(
            factors,
            memory.grid,
            memory.counts.shape,
            max(tolerance, _LEAST_TOLERANCE),
            min(max_rank, LEARNING_RANK),
        )
        return cls(basis, memory.whitened(basis), _log_lengthscales(factors))

    def holds(self, factors: KernelFactors) -> bool:
        """Whether a kernel's lengthscales are within ``RADIUS`` of the centre."""
        pairs = zip(self.centre, _log_lengthscales(factors), strict=True)
        distances = [float((old - new).abs().max()) for old, new in pairs]
        return max(distances, default=0.0) <= RADIUS and all(map(math.isfinite, distances))


def _log_lengthscales(factors: KernelFactors) -> tuple[Tensor, ...]:
    return tuple(factor.lengthscale.detach().log().clone() for factor in factors.factors)
