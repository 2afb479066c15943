"""O-SGPR against dense formulas, and in the limits in which it is exact."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import replace

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms.input import Normalize
from botorch.models.utils.inducing_point_allocators import GreedyVarianceReduction
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.quasirandom import SobolEngine

from bo_stream import OSGPR, CoarsePointsWarning, ProjectionWarning
from bo_stream.allocation import OIPS, Allocator, CoverTree, GreedyVariance, KMeans, Novelty, Random
from bo_stream.models.inducing import inference as inducing_choice
from bo_stream.testing.streams import (
    GRADIENT_TOLERANCE,
    assert_close,
    assert_gradient,
    assert_same_posterior,
)
from tests.oracles.inducing import SGPR, online_bound
from tests.support.problems import observations
from tests.support.problems.inducing import (
    KERNELS,
    D,
    assert_goes_on_after_odd_inputs,
    equal_rows,
    wave,
)


def dense(model: OSGPR, kernel: Kernel, X: Tensor, Y: Tensor, Z: Tensor) -> SGPR:
    noise = model.likelihood.noise.detach().expand(len(X))
    y = Y.squeeze(-1) - model.mean_module.constant.detach()
    return SGPR(kernel(X).to_dense(), kernel(X, Z).to_dense(), kernel(Z).to_dense(), y, noise)


def raw(X: Tensor, Y: Tensor, **options: object) -> OSGPR:
    model = OSGPR(X, Y, **{"outcome_transform": None, "window": 0, **options})
    with torch.no_grad():
        model.mean_module.constant.fill_(0.3)
        model.likelihood.noise = 0.05
    model.eval()
    return model


def exact_log_marginal(kernel: Kernel, X: Tensor, Y: Tensor) -> float:
    with torch.no_grad():
        K = kernel(X).to_dense() + 0.05 * torch.eye(len(X))
    mean = torch.full((len(X),), 0.3).double()
    return float(torch.distributions.MultivariateNormal(mean, K).log_prob(Y.squeeze(-1)))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("batches", [(60,), (20, 1, 39), tuple([1] * 60)])
def test_any_batching_is_batch_sgpr(name: str, batches: tuple[int, ...]) -> None:
    X, Y = wave()
    kernel, Z = KERNELS[name]().double(), torch.rand(12, D, dtype=torch.float64)
    first, *others = zip(X.split(list(batches)), Y.split(list(batches)), strict=True)
    model = raw(*first, covar_module=kernel, inducing_points=Z)
    for rows in others:
        model.update(*rows)
    test_X = torch.rand(7, D, dtype=torch.float64)
    with torch.no_grad():
        oracle = dense(model, kernel, X, Y, Z)
        mean, covariance = oracle.predict(kernel(test_X, Z).to_dense(), kernel(test_X).to_dense())
        posterior = model.posterior(test_X)
    assert_close(posterior.mean.squeeze(-1), mean + 0.3)
    assert_close(posterior.distribution.covariance_matrix, covariance)
    assert_close(model.elbo().detach(), oracle.bound(), factor=10)


def test_points_at_the_data_are_the_exact_gp() -> None:
    X, Y = wave(40)
    kernel = KERNELS["matern"]().double()
    model = raw(X[:15], Y[:15], covar_module=kernel, inducing_points=X)
    model.update(X[15:], Y[15:])
    test_X = torch.rand(6, D, dtype=torch.float64)
    with torch.no_grad():
        K = kernel(X).to_dense() + 0.05 * torch.eye(40)
        cross = kernel(test_X, X).to_dense()
        mean = 0.3 + cross @ torch.linalg.solve(K, Y.squeeze(-1) - 0.3)
        covariance = kernel(test_X).to_dense() - cross @ torch.linalg.solve(K, cross.mT)
        posterior = model.posterior(test_X)
    assert_close(posterior.mean.squeeze(-1), mean)
    assert_close(posterior.distribution.covariance_matrix, covariance)
    assert float(model.elbo().detach()) == pytest.approx(exact_log_marginal(kernel, X, Y), abs=1e-7)


@pytest.mark.parametrize("window", [0, 10, 512])
@pytest.mark.parametrize("rows", [1, 7])
def test_the_default_points_are_the_exact_gp(rows: int, window: int) -> None:
    X, Y = wave(45)
    kernel = KERNELS["matern"]().double()
    model = raw(X[:20], Y[:20], covar_module=kernel, window=window)
    for batch in torch.arange(20, 45).split(rows):
        model.update(X[batch], Y[batch])
    assert torch.equal(model.inducing_points, X)
    test_X = torch.rand(6, D, dtype=torch.float64)
    with torch.no_grad():
        K = kernel(X).to_dense() + 0.05 * torch.eye(45)
        cross = kernel(test_X, X).to_dense()
        mean = 0.3 + cross @ torch.linalg.solve(K, Y.squeeze(-1) - 0.3)
        covariance = kernel(test_X).to_dense() - cross @ torch.linalg.solve(K, cross.mT)
        posterior = model.posterior(test_X)
    assert_close(posterior.mean.squeeze(-1), mean, factor=10)
    assert_close(posterior.distribution.covariance_matrix, covariance, factor=10)
    assert float(model.elbo().detach()) == pytest.approx(exact_log_marginal(kernel, X, Y), abs=1e-6)
    assert float(model._memory.whole.trace.learned) == pytest.approx(0.0, abs=1e-8)


def test_growing_points_express_rows_of_known_noise_and_batches_exactly() -> None:
    X, Y = torch.rand(2, 30, D, dtype=torch.float64), torch.randn(2, 30, 2).double()
    Yvar = 0.1 + torch.rand_like(Y)
    Yvar[:, 1::3] = math.nan
    options = {"likelihood": GaussianLikelihood(batch_shape=torch.Size((2, 2)))}
    grown = OSGPR(X[:, :9], Y[:, :9], Yvar[:, :9], inducing_points=X[0, :3], **options)
    assert len(grown.inducing_points) == 3
    grown.allocator = Novelty(70)
    for i in range(9, 30):
        grown.update(X[:, i : i + 1], Y[:, i : i + 1], Yvar[:, i : i + 1])
    assert len(grown.inducing_points) > 40
    anew = OSGPR(X, Y, Yvar, inducing_points=grown.inducing_points, **options)
    grown.outcome_transform.load_state_dict(anew.outcome_transform.state_dict())
    test_X = torch.rand(2, 4, D, dtype=torch.float64)
    assert_close(grown.posterior(test_X).mean, anew.posterior(test_X).mean, factor=100)
    assert_close(grown.posterior(test_X).variance, anew.posterior(test_X).variance, factor=100)
    assert_close(grown.elbo().detach(), anew.elbo().detach(), factor=100)


def test_noise_free_outcomes_are_told_apart() -> None:
    """What is learned of them are smooth kernels, to which all inputs are alike."""
    X = torch.rand(40, 2, dtype=torch.float64)
    Y = (3.0 * X).sin().sum(-1, keepdim=True)
    kernel = RBFKernel(ard_num_dims=2).double()
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(1e-8)).double()
    kernel.lengthscale, likelihood.noise = 0.6, 1.01e-8  # as a SingleTaskGP learns them
    model = OSGPR(X, Y, likelihood=likelihood, covar_module=kernel).train().eval()
    test_X = 0.2 + 0.6 * torch.rand(50, 2, dtype=torch.float64)
    error = model.posterior(test_X).mean - (3.0 * test_X).sin().sum(-1, keepdim=True)
    assert float(error.square().mean().sqrt()) < 1e-3


@pytest.mark.parametrize("points", [1, 5, 20, 60])
def test_the_bound_never_exceeds_the_log_marginal(points: int) -> None:
    X, Y = wave()
    kernel = KERNELS["rbf"]().double()
    model = raw(X, Y, covar_module=kernel, inducing_points=X[:points])
    assert float(model.elbo().detach()) <= exact_log_marginal(kernel, X, Y) + 1e-7


@pytest.mark.filterwarnings("ignore::bo_stream.CoarsePointsWarning")
def test_moved_points_and_hyperparameters_are_the_papers_online_bound() -> None:
    X, Y = wave()
    old, new = (torch.rand(k, D, dtype=torch.float64) for k in (8, 11))
    kernel = KERNELS["matern"]().double()
    model = raw(X[:30], Y[:30], covar_module=kernel, inducing_points=old)
    before = copy.deepcopy(kernel)
    start = float(model.elbo().detach())
    with torch.no_grad():
        kernel.outputscale *= 1.3
        kernel.base_kernel.lengthscale = torch.tensor([[0.5, 0.9, 0.7]])
    model.allocator = Fixed(new)
    model.update(X[30:], Y[30:])
    assert torch.equal(model.inducing_points, new)
    first = (X[:30], Y[:30].squeeze(-1) - 0.3, old, lambda a, b: before(a, b).to_dense())
    second = (X[30:], Y[30:].squeeze(-1) - 0.3, new, lambda a, b: kernel(a, b).to_dense())
    with torch.no_grad():
        expected = online_bound(*first, *second, noise=0.05)
    assert_close(model.elbo().detach() - start, expected, factor=100)


class Fixed(Allocator):
    """Returns what it is told to."""

    def __init__(self, Z: object) -> None:
        self.Z = Z

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        return self.Z


def moved(model: OSGPR) -> OSGPR:
    """The same with other hyperparameters of its kernel."""
    with torch.no_grad():
        for parameter in model.covar_module.parameters():
            parameter.mul_(1.4).add_(0.1)
    return model


def test_rows_of_the_window_follow_the_hyperparameters_exactly() -> None:
    X, Y = wave(40)
    kernel, Z = KERNELS["matern"]().double(), torch.rand(9, D, dtype=torch.float64)
    model = moved(raw(X[:25], Y[:25], covar_module=kernel, inducing_points=Z, window=40))
    model.update(X[25:], Y[25:])
    moved(model)
    with torch.no_grad():
        cross, prior = kernel(X, Z).to_dense(), kernel(X).to_dense()
        mean, covariance = dense(model, kernel, X, Y, Z).predict(cross, prior)
        posterior = model.posterior(X)
    assert_close(posterior.mean.squeeze(-1), mean + 0.3)
    assert_close(posterior.distribution.covariance_matrix, covariance)
    assert float(model.elbo().detach()) == pytest.approx(exact_log_marginal(kernel, X, Y))
    assert model._memory.absorbed.counts.item() == 0


def test_what_leaves_the_window_is_absorbed_and_what_is_retracted_leaves_it() -> None:
    X, Y = wave(40)
    kernel, Z = KERNELS["matern"]().double(), torch.rand(9, D, dtype=torch.float64)
    model = raw(X[:10], Y[:10], covar_module=kernel, inducing_points=Z, window=16)
    for rows in torch.arange(10, 40).split(3):
        model.update(X[rows], Y[rows])
    assert torch.equal(model._memory.rows.data.X, X[24:])
    before = model.posterior(X).mean.detach()
    model.retract(X[36:], Y[36:]).retract(X[:2], Y[:2])
    assert torch.equal(model._memory.rows.data.X, X[24:36])
    assert model.num_observations == 34
    left = raw(X[2:36], Y[2:36], covar_module=kernel, inducing_points=Z)
    assert_close(model.posterior(X).mean, left.posterior(X).mean)
    model.update(X[:2], Y[:2]).update(X[36:], Y[36:])
    assert_close(model.posterior(X).mean, before)


def test_without_the_last_observation_the_posterior_is_the_prior() -> None:
    """Also where fewer points than rows know these only roughly under another kernel."""
    X = SobolEngine(2).draw(20, dtype=torch.float64)
    kernel = RBFKernel().double()
    kernel.lengthscale = 0.5
    Y = X.sum(-1, keepdim=True).sin()
    model = raw(X, Y, covar_module=kernel, allocator=GreedyVariance(8), window=5)
    prior = copy.deepcopy(model).clear()
    for each in (model, prior):
        each.covar_module.lengthscale = 0.501
    assert_same_posterior(model.retract(X, Y), prior, X)
    assert_same_posterior(model.update(X, Y), prior.update(X, Y), X)


def test_while_the_window_holds_all_learning_needs_no_inducing_points() -> None:
    X, Y = wave(20)
    kernel = KERNELS["rbf"]().double()
    model = raw(X[:12], Y[:12], covar_module=kernel, inducing_points=X[:5], window=16)
    assert torch.equal(model._memory.as_values.values.Z, X[:12])
    model.update(X[12:], Y[12:])
    assert torch.equal(model._memory.as_values.values.Z, torch.cat((X[:5], X[4:])))


@pytest.mark.parametrize("sizes", [(4, 30), (30, 4), (8, 8), (20,)])
def test_a_large_update_leaves_no_more_behind_than_the_window(sizes: tuple[int, ...]) -> None:
    X, Y = wave(sum(sizes))
    kernel = KERNELS["rbf"]().double()
    model = raw(X[:0], Y[:0], covar_module=kernel, inducing_points=X[:5], window=6)
    for rows in torch.arange(len(X)).split(list(sizes)):
        model.update(X[rows], Y[rows])
    held = model._memory.rows
    assert torch.equal(held.data.X, X[-6:])
    assert held.features.untyped_storage().nbytes() == 6 * 5 * 8
    assert_close(held.features, model.process().basis.features(X[-6:]))


def test_batch_elements_have_rows_of_their_own() -> None:
    X, Y = torch.rand(2, 30, D, dtype=torch.float64), torch.randn(2, 30, 1).double()
    Z, kernel = torch.rand(8, D, dtype=torch.float64), KERNELS["rbf"]().double()
    options = {"covar_module": kernel, "inducing_points": Z, "outcome_transform": None}
    both = moved(OSGPR(X, Y, window=20, **options))
    apart = []
    for x, y in zip(X, Y, strict=True):
        options["covar_module"] = KERNELS["rbf"]().double()
        apart.append(moved(OSGPR(x, y, window=20, **options)))
    test_X = torch.rand(5, D, dtype=torch.float64)
    means = torch.stack([model.posterior(test_X).mean for model in apart])
    assert_close(both.posterior(test_X).mean, means)
    assert_close(both.elbo(), torch.stack([model.elbo() for model in apart]))


def test_a_fit_places_the_points_anew() -> None:
    X = torch.rand(300, 2, dtype=torch.float64)
    Y = (12.0 * X).sin().prod(-1, keepdim=True) + 0.05 * torch.randn(300, 1).double()
    model = OSGPR(X, Y)
    before = len(model.inducing_points)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    assert len(model.inducing_points) > 1.5 * before
    with torch.no_grad():
        likeness = model.covar_module(X, model.inducing_points).to_dense().amax(-1)
    assert float(likeness.min()) >= 0.8
    test_X = torch.rand(300, 2, dtype=torch.float64)
    error = model.posterior(test_X).mean - (12.0 * test_X).sin().prod(-1, keepdim=True)
    assert float(error.square().mean().sqrt()) < 0.1


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("window", [0, 10])
def test_the_bounds_gradient(name: str, window: int) -> None:
    X, Y = wave(30)
    options = {"inducing_points": X[::3] + 0.01, "window": window}
    model = OSGPR(X, Y, covar_module=KERNELS[name]().double(), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_((0.3 * torch.randn_like(parameter)).exp()).add_(1e-3)
    model.elbo().backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        flat, step = parameter.data.view(-1), 1e-5
        for i in range(flat.numel()):
            values = []
            for sign in (1.0, -1.0):
                flat[i] += sign * step
                values.append(float(model.elbo().detach()))
                flat[i] -= sign * step
            difference = (values[0] - values[1]) / (2.0 * step)
            scale = max(1.0, abs(difference))
            error = abs(float(parameter.grad.view(-1)[i]) - difference)
            assert error <= 100 * GRADIENT_TOLERANCE * scale


def test_known_noise_and_the_level_of_unknown_noise() -> None:
    """Observations of half the noise variance weigh twice as much; the bound counts each once."""
    X, Y = wave(40)
    kernel, Z = KERNELS["rbf"]().double(), torch.rand(10, D, dtype=torch.float64)
    Yvar = 0.02 + 0.1 * torch.rand_like(Y)
    model = OSGPR(
        *(X[:9], Y[:9], Yvar[:9]),
        covar_module=kernel,
        inducing_points=Z,
        outcome_transform=None,
        window=0,
    )
    model.update(X[9:], Y[9:], Yvar[9:])
    with torch.no_grad():
        oracle = SGPR(
            kernel(X).to_dense(),
            kernel(X, Z).to_dense(),
            kernel(Z).to_dense(),
            Y.squeeze(-1),
            Yvar.squeeze(-1),
        )
        mean, _ = oracle.predict(kernel(X, Z).to_dense(), kernel(X).to_dense())
        assert_close(model.posterior(X).mean.squeeze(-1), mean)
    assert_close(model.elbo().detach(), oracle.bound(), factor=10)


def test_fantasies_far_from_every_point_know_what_is_hypothetical() -> None:
    X, Y = wave(30)
    model = raw(X, Y, covar_module=KERNELS["rbf"]().double(), inducing_points=X[:8])
    far = 5.0 + torch.rand(1, D, dtype=torch.float64)
    conditioned = model.condition_on_observations(
        far, torch.ones(1, 1).double(), 0.01 * torch.ones(1, 1).double()
    )
    prior, left = (float(m.posterior(far).variance) for m in (model, conditioned))
    assert left == pytest.approx(prior * 0.01 / (prior + 0.01), rel=1e-6)


def test_a_fit_from_memory_alone_finds_hyperparameters() -> None:
    X = torch.rand(400, 2, dtype=torch.float64)
    Y = (6.0 * X[:, :1]).sin() + 0.1 * torch.randn(400, 1).double()
    model = OSGPR(X, Y, inducing_points=X[:60])
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    lengthscale = model.covar_module.lengthscale.flatten().tolist()
    noise = float(model.likelihood.noise.detach() * model.outcome_scale().square())
    assert lengthscale[1] > 3.0 * lengthscale[0]
    assert math.sqrt(noise) == pytest.approx(0.1, rel=0.15)
    test_X = torch.rand(200, 2, dtype=torch.float64)
    error = model.posterior(test_X).mean - (6.0 * test_X[:, :1]).sin()
    assert float(error.square().mean().sqrt()) < 0.05


@pytest.mark.parametrize(
    "allocator", [OIPS(0.85), CoverTree(0.15), GreedyVariance(30), KMeans(30), Random(30)]
)
def test_a_stream_with_points_that_place_themselves(allocator: Allocator) -> None:
    X = torch.rand(300, 2, dtype=torch.float64)
    Y = (5.0 * X).sin().sum(-1, keepdim=True) + 0.05 * torch.randn(300, 1).double()
    kernel = RBFKernel().double()
    kernel.lengthscale = 0.3
    model = OSGPR(X[:50], Y[:50], covar_module=kernel, allocator=allocator)
    with torch.no_grad():
        model.likelihood.noise = 0.01
    for rows in torch.arange(50, 300).split(25):
        model.update(X[rows], Y[rows])
    assert 5 <= len(model.inducing_points) <= 60
    test_X = torch.rand(100, 2, dtype=torch.float64)
    error = model.posterior(test_X).mean - (5.0 * test_X).sin().sum(-1, keepdim=True)
    assert float(error.square().mean().sqrt()) < 0.1
    assert model.num_observations == 300


def test_the_users_allocator_is_copied() -> None:
    X, Y = wave()
    tree = CoverTree(0.5)
    OSGPR(X, Y, allocator=tree)
    assert tree.levels == []


def test_the_cap_binds_and_the_better_points_stay() -> None:
    X, Y = wave(300, 2)
    kernel = RBFKernel().double()
    kernel.lengthscale = 0.2
    model = OSGPR(X[:20], Y[:20], covar_module=kernel, allocator=OIPS(0.95), max_points=25)
    for rows in torch.arange(20, 300).split(10):
        model.update(X[rows], Y[rows])
        assert len(model.inducing_points) <= 25
    with torch.no_grad():
        left = [
            1.0 - (c := kernel(X, Z).to_dense()) @ torch.linalg.solve(kernel(Z).to_dense(), c.mT)
            for Z in (model.inducing_points, X[:25])
        ]
    assert float(left[0].diagonal().mean()) < 0.5 * float(left[1].diagonal().mean())


@pytest.mark.parametrize("kernel", [RBFKernel(), ScaleKernel(MaternKernel(nu=2.5))])
def test_the_bound_under_a_kernel_that_stays_has_the_gradient_in_the_points(kernel: Kernel) -> None:
    X, Y = wave(40, 2)
    model = raw(X, Y, covar_module=kernel.double(), inducing_points=X[:8] + 0.01, window=20)
    inference, prior = model._inference, model.prior
    cache = inference.current(model._memory, None, prior)

    def bound(Z: Tensor) -> Tensor:
        return inference.bound_at(cache.memory, prior, cache.basis.kernel, Z).sum()

    assert_gradient(bound, X[:8] + 0.03)


@pytest.mark.parametrize(("window", "gain"), [(0, 0.0), (30, 1.0)])
def test_points_move_to_a_better_bound(window: int, gain: float) -> None:
    """Towards rows that are held; statistics alone know no better points than their own."""
    X, Y = wave(60, 2)
    kernel = RBFKernel().double()
    kernel.lengthscale = 0.4
    model = raw(X, Y, covar_module=kernel, inducing_points=0.5 + 0.1 * X[:8], window=window)
    whole = model._memory.whole

    start = model.inducing_points.clone()
    before = float(model.bound_at(start).detach())
    model.optimize_points(maxiter=20)
    assert torch.equal(whole.values.Z, start)
    after = model.inducing_points
    moved = raw(X, Y, covar_module=kernel, inducing_points=start, window=window)
    reached = float(moved.bound_at(after).detach())
    assert reached >= before + gain
    assert model.num_observations == 60
    assert torch.equal(model.optimize_points(maxiter=0).inducing_points, after)


def test_merging_other_points_is_a_projection_that_says_so() -> None:
    """Rows are seen through their own points first, and through the merged model's points then."""
    X, Y = wave()
    kernel = KERNELS["rbf"]().double()
    one = raw(X[:30], Y[:30], covar_module=kernel, inducing_points=X[:10])
    two = raw(X[30:], Y[30:], covar_module=kernel, inducing_points=X[30:42])
    with pytest.warns(ProjectionWarning, match="projects the other model's memory"):
        merged = copy.deepcopy(one).merge(two)
    assert merged.num_observations == 60
    assert float(merged.elbo().detach()) < exact_log_marginal(kernel, X, Y)
    Z, others, test_X = X[:10], X[30:42], torch.rand(7, D, dtype=torch.float64)
    with torch.no_grad():
        between, inner = kernel(others, Z).to_dense(), kernel(others).to_dense()
        seen = kernel(X[30:], others).to_dense() @ torch.linalg.solve(inner, between)
        oracle = dense(one, kernel, X, Y, Z)
        oracle = replace(oracle, cross=torch.cat((oracle.cross[:30], seen)))
        mean, _ = oracle.predict(kernel(test_X, Z).to_dense(), kernel(test_X).to_dense())
    assert_close(merged.posterior(test_X).mean.squeeze(-1), mean + 0.3, factor=10)


def test_points_that_join_in_a_merge_lose_nothing_but_what_they_knew() -> None:
    X, Y = wave()
    kernel = KERNELS["rbf"]().double()
    options = {"covar_module": kernel, "allocator": OIPS(1.0 - 1e-6, prune=1.0)}
    one = raw(X[:30], Y[:30], inducing_points=X[:10], **options)
    two = raw(X[30:], Y[30:], inducing_points=X[30:42], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.merge(two)
    assert len(one.inducing_points) == 60
    with torch.no_grad():
        K = kernel(X).to_dense() + 0.05 * torch.eye(60)
        mean = 0.3 + kernel(X).to_dense() @ torch.linalg.solve(K, Y.squeeze(-1) - 0.3)
    assert float((one.posterior(X).mean.squeeze(-1) - mean).abs().max()) < 1e-6


def test_points_in_units_of_the_inputs() -> None:
    X, Y = wave()
    bounds = torch.tensor([[0.0] * D, [2.0] * D], dtype=torch.float64)
    model = OSGPR(X, Y, input_transform=Normalize(D, bounds=bounds), inducing_points=X[:9])
    assert torch.equal(model.inducing_points, X[:9] / 2.0)


def test_equal_rows_an_outlier_and_a_constant_column_do_not_break_it() -> None:
    model = OSGPR(*equal_rows())
    assert len(model.inducing_points) == 1
    assert_goes_on_after_odd_inputs(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"allocator": None}, ValueError, "neither"),
        ({"inducing_points": torch.rand(4, 2)}, BotorchTensorDimensionError, "M x 3"),
        ({"inducing_points": torch.rand(4, 3).float()}, InputDataError, "float64"),
        ({"inducing_points": torch.full((4, 3), math.nan).double()}, InputDataError, "finite"),
        ({"inducing_points": torch.rand(4, 3).double(), "max_points": 3}, ValueError, "at least 4"),
        ({"allocator": Fixed(None)}, InputDataError, "allocator"),
        ({"allocator": Fixed(torch.zeros(0, 3))}, InputDataError, "at least one"),
        ({"allocator": "OIPS"}, UnsupportedError, "such as OIPS.* got str"),
        ({"allocator": OIPS}, UnsupportedError, "got OIPS"),
        ({"allocator": GreedyVarianceReduction()}, UnsupportedError, "take GreedyVariance"),
        ({"max_points": 0}, ValueError, "max_points to be a whole number of at least 1, got 0"),
        ({"max_points": 10.5}, ValueError, "max_points to be a whole number"),
        ({"window": -1}, ValueError, "window to be a whole number of at least 0, got -1"),
        ({"window": 2.5}, ValueError, "window to be a whole number"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    X, Y = wave()
    with pytest.raises(error, match=message):
        OSGPR(X, Y, **options)


def test_too_many_points_are_said_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    X, Y = torch.rand(300, D, dtype=torch.float64), torch.rand(300, 1, dtype=torch.float64)
    fine = CoverTree(1e-4)
    model = OSGPR(X[:20], Y[:20], allocator=fine)
    before = model.posterior(X).mean.detach()
    monkeypatch.setattr(inducing_choice, "MEMORY_LIMIT_GIB", 1e-3)
    message = "300 inducing points would need .* smaller max_points"
    with pytest.raises(ValueError, match=message):
        model.update(X[20:], Y[20:])
    with pytest.raises(ValueError, match=message):
        OSGPR(X, Y, allocator=fine)
    with pytest.raises(ValueError, match=message):
        OSGPR(X, Y, inducing_points=X)
    assert len(OSGPR(X, Y, allocator=fine, max_points=100).inducing_points) == 100
    assert len(model.inducing_points) == 20
    assert model.num_observations == 20
    assert torch.equal(model.posterior(X).mean, before)
    more = torch.rand(30, D, dtype=torch.float64)
    assert len(model.update(more, more[:, :1]).inducing_points) == 50


@pytest.mark.parametrize(
    ("Z", "error", "message"),
    [
        (torch.rand(4, D + 1), BotorchTensorDimensionError, f"Z of shape `M x {D}`"),
        (torch.full((4, D), torch.nan), InputDataError, "Z to be finite"),
        (torch.rand(41, D), ValueError, "max_points of at least 41"),
    ],
)
def test_points_that_cannot_be_placed_change_nothing(
    Z: Tensor, error: type[Exception], message: str
) -> None:
    X, Y = wave()
    model = OSGPR(X, Y, max_points=40)
    before = model.posterior(X).mean.detach()
    with pytest.raises(error, match=message):
        model.place_points(Z.double())
    assert torch.equal(model.posterior(X).mean, before)


def test_an_allocator_that_fails_later_changes_nothing() -> None:
    X, Y = wave()
    model = OSGPR(X[:30], Y[:30])
    before = model.posterior(X).mean.detach()
    model.allocator = Fixed(None)
    with pytest.raises(InputDataError, match="Expected allocator to return"):
        model.update(X[30:], Y[30:])
    assert torch.equal(model.posterior(X).mean, before)
    assert model.num_observations == 30


class Counting(Fixed):
    """Counts its calls, as a tree grows by what it is shown."""

    calls = 0

    def _update(self, Z: Tensor, X_new: Tensor, kernel: Kernel) -> Tensor:
        self.calls += 1
        return super()._update(Z, X_new, kernel)


def test_what_fails_leaves_the_allocator_as_it_was() -> None:
    X, Y = wave()
    model, other = (OSGPR(part, Y[:30]) for part in (X[:30], X[30:]))
    model.allocator = Counting(None)
    allocator = model.allocator
    for fails in (lambda: model.update(X[30:], Y[30:]), lambda: model.merge(other)):
        with pytest.raises(InputDataError, match="Expected allocator to return"):
            fails()
    assert model.allocator is allocator
    assert allocator.calls == 0


def test_an_allocator_can_be_taken_away_and_given() -> None:
    X, Y = wave(60, 2)
    model = OSGPR(X[:20], Y[:20], allocator=OIPS(0.9))
    Z = model.inducing_points.clone()
    model.allocator = None
    assert torch.equal(model.update(X[20:40], Y[20:40]).inducing_points, Z)
    model.allocator = given = OIPS(0.99)
    assert model.allocator is not given
    assert len(model.update(X[40:], Y[40:]).inducing_points) > len(Z)
    with pytest.raises(UnsupportedError, match="Expected allocator to be one of"):
        model.allocator = "OIPS"  # type: ignore[assignment]


def test_options_may_be_changed_in_a_stream() -> None:
    X, Y = wave(60, 2)
    model = OSGPR(X[:20], Y[:20], window=8)
    before = model.process()
    model.allocator = OIPS(0.99)
    model.window, model.max_points = 3, 25
    assert model.process() is before
    model.update(X[20:], Y[20:])
    assert torch.equal(model._memory.rows.data.X, X[57:])
    assert 20 <= len(model.inducing_points) <= 25
    copied = copy.deepcopy(model)
    copied.window = 5
    assert (model.window, copied.window) == (3, 5)


def test_points_coarser_than_the_noise_are_said_once_after_a_fit() -> None:
    X = torch.rand(80, 2, dtype=torch.float64)
    Y = (9.0 * X).sin().prod(-1, keepdim=True) + 0.01 * torch.randn(80, 1).double()
    model = OSGPR(X, Y, max_points=8)
    model.posterior(X)
    with pytest.warns(CoarsePointsWarning, match=r"coarser than the noise. Raise max_points \(8\)"):
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    model.update(X[:9] / 2.0, Y[:9])
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    enough = OSGPR(X, Y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(enough.likelihood, enough))


def test_points_that_the_stream_outgrows_are_said() -> None:
    X, Y = torch.rand(200, 2, dtype=torch.float64), torch.randn(200, 1).double()
    kernel = RBFKernel().double()
    kernel.lengthscale = 0.05
    model = raw(X[:20], Y[:20], covar_module=kernel, max_points=30)
    with pytest.warns(CoarsePointsWarning, match="inducing points leave"):
        model.update(X[20:], Y[20:])


def test_a_merge_shows_the_allocator_no_row_of_this_model_again() -> None:
    data, more = observations(40), observations(5)
    models = [OSGPR(*data.astuple(), allocator=KMeans(8), window=12).eval() for _ in range(2)]
    models[0].merge(OSGPR(data.X[:0], data.Y[:0], inducing_points=models[0].inducing_points))
    for model in models:
        model.update(*more.astuple())
    assert torch.equal(models[0].inducing_points, models[1].inducing_points)
