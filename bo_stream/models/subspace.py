"""A fixed set of features in which hyperparameters move: the memory need not be visited again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.additive_basis import grid_basis
from bo_stream.bases.grid_kernel import GridKernel
from bo_stream.bases.interpolation import GridBasis
from bo_stream.bases.kernel_sensitivity import node_variances
from bo_stream.models.caches import WHITENED_ROWS
from bo_stream.models.memory import Observations, WhitenedMemory
from bo_stream.models.row_memory import RowMemory
from bo_stream.models.stream_memory import StreamMemory

_ROUNDING = 1e-12


@dataclass(frozen=True)
class Subspace:
    """The largest eigenvectors of the kernel at some hyperparameters, with the memory in them.

    Attributes:
        basis: At those hyperparameters.
        memory: In its weights.
        node_variances: Mean prior variance over the nodes that each feature carries there,
            ``... x m x r``.
        missed: What all of them miss there, or its rounding error, ``... x m``.
    """

    basis: GridBasis
    memory: WhitenedMemory
    node_variances: Tensor
    missed: Tensor

    @classmethod
    @torch.no_grad()
    def around(
        cls, factors: GridKernel, memory: RowMemory | StreamMemory, tolerance: float, max_rank: int
    ) -> Subspace:
        """Centred at a kernel's present parameters. Cost as a solve after they have changed.

        Args:
            factors: The kernel.
            memory: What was observed.
            tolerance: Largest part of its trace to leave out.
            max_rank: Cap on r.
        """
        basis = spread_basis(factors, memory, tolerance, max_rank)
        variances = node_variances(basis)
        missed = (basis.scale - variances.sum(-1)).maximum(_ROUNDING * basis.scale)
        return cls(basis, memory.whitened(basis), variances, missed)

    def outside(self, prior: Tensor, scale: Tensor) -> Tensor:
        """Mean over the nodes of a kernel's variance that the features miss, ``... x m``.

        Args:
            prior: Covariance of the weights under that kernel, ``... x m x r x r``.
            scale: Its prior variance, ``... x m``.
        """
        inside = (self.node_variances * prior.diagonal(dim1=-2, dim2=-1)).sum(-1)
        return scale - inside

    def after(self, data: Observations) -> Subspace | None:
        """The same with a batch more, or None for a large one. Cost O(n r²)."""
        if data.X.shape[-2] > WHITENED_ROWS:
            return None
        return replace(self, memory=self.memory.observed(self.basis.features(data.X), data))


def spread_basis(
    factors: GridKernel, memory: RowMemory | StreamMemory, tolerance: float, max_rank: int
) -> GridBasis:
    """Eigenvectors of a kernel on a memory's grid that hold also its derivatives in frequencies.

    Those of the kernel alone would make a likelihood's gradient vanish in the period of a strictly
    periodic kernel.
    """
    spread = factors.spread(memory.grid.bounds.diff(dim=0)[0].tolist())
    return grid_basis(memory.grid, spread, memory.counts.shape, tolerance, max_rank)
