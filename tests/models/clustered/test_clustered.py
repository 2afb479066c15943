"""Clustered data against the exact Gaussian process of the moved inputs."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms.input import Normalize
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import (
    Kernel,
    MaternKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from bo_stream import ClusteredGP, CoarsePointsWarning, ProjectionWarning
from bo_stream.allocation import CoverTree
from bo_stream.bases.inducing import frozen
from bo_stream.models import fitting
from bo_stream.models.clustered import inference as cluster_inference
from bo_stream.models.clustered.solver import CholeskySolver, ClusteredProcess, ConjugateGradients
from bo_stream.models.fitting import learn_hyperparameters
from bo_stream.testing.streams import assert_close, joint_covariance
from tests.oracles.clustered import kl_of_normals, moved_to_nearest
from tests.oracles.gaussian_process import DenseGP
from tests.oracles.reference import reference, reference_posterior
from tests.support.problems import observations
from tests.support.problems.inducing import (
    KERNELS,
    D,
    assert_goes_on_after_odd_inputs,
    equal_rows,
    wave,
)

NOISE = 0.05


def raw(X: Tensor, Y: Tensor, **options: object) -> ClusteredGP:
    """A model in the units of Y, of mean 0.3 and noise 0.05."""
    defaults = {"covar_module": RBFKernel(), "outcome_transform": None, "resolution": 0.3}
    model = ClusteredGP(X, Y, **{**defaults, **options})
    with torch.no_grad():
        model.mean_module.constant.fill_(0.3)
        model.likelihood.noise = torch.tensor(NOISE, dtype=torch.float64)
    return model.eval()


def streamed(
    X: Tensor, Y: Tensor, sizes: tuple[int, ...], **options: object
) -> tuple[ClusteredGP, Tensor]:
    """A model of batches, asked in between, and where each input was moved when it came."""
    first, *others = zip(X.split(list(sizes)), Y.split(list(sizes)), strict=True)
    model = raw(*first, **options)
    moved = [moved_to_nearest(first[0], model.centres)]
    for x, y in others:
        model.posterior(X[:2])
        model.update(x, y)
        moved.append(moved_to_nearest(x, model.centres))
    return model, torch.cat(moved)


def dense(kernel: Kernel, X: Tensor, Y: Tensor) -> DenseGP:
    mean = torch.full((1,), 0.3, dtype=X.dtype)
    noise = torch.full_like(Y.squeeze(-1), NOISE)
    return DenseGP(lambda a, b: kernel(a, b).to_dense(), mean, X, Y.squeeze(-1), noise)


@torch.no_grad()
def assert_is(model: ClusteredGP, gp: DenseGP, factor: float = 0.1) -> None:
    """Equal posterior (to 1e-9 in float64) and marginal likelihood."""
    T = torch.rand(7, gp.X.shape[-1]).to(gp.X)
    mean, covariance = gp.posterior(T)
    posterior = model.posterior(T)
    assert_close(posterior.mean.squeeze(-1), mean, factor)
    assert_close(posterior.distribution.covariance_matrix, covariance, factor)
    expected = gp.log_marginal_likelihood()
    assert_close(model.log_marginal_likelihood() / len(gp.X), expected / len(gp.X), 10 * factor)


# --- the posterior ------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("solver", ["cholesky", "cg"])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("sizes", [(36,), (12, 1, 23), tuple([1] * 36)])
def test_any_batching_is_the_exact_gp_of_the_moved_inputs(
    name: str, sizes: tuple[int, ...], solver: str
) -> None:
    X, Y = wave(36)
    kernel = KERNELS[name]().double()
    model, moved = streamed(X, Y, sizes, covar_module=kernel, solver=solver)
    assert 5 < len(model.centres) < 50
    assert_is(model, dense(kernel, moved, Y))


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_a_resolution_finer_than_the_data_is_the_exact_gp(solver: str) -> None:
    X, Y = wave(40)
    kernel = KERNELS["matern"]().double()
    model = raw(X, Y, covar_module=kernel, resolution=1e-6, solver=solver)
    assert len(model.centres) == 40
    assert_is(model, dense(kernel, X, Y))


@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
@pytest.mark.parametrize(("batch_shape", "outputs"), [((), 2), ((2,), 1), ((2,), 2)])
def test_batches_and_outputs_share_centres(
    batch_shape: tuple[int, ...], outputs: int, noise: str
) -> None:
    stream = observations(50, D, outputs, batch_shape).with_noise(noise)
    shape = torch.Size((*batch_shape, *([outputs] if outputs > 1 else [])))
    kernel = ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape).double()
    model = ClusteredGP(
        *stream.astuple(),
        likelihood=GaussianLikelihood(batch_shape=shape).double() if noise != "known" else None,
        covar_module=kernel,
        resolution=0.4,
    )
    moved, T = moved_to_nearest(stream.X, model.centres), torch.rand(5, D, dtype=torch.float64)
    arguments = (moved, stream.Y, stream.Yvar, lambda a, b: kernel(a, b).to_dense())
    with torch.no_grad():
        gp = reference(model, *arguments)
        mean, covariance = reference_posterior(
            model, moved, stream.Y, T, stream.Yvar, kernel=arguments[-1]
        )
        posterior = model.eval().posterior(T)
    assert_close(posterior.mean, mean, 0.1)
    assert_close(joint_covariance(posterior), covariance, 0.1)
    assert_close(model.log_marginal_likelihood().detach(), gp.log_marginal_likelihood())
    assert model.cluster_sizes.sum(-1).eq(50).all()


def test_few_observations_do_not_solve_anew_and_many_do() -> None:
    X, Y = wave(200)
    model = raw(X[:100], Y[:100])
    model.posterior(X[:1])
    before = model._cache
    model.update(X[100:101], Y[100:101]).posterior(X[:1])
    model.update(X[101:102], Y[101:102]).posterior(X[:1])
    assert model._cache.process.base is before.process
    model.update(X[102:], Y[102:]).posterior(X[:1])
    assert type(model._cache.process) is type(before.process)


def test_fantasies_are_not_moved() -> None:
    X, Y = wave()
    kernel = KERNELS["rbf"]().double()
    model, moved = streamed(X, Y, (60,), covar_module=kernel)
    new_X, new_Y = wave(4)
    conditioned = model.condition_on_observations(new_X, new_Y)
    gp = dense(kernel, torch.cat((moved, new_X)), torch.cat((Y, new_Y)))
    T = torch.rand(5, D, dtype=torch.float64)
    with torch.no_grad():
        mean, covariance = gp.posterior(T)
        posterior = conditioned.posterior(T)
    assert_close(posterior.mean.squeeze(-1), mean)
    assert_close(posterior.distribution.covariance_matrix, covariance)


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_the_prior_before_any_data(solver: str) -> None:
    X, Y = wave()
    kernel = KERNELS["rbf"]().double()
    model = raw(X[:0], Y[:0], covar_module=kernel, solver=solver)
    assert model.centres.shape == (0, D)
    posterior = model.posterior(X)
    assert_close(posterior.mean.detach(), torch.full_like(Y, 0.3))
    assert_close(posterior.distribution.covariance_matrix.detach(), kernel(X).to_dense().detach())
    assert float(model.log_marginal_likelihood().detach()) == 0.0
    assert float(model.stochastic_objective().detach()) == 0.0
    assert float(model.kl_divergence()) == 0.0
    model.update(X, Y)
    assert_is(model, dense(kernel, moved_to_nearest(X, model.centres), Y))


def test_inputs_are_transformed_before_they_are_moved() -> None:
    X, Y = wave()
    bounds = torch.tensor([[0.0] * D, [2.0] * D], dtype=torch.float64)
    kernel = KERNELS["rbf"]().double()
    model = raw(X, Y, covar_module=kernel, input_transform=Normalize(D, bounds=bounds))
    assert float(model.centres.max()) <= 0.5
    moved = moved_to_nearest(X / 2.0, model.centres)
    mean, _ = dense(kernel, moved, Y).posterior(X / 2.0)
    assert_close(model.posterior(X).mean.squeeze(-1).detach(), mean.detach(), 0.1)


# --- solvers and dtypes -------------------------------------------------------------------------


def test_the_number_of_centres_decides_on_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    X, Y = wave()
    assert isinstance(raw(X, Y).process().solver, CholeskySolver)
    monkeypatch.setattr(cluster_inference, "CHOLESKY_CENTRES", 10)
    assert isinstance(raw(X, Y).process().solver, ConjugateGradients)
    assert isinstance(raw(X, Y, solver="cholesky").process().solver, CholeskySolver)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_conjugate_gradients_reach_their_tolerance(dtype: torch.dtype) -> None:
    Z = torch.rand(2, 1, 300, 2, dtype=dtype)
    root = 5.0 * torch.rand(2, 1, 300, 1, dtype=dtype)
    kernel = RBFKernel().to(dtype)
    kernel.lengthscale = 0.2
    with torch.no_grad():
        Q = torch.eye(300, dtype=dtype) + root * kernel(Z).to_dense() * root.mT
    columns = torch.randn(4, 2, 1, 300, 3, dtype=dtype)
    columns[..., 1] = 0.0
    for tolerance in (1e-2, 1e-4):
        solution = ConjugateGradients.of(Q, tolerance).solve(columns)
        residual = (Q @ solution - columns).norm(dim=-2)
        assert bool((residual <= 3.0 * tolerance * columns.norm(dim=-2)).all())
        exact = torch.cholesky_solve(columns.double(), torch.linalg.cholesky(Q.double()))
        error = (solution - exact).norm(dim=-2)
        assert bool((error <= 3.0 * tolerance * columns.norm(dim=-2)).all())


def crowded(n: int = 3000) -> tuple[Tensor, Tensor, Kernel]:
    """Inputs so dense for a smooth kernel that float32 cannot factorise its matrix."""
    X = torch.rand(n, 2, dtype=torch.float64)
    Y = (6.0 * X[:, :1]).sin() + 0.2 * torch.randn(n, 1).double()
    kernel = RBFKernel().double()
    kernel.lengthscale = 0.5
    return X, Y, kernel


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_single_precision_throughout_without_jitter(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, Y, kernel = crowded()
    monkeypatch.setattr("bo_stream.linalg.JITTERS", (0.0,))
    options = {"covar_module": kernel, "resolution": 0.05}
    exact = raw(X, Y, **options)
    model = raw(X, Y, solver=solver, arithmetic=torch.float32, **options)
    process = model.process()
    assert isinstance(process, ClusteredProcess)
    held = (process.Z, process.root, process.solution, *vars(process.solver).values())
    assert {t.dtype for t in held if isinstance(t, Tensor)} == {torch.float32}
    with torch.no_grad():
        K = copy.deepcopy(kernel).float()(process.Z).to_dense()
        assert int(torch.linalg.cholesky_ex(K).info) > 0  # inducing points would need jitter
        ours, theirs = (m.posterior(X[:50]) for m in (model, exact))
    assert float((ours.mean - theirs.mean).abs().max()) < 2e-3
    assert float((ours.variance / theirs.variance - 1.0).abs().max()) < 0.1
    assert float(ours.variance.min()) > 0.0


def test_a_large_number_of_centres_by_conjugate_gradients() -> None:
    X, Y, kernel = crowded(2200)
    kernel.lengthscale = 0.05
    options = {"covar_module": kernel, "resolution": 0.015}
    exact = raw(X, Y, **options)
    model = raw(X, Y, solver="cg", arithmetic=torch.float32, **options)
    assert len(model.centres) > 1000
    T = X[:20]
    ours, theirs = (m.posterior(T) for m in (model, exact))
    assert_close(ours.mean.detach().float(), theirs.mean.detach())
    assert_close(ours.variance.detach().float(), theirs.variance.detach())


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_a_condition_beyond_single_precision_is_solved_in_double(solver: str) -> None:
    X, Y = wave()
    X = X.float().double()  # every row is a centre, in both models at one and the same place
    options = {"resolution": 1e-5, "solver": solver}
    single = _almost_noise_free(X, Y, arithmetic=torch.float32, **options)
    T = X[:9] + 0.05
    with pytest.warns(NumericalWarning, match=r"condition number .* solves in float64"):
        ours = single.posterior(T)
    double = _almost_noise_free(X, Y, **options)
    assert_close(ours.mean, double.posterior(T).mean, factor=100.0)
    assert_close(ours.variance.log(), double.posterior(T).variance.log(), factor=100.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        single.fantasize(T[:4], SobolQMCNormalSampler(torch.Size([2]))).posterior(T[4:])
        likelihood, expected = single.log_marginal_likelihood(), double.log_marginal_likelihood()
    assert_close(likelihood / expected, torch.ones(()).double())
    assert [event.what for event in single.numerical_log] == [
        "solved in float64 instead of float32"
    ]


def test_a_fit_beyond_single_precision_is_recorded_once() -> None:
    X, Y = wave()
    model = _almost_noise_free(X, Y, arithmetic=torch.float32, resolution=1e-5)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    mll.train()
    with pytest.warns(NumericalWarning, match="solves in float64"):
        model.compute_custom_loss(mll)
    for _ in range(3):
        model.compute_custom_loss(mll)
    assert [event.times for event in model.numerical_log] == [1]
    mll.eval()
    model.posterior(X)
    assert [event.times for event in model.numerical_log] == [2]


@pytest.mark.parametrize("arithmetic", [torch.float64, torch.float32])
def test_the_kernel_is_copied_once_for_a_posterior(
    arithmetic: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, Y = wave()
    model, copies = raw(X, Y, arithmetic=arithmetic, resolution=0.3), []

    def counted(kernel: Kernel, dtype: torch.dtype) -> Kernel:
        copies.append(dtype)
        return frozen(kernel, dtype)

    monkeypatch.setattr(cluster_inference, "frozen", counted)
    model.posterior(X)
    assert copies == [arithmetic]


def _almost_noise_free(X: Tensor, Y: Tensor, **options: object) -> ClusteredGP:
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(1e-12)).double()
    kernel = MaternKernel(nu=1.5).double()
    model = raw(X, Y, likelihood=likelihood, covar_module=kernel, **options)
    with torch.no_grad():
        model.likelihood.noise = 1e-8
    return model


# --- learning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["learned", "mixed"])
@pytest.mark.parametrize("name", KERNELS)
def test_the_marginal_likelihoods_gradient(name: str, noise: str) -> None:
    stream = observations(40, D).with_noise(noise)
    kernel = KERNELS[name]().double()
    likelihood = GaussianLikelihood().double()
    model = ClusteredGP(
        *stream.astuple(), likelihood=likelihood, covar_module=kernel, resolution=0.4
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_((0.3 * torch.randn_like(parameter)).exp()).add_(0.1)
    moved = moved_to_nearest(stream.X, model.centres)
    gp = reference(model, moved, stream.Y, stream.Yvar, kernel=lambda a, b: kernel(a, b).to_dense())
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(gp.log_marginal_likelihood(), parameters)
    actual = torch.autograd.grad(model.log_marginal_likelihood(), parameters)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)


def test_a_fit_from_memory_alone_finds_hyperparameters() -> None:
    X = torch.rand(1500, 2, dtype=torch.float64)
    Y = (6.0 * X[:, :1]).sin() + 0.1 * torch.randn(1500, 1).double()
    model = ClusteredGP(X, Y, resolution=0.08)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    lengthscale = model.covar_module.lengthscale.flatten().tolist()
    assert lengthscale[1] > 3.0 * lengthscale[0]
    T = torch.rand(200, 2, dtype=torch.float64)
    error = model.posterior(T).mean - (6.0 * T[:, :1]).sin()
    assert float(error.square().mean().sqrt()) < 0.05


@pytest.mark.parametrize("name", ["rbf", "matern"])
def test_kl_divergence_is_that_of_the_values_at_the_centres(name: str) -> None:
    X, Y = wave(80)
    kernel = KERNELS[name]().double()
    model = raw(X, Y, covar_module=kernel, resolution=0.4)
    Z = model.centres
    with torch.no_grad():
        mean, covariance = dense(kernel, moved_to_nearest(X, Z), Y).posterior(Z)
        expected = kl_of_normals(mean - 0.3, covariance, torch.zeros(len(Z)), kernel(Z).to_dense())
    assert_close(model.kl_divergence(), expected, factor=100)


# --- memory -------------------------------------------------------------------------------------


def assert_same(a: ClusteredGP, b: ClusteredGP, factor: float = 1.0) -> None:
    T = torch.rand(6, D, dtype=torch.float64)
    for name in ("mean", "variance"):
        ours, theirs = (getattr(m.posterior(T), name).detach() for m in (a, b))
        assert_close(ours, theirs, factor)
    assert_close(a.log_marginal_likelihood().detach(), b.log_marginal_likelihood().detach(), factor)
    assert a.num_observations == pytest.approx(b.num_observations)


@pytest.mark.parametrize("known", [False, True])
def test_a_cluster_that_was_emptied_says_nothing(known: bool) -> None:
    (X, Y), (far, wrong) = wave(), wave(5)
    Yvar = 1e-4 + 0.2 * torch.rand_like(Y) if known else None
    more = (far + 10.0, 1e3 * wrong, 3e-4 * torch.rand_like(wrong) if known else None)
    model = ClusteredGP(X, Y, Yvar, covar_module=RBFKernel(), resolution=0.3).eval()
    never = copy.deepcopy(model)
    model.update(*more).retract(*more)
    assert len(model.centres) > len(never.centres)
    assert int((model.cluster_sizes == 0).sum()) == len(model.centres) - len(never.centres)
    assert_same(model, never)


def test_what_was_not_observed_cannot_be_retracted() -> None:
    X, Y = wave()
    model = raw(X, Y)
    before = model.posterior(X).mean.detach()
    with pytest.raises(InputDataError, match="more in one cluster than it holds"):
        model.retract(X[:1].expand(59, -1) + 5.0, Y[:59])
    assert torch.equal(model.posterior(X).mean, before)
    assert model.num_observations == 60


def test_an_observation_whose_nearest_centre_changed_leaves_another_cluster() -> None:
    """Retraction then is refused where that cluster holds too little, as the class says."""
    X = torch.tensor([[0.0], [0.5]], dtype=torch.float64)
    model = raw(X[:1], X[:1], resolution=0.5).update(X[1:] - 0.1, X[1:])
    assert len(model.centres) == 1
    model.update(torch.tensor([[0.7]]).double(), X[1:])
    model.retract(torch.tensor([[0.7]]).double(), X[1:])
    assert len(model.centres) == 2
    with pytest.raises(InputDataError, match="centres nearer to them have been added since"):
        model.retract(X[1:] - 0.1, X[1:])
    assert model.cluster_sizes.tolist() == [2.0, 0.0]


def test_merging_models_of_one_tree_is_exact() -> None:
    X, Y = wave()
    tree = CoverTree(0.3).insert(X)
    one, two, both = (
        raw(X[rows], Y[rows], tree=tree) for rows in (slice(30), slice(30, 60), slice(60))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.merge(two)
    assert torch.equal(one.centres, both.centres)
    assert_same(one, both)


def test_merging_unites_trees_that_are_apart() -> None:
    X, Y = wave()
    kernel = KERNELS["rbf"]().double()
    one = raw(X[:30], Y[:30], covar_module=kernel)
    two = raw(X[30:] + 3.0, Y[30:], covar_module=kernel)
    moved = [moved_to_nearest(X[:30], one.centres), moved_to_nearest(X[30:] + 3.0, two.centres)]
    one.merge(two)
    assert one._memory.tree.average
    assert_is(one, dense(kernel, torch.cat(moved), Y))


def test_merging_trees_that_differ_moves_twice_and_says_so() -> None:
    X, Y = wave()
    kernel = KERNELS["rbf"]().double()
    one = raw(X[:30], Y[:30], covar_module=kernel)
    two = raw(X[30:], Y[30:], covar_module=kernel)
    moved = [moved_to_nearest(X[:30], one.centres), moved_to_nearest(X[30:], two.centres)]
    with pytest.warns(ProjectionWarning, match="moves clusters of the other model"):
        one.merge(two)
    again = moved_to_nearest(moved[1], one.centres)
    assert float((again - moved[1]).norm(dim=-1).max()) <= 0.3
    assert_is(one, dense(kernel, torch.cat((moved[0], again)), Y))


def test_a_coarser_resolution_joins_clusters() -> None:
    X, Y = wave()
    kernel = KERNELS["matern"]().double()
    model, moved = streamed(X, Y, (60,), covar_module=kernel, resolution=0.2)
    fine = len(model.centres)
    model.resolve(0.9)
    assert model.resolution == 0.8
    assert len(model.centres) < fine
    assert float(model.cluster_sizes.sum()) == 60
    assert_is(model, dense(kernel, moved_to_nearest(moved, model.centres), Y))


def test_a_finer_resolution_is_for_what_comes() -> None:
    X, Y = wave(100)
    kernel = KERNELS["matern"]().double()
    model, moved = streamed(X[:60], Y[:60], (60,), covar_module=kernel, resolution=0.4)
    coarse = len(model.centres)
    model.resolve(0.15)
    assert model.resolution == 0.1
    assert_is(model, dense(kernel, moved, Y[:60]))
    model.update(X[60:], Y[60:])
    assert len(model.centres) > coarse
    new = moved_to_nearest(X[60:], model.centres)
    assert float((new - X[60:]).norm(dim=-1).max()) <= 0.1
    assert_is(model, dense(kernel, torch.cat((moved, new)), Y))


def test_a_resolution_before_any_data() -> None:
    X, Y = wave()
    model = raw(X[:0], Y[:0], resolution=0.5).resolve(0.1).update(X, Y)
    assert torch.equal(model.centres, raw(X, Y, resolution=0.1).centres)


@pytest.mark.parametrize("resolution", [0.0, -1.0, math.nan, math.inf])
def test_a_resolution_is_a_length(resolution: float) -> None:
    X, Y = wave()
    model = raw(X, Y)
    for verb in (model.resolve, lambda r: raw(X, Y, resolution=r)):
        with pytest.raises(ValueError, match="resolution to be positive and finite"):
            verb(resolution)
    assert model.resolution == 0.3


def test_the_users_tree_is_copied() -> None:
    X, Y = wave()
    tree = CoverTree(0.3).insert(X[:5])
    levels = tree.levels
    model = raw(X, Y, tree=tree)
    model.resolve(0.1)
    assert all(a is b for a, b in zip(tree.levels, levels, strict=True))
    assert len(model.centres) > len(tree.centres)


def test_a_file_goes_on_as_the_model(tmp_path: Path) -> None:
    X, Y = wave()
    model = raw(X[:40], Y[:40])
    model.save(tmp_path / "model.pt")
    loaded = ClusteredGP.load(tmp_path / "model.pt")
    assert_same(loaded.update(X[40:], Y[40:]), model.update(X[40:], Y[40:]), factor=0.0)


def test_on_a_device(device: torch.device) -> None:
    X, Y = (t.to(device) for t in wave())
    model = raw(X[:40], Y[:40]).to(device).update(X[40:], Y[40:])
    other = raw(X[:40].cpu(), Y[:40].cpu()).to(device).update(X[40:], Y[40:])
    assert model.posterior(X).mean.device.type == device.type
    assert_close(model.posterior(X).mean.detach(), other.posterior(X).mean.detach())


# --- bad input ----------------------------------------------------------------------------------


def test_too_many_centres_are_said_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    X, Y = wave(300)
    model = raw(X[:20], Y[:20], resolution=1e-3)
    before = model.posterior(X).mean.detach()
    monkeypatch.setattr(cluster_inference, "MEMORY_LIMIT_GIB", 1e-3)
    message = r"300 centres at a resolution of 0\.001 would need 0\.0 GiB .* coarser resolution"
    with pytest.raises(ValueError, match=message):
        model.update(X[20:], Y[20:])
    with pytest.raises(ValueError, match=message):
        raw(X, Y, resolution=1e-3)
    assert len(model.centres) == 20
    assert torch.equal(model.posterior(X).mean, before)


def test_equal_rows_an_outlier_and_a_constant_column_do_not_break_it() -> None:
    model = ClusteredGP(*equal_rows())
    assert len(model.centres) == 1
    assert_goes_on_after_odd_inputs(model)


@pytest.mark.matrix
@pytest.mark.parametrize("solver", ["cholesky", "cg"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("far", [1e4, 1e8, 1e12])
def test_far_outliers_leave_the_others_as_they_were(
    far: float, dtype: torch.dtype, solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpytorch squares distances from the mean: of the others' no digit would be left."""
    monkeypatch.setitem(fitting._FIT_OPTIONS, "maxiter", 8)
    X, Y = (t.float().double() for t in wave())
    options = {"arithmetic": dtype, "solver": solver}
    model, alone = raw(X, Y, **options), raw(X, Y, **options)
    outliers = torch.stack((torch.full((D,), far), torch.full((D,), -30.0 * far))).double()
    model.update(outliers, torch.full((2, 1), 5.0).double())
    for part in (model, alone):
        with torch.no_grad():
            part.covar_module.lengthscale = 0.5  # all is solved anew
    test = torch.rand(9, D).double()
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {}
    torch.testing.assert_close(model.posterior(test).mean, alone.posterior(test).mean, **tolerance)
    loss = model.log_marginal_likelihood()
    (gradient,) = torch.autograd.grad(loss, model.covar_module.raw_lengthscale)
    (expected,) = torch.autograd.grad(
        alone.log_marginal_likelihood(), alone.covar_module.raw_lengthscale
    )
    torch.testing.assert_close(gradient, expected, **{**tolerance, "rtol": 1e-3, "atol": 1e-3})
    learn_hyperparameters(model)
    assert bool(model.posterior(test).variance.isfinite().all())


def test_a_stochastic_objective_needs_probes_and_rows() -> None:
    model = raw(*wave())
    with pytest.raises(ValueError, match="probes to be a whole number of at least 1, got 0"):
        model.stochastic_objective(probes=0)
    with pytest.raises(ValueError, match="batch_size to be a whole number of at least 1, got -2"):
        model.stochastic_objective(batch_size=-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("far", [1e4, 1e8, 1e12])
def test_a_far_outlier_among_others_leaves_them_as_they_were(
    far: float, dtype: torch.dtype
) -> None:
    """In an update that the solved posterior is conditioned on, and in a prediction."""
    X, Y = (t.float().double() for t in wave())
    model, alone = (raw(X[:50], Y[:50], arithmetic=dtype) for _ in range(2))
    outlier = torch.full((1, D), far).double()
    for part in (model, alone):
        part.posterior(X)
    model.update(torch.cat((X[50:], outlier)), torch.cat((Y[50:], Y[:1])))
    alone.update(X[50:], Y[50:])
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {}
    found = model.posterior(torch.cat((X, outlier))).mean
    torch.testing.assert_close(found[:-1], alone.posterior(X).mean, **tolerance)
    assert found[-1].item() == pytest.approx(0.3 + (Y[0].item() - 0.3) / 1.05, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"solver": "lu"}, ValueError, "solver"),
        ({"cg_tolerance": 0.0}, ValueError, "cg_tolerance"),
        ({"arithmetic": torch.float16}, ValueError, "arithmetic"),
        ({"tree": 0.3}, UnsupportedError, "CoverTree or None, got float"),
        ({"tree": CoverTree(0.3).insert(torch.rand(4, 2))}, BotorchTensorDimensionError, "n x 2"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    X, Y = wave()
    with pytest.raises(error, match=message):
        ClusteredGP(X, Y, **options)


@pytest.mark.filterwarnings("ignore:Data .input features.")
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_default_resolution_is_about_the_exact_gp(scale: float) -> None:
    X, Y = wave(40)
    kernel = RBFKernel().double()
    kernel.lengthscale = 0.4 * scale
    X = scale * X
    model = ClusteredGP(X[:15], Y[:15], covar_module=kernel, outcome_transform=None)
    model.likelihood.noise = 0.05
    model.eval()
    for rows in torch.arange(15, 40).split(5):
        model.update(X[rows], Y[rows])
        model.posterior(X)
    assert len(model.centres) == 40
    test_X = scale * torch.rand(9, X.shape[-1], dtype=torch.float64)
    with torch.no_grad():
        cross, K = kernel(test_X, X).to_dense(), kernel(X).to_dense()
        mean = cross @ torch.linalg.solve(K + 0.05 * torch.eye(40), Y)
        assert torch.allclose(model.posterior(test_X).mean, mean, atol=1e-2)
    nothing = ClusteredGP(X[:0], Y[:0])
    assert nothing.resolution == ClusteredGP(X[:1], Y[:1]).resolution == 1e-4


@pytest.mark.filterwarnings("ignore:At a resolution of")
def test_too_many_centres_double_the_default_resolution() -> None:
    X, Y = wave(300)
    model = ClusteredGP(X[:100], Y[:100], covar_module=RBFKernel().double(), max_centres=60).eval()
    model.posterior(X)
    resolutions = [model.resolution]
    for rows in torch.arange(100, 300).split(50):
        model.update(X[rows], Y[rows])
        assert len(model.centres) <= 60
        assert float(model.cluster_sizes.sum()) == model.num_observations
        resolutions.append(model.resolution)
        kept = model.posterior(X).mean
        solved = model.process()
        model._set_memory(model._memory)
        assert torch.allclose(model.posterior(X).mean, kept, atol=1e-8)
        assert model.process() is not solved
    assert resolutions == sorted(resolutions)
    distances = torch.cdist(X, model.centres).amin(-1)
    assert float(distances.max()) <= model.resolution
    other = ClusteredGP(X[:100] + 2.0, Y[:100], covar_module=RBFKernel().double())
    with pytest.warns(ProjectionWarning, match="moves clusters"):
        model.merge(other)
    assert len(model.centres) <= 60
    fine = ClusteredGP(X, Y, resolution=1e-4, max_centres=60)
    assert len(fine.centres) == 300


def test_centres_coarser_than_the_noise_are_said_once_after_a_fit() -> None:
    X = torch.rand(40, 1, dtype=torch.float64)
    Yvar = torch.full_like(X, 1e-5)
    Y = (9.0 * X).sin() + Yvar.sqrt() * torch.randn_like(X)
    model = ClusteredGP(X, Y, Yvar, max_centres=12)
    with pytest.warns(CoarsePointsWarning, match=r"coarser than the noise.* max_centres \(12\)"):
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    model.update(2.0 * X, Y, Yvar)
    model.train()
    model.posterior(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enough = ClusteredGP(X, Y, Yvar)
        enough.covar_module.load_state_dict(model.covar_module.state_dict())
        enough.posterior(X)
    given = ClusteredGP(X, Y, Yvar, resolution=0.1)
    given.covar_module.load_state_dict(model.covar_module.state_dict())
    with pytest.warns(CoarsePointsWarning, match="coarser than the noise.* finer resolution"):
        given.posterior(X)


def test_centres_that_the_stream_outgrows_are_said() -> None:
    X, Y = torch.rand(200, 2, dtype=torch.float64), torch.randn(200, 1).double()
    kernel = RBFKernel().double()
    kernel.lengthscale = 0.05
    model = ClusteredGP(X[:20], Y[:20], covar_module=kernel, max_centres=30)
    model.posterior(X)
    with pytest.warns(CoarsePointsWarning, match="times the noise variance"):
        model.update(X[20:], Y[20:])


@pytest.mark.parametrize("outputs", [1, 2])
def test_what_moves_of_inputs_change_is_measured(outputs: int) -> None:
    kernel = RBFKernel(batch_shape=torch.Size((2, outputs) if outputs > 1 else (2,))).double()
    X, Y = torch.rand(2, 40, 3).double(), torch.randn(2, 40, outputs).double()
    model = ClusteredGP(X, Y, covar_module=kernel, resolution=0.3)
    moved = moved_to_nearest(X, model.centres)
    steps = moved - X
    expected = steps.square().mean(-2).sqrt()
    assert_close(model._memory.typical_move(), expected)
    between = 2.0 - 2.0 * (-0.5 * (steps / kernel.lengthscale.mean()).square().sum(-1)).exp()
    change = cluster_inference.variance_between(model._memory, model.prior)
    assert change.shape == (2, outputs)
    assert torch.allclose(change, between.mean(-1, keepdim=True).expand(2, outputs), rtol=0.05)
    half = ClusteredGP(X[:, :20], Y[:, :20], covar_module=kernel, tree=model._memory.tree)
    other = ClusteredGP(X[:, 20:], Y[:, 20:], covar_module=kernel, tree=model._memory.tree)
    half.merge(other).forget(0.5)
    assert_close(half._memory.typical_move(), expected)
    model.retract(X[:, :20], Y[:, :20]).retract(X[:, 25:], Y[:, 25:])
    assert_close(model._memory.typical_move(), steps[:, 20:25].square().mean(-2).sqrt())


def test_a_number_of_centres_is_positive() -> None:
    X, Y = wave(9)
    with pytest.raises(ValueError, match="max_centres"):
        ClusteredGP(X, Y, max_centres=0)
