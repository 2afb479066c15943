"""Several grids side by side: statistics, features, truncation and integrals, all dense."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpytorch.kernels import AdditiveKernel, Kernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream.bases.grid.contraction import (
    MeshPullBack,
    expected_log_prior,
    node_variances,
    prior_covariance,
    prior_variance,
    variance_outside,
)
from bo_stream.bases.grid.interpolation import GridBasis, grid_basis, integrated_gram
from bo_stream.bases.grid.kernel import (
    default_grid_size,
    interpolation_error,
    kernel_factors,
    sufficient_grid_size,
)
from bo_stream.bases.grid.mesh import Mesh
from bo_stream.bases.grid.statistics import (
    NodeGram,
    NodeStatistics,
    accumulate,
    embed,
    zero_statistics,
)
from bo_stream.bases.kernels import ProductMatern
from bo_stream.tensors import map_tensors
from bo_stream.testing.streams import assert_close
from bo_stream.weights import weighted_statistics
from tests.oracles.interpolation import (
    additive_interpolated_kernel,
    interpolation_weights,
    node_inputs,
)
from tests.oracles.kernels import dense_kernel
from tests.support.problems.grids import mesh_of

BOUNDS = torch.tensor([[0.0, -1.0, 2.0], [1.0, 0.5, 3.0]], dtype=torch.float64)
GROUPS = ((0,), (1, 2), (0, 1))
SIZES = ((8,), (5, 6), (6, 4))
CPU = torch.device("cpu")
BATCH, OUTPUTS, N = (2,), 2, 9


def mesh() -> Mesh:
    return Mesh.over(BOUNDS, GROUPS, SIZES)


def module(batch: tuple[int, ...] = ()) -> Kernel:
    """A sum over ``GROUPS`` with random hyperparameters."""
    parts = []
    for i, group in enumerate(GROUPS):
        options = {"ard_num_dims": len(group), "active_dims": group, "batch_shape": batch}
        base = ProductMatern(nu=1.5, **options) if i == 1 else RBFKernel(**options)
        parts.append(ScaleKernel(base, batch_shape=torch.Size(batch)).double())
        base.lengthscale = 0.3 + 0.6 * torch.rand_like(base.lengthscale)
        parts[-1].outputscale = 0.3 + torch.rand(batch).double()
    return AdditiveKernel(*parts)


def cover(dims: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    return BOUNDS[:, list(dims)], SIZES[GROUPS.index(dims)]


def basis_of(kernel: Kernel, max_rank: int = 1000, tolerance: float = 0.0) -> GridBasis:
    found = kernel_factors(kernel, 3).for_single_output()
    return grid_basis(mesh(), found, torch.Size((1,)), tolerance, max_rank)


def points(*shape: int) -> Tensor:
    return BOUNDS[0] + (BOUNDS[1] - BOUNDS[0]) * torch.rand(*shape, 3, dtype=torch.float64)


def dense_weights(X: Tensor, on: Mesh) -> Tensor:
    """Interpolation weights of all nodes of all grids, ``... x n x p``."""
    pairs = zip(on.parts, GROUPS, strict=True)
    lines = [interpolation_weights(X[..., list(g)], grid.bounds, grid.size) for grid, g in pairs]
    return torch.cat(lines, -1)


# --- memory -------------------------------------------------------------------------------------


class Stream:
    """Random observations, batched, with two outputs and their own noise."""

    def __init__(self, noise_groups: int = OUTPUTS) -> None:
        self.X = points(*BATCH, N)
        self.targets = torch.randn(*BATCH, OUTPUTS, N).double()
        self.noise = 0.5 + torch.rand(*BATCH, noise_groups, N).double()
        self.weight = torch.tensor([1.0, 0.0, -1.0]).double()[torch.randint(3, self.noise.shape)]

    def statistics(self) -> NodeStatistics:
        groups = self.noise.shape[-2]
        result = zero_statistics(mesh(), torch.Size(BATCH), groups, OUTPUTS, CPU)
        return accumulate(result, mesh(), self.X, self.targets, self.noise, self.weight)

    def dense(self, on: Mesh) -> dict[str, Tensor]:
        W = dense_weights(self.X, on).unsqueeze(-3)
        dense = weighted_statistics(W, self.targets, self.noise, self.weight)
        return {"gram": dense.gram, "moment": dense.moment, "energy": dense.energy}


def assert_same(actual: NodeStatistics, on: Mesh, dense: dict[str, Tensor]) -> None:
    """Entry by entry between grids; within a grid ``test_cell_gram`` compares."""
    starts = np.cumsum([0, *(grid.num_nodes for grid in on.parts)]).tolist()
    for a, strip in enumerate(actual.gram.strips):
        block = dense["gram"][..., starts[a] : starts[a + 1], starts[a + 1] :]
        assert_close(strip, block)
    assert_close(actual.moment, dense["moment"])
    assert_close(actual.energy, dense["energy"])


def test_accumulated_statistics_are_the_dense_ones() -> None:
    stream = Stream()
    assert_same(stream.statistics(), mesh(), stream.dense(mesh()))


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr("bo_stream.bases.grid.statistics._NUMBERS_BY_ROW", 3000)
    assert_same(stream.statistics(), mesh(), stream.dense(mesh()))


def test_embedding_in_a_larger_mesh_is_accumulating_there() -> None:
    stream = Stream()
    larger = mesh().grown_to(torch.tensor([[-0.4, -1.0, 2.5], [0.2, 0.9, 3.1]]).double())
    assert larger.parts != mesh().parts
    assert_same(embed(stream.statistics(), mesh(), larger), larger, stream.dense(larger))
    other = Mesh.over(BOUNDS, GROUPS, ((8,), (5, 6), (6, 5)))
    with pytest.raises(ValueError, match="shares this grid's nodes"):
        embed(stream.statistics(), mesh(), other)


@pytest.mark.parametrize("noise_groups", [1, OUTPUTS])
def test_grams_add_scale_and_are_selected(noise_groups: int) -> None:
    one, other = (Stream(noise_groups).statistics() for _ in range(2))
    first, total = one.gram, ((one + other).scale(0.5) + other.scale(-0.5)).gram
    chosen = one.select([1]).gram
    before = [strip.clone() for strip in chosen.strips]
    for ours, theirs in zip(total.blocks, first.blocks, strict=True):
        assert_close(ours.moments, 0.5 * theirs.moments)
    for ours, part, theirs in zip(total.strips, chosen.strips, first.strips, strict=True):
        assert_close(ours, 0.5 * theirs)
        assert_close(part, theirs if noise_groups == 1 else theirs[:, [1]])
        theirs.zero_()
    for part, kept in zip(chosen.strips, before, strict=True):
        assert_close(part, kept)
    assert isinstance(map_tensors(chosen, lambda values: values.to(CPU)), NodeGram)


def test_too_much_memory_is_refused_before_it_is_taken() -> None:
    bounds = torch.tensor([[0.0] * 6, [1.0] * 6])
    large = Mesh.over(bounds, ((0, 1, 2), (3, 4, 5)), ((40,) * 3, (50,) * 3))
    match = r"pairs of grids of 40 x 40 x 40, 50 x 50 x 50 nodes would need [\d,.]+ GiB"
    with pytest.raises(ValueError, match=match):
        zero_statistics(large, torch.Size(), 1, 1, CPU)


@pytest.mark.parametrize("max_rank", [1000, 25])
@pytest.mark.parametrize("sizes", [SIZES, ((5,), (6, 7), (5, 5))], ids=["own grids", "others"])
def test_pulls_statistics_back_to_whitened_weights(
    sizes: tuple[tuple[int, ...], ...], max_rank: int
) -> None:
    kernel, stream = kernel_factors(module((2,)), 3), Stream(noise_groups=1)
    nodes, shape = mesh().resized(sizes), torch.Size((*BATCH, OUTPUTS))
    basis = grid_basis(nodes, kernel, shape, 0.0, max_rank)
    z = features_through(basis, stream.X)
    expected = weighted_statistics(z, stream.targets, stream.noise, stream.weight)
    actual = stream.statistics().pull_back(MeshPullBack(basis, mesh()))
    assert_close(actual.gram, expected.gram, factor=10)
    assert_close(actual.moment, expected.moment, factor=10)


def features_through(basis: GridBasis, X: Tensor) -> Tensor:
    """Features interpolated from their values at the nodes of another mesh."""
    if basis.grid == mesh():
        return basis.features(X)
    result = X.new_zeros(*BATCH, OUTPUTS, N, basis.rank)
    for g, (grid, part) in enumerate(zip(mesh().parts, basis.parts, strict=True)):
        W = interpolation_weights(X[..., list(GROUPS[g])], grid.bounds, grid.size).unsqueeze(-3)
        first = torch.zeros(part.rank, dtype=torch.long)
        own = GridBasis((part,), mesh_of(grid), part.scale, first, 0.0)
        result[..., basis.member == g] = W @ own.features(node_inputs(grid.bounds, grid.size))
    return result


# --- features -----------------------------------------------------------------------------------


def test_features_span_the_sum_of_interpolated_kernels() -> None:
    kernel, X = module(), points(7)
    z = basis_of(kernel).features(X)[0]
    assert_close(z @ z.mT, additive_interpolated_kernel(kernel, cover)(X, X))
    batched = grid_basis(mesh(), kernel_factors(module((2,)), 3), torch.Size((2,)), 0.0, 1000)
    assert batched.features(points(4, 1, 5)).shape[:-1] == (4, 1, 2, 5)


@pytest.mark.parametrize("rank", [1, 12, 30])
def test_kept_are_the_largest_eigenvectors_of_all_parts_together(rank: int) -> None:
    kernel = module()
    with torch.no_grad():
        values = torch.cat([part_eigenvalues(kernel, g) for g in range(3)])
    nodes = torch.tensor([grid.num_nodes for grid in mesh().parts])
    owner = torch.arange(3).repeat_interleave(nodes)
    shares, order = (values / nodes[owner]).sort(descending=True)
    basis = basis_of(kernel, rank)
    assert basis.rank == rank
    assert basis.member.tolist() == owner[order[:rank]].tolist()
    left = 1.0 - shares[:rank].sum() / shares.sum()
    assert basis.dropped == pytest.approx(float(left), abs=1e-12)
    assert basis.enough(float(left) + 1e-12, 1000) == rank
    tolerant = basis_of(kernel, tolerance=float(left) + 1e-12)
    assert tolerant.rank == rank


def part_eigenvalues(kernel: Kernel, g: int) -> Tensor:
    bounds, sizes = cover(GROUPS[g])
    nodes = torch.zeros(mesh().parts[g].num_nodes, 3).double()
    nodes[:, list(GROUPS[g])] = node_inputs(bounds, sizes)
    return torch.linalg.eigvalsh(dense_kernel(kernel.kernels[g], nodes, nodes)).clamp_min(0.0)


@pytest.mark.parametrize("rank", [0, 1, 13, 40])
def test_leading_and_trailing_features_are_all_of_them(rank: int) -> None:
    basis, X = basis_of(module(), 40), points(6)
    z = basis.features(X)
    assert_close(basis.between(0, rank).features(X), z[..., :rank])
    assert_close(basis.between(rank, basis.rank).features(X), z[..., rank:])


def test_the_prior_of_another_kernel_is_that_of_its_parts() -> None:
    kernel, other, X = module(), module(), points(9)
    basis, moved = basis_of(kernel), kernel_factors(other, 3).for_single_output()
    prior, z = prior_covariance(basis, moved), basis.features(X)[0]
    own, dense = z @ prior[0] @ z.mT, additive_interpolated_kernel(other, cover)(X, X)
    assert_close(own, dense, factor=10)
    assert_close(prior_variance(basis, moved), prior.diagonal(dim1=-2, dim2=-1))
    same = prior_covariance(basis, kernel_factors(kernel, 3).for_single_output())[0]
    assert_close(z @ same @ z.mT, z @ z.mT)
    large = basis.enough(1e-7, basis.rank)  # rounding is over a feature's eigenvalue
    assert_close(same[:large, :large], torch.eye(large).double())
    weights, parameters = torch.randn(9, 9).double(), list(other.parameters())
    actual = torch.autograd.grad((weights * own).sum(), parameters)
    expected = torch.autograd.grad((weights * dense).sum(), parameters)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, factor=10)


@pytest.mark.parametrize("rank", [1, 20, 1000])
def test_the_expected_log_prior_has_the_priors_gradient(rank: int) -> None:
    """``½ (log|P(θ)| + tr(P(θ)⁻¹ M))`` at P = I; also where a part has no feature left."""
    kernel = module()
    basis, own, again = (
        basis_of(kernel, rank),
        *(kernel_factors(kernel, 3).for_single_output() for _ in range(2)),
    )
    root = torch.randn(1, basis.rank, basis.rank).double()
    M, P = root @ root.mT, prior_covariance(basis, again)
    parameters = list(kernel.parameters())
    value = expected_log_prior(basis, own, M).sum()
    dense = 0.5 * (torch.logdet(P) + (torch.linalg.inv(P) * M).sum((-2, -1))).sum()
    actual = torch.autograd.grad(value, parameters)
    expected = torch.autograd.grad(dense, parameters, allow_unused=True)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, torch.zeros_like(a) if e is None else e, factor=10)


def test_outside_all_features_is_what_they_leave_out() -> None:
    kernel = module()
    own = kernel_factors(kernel, 3).for_single_output()
    basis = basis_of(kernel, 15)
    expected = basis.dropped * own.scale()
    assert_close(variance_outside(basis, own), expected)
    assert_close(own.scale() - node_variances(basis).sum(-1), expected)
    assert_close(variance_outside(basis_of(kernel), own), torch.zeros(1).double())


@pytest.mark.parametrize(
    "box", [BOUNDS, torch.tensor([[0.13, -0.9, 2.2], [0.58, -0.2, 2.9]]).double()]
)
def test_integrated_gram_is_the_integral(box: Tensor) -> None:
    """Also between grids that share an input but not their nodes."""
    basis = grid_basis(mesh(), kernel_factors(module((2,)), 3), torch.Size((2,)), 0.0, 30)
    lines = [quadrature(i, *box[:, i].tolist()) for i in range(3)]
    X = torch.cartesian_prod(*(line[0] for line in lines))
    weights = torch.cartesian_prod(*(line[1] for line in lines)).prod(-1)
    z = basis.features(X)
    assert_close(integrated_gram(basis, box), z.mT @ (weights.unsqueeze(-1) * z))


def quadrature(dimension: int, low: float, high: float) -> tuple[Tensor, Tensor]:
    """A mean over an interval, exact for polynomials of degree 7 between any grid's nodes."""
    nodes = [low, high]
    for grid, group in zip(mesh().parts, GROUPS, strict=True):
        if dimension in group:
            nodes += grid.nodes(group.index(dimension)).tolist()
    edges = np.unique(np.clip(nodes, low, high))
    unit, weights = np.polynomial.legendre.leggauss(4)
    width = np.diff(edges)[:, None]
    x = edges[:-1, None] + width * (unit + 1.0) / 2.0
    return torch.from_numpy(x.ravel()), torch.from_numpy(
        (width * weights / 2.0 / (high - low)).ravel()
    )


# --- grids --------------------------------------------------------------------------------------


def test_a_mesh_covers_what_all_its_grids_cover() -> None:
    grown = mesh().grown_to(torch.tensor([[-0.05, 0.0, 2.5], [0.5, 0.0, 3.3]]).double())
    bounds = grown.bounds
    for grid, group in zip(grown.parts, GROUPS, strict=True):
        assert bool((grid.bounds[0] <= bounds[0, list(group)]).all())
        assert bool((grid.bounds[1] >= bounds[1, list(group)]).all())
    assert_close(
        bounds[0, 0], torch.tensor(-0.2).double()
    )  # the finer of two grids has cells of 0.2
    assert grown.parts[2].bounds[0, 0] < bounds[0, 0]
    assert grown.contains(bounds)
    assert not grown.contains(bounds + torch.tensor([0.0, 0.0, 0.01]).double())
    assert mesh().lies_in(grown)
    assert not grown.lies_in(mesh())
    assert mesh().grown_over(grown) == grown
    assert grown.outgrown(mesh(), 4) is None
    assert grown.outgrown(mesh(), 1.3) == 2


def test_default_sizes_are_those_of_each_part() -> None:
    assert default_grid_size(kernel_factors(module(), 3), 3) == ((128,), (60, 60), (36, 36))


def test_the_error_is_a_bound_and_the_sufficient_grids_suffice() -> None:
    kernel = module()
    own, X = kernel_factors(kernel, 3), points(400)
    difference = additive_interpolated_kernel(kernel, cover)(X, X) - dense_kernel(kernel, X, X)
    bound = interpolation_error(own, mesh())
    measured = float((difference.abs().max() / own.scale()).detach())
    assert 0.2 * bound < measured <= 1.05 * bound
    sizes = sufficient_grid_size(own, mesh(), 0.01)
    assert sizes is not None
    assert interpolation_error(own, mesh().resized(sizes)) <= 0.01
