"""The prior of a grid model while its observations are few: an interpolated kernel, no features."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from bo_stream.bases.grid.interpolated_kernel import InterpolatedKernel, interpolation_lines
from bo_stream.bases.grid.interpolation import GridBasis, grid_basis
from bo_stream.bases.grid.kernel import GridKernel
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.process.observation_space import ObservationSpacePrior


@dataclass(frozen=True)
class GridPrior(ObservationSpacePrior):
    """A Gaussian process prior with an interpolated kernel at fixed hyperparameters.

    The coordinates of points are their interpolation weights w of all dimensions side by side,
    ``... x 1 x n x G``, their images ``K w``.

    Attributes:
        kernel: Before it is interpolated, detached.
        mesh: The nodes.
        mean: Constant prior mean, ``... x m x 1``.
        tolerance: Part of the kernel's trace that its features may leave out.
        max_rank: Cap on the number of features.
    """

    kernel: GridKernel
    mesh: Mesh
    mean: Tensor
    tolerance: float
    max_rank: int

    @cached_property
    def _interpolated(self) -> InterpolatedKernel:
        """The kernel k̃, ``batch x m``, also where all outputs share one."""
        kernel = InterpolatedKernel.of(self.kernel, self.mesh)
        return replace(kernel, scales=tuple(s.expand(self.mean.shape[:-1]) for s in kernel.scales))

    def coordinates(self, X: Tensor) -> Tensor:
        """Compute interpolation weights."""
        return interpolation_lines(self.mesh, X).unsqueeze(-3)

    def images(self, coordinates: Tensor) -> Tensor:
        """Multiply weights by the kernel between the nodes."""
        return self._interpolated.images(coordinates)

    def covariance(self, coordinates: Tensor, images: Tensor) -> Tensor:
        """Multiply the products of all dimensions."""
        return self._interpolated.covariance(coordinates, images)

    def variance(self, coordinates: Tensor, images: Tensor) -> Tensor:
        """Multiply the products of all dimensions, each point with itself."""
        return self._interpolated.variance(coordinates, images)

    def basis_for(self, X: Tensor, batch: torch.Size) -> GridBasis:
        """Build the kernel's features, whatever the observations."""
        return grid_basis(self.mesh, self.kernel, batch, self.tolerance, self.max_rank)
