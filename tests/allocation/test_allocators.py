"""What every allocator obeys, and what each promises."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models import SingleTaskVariationalGP
from botorch.models.utils.inducing_point_allocators import GreedyVarianceReduction
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream.allocation import (
    OIPS,
    Allocator,
    CoverTree,
    GreedyVariance,
    KMeans,
    Novelty,
    Random,
    UniformGrid,
)
from bo_stream.allocation.allocator import greedy_points

ALLOCATORS: dict[str, Callable[[], Allocator]] = {
    "OIPS": lambda: OIPS(0.6),
    "Novelty": lambda: Novelty(12),
    "CoverTree": lambda: CoverTree(0.3),
    "GreedyVariance": lambda: GreedyVariance(12),
    "KMeans": lambda: KMeans(12),
    "Random": lambda: Random(12),
    "UniformGrid": lambda: UniformGrid(4),
}


def kernel(lengthscale: float = 0.3) -> ScaleKernel:
    made = ScaleKernel(RBFKernel()).double()
    made.base_kernel.lengthscale = lengthscale
    return made


def test_every_allocator_is_here() -> None:
    import bo_stream.allocation as package

    classes = [getattr(package, name) for name in package.__all__]
    final = {
        c.__name__
        for c in classes
        if isinstance(c, type) and issubclass(c, Allocator) and c is not Allocator
    }
    assert final == set(ALLOCATORS)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_stream_of_batches(name: str, dtype: torch.dtype, device: torch.device) -> None:
    allocator, X = ALLOCATORS[name](), torch.rand(90, 2, dtype=dtype, device=device)
    Z, k = X[:0], kernel().to(X)
    for rows in (X[:1], X[1:1], X[1:40], X[40:]):
        former, copy = Z.clone(), rows.clone()
        new = allocator.update(Z, rows, k)
        assert torch.equal(Z, former)
        assert torch.equal(rows, copy)
        Z = new
    assert Z.dtype == dtype
    assert Z.device == X.device
    assert 4 <= len(Z) < 60
    assert not Z.requires_grad
    apart = torch.cdist(Z, Z) + 9.0 * torch.eye(len(Z), device=device, dtype=dtype)
    assert float(apart.min()) > 0.0
    assert bool(((X.amin(0) - 1e-6 <= Z) & (X.amax(0) + 1e-6 >= Z)).all())


@pytest.mark.parametrize("name", ALLOCATORS)
def test_the_same_again_from_a_fresh_one(name: str) -> None:
    first, X = ALLOCATORS[name](), torch.rand(60, 2, dtype=torch.float64)
    one = first.update(first.update(X[:0], X[:30], kernel()), X[30:], kernel())
    again = first.fresh()
    two = again.update(again.update(X[:0], X[:30], kernel()), X[30:], kernel())
    assert torch.equal(one, two)


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_botorchs_variational_gp_takes_it(name: str, batch: tuple[int, ...]) -> None:
    X = torch.rand(*batch, 40, 2, dtype=torch.float64)
    Y = X.sum(-1, keepdim=True)
    model = SingleTaskVariationalGP(
        X,
        (Y - Y.mean(-2, keepdim=True)) / Y.std(-2, keepdim=True),
        inducing_points=10,
        learn_inducing_points=False,
        inducing_point_allocator=ALLOCATORS[name](),
    )
    Z = model.model.variational_strategy.inducing_points
    assert Z.shape[:-2] == batch
    assert Z.shape[-1] == 2
    assert 3 <= Z.shape[-2] <= 10
    assert model.posterior(X).mean.shape == (*batch, 40, 1)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_as_many_points_as_kernels(name: str) -> None:
    """GPyTorch takes the variances of n points for a covariance where the kernel's batch is n."""
    X = torch.tensor([[0.1, 0.2], [0.5, 0.9], [0.9, 0.4]], dtype=torch.float64)
    three = torch.Size([3])
    of_three = ScaleKernel(RBFKernel(batch_shape=three), batch_shape=three).double()
    of_three.outputscale = torch.tensor([0.1, 1.0, 7.0], dtype=torch.float64)
    of_three.base_kernel.lengthscale = 0.3
    Z = ALLOCATORS[name]().update(X[:0], X, of_three)
    assert torch.equal(Z, ALLOCATORS[name]().update(X[:0], X, kernel()))


@pytest.mark.parametrize("name", [n for n in ALLOCATORS if n != "Random"])
def test_equal_rows_and_a_constant_column(name: str) -> None:
    X = torch.full((500, 2), 0.25, dtype=torch.float64)
    allocator = ALLOCATORS[name]()
    assert allocator.update(X[:0], X, kernel()).tolist() == [pytest.approx([0.25, 0.25])]
    flat = torch.cat((torch.rand(50, 1), torch.ones(50, 1)), -1).double()
    Z = ALLOCATORS[name]().update(flat[:0], flat, kernel())
    assert torch.allclose(Z[:, 1], torch.ones(len(Z)).double())
    assert len(torch.unique(Z, dim=0)) == len(Z)


def test_greedy_is_botorchs() -> None:
    X = torch.rand(80, 3, dtype=torch.float64)
    k = ScaleKernel(MaternKernel(nu=2.5)).double()
    theirs = GreedyVarianceReduction().allocate_inducing_points(X, k, 20, torch.Size())
    assert torch.equal(GreedyVariance(20).update(X[:0], X, k), theirs)


def test_greedy_takes_the_largest_fraction_of_a_point_s_own_prior_variance() -> None:
    """Its first choice is the first candidate, for nothing is left of less than all."""
    X = torch.rand(50, 2, dtype=torch.float64)
    k = (ScaleKernel(MaternKernel(nu=2.5)) + LinearKernel()).double()
    Z = GreedyVariance(6).update(X[:0], X, k)
    assert torch.equal(Z[0], X[0])
    with torch.no_grad():
        K, cross, own = k(X).to_dense().diagonal(), k(X, Z[:5]).to_dense(), k(Z[:5]).to_dense()
    left = K - (cross @ torch.linalg.solve(own, cross.mT)).diagonal()
    assert torch.equal(Z[5], X[(left / K).argmax()])


def test_greedy_goes_on_from_given_points() -> None:
    X = torch.rand(50, 2, dtype=torch.float64)
    Z = greedy_points(X, kernel(), 10)
    assert torch.equal(greedy_points(X, kernel(), 10, first=Z[:4]), Z)
    with torch.no_grad():
        K = kernel()(torch.cat((Z[:9], X))).to_dense()
    left = K[9:, 9:] - K[9:, :9] @ torch.linalg.solve(K[:9, :9], K[:9, 9:])
    assert torch.equal(Z[9], X[left.diagonal().argmax()])


def test_greedy_stops_where_nothing_is_left() -> None:
    X = torch.rand(50, 2, dtype=torch.float64)
    linear = LinearKernel().double()
    assert len(GreedyVariance(20).update(X[:0], X, linear)) == 2


def test_greedy_chooses_among_old_and_new_points() -> None:
    X = torch.rand(40, 2, dtype=torch.float64)
    Z = GreedyVariance(8).update(X[:0], X[:20], kernel())
    both = GreedyVariance(8).update(Z, X[20:], kernel())
    assert torch.equal(both, greedy_points(torch.cat((Z, X[20:])), kernel(), 8))


def test_kmeans_means_are_running_means() -> None:
    allocator, spots = KMeans(3), torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]]).double()
    X = spots.repeat(40, 1) + torch.rand(120, 2, dtype=torch.float64)
    Z = X[:0]
    for rows in X.split(30):
        Z = allocator.update(Z, rows, kernel())
    expected = torch.stack([X[i::3].mean(0) for i in range(3)])
    order = torch.cdist(expected, Z).argmin(-1)
    torch.testing.assert_close(Z[order], expected)


@pytest.mark.parametrize("sizes", [(1001,), (2, 999), (1, 700, 300)])
def test_kmeans_counts_equal_inputs_from_the_start(sizes: tuple[int, ...]) -> None:
    """Those of its first means, too, which are the distinct inputs; the mean of all is the mean."""
    X = torch.cat((torch.zeros(500), torch.full((501,), 5.0), torch.ones(1))).double()
    X = X[[*range(0, 1001, 2), *range(1, 1001, 2), 1001]].unsqueeze(-1)
    allocator, Z = KMeans(2), X[:0]
    for rows in X.split((*sizes, len(X) - sum(sizes))):
        Z = allocator.update(Z, rows, kernel())
    torch.testing.assert_close(Z.flatten().sort().values, torch.tensor([1 / 501, 5.0]).double())


def test_the_first_of_kmeans_means_are_of_all_inputs() -> None:
    X = torch.tensor([0.0] * 999 + [1.0, 9.0, 9.2]).double().unsqueeze(-1)
    Z = KMeans(2).update(X[:0], X, kernel())
    torch.testing.assert_close(Z.flatten().sort().values, torch.tensor([1e-3, 9.1]).double())


def test_kmeans_far_from_the_origin() -> None:
    X = (1024.0 * torch.rand(200, 2, dtype=torch.float64)).round() / 1024.0
    near, far = (
        KMeans(20).update(X[:20] + shift, X[20:] + shift, kernel()) - shift
        for shift in (0.0, 2.0**27)
    )
    torch.testing.assert_close(far, near, rtol=0.0, atol=1e-6)


def test_a_grid_spans_the_box_of_all_inputs() -> None:
    X = torch.rand(30, 2, dtype=torch.float64)
    allocator = UniformGrid(5)
    Z = allocator.update(allocator.update(X[:0], X[:10], kernel()), X[10:], kernel())
    assert len(Z) == 25
    assert torch.equal(torch.stack((Z.amin(0), Z.amax(0))), torch.stack((X.amin(0), X.amax(0))))
    with pytest.raises(ValueError, match="at most 10,000 points"):
        UniformGrid(10).update(torch.zeros(0, 8), torch.rand(3, 8), RBFKernel())


def test_random_keeps_each_input_as_likely() -> None:
    X = torch.arange(40.0, dtype=torch.float64).unsqueeze(-1)
    hits, same = torch.zeros(40), kernel()
    for seed in range(300):
        allocator = Random(10, seed)
        Z = X[:0]
        for rows in X.split(7):
            Z = allocator.update(Z, rows, same)
        hits[Z.flatten().long()] += 1
    assert float((hits / 300 - 0.25).abs().max()) < 0.125  # five standard deviations


def test_a_tree_follows_the_lengthscale() -> None:
    X = torch.rand(600, 2, dtype=torch.float64)
    tree = CoverTree(0.1, per_lengthscale=0.5)
    Z = tree.update(X[:0], X, kernel(0.8))
    assert Z.shape[0] == len(tree.level(0.4))
    coarse = tree.update(Z, X[:0], kernel(1.6))
    assert 0 < len(coarse) < len(Z)
    fine = tree.update(coarse, X, kernel(0.1))
    assert tree.resolution == 0.05
    assert float(torch.cdist(X, fine).amin(-1).max()) <= 0.05
    assert float(torch.pdist(fine).min()) > 0.05
    with pytest.raises(ValueError, match="finest level"):
        tree.level(0.01)
    with pytest.raises(UnsupportedError, match="no lengthscale"):
        tree.update(Z, X, LinearKernel())


def named_points(Z: Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in Z.tolist()}


def test_too_many_points_for_botorch_are_thinned_by_variance() -> None:
    X = torch.rand(60, 2, dtype=torch.float64)
    everything = OIPS(0.95).update(X[:0], X, kernel())
    some = OIPS(0.95).allocate_inducing_points(X, kernel(), 9, torch.Size())
    assert len(everything) > 9
    assert len(some) == 9
    assert named_points(some) < named_points(everything)
    assert torch.equal(some, greedy_points(everything, kernel(), 9))


@pytest.mark.parametrize("name", ALLOCATORS)
def test_nothing_seen_is_no_point(name: str) -> None:
    none = torch.zeros(0, 2, dtype=torch.float64)
    assert ALLOCATORS[name]().update(none, none, kernel()).shape == (0, 2)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_copy_goes_its_own_way(name: str) -> None:
    """Models try an update on a copy, which must leave the original as it is."""
    first, X = ALLOCATORS[name](), torch.rand(90, 2, dtype=torch.float64)
    Z = first.update(X[:0], X[:30], kernel())
    twin = copy.deepcopy(first)
    copy.copy(first).update(Z, X[30:60], kernel())
    assert torch.equal(first.update(Z, X[60:], kernel()), twin.update(Z, X[60:], kernel()))


@pytest.mark.parametrize("make", [GreedyVariance, KMeans, Random])
@pytest.mark.parametrize("number", [0, 2.5, math.nan, math.inf, "3", None])
def test_a_number_out_of_range(make: Callable[[object], Allocator], number: object) -> None:
    with pytest.raises(ValueError, match="Expected max_points to be a whole number"):
        make(number)


def test_a_size_and_a_tolerance_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"tolerance in \[0, 1\), got nan"):
        GreedyVariance(3, tolerance=math.nan)
    with pytest.raises(ValueError, match="of at least 2"):
        UniformGrid(1)
