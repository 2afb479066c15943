"""Interpolation on a grid: weights, features, the interpolated kernel and integrals of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, starmap

import torch
from torch import Tensor

from bo_stream.bases.grid.kernel import GridKernel, KernelFactors
from bo_stream.bases.grid.mesh import (
    STENCIL,
    Grid,
    Mesh,
    columns,
    gauss_legendre,
    ravel,
    unravel,
    weights,
)
from bo_stream.bases.inducing import Basis
from bo_stream.linalg import row_product, stack_columns
from bo_stream.tensors import broadcast_shapes, cached_for_autograd


@dataclass(frozen=True)
class GridBasis(Basis):
    """Features of ``Σ_g k̃_g(x_g, x'_g)`` on one grid or on several, without residual covariance.

    The features of the parts are independent a priori. They belong to the r largest eigenvalues of
    all parts together, in order of their size.

    Attributes:
        parts: The features on each grid.
        grid: The grids.
        scale: Prior variance, the sum of the parts', ``... x m``.
        member: The part that each feature belongs to, ``r``.
        dropped: Truncated part of the kernel's trace, the largest over the outputs.
    """

    parts: tuple[InterpolationBasis, ...]
    grid: Mesh
    scale: Tensor
    member: Tensor
    dropped: float

    @property
    def rank(self) -> int:
        """Number r of features."""
        return self.member.shape[0]

    @cached_for_autograd
    def order(self) -> Tensor:
        """Position of each feature among the features of all parts side by side, ``r``."""
        return self.member.argsort(stable=True).argsort()

    def features(self, X: Tensor) -> Tensor:
        """Compute the features, ``... x n x d -> ... x m x n x r``. Cost O(n (Σ g_i² + r d))."""
        values = []
        for part, group in zip(self.parts, self.grid.groups, strict=True):
            own = X if len(self.parts) == 1 else columns(X, group)
            lines = part.grid.interpolation_matrices(own.unsqueeze(-3))
            values.append(list(map(row_product, lines, part.roots)))
        return self.products(values)

    def values(self, X: Tensor) -> list[list[Tensor]]:
        """Compute the functions of each part and dimension, ``... x n x d -> ... x m x n x k``."""
        result = []
        for part, group in zip(self.parts, self.grid.groups, strict=True):
            own = X if len(self.parts) == 1 else columns(X, group)
            lines = part.grid.interpolation_matrices(own.unsqueeze(-3))
            result.append(list(map(row_product, lines, part.roots)))
        return result

    def products(self, values: Sequence[Sequence[Tensor]]) -> Tensor:
        """Multiply :meth:`values` to features, ``... x m x n x r``. Cost O(n r d)."""
        products = []
        for part, (first, *others) in zip(self.parts, values, strict=True):
            pairs = zip((part.deviation * first, *others), part.positions, strict=True)
            factors = (f.gather(-1, i.expand(*f.shape[:-1], part.rank)) for f, i in pairs)
            products.append(reduce(torch.mul, factors))
        return self.joined(products)

    def shares(self) -> Tensor:
        """Return the eigenvalues of all p nodes relative to the prior variance, ``... x m x p``."""
        shares = [relative_products(part.eigenvalues) for part in self.parts]
        if len(shares) == 1:
            return shares[0]
        weights = ((part.scale / self.scale).unsqueeze(-1) for part in self.parts)
        return torch.cat([w * own for w, own in zip(weights, shares, strict=True)], -1)

    def between(self, first: int, last: int) -> GridBasis:
        """Return the features from ``first`` to before ``last``, in order of their size."""
        ends = (self.member[:end].bincount(minlength=len(self.parts)) for end in (first, last))
        triples = zip(self.parts, *(end.tolist() for end in ends), strict=True)
        parts = (replace(part, index=part.index[begin:end]) for part, begin, end in triples)
        return replace(self, parts=tuple(parts), member=self.member[first:last])

    def enough(self, tolerance: float, max_rank: int) -> int:
        """Count the leading features that truncate at most ``tolerance`` of the trace."""
        return select_largest(self.shares(), tolerance, max_rank)[0].shape[0]

    def joined(self, values: Sequence[Tensor], dim: int = -1) -> Tensor:
        """Put values of each part's features in the order of the features."""
        if len(values) == 1:
            return values[0]
        return torch.cat(list(values), dim).index_select(dim, self.order)

    def in_order(self, matrix: Tensor) -> Tensor:
        """Put a matrix between the parts' features side by side in the order of the features."""
        if len(self.parts) == 1:
            return matrix
        return matrix.index_select(-2, self.order).index_select(-1, self.order)

    def own_blocks(self, matrix: Tensor) -> list[Tensor]:
        """Extract the blocks of a matrix within each part."""
        if len(self.parts) == 1:
            return [matrix]
        positions = self.order.argsort().split([part.rank for part in self.parts])
        return [matrix.index_select(-2, own).index_select(-1, own) for own in positions]


@dataclass(frozen=True)
class Lines:
    """Features that agree in all dimensions but one, in which their positions are 0 to n − 1.

    Attributes:
        order: Features by the length of their line, line by line, ``r``.
        inverse: Position of each feature in that order, ``r``.
        shapes: Number of lines of each length n, and n.
    """

    order: Tensor
    inverse: Tensor
    shapes: tuple[tuple[int, int], ...]

    @classmethod
    def along(cls, dimension: int, index: Tensor, sizes: Sequence[int]) -> Lines:
        """Sort products of functions, ``r x d`` positions of so many ``sizes``, into lines."""
        others = [i for i in range(len(sizes)) if i != dimension]
        key = torch.zeros_like(index[:, 0])
        if others:
            key = ravel(index[:, others], [sizes[i] for i in others])
        length, most = key.bincount()[key], math.prod(sizes[i] for i in others)
        order = ((length * most + key) * sizes[dimension] + index[:, dimension]).argsort()
        totals = enumerate(length.bincount().tolist())
        shapes = tuple((total // n, n) for n, total in totals if total > 0)
        return cls(order, order.argsort(), shapes)

    def sums_of_pairs(self, matrix: Tensor, k: int) -> Tensor:
        """Sum a matrix's entries between features of one line, ``... x r x r -> ... x k x k``."""
        result = matrix.new_zeros(*matrix.shape[:-2], k, k)
        for rows in self.split(self.order.unsqueeze(-1)):
            n = rows.shape[-2]
            result[..., :n, :n] += matrix[..., rows, rows.mT].sum(-3)
        return result

    def split(self, rows: Tensor) -> list[Tensor]:
        """Split rows that are in order, ``... x r x c``, to ``... x lines x n x c`` by length."""
        parts = rows.split([count * n for count, n in self.shapes], -2)
        pairs = zip(parts, self.shapes, strict=True)
        return [part.unflatten(-2, shape) for part, shape in pairs]


@dataclass(frozen=True)
class InterpolationBasis:
    """Features of ``k̃(x, x') = w(x)ᵀ K w(x')`` on a grid, K the kernel on its nodes.

    K is a Kronecker product, ``K = E Λ Eᵀ`` one dimension at a time. A feature α belongs to one
    product λ_α of eigenvalues: ``z_α(x) = √λ_α Π_i w_iᵀ e_{α_i}`` with the interpolation weights
    w_i at x, so the prior root is ``E Λ^½`` and is never formed. [Stanton2021, section 3.2 and 4;
    the truncation is ours]

    Attributes:
        grid: Nodes.
        eigenvalues: Per dimension, ``... x m x g_i``, largest first.
        eigenvectors: Per dimension, ``... x m x g_i x g_i``.
        scale: Prior variance, ``... x m``.
        index: The products: positions α_i of their eigenvalues, ``r x d``.
    """

    grid: Grid
    eigenvalues: tuple[Tensor, ...]
    eigenvectors: tuple[Tensor, ...]
    scale: Tensor
    index: Tensor

    @property
    def rank(self) -> int:
        """Number r of features."""
        return self.index.shape[0]

    @cached_for_autograd
    def deviation(self) -> Tensor:
        """Prior standard deviation, ``... x m x 1 x 1``."""
        return self.scale.sqrt()[..., None, None]

    @cached_for_autograd
    def positions(self) -> list[Tensor]:
        """Positions α_i of each dimension, ``r`` each, side by side in memory."""
        return [column.contiguous() for column in self.index.unbind(-1)]

    @cached_for_autograd
    def roots(self) -> list[Tensor]:
        """Eigenvectors times the root of their eigenvalue, as far as any product needs them."""
        return self._scaled([values.sqrt() for values in self.eigenvalues])

    @cached_for_autograd
    def whitenings(self) -> list[Tensor]:
        """Eigenvectors over the root of their eigenvalue, as :attr:`roots`; 0 where that is 0."""
        return self._scaled([torch.where(v > 0, v.rsqrt(), 0.0) for v in self.eigenvalues])

    @cached_for_autograd
    def product_whitenings(self) -> list[Tensor]:
        """Column of :attr:`whitenings` of each feature, per dimension, ``... x g x r``."""
        return [line[..., i] for line, i in zip(self.whitenings, self.positions, strict=True)]

    @cached_for_autograd
    def lines(self) -> list[Lines]:
        """Features along each dimension: with an eigenvalue all larger ones are there, too."""
        return [Lines.along(i, self.index, self.grid.size) for i in range(self.grid.dim)]

    def _scaled(self, factors: list[Tensor]) -> list[Tensor]:
        largest = [int(own.max()) if self.rank > 0 else 0 for own in self.positions]
        lines = zip(self.eigenvectors, factors, largest, strict=True)
        return [vectors[..., : i + 1] * own[..., None, : i + 1] for vectors, own, i in lines]


def grid_basis(
    mesh: Mesh, kernel: GridKernel, batch: torch.Size, tolerance: float, max_rank: int
) -> GridBasis:
    """Build the basis of a kernel. Cost O(Σ g_i³ + p log p) over all grids.

    Args:
        mesh: Made for the kernel.
        kernel: Differentiable or not; its hyperparameters are used as they are now.
        batch: ``batch_shape x m``, to which the hyperparameters broadcast.
        tolerance: Largest part of the trace of K that may be truncated.
        max_rank: Cap on r, for any tolerance.
    """
    parts = []
    for factors, grid in zip(kernel.parts, mesh.parts, strict=True):
        lines = [node_correlation(factors, grid, i).detach() for i in range(grid.dim)]
        pairs = [torch.linalg.eigh(line.expand(*batch, *line.shape[-2:])) for line in lines]
        values = tuple(own.flip(-1).clamp_min(0.0) for own, _ in pairs)
        vectors = tuple(own.flip(-1) for _, own in pairs)
        scale = factors.scale().detach().to(values[0].device).expand(batch)
        nothing = torch.zeros(0, grid.dim, dtype=torch.long, device=scale.device)
        parts.append(InterpolationBasis(grid, values, vectors, scale, nothing))
    total = parts[0].scale
    if len(parts) > 1:
        total = torch.stack([part.scale for part in parts]).sum(0)
    nothing = torch.zeros(0, dtype=torch.long, device=total.device)
    whole = GridBasis(tuple(parts), mesh, total, nothing, 1.0)
    chosen, dropped = select_largest(whole.shares(), tolerance, max_rank)
    ends = torch.tensor([grid.num_nodes for grid in mesh.parts], device=chosen.device).cumsum(0)
    member = torch.bucketize(chosen, ends, right=True)
    terms = []
    for g, part in enumerate(parts):
        own = chosen[member == g] - (ends[g] - mesh.parts[g].num_nodes)
        sizes = [values.shape[-1] for values in part.eigenvalues]
        terms.append(replace(part, index=unravel(own, sizes)))
    return replace(whole, parts=tuple(terms), member=member, dropped=dropped)


def select_largest(shares: Tensor, tolerance: float, max_rank: int) -> tuple[Tensor, float]:
    """Select the largest of ``... x p`` shares that sum to one, one set for all batch elements.

    Returns:
        Their positions, largest first, and the largest sum of the other shares.
    """
    rows = shares.reshape(-1, shares.shape[-1])
    best = rows.amax(0)
    order = best.argsort(descending=True, stable=True)
    left = 1.0 - rows[:, order].cumsum(-1).amin(0)
    enough = int((left > tolerance).sum()) + 1 if tolerance > 0 else int((best > 0).sum())
    rank = max(1, min(enough, max_rank, order.numel()))
    return order[:rank], max(float(left[rank - 1]), 0.0)


def relative_products(eigenvalues: tuple[Tensor, ...]) -> Tensor:
    """Compute all p products of eigenvalues relative to their sum, ``... x p``."""
    shares = torch.ones((), dtype=torch.float64, device=eigenvalues[0].device)
    for values in eigenvalues:
        share = values / values.sum(-1, keepdim=True)
        shares = (shares.unsqueeze(-1) * share.unsqueeze(-2)).flatten(-2) if shares.ndim else share
    return shares


def node_correlation(factors: KernelFactors, grid: Grid, dimension: int) -> Tensor:
    """Compute the correlation matrix of one dimension's nodes, ``... x g x g``, differentiable."""
    nodes = grid.nodes(dimension, factors.device)
    return factors.correlation(dimension, nodes, nodes)


def first_correlations(factors: KernelFactors, grid: Grid, dimension: int) -> Tensor:
    """Compute correlations of one dimension's first node with all nodes, ``... x g``.

    Differentiable. The nodes are evenly spaced and the kernel is stationary: this is the content of
    :func:`node_correlation`.
    """
    steps = torch.arange(grid.size[dimension], dtype=torch.float64, device=factors.device)
    distances = steps * grid.spacing[dimension]
    return factors.correlation(dimension, distances[:1], distances).squeeze(-2)


# --- the interpolated kernel between points without features -------------------------------------


@dataclass(frozen=True)
class InterpolatedKernel:
    """Kernel ``k̃(x, x') = Σ_g s_g Π_i w_i(x)ᵀ K_i w_i(x')`` over the parts g of a sum of products.

    The tensor product of one-dimensional interpolations makes each part a product of
    one-dimensional interpolated kernels. So no node of the whole grid is visited and nothing is
    truncated. Differentiable in the kernel's hyperparameters and in the weights w. Points are given
    by their ``lines``, :func:`interpolation_lines`, ``... x 1 x n x G``, and by their
    :meth:`images`.

    Attributes:
        scales: s_g per part, ``... x m``.
        correlations: K_i per part and dimension, ``... x m x g_i x g_i``.
    """

    scales: tuple[Tensor, ...]
    correlations: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, kernel: GridKernel, mesh: Mesh) -> InterpolatedKernel:
        """Evaluate a kernel's present hyperparameters on a mesh. Cost O(Σ g_i²)."""
        pairs = list(zip(kernel.parts, mesh.parts, strict=True))
        correlations = tuple(
            tuple(node_correlation(part, grid, i) for i in range(grid.dim)) for part, grid in pairs
        )
        device = correlations[0][0].device
        return cls(tuple(part.scale().to(device) for part in kernel.parts), correlations)

    def images(self, lines: Tensor) -> Tensor:
        """Compute all ``K_i w_i(x)`` side by side, ``... x m x n x G``. Cost O(n Σ g_i²)."""
        own = zip(self._by_dimension(lines), chain(*self.correlations), strict=True)
        return reduce(stack_columns, starmap(row_product, own))

    def covariance(self, lines: Tensor, images: Tensor) -> Tensor:
        """Compute the covariance of points with others, ``... x m x n x n'``. Cost O(n n' G)."""
        pairs = zip(self._by_dimension(lines), self._by_dimension(images), strict=True)
        values = (row_product(w, image.mT) for w, image in pairs)
        return _summed(self.scales, map(len, self.correlations), values, 2)

    def variance(self, lines: Tensor, images: Tensor) -> Tensor:
        """Compute the prior variance at n points, ``... x m x n``. Cost O(n G)."""
        pairs = zip(self._by_dimension(lines), self._by_dimension(images), strict=True)
        values = ((w * image).sum(-1) for w, image in pairs)
        return _summed(self.scales, map(len, self.correlations), values, 1)

    def _by_dimension(self, columns: Tensor) -> tuple[Tensor, ...]:
        return columns.split([K.shape[-1] for K in chain(*self.correlations)], -1)


def interpolation_lines(mesh: Mesh, X: Tensor) -> Tensor:
    """Compute the interpolation weights of all dimensions, ``... x n x d -> ... x n x G``.

    ``G = Σ g_i`` counts the nodes of all dimensions of all grids. Differentiable.
    """
    pairs = zip(mesh.parts, mesh.groups, strict=True)
    own = (grid.interpolation_matrices(columns(X, group)) for grid, group in pairs)
    return torch.cat([line for lines in own for line in lines], -1)


@dataclass(frozen=True)
class Pairs:
    """All pairs of n points in one dimension of a grid.

    A point has weights w of ``STENCIL`` consecutive nodes only, and the nodes are evenly spaced
    with distance h. So the interpolated correlation of a pair is ``w(x)ᵀ K w(x') = Σ_s c_s κ(s h)``
    over seven numbers of steps s, for any number of nodes; κ is the correlation at a distance.

    Attributes:
        steps: The numbers s, ``... x 1 x 7 n²``.
        products: Sums c_s of products of weights, ``... x 1 x 7 x n x n``.
    """

    steps: Tensor
    products: Tensor

    @classmethod
    def of(cls, cell: Tensor, position: Tensor) -> Pairs:
        """Pair points at positions in cells of a line of the grid, ``... x n`` each."""
        w = weights(position)
        node = torch.arange(STENCIL, device=cell.device)
        apart = torch.arange(1 - STENCIL, STENCIL, device=cell.device)[:, None, None]
        which = (node.unsqueeze(-1) - node == apart).to(w)
        products = torch.einsum("...ia,...jb,sab->...sij", w, w, which)
        cells = cell.unsqueeze(-1) - cell.unsqueeze(-2)
        steps = (cells.unsqueeze(-3) + apart).abs().flatten(-3)
        return cls(steps.unsqueeze(-2), products.unsqueeze(-4))

    def correlation(self, nodes: Tensor) -> Tensor:
        """Interpolate the first node's correlations, ``... x m x g -> ... x m x n x n``."""
        batch = broadcast_shapes(nodes.shape[:-1], self.steps.shape[:-1])
        values = nodes.expand(*batch, -1).gather(-1, self.steps.expand(*batch, -1))
        return (values.unflatten(-1, self.products.shape[-3:]) * self.products).sum(-3)


def pairs_of(mesh: Mesh, X: Tensor) -> tuple[Pairs, ...]:
    """Pair points ``... x n x d`` in each dimension of each grid. Memory O(n²) for each."""
    groups = zip(mesh.parts, mesh.groups, strict=True)
    located = [grid.locate(columns(X, group)) for grid, group in groups]
    return tuple(
        Pairs.of(*line)
        for cell, position in located
        for line in zip(cell.unbind(-1), position.unbind(-1), strict=True)
    )


def covariance_of_pairs(kernel: GridKernel, mesh: Mesh, pairs: Sequence[Pairs]) -> Tensor:
    """Compute the covariance of n points, ``... x m x n x n``. Cost O(n² d + Σ g_i).

    As :meth:`InterpolatedKernel.covariance`, and cheaper for few points and many nodes.
    """
    parts = list(zip(kernel.parts, mesh.parts, strict=True))
    nodes = [first_correlations(part, grid, i) for part, grid in parts for i in range(grid.dim)]
    values = (own.correlation(row) for own, row in zip(pairs, nodes, strict=True))
    scales = [part.scale().to(nodes[0].device) for part in kernel.parts]
    return _summed(scales, [grid.dim for _, grid in parts], values, 2)


def _summed(
    scales: Sequence[Tensor], dims: Iterable[int], values: Iterable[Tensor], after: int
) -> Tensor:
    """Compute ``Σ_g s_g Π_i value_i`` over parts g of ``dims[g]`` dimensions i.

    ``values`` has one tensor per dimension of each part, with ``after`` dimensions after m.
    """
    remaining, total = iter(values), None
    for scale, dim in zip(scales, dims, strict=True):
        product = scale[(..., *(None,) * after)]
        for _ in range(dim):
            product = product * next(remaining)
        total = product if total is None else total + product
    if total is None:
        raise ValueError("Expected a kernel of at least one part, got none.")
    return total


# --- exact means of products of features over a box ----------------------------------------------


def integrated_gram(basis: GridBasis, bounds: Tensor) -> Tensor:
    """Compute the mean of ``z zᵀ`` over the box ``bounds`` (``2 x d``), exact, ``... x m x r x r``.

    Dimension by dimension: products of two interpolated eigenvectors where the grids of both
    features cover it, means of one where only one does. They are polynomials of degree at most 6 in
    each cell, integrated exactly by four Gauss points; the box is cut at all cell borders.
    """
    own, rows = list(zip(basis.parts, basis.grid.groups, strict=True)), []
    for first in own:
        blocks = []
        for second in own:
            block = (first[0].scale * second[0].scale).sqrt()[..., None, None]
            for dimension in sorted({*first[1], *second[1]}):
                block = block * _mean_products(first, second, dimension, bounds[:, dimension])
            blocks.append(block)
        rows.append(torch.cat(blocks, -1))
    return basis.in_order(torch.cat(rows, -2))


_Part = tuple[InterpolationBasis, tuple[int, ...]]


def _mean_products(first: _Part, second: _Part, dimension: int, interval: Tensor) -> Tensor:
    """Compute mean products of two parts' functions of one dimension, ``... x m x r x r'``."""
    sides = [
        (basis, group.index(dimension) if dimension in group else None)
        for basis, group in (first, second)
    ]
    cuts = torch.cat([basis.grid.nodes(i) for basis, i in sides if i is not None])
    low, high = interval.tolist()
    inner = cuts[(cuts > low) & (cuts < high)].unique()
    edges = torch.cat((cuts.new_tensor([low]), inner, cuts.new_tensor([high])))
    widths, (t, quadrature) = edges.diff()[:, None], gauss_legendre(4)  # exact to degree 7
    x = (edges[:-1, None] + widths * t).flatten().to(first[0].scale)
    share = (widths * quadrature / (high - low)).flatten().to(first[0].scale)
    rows, columns = (
        torch.ones_like(x).unsqueeze(-1)  # a part without the dimension: the constant function 1
        if i is None
        else basis.grid.interpolation_matrix(i, x) @ basis.roots[i]
        for basis, i in sides
    )
    line = rows.mT @ (columns * share.unsqueeze(-1))
    for dim, (basis, i) in zip((-2, -1), sides, strict=True):
        line = line if i is None else line.index_select(dim, basis.positions[i])
    return line
