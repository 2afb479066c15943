"""Functions and quadratic forms of a basis's features, evaluated at many inputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from bo_stream.acquisition.feature_nipv import CHUNK_NUMBERS
from bo_stream.bases.basis import Basis
from bo_stream.bases.grid.contraction import KroneckerPullBack
from bo_stream.bases.grid.interpolation import GridBasis, InterpolationBasis
from bo_stream.bases.grid.mesh import PAIR_DEGREES, STENCIL, Grid, legendre, outer_product, ravel
from bo_stream.bases.grid.mesh import weights as cubic_weights
from bo_stream.bases.grid.statistics import CellGram
from bo_stream.bases.inducing import InducingBasis, frozen
from bo_stream.tensors import map_tensors

KEPT_NUMBERS = 32_000_000
"""Up to this many interpolation weights are kept; beyond it they are computed at each use."""

KEPT_FEATURES = 500_000_000
"""Up to this many features are kept in float32, 2 GB; beyond it they are computed at each use."""

_SINGLE = torch.float32
_ROWS = 2048


def sites(basis: Basis, X: Tensor) -> Sites:
    """Return the sites at transformed inputs, ``N x d``."""
    if not isinstance(basis, GridBasis) or len(basis.parts) > 1:
        return _DenseSites(basis, X)
    (part,) = basis.parts
    keep = X.shape[0] * STENCIL**part.grid.dim <= KEPT_NUMBERS
    return _GridSites(basis, X, part, tuple(_locate(part.grid, X)) if keep else None)


def kept_sites(basis: Basis, X: Tensor) -> Sites:
    """Return sites in float32 that keep their features where memory allows, off a single grid.

    Args:
        basis: Any.
        X: Transformed inputs, ``N x d``.
    """
    dense = not isinstance(basis, GridBasis) or len(basis.parts) > 1
    if dense and X.shape[0] * basis.rank <= KEPT_FEATURES:
        return _KeptSites.of(basis, X)
    return sites(basis, X)


@dataclass(frozen=True)
class Sites(ABC):
    """N inputs of one basis with r features z and m outputs.

    Attributes:
        basis: The basis.
        X: Transformed inputs, ``N x d``.
    """

    basis: Basis
    X: Tensor

    @abstractmethod
    def linear(self, weights: Tensor) -> Tensor:
        """Evaluate k functions ``z(x)ᵀ w`` at all sites, ``m x r x k -> m x k x N``."""

    @abstractmethod
    def quadratic(self, matrices: Tensor) -> Tensor:
        """Evaluate k symmetric ``z(x)ᵀ M z(x)`` at all sites, ``k x m x r x r -> k x m x N``."""

    def feature(self, site: int) -> Tensor:
        """Return the features of one site, ``m x r x 1``."""
        return self.basis.features(self.X[site : site + 1]).mT

    def residual(self) -> Tensor:
        """Compute the variance of one output that features leave at all sites, ``N``."""
        if not self.basis.has_residual:
            return self.X.new_zeros(len(self.X))
        parts = [_residual(self.basis, X, None) for X in self.X.split(_ROWS)]
        return torch.cat(parts).to(self.X)


@dataclass(frozen=True)
class _DenseSites(Sites):
    """Sites of any basis, whose features are computed at each use, in chunks.

    Cost O(N r) a function, O(N r²) a form.
    """

    def _features(self) -> Iterator[Tensor]:
        size = max(1, CHUNK_NUMBERS // self.basis.rank)
        return (self.basis.features(X) for X in self.X.split(size))

    def linear(self, weights: Tensor) -> Tensor:
        return torch.cat([weights.mT @ z.mT for z in self._features()], -1)

    def quadratic(self, matrices: Tensor) -> Tensor:
        return torch.cat([((z @ matrices) * z).sum(-1) for z in self._features()], -1)


@dataclass(frozen=True)
class _KeptSites(Sites):
    """Sites of any basis of one output whose features are kept, in float32.

    Memory O(N r). Cost O(N r²) once, O(N r) a function, O(N r²) a form.

    Attributes:
        features: ``N x r``.
        left: Variance that they leave, ``N``.
    """

    features: Tensor
    left: Tensor

    @classmethod
    def of(cls, basis: Basis, X: Tensor) -> _KeptSites:
        """Compute the features, of an inducing basis in float32."""
        single = basis
        if isinstance(basis, InducingBasis):
            single = replace(map_tensors(basis, Tensor.float), kernel=frozen(basis.kernel, _SINGLE))
        features = torch.empty(len(X), basis.rank, dtype=_SINGLE, device=X.device)
        left = torch.zeros_like(features[:, 0])
        for z, rest, rows in zip(
            features.split(_ROWS), left.split(_ROWS), X.split(_ROWS), strict=True
        ):
            inputs = rows if single is basis else rows.to(_SINGLE)
            found = single.features(inputs)
            z.copy_(found[0])
            if basis.has_residual:
                rest.copy_(_residual(single, inputs, found))
        return cls(basis, X, features, left)

    def linear(self, weights: Tensor) -> Tensor:
        return (weights.mT.to(_SINGLE) @ self.features.mT).to(weights)

    def quadratic(self, matrices: Tensor) -> Tensor:
        single = matrices.to(_SINGLE)
        parts = [((z @ single) * z).sum(-1) for z in self.features.split(_ROWS)]
        return torch.cat(parts, -1).to(matrices)

    def residual(self) -> Tensor:
        """Return the variance that features leave at all sites, ``N``."""
        return self.left.to(self.X)


def _residual(basis: Basis, X: Tensor, features: Tensor | None) -> Tensor:
    variance = basis.residual_variance(X, features)
    return X.new_zeros(len(X)) if variance is None else variance[0]


@dataclass(frozen=True)
class _GridSites(Sites):
    """Sites of an interpolation basis, without their N x r features.

    A function of the basis is interpolated from its node values, and a quadratic form is a
    polynomial in each cell. Cost O(4^d N + p Σ r_i) a function of p nodes, O(7^d N + (7 g)^d g²) a
    form.

    Attributes:
        part: The features on its only grid.
        located: Nodes and interpolation weights, or None where they would be too many to keep.
    """

    part: InterpolationBasis
    located: tuple[tuple[Tensor, Tensor], ...] | None

    def linear(self, weights: Tensor) -> Tensor:
        values = _node_values(self.part, weights)
        table = values.flatten(0, -2).mT.contiguous()
        located = _locate(self.part.grid, self.X) if self.located is None else self.located
        parts = [
            embedding_bag(nodes, table, per_sample_weights=shares, mode="sum").mT
            for nodes, shares in located
        ]
        return torch.cat(parts, -1).unflatten(0, values.shape[:-1])

    def quadratic(self, matrices: Tensor) -> Tensor:
        coefficients = _cell_polynomials(self.part, matrices)
        size = max(1, CHUNK_NUMBERS // coefficients.shape[-1])
        parts = []
        for cell, t in map(self.part.grid.locate, self.X.split(size)):
            chosen = coefficients[..., ravel(cell, self.part.grid.cells), :]
            parts.append((chosen * outer_product(legendre(t))).sum(-1))
        return torch.cat(parts, -1)


def _locate(grid: Grid, X: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the nodes around each site of a chunk, flat indices, and their weights, ``N x 4^d``."""
    corner = torch.cartesian_prod(*[torch.arange(STENCIL, device=X.device)] * grid.dim)
    for chunk in X.split(max(1, CHUNK_NUMBERS // STENCIL**grid.dim)):
        cell, t = grid.locate(chunk)
        nodes = cell.unsqueeze(-2) + corner.reshape(-1, grid.dim)
        yield ravel(nodes, grid.size), outer_product(cubic_weights(t))


def _node_values(basis: InterpolationBasis, weights: Tensor) -> Tensor:
    """Evaluate k functions at the grid's p nodes, ``m x r x k -> m x k x p``. Cost O(k p Σ r_i)."""
    roots = basis.roots
    sizes = [root.shape[-1] for root in roots]
    scaled = weights * basis.scale.sqrt()[..., None, None]
    tensor = weights.new_zeros(*weights.mT.shape[:-1], *sizes).flatten(-len(sizes))
    tensor[..., ravel(basis.index, sizes)] = scaled.mT
    for root in roots:
        tensor = (tensor.unflatten(-1, (root.shape[-1], -1)).mT @ root.mT.unsqueeze(-3)).flatten(-2)
    return tensor


def _cell_polynomials(basis: InterpolationBasis, matrices: Tensor) -> Tensor:
    """Compute the Legendre coefficients of k forms in each cell, ``k x m x cells x 7^d``.

    The form at x is ``⟨M, Rᵀ g(x) R⟩`` with g(x) the gram of one observation at x, linear in its
    moments: the coefficients are the adjoint of the pull-back, which differentiation gives. The
    symmetric matrices M are ``k x m x r x r``.
    """
    grid, batch = basis.grid, basis.scale.shape
    zeros = matrices.new_zeros(*batch, math.prod(grid.cells), PAIR_DEGREES**grid.dim)
    with torch.enable_grad():
        moments = zeros.requires_grad_()
        gram = KroneckerPullBack(basis, grid).congruence(CellGram(moments, grid.cells))
        adjoints = [
            torch.autograd.grad(gram, moments, matrix, retain_graph=True)[0] for matrix in matrices
        ]
    return torch.stack(adjoints)
