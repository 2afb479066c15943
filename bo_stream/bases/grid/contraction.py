"""Contractions of statistics with features on a grid, and derivatives with respect to inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from linear_operator.utils.errors import NotPSDError
from torch import Tensor
from torch.nn.functional import pad

from bo_stream.bases.grid.interpolation import GridBasis, InterpolationBasis, node_correlation
from bo_stream.bases.grid.kernel import GridKernel, KernelFactors
from bo_stream.bases.grid.mesh import PAIR_DEGREES, STENCIL, Grid, Mesh, pair_coefficients, ravel
from bo_stream.bases.grid.statistics import MEMORY_LIMIT_GIB, CellGram, NodeGram
from bo_stream.linalg import check_memory, identity, transposed
from bo_stream.tensors import broadcast_shapes

_CONTRACTION_LIMIT_GIB = 8.0
_BUCKETS = 12
_FEWEST = 64

_NUMBERS = 200_000
"""Numbers of products of functions that are computed at a time: they fit in a cache."""


@dataclass(frozen=True)
class MeshPullBack:
    """Map from the whitened weights of a basis to the node values of all its grids.

    Block-diagonal: one Kronecker root per grid.

    Attributes:
        basis: The basis whose weights are mapped.
        mesh: The nodes: the basis's own or others inside its box.
    """

    basis: GridBasis
    mesh: Mesh

    def _roots(self) -> list[KroneckerPullBack]:
        pairs = zip(self.basis.parts, self.mesh.parts, strict=True)
        return [KroneckerPullBack(part, grid) for part, grid in pairs]

    def congruence(self, gram: NodeGram) -> Tensor:
        """Compute ``Rᵀ gram R``, ``... x m x r x r``.

        Cost O((7 g)^d g²) a grid, and O(p p' Σ r_i) for two of p and p' nodes.
        """
        roots = self._roots()
        diagonal = [root.congruence(block) for root, block in zip(roots, gram.blocks, strict=True)]
        if len(diagonal) == 1:
            return diagonal[0]
        nodes = [block.num_nodes for block in gram.blocks]
        halves = [
            root.transpose(strip).split(nodes[a + 1 :], -1)
            for a, (root, strip) in enumerate(zip(roots[:-1], gram.strips, strict=True))
        ]
        rank, start = sum(block.shape[-1] for block in diagonal), 0
        result = diagonal[0].new_empty(*diagonal[0].shape[:-2], rank, rank)
        for b, (root, block) in enumerate(zip(roots, diagonal, strict=True)):
            end = start + block.shape[-1]
            result[..., start:end, start:end] = block
            if b > 0:  # with all earlier grids, `... x m x r x Σ r'`
                earlier = torch.cat([halves[a][b - a - 1] for a in range(b)], -2)
                left = root.transpose(earlier.mT)
                result[..., start:end, :start] = left
                result[..., :start, start:end] = left.mT
            start = end
        return self.basis.in_order(result)

    def diagonal(self, gram: NodeGram) -> Tensor:
        """Compute the diagonal of :meth:`congruence`, ``... x m x r``. Cost O((7 g)^d Σ r_i)."""
        pairs = zip(self._roots(), gram.blocks, strict=True)
        return self.basis.joined([root.diagonal(block) for root, block in pairs])

    def transpose(self, moment: Tensor) -> Tensor:
        """Compute ``Rᵀ moment``, ``... x m x p x 2 -> ... x m x r x 2``. Cost O(p Σ r_i)."""
        rows = moment.split([grid.num_nodes for grid in self.mesh.parts], -2)
        images = [root.transpose(own) for root, own in zip(self._roots(), rows, strict=True)]
        return self.basis.joined(images, -2)


@dataclass(frozen=True)
class KroneckerPullBack:
    """Map ``v = R w`` from whitened weights to node values of a grid, R the Kronecker root.

    Attributes:
        basis: The basis of the weights w.
        grid: The grid of the node values v: the basis's own or another inside its box.
    """

    basis: InterpolationBasis
    grid: Grid

    def _node_roots(self) -> list[Tensor]:
        """Compute each dimension's root functions at the grid's nodes, ``... x m x g x r_i``."""
        roots, own = self.basis.roots, self.basis.grid
        offset = self.grid.offset_in(own)
        if offset is not None:  # its nodes are nodes of the basis
            windows = zip(roots, offset, self.grid.size, strict=True)
            return [root[..., start : start + size, :] for root, start, size in windows]
        nodes = (self.grid.nodes(i, roots[0].device) for i in range(own.dim))
        return [own.interpolation_matrix(i, x) @ roots[i] for i, x in enumerate(nodes)]

    def congruence(self, gram: CellGram) -> Tensor:
        """Compute ``Rᵀ gram R``, ``... x m x r x r``, by dimension. Cost O((7 g)^d g²)."""
        shape = broadcast_shapes(self.basis.scale.shape, gram.moments.shape[:-2])
        moments = gram.moments.expand(*shape, *gram.moments.shape[-2:])
        flat = CellGram(moments.reshape(-1, *moments.shape[-2:]), gram.cells).by_dimension()
        pairs = zip(self._contractions(shape), flat, strict=True)
        results = [contraction.gram(moments) for contraction, moments in pairs]
        scale = self.basis.scale[..., None, None]
        return torch.stack(results).reshape(*shape, *results[0].shape) * scale

    def coefficients(self, matrices: Tensor) -> Tensor:
        """Compute polynomials of forms ``⟨M, Rᵀ g(x) R⟩``, g(x) the gram of one observation at x.

        Their Legendre coefficients in each cell: the adjoint of :meth:`congruence`, at its cost.

        Args:
            matrices: k symmetric M, ``k x ... x m x r x r``.

        Returns:
            ``k x ... x m x cells x 7^d``.
        """
        shape = self.basis.scale.shape
        scaled = (matrices * self.basis.scale[..., None, None]).flatten(1, -3)
        found = [
            CellGram.of_dimensions(contraction.adjoint(M), self.grid.cells).moments
            for contraction, each in zip(self._contractions(shape), scaled.unbind(1), strict=True)
            for M in each
        ]
        return torch.stack(found).unflatten(0, (*shape, -1)).movedim(len(shape), 0)

    def _contractions(self, shape: torch.Size) -> Iterator[Contraction]:
        """Yield that of each batch element and output, of so many: one in memory at a time."""
        roots = [
            root.expand(*shape, *root.shape[-2:]).flatten(0, -3) for root in self._node_roots()
        ]
        for own in zip(*roots, strict=True):
            yield Contraction.of(own, self.basis.index)

    def diagonal(self, gram: CellGram) -> Tensor:
        """Compute the diagonal of :meth:`congruence`, ``... x m x r``. Cost O((7 g)^d Σ r_i)."""
        squares = [_square_polynomials(root) for root in self._node_roots()]
        sums = _along_each(gram.by_dimension().flatten(-self.grid.dim), squares)
        chosen = sums[..., ravel(self.basis.index, [each.shape[-1] for each in squares])]
        return chosen * self.basis.scale[..., None]

    def transpose(self, moment: Tensor) -> Tensor:
        """Compute ``Rᵀ moment``, ``... x m x p x 2 -> ... x m x r x 2``. Cost O(p Σ r_i)."""
        roots = self._node_roots()
        sizes = [root.shape[-1] for root in roots]
        flat = _along_each(moment.flatten(-2), roots)
        products = flat.unflatten(-1, (moment.shape[-1], math.prod(sizes)))
        chosen = products[..., ravel(self.basis.index, sizes)].mT
        return chosen * self.basis.scale.sqrt()[..., None, None]


def _along_each(flat: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Multiply one dimension after the other by a matrix, ``... x p_i x k_i``.

    What is flat, ``... x p_1 ··· p_d c``, becomes ``... x c k_1 ··· k_d``.
    """
    for matrix in matrices:
        flat = (flat.unflatten(-1, (matrix.shape[-2], -1)).mT @ matrix).flatten(-2)
    return flat


@dataclass(frozen=True)
class Contraction:
    """The map of moments to ``C[α, α'] = Σ moments Π_i (f_{α_i} f_{α'_i})``, and its adjoint.

    For r products α of functions of one dimension each. Dimensions are summed out from the last to
    the first. After each, only the pairs of functions remain that some pair of products needs: with
    products chosen by size (a hyperbolic cross) these are few. Cost about O((7 g)^d g²), without
    any power of r.

    Attributes:
        roots: Per dimension, node values of its functions, ``g_i x r_i``.
        index: The products, ``r x d``.
        sums: Over each dimension, the last one first; of a single dimension there are none.
        chosen: Position of each pair of products among what the last sum gives, ``r x r``.
    """

    roots: tuple[Tensor, ...]
    index: Tensor
    sums: tuple[_SumOverDimension, ...]
    chosen: Tensor

    @classmethod
    def of(cls, roots: Sequence[Tensor], index: Tensor) -> Contraction:
        """Find out which pairs of functions are needed. Cost O(r² d)."""
        # a row for each pair of tails that differs; the row of each pair of tails; and the tail of
        # each product: its functions in the dimensions behind
        rows, tail = 1, torch.zeros_like(index[:, 0])
        position = torch.zeros(1, 1, dtype=torch.long, device=index.device)
        sums = list[_SumOverDimension]()
        for i in reversed(range(1, len(roots))):
            distinct, longer = index[:, i:].unique(dim=0, return_inverse=True)
            own, polynomials = distinct[:, 0], _pair_polynomials(roots[i])
            parent, tail = torch.empty_like(own).scatter(0, longer, tail), longer
            code = _codes(position, parent, own, polynomials)
            extents = _extents(position, rows, parent, own)
            needed, position = code.unique(return_inverse=True)
            sums.append(_SumOverDimension.of(polynomials, extents, needed))
            rows = len(needed)
        if not sums:
            return cls(tuple(roots), index, (), position)
        own, polynomials = index[:, 0], _pair_polynomials(roots[0])
        extents = _extents(position, rows, tail, own)
        sums.append(_SumOverDimension.of(polynomials, extents, None))
        chosen = _codes(position, tail, own, polynomials)
        return cls(tuple(roots), index, tuple(sums), chosen)

    def gram(self, moments: Tensor) -> Tensor:
        """Map moments, ``(cells_1 · 7) x ... x (cells_d · 7)``, to C, ``r x r``."""
        if not self.sums:
            local = self.roots[0].unfold(0, STENCIL, 1).mT
            coefficients = pair_coefficients().to(local)
            lines = moments.unflatten(0, (-1, PAIR_DEGREES))
            blocks = torch.einsum("cl,ljk->cjk", lines, coefficients)
            line = local.flatten(0, 1).mT @ (blocks @ local).flatten(0, 1)
            return line[self.index, self.index.mT]
        rows = moments.reshape(1, -1)
        for each in self.sums:
            rows = each.apply(rows)
        return rows.view(-1)[self.chosen]

    def adjoint(self, matrix: Tensor) -> Tensor:
        """Map a symmetric ``r x r`` matrix M to the moments' coefficients in ``⟨M, C⟩``."""
        sizes = [(len(root) - STENCIL + 1) * PAIR_DEGREES for root in self.roots]
        if not self.sums:
            functions = self.roots[0][:, self.index[:, 0]]
            images = (functions @ matrix).unfold(0, STENCIL, 1)
            blocks = torch.einsum("crj,crk->cjk", images, functions.unfold(0, STENCIL, 1))
            return torch.einsum("cjk,ljk->cl", blocks, pair_coefficients().to(blocks)).flatten()
        last = self.sums[-1]
        rows = matrix.new_zeros(last.rows * last.polynomials.shape[-1], 1)
        rows.index_add_(0, self.chosen.flatten(), matrix.reshape(-1, 1))
        for each in reversed(self.sums):
            rows = each.adjoint(rows)
        return rows.view(sizes)


def _codes(position: Tensor, parent: Tensor, own: Tensor, polynomials: Tensor) -> Tensor:
    """Return the position of each pair of products among all rows' pairs of functions."""
    rows, begin = position[parent.unsqueeze(-1), parent], own * (own + 1) // 2
    pair = torch.maximum(begin.unsqueeze(-1), begin).add_(torch.minimum(own.unsqueeze(-1), own))
    return pair.add_(rows, alpha=polynomials.shape[-1])


def _extents(position: Tensor, size: int, parent: Tensor, own: Tensor) -> Tensor:
    """Count the functions of the next dimension that each row of sums is multiplied with."""
    tails = position.shape[0]
    most = own.new_zeros(tails).scatter_reduce(0, parent, own + 1, "amax")
    both = torch.maximum(most.unsqueeze(-1), most).reshape(-1)
    return own.new_zeros(size).scatter_reduce(0, position.reshape(-1), both, "amax")


@dataclass(frozen=True)
class _SumOverDimension:
    """Products of rows of sums with pairs of functions, summed over one dimension.

    Attributes:
        rows: Number k of rows of sums.
        polynomials: Of pairs of functions, ``(cells · 7) x pairs``.
        buckets: Rows that are multiplied with as many pairs, and how many these are.
        needed: Those of the ``k · pairs`` products that remain; None: all.
    """

    rows: int
    polynomials: Tensor
    buckets: tuple[tuple[Tensor | slice, int], ...]
    needed: Tensor | None

    @classmethod
    def of(cls, polynomials: Tensor, extents: Tensor, needed: Tensor | None) -> _SumOverDimension:
        """Put rows into buckets by ``extents``, the functions that each is multiplied with."""
        rows = len(extents)
        parts: Sequence[Tensor | slice] = [slice(None)]
        if rows >= _FEWEST * 2:
            parts = extents.argsort().chunk(min(_BUCKETS, rows // _FEWEST))
        buckets = [(part, math.comb(int(extents[part].max()) + 1, 2)) for part in parts]
        return cls(rows, polynomials, tuple(buckets), needed)

    def apply(self, sums: Tensor) -> Tensor:
        """Compute the products that are needed, ``k x (rest · cells · 7) -> needed x rest``."""
        degrees, pairs = self.polynomials.shape
        folded = sums.view(self.rows, -1, degrees)
        products = self._empty(sums, pairs, folded.shape[1])
        for bucket, count in self.buckets:
            products[bucket, :count] = (folded[bucket] @ self.polynomials[:, :count]).mT
        flat = products.flatten(0, 1)
        return flat if self.needed is None else flat[self.needed]

    def adjoint(self, products: Tensor) -> Tensor:
        """Map ``needed x rest`` back to ``k x (rest · cells · 7)``."""
        degrees, pairs = self.polynomials.shape
        if self.needed is not None:
            flat = products.new_zeros(self.rows * pairs, products.shape[-1])
            products = flat.index_copy_(0, self.needed, products)
        folded = products.view(self.rows, pairs, -1)
        sums = self._empty(products, folded.shape[-1], degrees)
        for bucket, count in self.buckets:
            own = folded[bucket, :count].mT
            image = own.reshape(-1, count) @ self.polynomials[:, :count].mT  # one for all rows
            sums[bucket] = image.view(*own.shape[:-1], degrees)
        return sums.flatten(1)

    def _empty(self, like: Tensor, *sizes: int) -> Tensor:
        shape = self.rows, *sizes
        check_memory("The gram in feature space", math.prod(shape), _CONTRACTION_LIMIT_GIB)
        return like.new_empty(shape)


def _pair_polynomials(values: Tensor) -> Tensor:
    """Compute Legendre coefficients of products of interpolated functions, cell by cell.

    Node values of r one-dimensional functions, ``g x r``, to ``(cells · 7) x r (r + 1) / 2``:
    unordered pairs, ordered by the larger index.
    """
    functions, cells = values.shape[-1], values.shape[0] - STENCIL + 1
    first, second = torch.tril_indices(functions, functions, device=values.device)
    check_memory("A grid's pairs of functions", cells * PAIR_DEGREES * len(first), MEMORY_LIMIT_GIB)
    local, position = values.unfold(0, STENCIL, 1), first * functions + second
    half = torch.einsum("ljk,caj->clak", pair_coefficients().to(values), local).flatten(1, 2)
    size = max(1, _NUMBERS // (PAIR_DEGREES * functions**2))
    products = [
        torch.bmm(*pair).view(-1, PAIR_DEGREES, functions**2).index_select(-1, position)
        for pair in zip(half.split(size), local.mT.split(size), strict=True)
    ]
    return torch.cat(products).flatten(0, 1)


def _square_polynomials(values: Tensor) -> Tensor:
    """Compute Legendre coefficients of squares of interpolated functions, cell by cell.

    Node values of r one-dimensional functions, ``... x g x r``, to ``... x (cells · 7) x r``.
    """
    local, rule = values.unfold(-2, STENCIL, 1), pair_coefficients().to(values)
    return torch.einsum("ljk,...caj,...cak->...cla", rule, local, local).flatten(-3, -2)


# --- prior moments of a basis's weights as functions of the kernel's hyperparameters -------------
# They are differentiable without differentiating an eigendecomposition.


def expected_log_prior(
    basis: GridBasis,
    kernel: GridKernel,
    second_moment: Tensor,
    whitening: Rewhitening | None = None,
) -> Tensor:
    """Compute −E log p(w) up to a constant, to first order in the hyperparameters, ``... x m``.

    The weights' prior is N(0, I + H(θ)) with ``H = Λ^{-½} Eᵀ (K(θ) − K) E Λ^{-½}`` and H = 0 at the
    hyperparameters that ``basis`` was built from, so the gradient is ``½ tr((I − E[w wᵀ]) dH)``: by
    Fisher's identity the gradient of the negative log marginal likelihood. K is a Kronecker
    product, or several side by side, hence dH couples only products of one part that differ in one
    dimension. Cost O(r² d + Σ g³).

    Args:
        basis: Built from ``kernel`` at its present values, or at others if ``whitening`` is given.
        kernel: The kernel, differentiable.
        second_moment: ``E[w wᵀ] = Σ + w wᵀ``, ``... x m x r x r``.
        whitening: Under ``kernel`` at its present values. Then ``second_moment`` is that of the
            weights v that it whitens, and dH is ``L⁻¹ dH L⁻ᵀ``.
    """
    sensitivity = -0.5 * second_moment
    sensitivity.diagonal(dim1=-2, dim2=-1).add_(0.5)
    sums = []
    for part, block in zip(basis.parts, basis.own_blocks(sensitivity), strict=True):
        pairs = zip(part.lines, part.whitenings, strict=True)
        sums.append([lines.sums_of_pairs(block, own.shape[-1]) for lines, own in pairs])
    return _first_order(basis, kernel, sums, whitening)


def expected_log_prior_at_rows(
    basis: GridBasis,
    kernel: GridKernel,
    values: Sequence[Sequence[Tensor]],
    slopes: Sequence[Sequence[Tensor]],
) -> Tensor:
    """Compute :func:`expected_log_prior` of weights of which n rows are known, ``... x m``.

    With features Φ of the rows and the derivative G of their log marginal likelihood in Φ, ``E[w
    wᵀ] = I + Φᵀ G``, a symmetric matrix. A feature is a product over dimensions, so that its sums
    over all products with functions a and b ≥ a of a dimension are ``Σ_x f_a(x) G_b(x)``, with G_b
    the derivative in f_b: where b is in a product, a is in the same. Cost O(n Σ k²) for k functions
    of a dimension.

    Args:
        basis: Built from ``kernel`` at its present values.
        kernel: The kernel, differentiable.
        values: Functions f of each part and dimension, ``... x m x n x k``.
        slopes: Derivatives in these.
    """
    sums = []
    for lines, own in zip(values, slopes, strict=True):
        products = (-0.5 * (f.mT @ G) for f, G in zip(lines, own, strict=True))
        sums.append([each.triu() + each.triu(1).mT for each in products])
    return _first_order(basis, kernel, sums)


def _first_order(
    basis: GridBasis,
    kernel: GridKernel,
    sums: Sequence[Sequence[Tensor]],
    whitening: Rewhitening | None = None,
) -> Tensor:
    """Compute ``tr(S dH)``, ``... x m``, from sums of S per part and dimension, ``... x k x k``.

    These are over products that agree in all other dimensions.
    """
    values = []
    for g, (part, factors, own) in enumerate(zip(basis.parts, kernel.parts, sums, strict=True)):
        present = part.scale if whitening is None else factors.scale().detach()
        trace = own[0].diagonal(dim1=-2, dim2=-1).sum(-1)
        total = trace * (factors.scale() / present)
        for i, gathered in enumerate(own):
            if whitening is not None:  # tr(S L⁻¹ dH L⁻ᵀ)
                upper = whitening.factors[g][i].mT
                for _ in range(2):
                    gathered = torch.linalg.solve_triangular(upper, gathered, upper=True).mT
            total = total + (gathered * _whitened_correlation(part, factors, i)).sum((-2, -1))
        values.append(total)
    return torch.stack(values).sum(0)


@dataclass(frozen=True)
class Rewhitening:
    """Map ``w = L v`` to the weights w of a basis from weights v that another kernel whitens.

    Under that kernel w has the covariance ``P = L Lᵀ`` of :func:`prior_covariance`: of a Kronecker
    product of one matrix per dimension the rows and columns of the features' products. The lower
    Cholesky factor of the whole product is that of these matrices, and L its rows and columns,
    because with a product all are among the features that come before it in every dimension
    (:attr:`InterpolationBasis.lines`). So L is never formed but applied one dimension at a time.

    Attributes:
        basis: The basis of the weights w.
        factors: Cholesky factors per part and dimension, ``... x m x k x k``.
        scales: Standard deviation of each part relative to the basis's, ``... x m``.
    """

    basis: GridBasis
    factors: tuple[tuple[Tensor, ...], ...]
    scales: tuple[Tensor, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, basis: GridBasis, kernel: GridKernel) -> Rewhitening:
        """Whiten under the present values of a kernel. Cost O(Σ g³).

        Raises:
            NotPSDError: Hyperparameters are NaN or infinite.
        """
        pairs = list(zip(basis.parts, kernel.parts, strict=True))
        factors = tuple(
            tuple(correlation_factor(part, own, i) for i in range(part.grid.dim))
            for part, own in pairs
        )
        scales = tuple((own.scale() / part.scale).sqrt() for part, own in pairs)
        return cls(basis, factors, scales)

    def variance(self) -> Tensor:
        """Compute the diagonal of ``L Lᵀ``, ``... x m x r``. Cost O(r d + Σ k²)."""
        values = []
        for part, factors, scale in zip(self.basis.parts, self.factors, self.scales, strict=True):
            result = scale.square().unsqueeze(-1)
            for factor, own in zip(factors, part.positions, strict=True):
                result = result * factor.square().sum(-1).index_select(-1, own)
            values.append(result)
        return self.basis.joined(values)

    def transpose(self, moment: Tensor) -> Tensor:
        """Compute ``Lᵀ moment``, ``... x m x r x c``, differentiable. Cost O(c r Σ k)."""
        if len(self.basis.parts) == 1:
            return self._part_transpose(0, moment)
        positions = self.basis.order.argsort().split([part.rank for part in self.basis.parts])
        own = (moment.index_select(-2, rows) for rows in positions)
        return self.basis.joined([self._part_transpose(g, rows) for g, rows in enumerate(own)], -2)

    def _part_transpose(self, g: int, rows: Tensor) -> Tensor:
        scale, order = self.scales[g][..., None, None], None
        for factor, lines in zip(self.factors[g], self.basis.parts[g].lines, strict=True):
            transposed = (scale * factor).mT.unsqueeze(-3)
            ordered = lines.order if order is None else order[lines.order]
            moved = [
                (transposed[..., : part.shape[-2], : part.shape[-2]] @ part).flatten(-3, -2)
                for part in lines.split(rows.index_select(-2, ordered))
            ]
            rows = moved[0] if len(moved) == 1 else torch.cat(moved, -2)
            scale, order = torch.ones_like(scale), lines.inverse
        return rows if order is None else rows.index_select(-2, order)

    def congruence(self, gram: Tensor) -> Tensor:
        """Compute ``Lᵀ gram L`` of a symmetric gram, ``... x m x r x r``. Cost O(r² Σ k)."""
        return self.transpose(transposed(self.transpose(gram)))

    def features(self, features: Tensor) -> Tensor:
        """Turn features of w into those of v, ``... x m x n x r``, differentiable."""
        return self.transpose(features.mT).mT


_NUGGETS = (0.0, 1e-15, 1e-14, 1e-13, 1e-12, 1e-10)
"""Shares of the correlations' trace tried in turn: the rounding error of small eigenvalues."""


def correlation_factor(part: InterpolationBasis, factors: KernelFactors, dimension: int) -> Tensor:
    """Factorise one dimension's ``Λ^{-½} Eᵀ K(θ) E Λ^{-½}`` for k eigenvectors, ``... x k x k``.

    What rounding may have added to K(θ) is added to its diagonal where there is no factor else.
    """
    whitening = part.whitenings[dimension]
    k = whitening.shape[-1]
    parts = part.eigenvalues, part.eigenvectors
    values, vectors = (each[dimension][..., :k] for each in parts)
    correlation = vectors.mT @ node_correlation(factors, part.grid, dimension) @ vectors
    size = correlation.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] * identity(correlation)
    for nugget in _NUGGETS:
        factor, info = torch.linalg.cholesky_ex(correlation + nugget * size)
        if not bool(info.any()):
            return factor * torch.where(values > 0.0, values.rsqrt(), 1.0).unsqueeze(-1)
    raise NotPSDError(
        f"Expected the correlations of {k} functions to be positive definite, got some that are "
        "not. Check the hyperparameters for NaN and for extreme values."
    )


def prior_covariance(basis: GridBasis, kernel: GridKernel) -> Tensor:
    """Compute the prior covariance of the weights under another kernel, ``... x m x r x r``.

    ``Λ^{-½} Eᵀ K(θ) E Λ^{-½}``, differentiable in the hyperparameters: the identity where the basis
    was built, else the kernel K(θ) as far as the basis spans it. Cost O(r² d + Σ g³).
    """
    rows, start, width = [], 0, basis.rank
    for part, factors in zip(basis.parts, kernel.parts, strict=True):
        scale = (factors.scale() / part.scale)[..., None, None]
        block = scale.expand(*part.scale.shape, 1, 1)
        for i, whitening in enumerate(part.product_whitenings):
            correlation = node_correlation(factors, part.grid, i)
            block = block * (whitening.mT @ correlation @ whitening)
        end = start + part.rank
        rows.append(pad(block, (start, width - end)))
        start = end
    return basis.in_order(torch.cat(rows, -2))


def prior_variance(basis: GridBasis, kernel: GridKernel) -> Tensor:
    """Compute the diagonal of :func:`prior_covariance`, ``... x m x r``. Cost O(r d + Σ g³)."""
    values = []
    for part, factors in zip(basis.parts, kernel.parts, strict=True):
        shape = (*part.scale.shape, part.rank)
        result = (factors.scale() / part.scale).unsqueeze(-1).expand(shape)
        for i in range(part.grid.dim if part.rank > 0 else 0):
            line = _whitened_correlation(part, factors, i).diagonal(dim1=-2, dim2=-1)
            result = result * line.index_select(-1, part.positions[i])
        values.append(result)
    return basis.joined(values)


def node_variances(basis: GridBasis) -> Tensor:
    """Compute the mean prior variance of each feature over the nodes, ``... x m x r``."""
    variances = []
    for part in basis.parts:
        result = part.scale.unsqueeze(-1).expand(*part.scale.shape, part.rank)
        for i, values in enumerate(part.eigenvalues):
            result = result * values[..., part.positions[i]] / part.grid.size[i]
        variances.append(result)
    return basis.joined(variances)


def variance_outside(basis: GridBasis, kernel: GridKernel) -> Tensor:
    """Compute the mean over the nodes of the prior variance outside the span, ``... x m``.

    ``scale · (1 − tr(Eᵀ K E) / p)`` of each part with p nodes, K the correlation of the nodes and E
    the eigenvectors of the basis. Cost O(r d + Σ g³).
    """
    variances = []
    for part, factors in zip(basis.parts, kernel.parts, strict=True):
        inside = torch.ones_like(part.scale).unsqueeze(-1)
        for i, vectors in enumerate(part.eigenvectors):
            moved = node_correlation(factors, part.grid, i) @ vectors
            line = (vectors * moved).sum(-2) / part.grid.size[i]
            inside = inside * line.index_select(-1, part.positions[i])
        variances.append(factors.scale() * (1.0 - inside.sum(-1)).clamp_min(0.0))
    return torch.stack(variances).sum(0)


def _whitened_correlation(
    basis: InterpolationBasis, factors: KernelFactors, dimension: int
) -> Tensor:
    """Compute one dimension's ``Λ^{-½} Eᵀ K(θ) E Λ^{-½}`` for k eigenvectors, ``... x k x k``."""
    whitening = basis.whitenings[dimension]
    return whitening.mT @ node_correlation(factors, basis.grid, dimension) @ whitening
