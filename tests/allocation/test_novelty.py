"""Novelty: which inputs become inducing points, and how a full set makes room."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ZeroMean
from torch import Tensor

from bo_stream import OSGPR
from bo_stream.allocation import Novelty
from bo_stream.allocation.allocator import greedy_points
from bo_stream.allocation.oips import KEPT, NOVEL, RISE
from bo_stream.bases.inducing import InducingBasis
from tests.oracles.kernels import dense_kernel


def matern(lengthscale: float = 0.3) -> Kernel:
    kernel = MaternKernel(2.5, ard_num_dims=2).double()
    kernel.lengthscale = lengthscale
    return kernel


def left(kernel: Kernel, Z: Tensor, X: Tensor) -> Tensor:
    """Parts of the prior variance of X that Z leaves, naively."""
    with torch.no_grad():
        K = kernel(torch.cat((Z, X))).to_dense()
        own = K[: len(Z), : len(Z)]
        cross = K[: len(Z), len(Z) :]
        variance = K.diagonal()[len(Z) :]
        return 1.0 - (cross * torch.linalg.solve(own, cross)).sum(0) / variance


def test_every_distinct_row_is_a_point() -> None:
    X = torch.rand(60, 2, dtype=torch.float64)
    repeated = torch.cat((X[:30], X[:10], X[30:], X[20:]))
    at_once = Novelty(100).update(X[:0], repeated, matern())
    assert torch.equal(torch.unique(at_once, dim=0), torch.unique(X, dim=0))
    assert len(at_once) == 60
    allocator, Z = Novelty(100), X[:0]
    for row in repeated.split(1):
        Z = allocator.update(Z, row, matern())
    assert torch.equal(Z, X)


def test_what_the_points_determine_does_not_enter() -> None:
    X, kernel = torch.rand(200, 2, dtype=torch.float64), RBFKernel().double()
    kernel.lengthscale = 0.8
    Z = Novelty(300).update(X[:0], X, kernel)
    assert 20 < len(Z) < 120
    assert float(left(kernel, Z, X).max()) < 1e-9
    assert len(Novelty(300).update(X[:0], X, LinearKernel().double())) == 2


@pytest.mark.parametrize("rows", [1, 10])
def test_points_follow_a_stream_through_space_of_a_smooth_kernel(rows: int) -> None:
    """There rounding makes an input beyond all points seem to keep less than nothing."""
    X, kernel = torch.rand(200, 2, dtype=torch.float64), RBFKernel().double()
    kernel.lengthscale = 0.5
    allocator, Z = Novelty(300), X[:0]
    for batch in X[X[:, 0].argsort()].split(rows):
        Z = allocator.update(Z, batch, kernel)
    assert len(Z) < 150
    assert float(left(kernel, Z, X).max()) < 1e-5
    assert float(Z[:, 0].max()) > 0.9


@pytest.mark.parametrize("rows", [1, 7, 400])
def test_a_full_set_is_thinned_a_bounded_number_of_times(rows: int) -> None:
    X, kernel, cap = torch.rand(700, 2, dtype=torch.float64), matern(), 24
    allocator, Z, thinned, least = Novelty(cap), X[:0], 0, math.ceil(KEPT * cap) - 1
    for batch in X.split(rows):
        new = allocator.update(Z, batch, kernel)
        thinned += not torch.equal(new[: len(Z)], Z)
        assert len(new) <= cap
        assert len(new) >= min(least, len(Z))
        Z = new
    assert thinned <= -math.log(NOVEL) / math.log(RISE)
    chosen = greedy_points(X, kernel, cap)
    assert float(left(kernel, Z, X).mean()) < 2.0 * float(left(kernel, chosen, X).mean())


def test_a_full_set_follows_the_stream() -> None:
    X, kernel = torch.rand(600, 2, dtype=torch.float64), matern()
    X = X[X[:, 0].argsort()]
    allocator, Z = Novelty(24), X[:0]
    for batch in X.split(20):
        Z = allocator.update(Z, batch, kernel)
    chosen = greedy_points(X, kernel, 24)
    assert float(left(kernel, Z, X).mean()) < 2.0 * float(left(kernel, chosen, X).mean())


def test_points_that_become_redundant_make_room() -> None:
    """A dimension that turns out not to matter: points that differ in it alone are in the way."""
    line = torch.linspace(0.0, 1.0, 60, dtype=torch.float64)
    upright, flat = (torch.stack(pair, -1) for pair in ((0.0 * line, line), (line, 0.0 * line)))
    allocator, kernel = Novelty(40), matern(0.002)  # hardly correlated: nearly all there is, is new
    Z = allocator.update(upright[:0], upright, kernel)
    assert len(Z) == round(KEPT * 40)
    with torch.no_grad():
        kernel.lengthscale = torch.tensor([[0.05, 50.0]])
    flat = flat[::2]  # 0.7 lengthscales apart
    Z = allocator.update(Z, flat, kernel)
    assert len(Z) <= 40
    assert float(left(kernel, Z, flat).max()) < 1e-9


def test_of_a_batch_of_kernels_the_most_curious_decides() -> None:
    X = torch.rand(30, 2, dtype=torch.float64)
    both = RBFKernel(batch_shape=torch.Size((2,))).double()
    both.lengthscale = torch.tensor([30.0, 0.05]).reshape(2, 1, 1)
    rough = RBFKernel().double()
    rough.lengthscale = 0.05
    assert torch.equal(Novelty(50).update(X[:0], X, both), X)
    assert torch.equal(Novelty(50).update(X[:0], X, rough), X)


@pytest.mark.parametrize("at", [0, 1, 25])
@pytest.mark.parametrize("rows", [1, 26])
def test_a_point_very_far_away_does_not_cost_the_others_their_digits(at: int, rows: int) -> None:
    X, kernel = torch.rand(25, 2, dtype=torch.float64), RBFKernel().double()
    kernel.lengthscale = 0.5
    stream = torch.cat((X[:at], torch.full((1, 2), 1e7).double(), X[at:]))
    allocator, Z = Novelty(50), X[:0]
    for batch in stream.split(rows):
        Z = allocator.update(Z, batch, kernel)
    near = Z[Z[:, 0] <= 1.0]
    assert len(near) == len(Z) - 1
    assert float(left(kernel, near, X).max()) < 1e-9


def outer_selection() -> Kernel:
    """A kernel of two of three inputs, which the kernel around it selects, and its sum selects."""
    parts = RBFKernel(active_dims=(0,)) + RBFKernel(active_dims=(1,))
    return ScaleKernel(parts, active_dims=(0, 2)).double()


def test_inputs_that_the_outer_kernel_selects() -> None:
    X = torch.rand(80, 3, dtype=torch.float64)
    inner = (RBFKernel(active_dims=(0,)) + RBFKernel(active_dims=(2,))).double()
    flat = RBFKernel(ard_num_dims=2, active_dims=(0, 2)).double()
    outer = ScaleKernel(RBFKernel(ard_num_dims=2), active_dims=(0, 2)).double()
    for one, other in ((outer, flat), (outer_selection(), inner)):
        Z = Novelty(100).update(X[:0], X, one)
        assert 2 < len(Z) < 80
        assert torch.equal(Z, Novelty(100).update(X[:0], X, other))


TOWNS = [
    RBFKernel(),
    ScaleKernel(MaternKernel(2.5, ard_num_dims=2)),
    RBFKernel(active_dims=(0,)) * MaternKernel(1.5, active_dims=(1,)),
]


@pytest.mark.parametrize("rows", [6, 60])
@pytest.mark.parametrize("kernel", TOWNS, ids=["RBF", "Matern", "product"])
def test_places_far_apart_have_their_points_and_the_exact_process(
    kernel: Kernel, rows: int
) -> None:
    """Three equal towns, without one in the middle, 1e5 and more lengthscales from each other."""
    kernel = copy.deepcopy(kernel).double()
    with torch.no_grad():
        for part in kernel.modules():
            if isinstance(part, RBFKernel | MaternKernel):
                part.lengthscale = 0.5
    town = torch.arange(3).repeat_interleave(20)
    corner = torch.tensor([[0.0, 0.0], [6e4, 0.0], [0.0, 6e4]]).double()[town]
    X = torch.rand(60, 2, dtype=torch.float64)
    Y = torch.sin(5.0 * X).sum(-1, keepdim=True)
    likelihood = GaussianLikelihood().double()
    likelihood.noise = 0.01
    options = {"outcome_transform": None, "mean_module": ZeroMean(), "window": 0}
    X = (X + corner)[(order := torch.randperm(60))]
    Y, town = Y[order], town[order]
    model = OSGPR(X[:0], Y[:0], likelihood=likelihood, covar_module=kernel, **options)
    for some in torch.arange(60).split(rows):
        model.update(X[some], Y[some])
    with torch.no_grad():
        posterior, K = model.posterior(X), dense_kernel(kernel, X, X)
        gain = torch.linalg.solve(K + 0.01 * torch.eye(60), K).mT
        torch.testing.assert_close(posterior.mean, gain @ Y, rtol=0.0, atol=1e-5)
        variance = (K - gain @ K).diagonal().unsqueeze(-1)
        torch.testing.assert_close(posterior.variance, variance, rtol=0.0, atol=1e-6)
        for one in range(3):
            here = X[town == one]
            Z = model.inducing_points
            near = Z[torch.cdist(Z, here).amin(-1) < 10.0]
            assert float(left(kernel, near, here).max()) < 1e-8


def test_inputs_far_apart_in_lengthscales_are_points_all_the_same() -> None:
    X = 1e6 * torch.rand(40, 2, dtype=torch.float64)
    assert len(Novelty(50).update(X[:0], X, matern())) == 40


def test_a_basis_grows_as_one_made_anew() -> None:
    X, kernel = torch.rand(20, 2, dtype=torch.float64), matern()
    whole = InducingBasis.of(kernel, X, 1)
    grown = InducingBasis.of(kernel, X[:12], 1).grown(X[12:13]).grown(X[13:])
    assert torch.equal(grown.Z, X)
    assert torch.allclose(grown.root, whole.root, atol=1e-10)
    at = torch.rand(5, 2, dtype=torch.float64)
    first = InducingBasis.of(kernel, X[:12], 1).features(at)
    assert torch.allclose(grown.continued(at, first), whole.features(at), atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_points": 0}, "max_points"),
        ({"max_points": 9, "tolerance": 0.0}, "tolerance in"),
        ({"max_points": 9, "tolerance": 1.0}, "tolerance in"),
    ],
)
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Novelty(**options)  # type: ignore[arg-type]
