"""Regular grids over a box, padded by one node on each side, and cubic interpolation on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, reduce
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from bo_stream.tensors import none_set

T = TypeVar("T")

STENCIL = 4
"""Number of nodes with weight at a point, per dimension."""

PAIR_DEGREES = 7
"""Number of Legendre polynomials (degrees 0 to 6) that span products of two weights."""

EDGE = 1e-6
"""Points outside the box by less than this fraction of a cell count as inside."""

_ROUNDINGS = 16.0
"""Rounding errors by which a corner may differ from its node: for a box that was rounded at both
ends, grew to four times its width, and did both once more.
"""

# Rows: nodes −1, 0, 1, 2; columns: powers 0 to 3 of the position in the cell. [Keys1981, a = −1/2]
_KEYS = (
    (0.0, -0.5, 1.0, -0.5),
    (1.0, 0.0, -2.5, 1.5),
    (0.0, 0.5, 2.0, -1.5),
    (0.0, 0.0, -0.5, 0.5),
)

# Rows: Legendre polynomials of degrees 0 to 6; columns: powers 0 to 6.
_LEGENDRE = (
    (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    (-0.5, 0.0, 1.5, 0.0, 0.0, 0.0, 0.0),
    (0.0, -1.5, 0.0, 2.5, 0.0, 0.0, 0.0),
    (0.375, 0.0, -3.75, 0.0, 4.375, 0.0, 0.0),
    (0.0, 1.875, 0.0, -8.75, 0.0, 7.875, 0.0),
    (-0.3125, 0.0, 6.5625, 0.0, -19.6875, 0.0, 14.4375),
)

Coefficients = tuple[tuple[float, ...], ...]
"""Of polynomials: a row for each, a column for each power."""

Sizes = tuple[tuple[int, ...], ...]
"""Nodes per dimension of each grid."""

Groups = tuple[tuple[int, ...], ...]
"""Inputs of each grid."""


@dataclass(frozen=True)
class Stencil:
    """Nodes and cells of n points of a grid.

    Attributes:
        nodes: Flat index of the nodes around each point, ``... x n x 4^d``.
        weights: Their interpolation weights, ``... x n x 4^d``.
        cells: Flat index of each point's cell, ``... x n``.
        polynomials: Products of Legendre polynomials of each point's position in its cell, up to
            degree 6 in each dimension, ``... x n x 7^d``.
    """

    nodes: Tensor
    weights: Tensor
    cells: Tensor
    polynomials: Tensor


@dataclass(frozen=True)
class Mesh:
    """Nodes that cover a box of d inputs: of one grid, or of one grid for each part of a sum.

    Attributes:
        parts: The grids.
        groups: The inputs that each grid covers; they may overlap, and every input is in one.
    """

    parts: tuple[Grid, ...]
    groups: Groups

    @classmethod
    def over(cls, bounds: Tensor, groups: Groups, sizes: Sizes) -> Mesh:
        """Make the nodes over ``bounds``, ``2 x d``, for a kernel whose parts act on groups."""
        pairs = zip(groups, sizes, strict=True)
        return cls(tuple(Grid.over(bounds[:, list(group)], size) for group, size in pairs), groups)

    @property
    def size(self) -> tuple[int, ...] | Sizes:
        """Nodes per dimension, of one grid or of each."""
        sizes = tuple(grid.size for grid in self.parts)
        return sizes[0] if len(sizes) == 1 else sizes

    @property
    def bounds(self) -> Tensor:
        """The box that all grids cover, ``2 x d``."""
        ends: dict[int, list[Tensor]] = {}
        for grid, group in zip(self.parts, self.groups, strict=True):
            for i, line in zip(group, grid.bounds.unbind(-1), strict=True):
                ends.setdefault(i, []).append(line)
        both = [torch.stack(ends[i]) for i in sorted(ends)]
        return torch.stack([torch.stack((line[:, 0].max(), line[:, 1].min())) for line in both], -1)

    def _each(self, rule: Callable[[Grid, T], Grid], values: Sequence[T]) -> Mesh:
        """Replace every grid by a rule for it and a value of its own."""
        pairs = zip(self.parts, values, strict=True)
        return Mesh(tuple(rule(grid, value) for grid, value in pairs), self.groups)

    def stencils(self, X: Tensor) -> list[Stencil]:
        """Return each grid's stencils of points in the box, ``... x n x d``."""
        stencils = []
        for grid, group in zip(self.parts, self.groups, strict=True):
            cell, t = grid.locate(columns(X, group))
            interpolation, polynomials = outer_product(weights(t)), outer_product(legendre(t))
            cells, nodes = ravel(cell, grid.cells), grid.nodes_around(cell)
            stencils.append(Stencil(nodes, interpolation, cells, polynomials))
        return stencils

    def contains(self, X: Tensor) -> bool:
        """Say whether all points lie in the box."""
        pairs = zip(self.parts, self.groups, strict=True)
        if X.is_cpu:
            return all(grid.reaches(columns(X, group)) for grid, group in pairs)
        # nothing is fetched
        outside = [grid.outside(columns(X, group)).flatten() for grid, group in pairs]
        return none_set(torch.cat(outside))

    def grown_to(self, X: Tensor) -> Mesh:
        """Return the smallest mesh with the same nodes, and more, whose box holds X."""
        return self._each(
            lambda grid, group: grid.grown_by(*grid.missing_cells(columns(X, group))), self.groups
        )

    def grown_past(self, X: Tensor) -> Mesh:
        """Grow as :meth:`grown_to`, by a power of two of cells or none on each side.

        So few meshes serve the inputs of many queries.
        """

        def grown(grid: Grid, group: tuple[int, ...]) -> Grid:
            sides = grid.missing_cells(columns(X, group))
            powers = ([1 << (n - 1).bit_length() if n > 0 else 0 for n in side] for side in sides)
            return grid.grown_by(*powers)

        return self._each(grown, self.groups)

    def grown_over(self, other: Mesh) -> Mesh:
        """Return the smallest mesh with the same nodes, and more, over the other's boxes too."""
        return self._each(
            lambda grid, box: grid.grown_by(*grid.missing_cells(box.bounds)), other.parts
        )

    def aligned(self, other: Mesh, rounding: float) -> Mesh:
        """Replace nodes that differ only by rounding from those of another mesh's grids by these.

        A grid over a box that was rounded to single precision has nodes that are rounded too.
        ``rounding`` is the relative rounding error of coordinates.
        """
        return self._each(lambda grid, theirs: grid.aligned_to(theirs, rounding), other.parts)

    def resized(self, sizes: Sizes) -> Mesh:
        """Put other nodes over the same boxes."""
        return self._each(lambda grid, size: Grid.over(grid.bounds, size), sizes)

    def lies_in(self, larger: Mesh) -> bool:
        """Say whether all nodes are nodes of ``larger`` too."""
        pairs = zip(self.parts, larger.parts, strict=True)
        return all(own.offset_in(other) is not None for own, other in pairs)

    def outgrown(self, first: Mesh, factor: float) -> int | None:
        """Return an input in which a grid is over ``factor`` times as wide as at first, if any."""
        for group, own, before in zip(self.groups, self.parts, first.parts, strict=True):
            for i, cells, first_cells in zip(group, own.cells, before.cells, strict=True):
                if cells > factor * first_cells:
                    return i
        return None


@dataclass(frozen=True)
class Grid:
    """Nodes ``lower + (k − 1) spacing``, k = 0 ... cells + 2, in each of d dimensions.

    Attributes:
        lower: Lower corner of the box, per dimension.
        spacing: Width of a cell.
        cells: Number of cells of the box; there are three nodes more than cells.
    """

    lower: tuple[float, ...]
    spacing: tuple[float, ...]
    cells: tuple[int, ...]

    @classmethod
    def over(cls, bounds: Tensor, grid_size: tuple[int, ...]) -> Grid:
        """Make a grid of ``grid_size`` nodes per dimension whose cells tile the box, ``2 x d``."""
        lower, upper = bounds.tolist()
        cells = tuple(size - STENCIL + 1 for size in grid_size)
        spacing = tuple((u - low) / c for low, u, c in zip(lower, upper, cells, strict=True))
        return cls(tuple(lower), spacing, cells)

    @property
    def dim(self) -> int:
        """Number d of dimensions."""
        return len(self.cells)

    @property
    def size(self) -> tuple[int, ...]:
        """Nodes per dimension."""
        return tuple(c + STENCIL - 1 for c in self.cells)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the whole grid."""
        return math.prod(self.size)

    @property
    def bounds(self) -> Tensor:
        """The box, ``2 x d``."""
        lower = torch.tensor(self.lower, dtype=torch.float64)
        widths = torch.tensor(self.spacing, dtype=torch.float64) * torch.tensor(self.cells)
        return torch.stack((lower, lower + widths))

    def nodes(self, dimension: int, device: torch.device | None = None) -> Tensor:
        """Return the coordinates of the nodes of one dimension, on the host or a device."""
        steps = torch.arange(-1, self.cells[dimension] + 2, dtype=torch.float64, device=device)
        return self.lower[dimension] + steps * self.spacing[dimension]

    def locate(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cells of points in the box and positions in them, ``... x d`` each."""
        lower, spacing, first, last = _constants(self, X.dtype, X.device)
        scaled = (X - lower) / spacing
        cell = scaled.long().clamp(first, last)  # beyond the box it is the nearest one
        return cell, scaled - cell

    def nodes_around(self, cell: Tensor) -> Tensor:
        """Return the flat index of the nodes around cells, ``... x d -> ... x 4^d``."""
        node = (cell * _strides(self.size, cell.device)).sum(-1, keepdim=True)
        return node + _node_offsets(self.size, cell.device)

    def interpolation_matrices(self, X: Tensor) -> list[Tensor]:
        """Compute dense weights of each dimension, ``... x d -> ... x g`` each, differentiable."""
        cell, t = self.locate(X)
        nodes = cell.unsqueeze(-1) + _node_offsets(self.size[:1], cell.device)
        widest = max(self.size)
        lines = t.new_zeros(*t.shape, widest).scatter(-1, nodes, weights(t)).unbind(-2)
        pairs = zip(lines, self.size, strict=True)
        return [line if size == widest else line[..., :size] for line, size in pairs]

    def interpolation_matrix(self, dimension: int, x: Tensor) -> Tensor:
        """Compute dense one-dimensional weights at x in the box, ``... -> ... x g``."""
        one = slice(dimension, dimension + 1)
        line = Grid(self.lower[one], self.spacing[one], self.cells[one])
        return line.interpolation_matrices(x.unsqueeze(-1))[0]

    def outside(self, X: Tensor) -> Tensor:
        """Say which coordinates are not in the box, ``... x d``, as :meth:`missing_cells` does."""
        lower, spacing, _, last = _constants(self, X.dtype, X.device)
        steps = (X.detach() - lower) / spacing
        return (steps < -EDGE) | (steps > last + (1.0 + EDGE))

    @cached_property
    def extent(self) -> tuple[tuple[float, float], ...]:
        """Least and largest coordinate in the box, a rounding error aside, per dimension."""
        lines = zip(self.lower, self.spacing, self.cells, strict=True)
        return tuple((low - EDGE * h, low + (cells + EDGE) * h) for low, h, cells in lines)

    def reaches(self, X: Tensor) -> bool:
        """Say whether all points on the host, ``... x d``, are in the box; see :meth:`outside`."""
        ends = _ends(X)
        return ends is None or all(
            least <= low and high <= most
            for low, high, (least, most) in zip(*ends, self.extent, strict=True)
        )

    def missing_cells(self, X: Tensor) -> tuple[list[int], list[int]]:
        """Count the cells to add below and above, per dimension, so that the box holds X."""
        ends = _ends(X)
        if ends is None:
            return [0] * self.dim, [0] * self.dim
        lines = list(zip(*ends, self.lower, self.spacing, self.cells, strict=True))
        below = [(lower - lo) / h for lo, _, lower, h, _ in lines]
        above = [(hi - lower) / h - cells for _, hi, lower, h, cells in lines]
        # rounded up to whole cells, a rounding error aside
        return (
            [max(0, math.ceil(cells - EDGE)) for cells in below],
            [max(0, math.ceil(cells - EDGE)) for cells in above],
        )

    def grown_by(self, below: list[int], above: list[int]) -> Grid:
        """Add cells below and above the box, per dimension."""
        lines = zip(self.lower, below, self.spacing, strict=True)
        cells = tuple(b + c + a for b, c, a in zip(below, self.cells, above, strict=True))
        return Grid(tuple(low - b * h for low, b, h in lines), self.spacing, cells)

    def aligned_to(self, other: Grid, rounding: float) -> Grid:
        """Take the other's nodes if both corners are among them up to ``_ROUNDINGS`` roundings."""
        corners = self.bounds
        lower, spacing, *_ = _constants(other, corners.dtype, corners.device)
        steps = (corners - lower) / spacing
        whole = steps.round()
        slack = _ROUNDINGS * rounding * corners.abs().amax(0) / spacing
        if whole.diff(dim=0)[0].tolist() != list(self.cells) or bool(
            ((steps - whole).abs() > slack).any()
        ):
            return self
        return Grid(tuple((lower + whole[0] * spacing).tolist()), other.spacing, self.cells)

    def offset_in(self, larger: Grid) -> tuple[int, ...] | None:
        """Count the cells of ``larger`` below this box; None if the nodes do not coincide."""
        offsets = []
        for i in range(self.dim):
            steps = (self.lower[i] - larger.lower[i]) / larger.spacing[i]
            offset = round(steps)
            same_width = math.isclose(self.spacing[i], larger.spacing[i], rel_tol=1e-9)
            inside = 0 <= offset <= larger.cells[i] - self.cells[i]
            if not (same_width and inside and abs(steps - offset) < EDGE):
                return None
            offsets.append(offset)
        return tuple(offsets)


def _ends(X: Tensor) -> list[list[float]] | None:
    """Return the least and the largest coordinates of points ``... x d``, None of none."""
    if X.numel() == 0:
        return None
    return torch.stack(torch.aminmax(X.detach().reshape(-1, X.shape[-1]), dim=0)).tolist()


@lru_cache(maxsize=256)
def _constants(
    grid: Grid, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return lower corner, spacing, first and last cell of a grid, ``d`` each, uploaded once."""
    with torch.inference_mode(False):  # they serve later gradients too
        lower, spacing = (
            torch.tensor(values, dtype=torch.float64).to(device, dtype)
            for values in (grid.lower, grid.spacing)
        )
        last = (torch.tensor(grid.cells) - 1).to(device)
        return lower, spacing, torch.zeros_like(last), last


@lru_cache(maxsize=256)
def _strides(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return what a step in each of d dimensions adds to a flat index, ``d``, uploaded once."""
    with torch.inference_mode(False):  # they serve later gradients too
        strides = torch.tensor([math.prod(sizes[i + 1 :]) for i in range(len(sizes))])
        return strides.to(device, non_blocking=True)


@lru_cache(maxsize=256)
def _node_offsets(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return what ``4^d`` steps add to a node's flat index, uploaded once."""
    with torch.inference_mode(False):
        steps = torch.cartesian_prod(*[torch.arange(STENCIL)] * len(sizes)).view(-1, len(sizes))
        return ravel(steps, sizes).to(device)


def outer_product(factors: Tensor) -> Tensor:
    """Compute products over dimensions, ``... x d x l -> ... x l^d``, row-major."""
    result, *others = factors.unbind(-2)
    for factor in others:
        result = (result.unsqueeze(-1) * factor.unsqueeze(-2)).flatten(-2)
    return result


def ravel(index: Tensor, sizes: Sequence[int]) -> Tensor:
    """Compute the row-major flat index of ``... x d`` indices."""
    return (index * _strides(tuple(sizes), index.device)).sum(-1)


def unravel(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Compute the ``... x d`` indices of row-major flat ones.

    ``torch.unravel_index`` does, but imports a library for symbols first, for half a second.
    """
    strides = _strides(tuple(sizes), flat.device)
    most = torch.tensor(sizes).to(flat.device, non_blocking=True)
    return flat.unsqueeze(-1).div(strides, rounding_mode="floor") % most


def columns(X: Tensor, group: tuple[int, ...]) -> Tensor:
    """Select a group's inputs, ``... x d -> ... x k``; neighbours without an index to upload."""
    first, last = group[0], group[-1]
    if group != tuple(range(first, last + 1)):
        return X[..., list(group)]
    return X if len(group) == X.shape[-1] else X[..., first : last + 1]


def weights(t: Tensor) -> Tensor:
    """Compute interpolation weights of nodes −1, 0, 1, 2 at t in [0, 1], ``... -> ... x 4``.

    They sum to one and reproduce quadratics. [Keys1981; Stanton2021, section 3.2]
    """
    column, (highest, *others) = t.unsqueeze(-1), _uploaded(_KEYS, t.dtype, t.device)
    return reduce(lambda value, power: torch.addcmul(power, value, column), others, highest)


def legendre(t: Tensor) -> Tensor:
    """Evaluate Legendre polynomials of ``2 t − 1`` of degrees 0 to 6, ``... -> ... x 7``."""
    x, (highest, *others) = (2.0 * t - 1.0).unsqueeze(-1), _uploaded(_LEGENDRE, t.dtype, t.device)
    return reduce(lambda value, power: torch.addcmul(power, value, x), others, highest)


@cache
def _uploaded(
    coefficients: Coefficients, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Return k polynomials' coefficients, ``k``, of each power, the highest one first.

    In this order Horner's rule takes them.
    """
    with torch.inference_mode(False):  # they serve later gradients too
        powers = reversed(list(zip(*coefficients, strict=True)))
        return tuple(torch.tensor(power, dtype=dtype, device=device) for power in powers)


@cache
def pair_coefficients() -> Tensor:
    """Compute the Legendre coefficients c in ``w_j(t) w_k(t) = Σ_l c[l, j, k] P_l``.

    A product of two cubics has degree 6, hence Gauss quadrature with 7 points is exact.
    """
    t, quadrature = gauss_legendre(PAIR_DEGREES)
    w = weights(t)
    norms = 2.0 * torch.arange(PAIR_DEGREES, dtype=torch.float64) + 1.0
    return torch.einsum("n,nl,l,nj,nk->ljk", quadrature, legendre(t), norms, w, w)


def gauss_legendre(points: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of Gauss–Legendre quadrature on [0, 1]."""
    nodes, quadrature = np.polynomial.legendre.leggauss(points)
    return torch.from_numpy((nodes + 1.0) / 2.0), torch.from_numpy(quadrature / 2.0)
