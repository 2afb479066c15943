"""Local models against dense formulas, one by one and blended."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms.input import Normalize
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import LocalGP
from bo_stream.models import local
from bo_stream.testing.streams import assert_close
from tests.oracles.kernels import DenseKernel
from tests.oracles.local import blended_models, local_groups

KERNELS: dict[str, Callable[[], Kernel]] = {
    "rbf": lambda: _short(RBFKernel(ard_num_dims=2)),
    "matern": lambda: ScaleKernel(_short(MaternKernel(nu=1.5))),
    "linear plus periodic": lambda: AdditiveKernel(
        ScaleKernel(LinearKernel()), ScaleKernel(PeriodicKernel(ard_num_dims=2))
    ),
}

NOISE = 0.05
MEAN = 0.3


def _short(kernel: Kernel) -> Kernel:
    kernel.lengthscale = 0.3
    return kernel


def data(n: int = 60, d: int = 2) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, d, dtype=torch.float64)
    return X, (5.0 * X.sum(-1, keepdim=True)).sin() + 0.1 * torch.randn(n, 1).double()


def raw(X: Tensor, Y: Tensor, **options: object) -> LocalGP:
    """A model whose units are those of the data, with hyperparameters that a test knows."""
    model = LocalGP(X[:0], Y[:0], outcome_transform=None, **options)
    with torch.no_grad():
        model.mean_module.constant.fill_(MEAN)
        model.likelihood.noise = NOISE
    return model.eval().update(X, Y)


def one_by_one(X: Tensor, Y: Tensor, **options: object) -> LocalGP:
    model = raw(X[:1], Y[:1], **options)
    for x, y in zip(X[1:].split(1), Y[1:].split(1), strict=True):
        model.update(x, y)
    return model


def dense(kernel: Kernel) -> DenseKernel:
    def values(A: Tensor, B: Tensor) -> Tensor:
        with torch.no_grad():
            return kernel(A, B).to_dense()

    return values


def held(model: LocalGP) -> list[Tensor]:
    """Inputs of each local model, in the order of their age."""
    memory = model._memory
    counts = memory.entered.flatten().clamp_max(memory.size).tolist()
    return [memory.by_age(i).X[0, len(memory.rows) - n :] for i, n in enumerate(counts) if n]


def expected(
    X: Tensor, Y: Tensor, groups: list[list[int]], kernel: Kernel, nearest: int, T: Tensor
) -> tuple[Tensor, Tensor]:
    y = Y.squeeze(-1) - MEAN
    noise = torch.full_like(y, NOISE)
    models = [(X[rows], y[rows], noise[rows]) for rows in groups]
    mean, covariance = blended_models(models, dense(kernel), nearest, T)
    return mean + MEAN, covariance


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("nearest", "size"), [(1, 100), (3, 4), (99, 100)])
def test_one_by_one_is_the_paper(name: str, nearest: int, size: int) -> None:
    X, Y = data(16)
    kernel = KERNELS[name]().double()
    options = {"covar_module": kernel, "nearest": nearest, "max_size": size, "w_gen": 0.6}
    model = one_by_one(X, Y, **options)
    groups = local_groups(X, dense(kernel), 0.6, size)
    assert len(groups) > 1
    for found, rows in zip(held(model), groups, strict=True):
        assert_close(found, X[rows])
    T = torch.rand(9, 2, dtype=torch.float64)
    mean, covariance = expected(X, Y, groups, kernel, nearest, T)
    posterior = model.posterior(T)
    assert_close(posterior.mean.squeeze(-1).detach(), mean)
    assert_close(posterior.distribution.covariance_matrix.detach(), covariance)
    assert float(torch.linalg.eigvalsh(covariance)[0]) > -1e-10


def clusters(n: int) -> tuple[Tensor, Tensor]:
    """Rows of four far corners in turn."""
    corners = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0], [3.0, 3.0]]).double()
    X = corners.repeat(n // 4, 1) + 0.1 * torch.rand(n, 2, dtype=torch.float64)
    return X, X.sum(-1, keepdim=True).sin()


def test_where_models_are_far_apart_any_batching_is_one_by_one() -> None:
    X, Y = clusters(80)
    options = {"covar_module": KERNELS["rbf"]().double(), "max_size": 12}
    alone = one_by_one(X, Y, **options)
    T = 3.0 * torch.rand(5, 2, dtype=torch.float64)
    for batches in ([80], [1, 60, 19], [16] * 5):
        first, *others = zip(X.split(batches), Y.split(batches), strict=True)
        model = raw(*first, **options)
        for rows in others:
            model.update(*rows)
        assert model.num_models.tolist() == [4]
        for mine, theirs in zip(held(model), held(alone), strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(held(model)[1], X[1::4][-12:])
        assert model.num_observations == 80
        assert_close(model.posterior(T).mean, alone.posterior(T).mean)


def test_one_model_that_is_not_full_is_the_exact_gp() -> None:
    X, Y = data(40)
    kernel = KERNELS["matern"]().double()
    model = raw(X, Y, covar_module=kernel, w_gen=1e-6)
    T = torch.rand(6, 2, dtype=torch.float64)
    with torch.no_grad():
        K = kernel(X).to_dense() + NOISE * torch.eye(40)
        cross = kernel(T, X).to_dense()
        mean = MEAN + cross @ torch.linalg.solve(K, Y.squeeze(-1) - MEAN)
        covariance = kernel(T).to_dense() - cross @ torch.linalg.solve(K, cross.mT)
    normal = torch.distributions.MultivariateNormal(torch.full((40,), MEAN).double(), K)
    posterior = model.posterior(T)
    assert_close(posterior.mean.squeeze(-1).detach(), mean)
    assert_close(posterior.distribution.covariance_matrix.detach(), covariance)
    assert_close(model.log_marginal_likelihood().detach(), normal.log_prob(Y.squeeze(-1)))


def test_the_objective_and_its_gradient_are_sums_of_dense_ones() -> None:
    X, Y = data(50)
    kernel = KERNELS["matern"]().double()
    model = raw(X, Y, covar_module=kernel, max_size=9, w_gen=0.6)
    model.train()
    groups = [[int((x == X).all(-1).nonzero()) for x in rows] for rows in held(model)]
    assert len(groups) > 2
    total = torch.zeros(()).double()
    for rows in groups:
        K = kernel(X[rows]).to_dense() + model.likelihood.noise * torch.eye(len(rows))
        mean = model.mean_module.constant.expand(len(rows))
        normal = torch.distributions.MultivariateNormal(mean, K)
        total = total + normal.log_prob(Y[rows].squeeze(-1))
    value = model.log_marginal_likelihood()
    assert_close(value.detach(), total.detach())
    parameters = list(model.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(value, parameters), torch.autograd.grad(total, parameters), strict=True
    ):
        assert_close(ours, theirs)


def test_learning_finds_the_scales_of_the_data() -> None:
    """Of a signal of standard deviation 0.7, and of its noise of 0.1."""
    X, Y = data(200)
    model = LocalGP(X, Y, w_gen=0.05)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    error = (model.posterior(X).mean - (5.0 * X.sum(-1, keepdim=True)).sin()).square().mean()
    assert float(error.sqrt()) < 0.2  # small models beside each other lose most of what 200 say
    assert model.likelihood.noise.item() * float(Y.var()) == pytest.approx(0.01, rel=0.6)


def test_what_counts_half_has_twice_the_noise() -> None:
    X, Y = data(30)
    kernel = KERNELS["rbf"]().double()
    model = raw(X, Y, covar_module=kernel, w_gen=1e-6).forget(0.5)
    model.update(X[:1] + 0.01, Y[:1])
    rows, y = torch.cat((X, X[:1] + 0.01)), torch.cat((Y, Y[:1])).squeeze(-1) - MEAN
    noise = torch.cat((torch.full((30,), 2.0 * NOISE), torch.tensor([NOISE]))).double()
    T = torch.rand(6, 2, dtype=torch.float64)
    mean, covariance = blended_models([(rows, y, noise)], dense(kernel), 1, T)
    assert_close(model.posterior(T).mean.squeeze(-1).detach(), mean + MEAN)
    assert_close(model.posterior(T).distribution.covariance_matrix.detach(), covariance)
    assert model.num_observations == pytest.approx(16.0)


def test_models_that_did_not_change_are_not_forgotten() -> None:
    """Solving the touched models alone is solving all."""
    X, Y = data(90)
    model = raw(X[:60], Y[:60], covar_module=KERNELS["rbf"]().double(), max_size=8)
    T = torch.rand(9, 2, dtype=torch.float64)
    for x, y in zip(X[60:].split(3), Y[60:].split(3), strict=True):
        model.posterior(T)
        model.update(x, y)
        anew = copy.deepcopy(model)
        anew._set_memory(anew._memory)
        for mine, theirs in zip(
            (model.posterior(T).mean, model.posterior(T).variance),
            (anew.posterior(T).mean, anew.posterior(T).variance),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_merging_joins_twins_and_keeps_strangers() -> None:
    X, Y = clusters(80)
    options = {"covar_module": KERNELS["rbf"]().double(), "max_size": 12}
    near = X[:, 0] < 1.0
    mine, theirs = raw(X[near], Y[near], **options), raw(X[40:], Y[40:], **options)
    before = held(theirs)
    assert mine.merge(theirs) is mine
    assert mine.num_models.tolist() == [4]
    assert mine.num_observations == 80
    first, second = held(mine)[:2]
    assert torch.equal(first, torch.cat((X[near][::2], X[40::4]))[-12:])
    assert torch.equal(second, torch.cat((X[near][1::2], X[42::4]))[-12:])
    assert torch.equal(held(mine)[2], X[41::4])
    for former, now in zip(before, held(theirs), strict=True):
        assert torch.equal(former, now)


def test_a_larger_model_merges_its_newest() -> None:
    X, Y = clusters(80)
    kernel = KERNELS["rbf"]().double()
    small = raw(X[:0], Y[:0], covar_module=kernel, max_size=4)
    small.merge(raw(X, Y, covar_module=kernel, max_size=50))
    for found, rows in zip(held(small), (X[i::4] for i in range(4)), strict=True):
        assert torch.equal(found, rows[-4:])


def test_no_more_models_than_allowed() -> None:
    X, Y = clusters(40)
    model = raw(X, Y, covar_module=KERNELS["rbf"]().double(), max_models=3)
    assert model.num_models.tolist() == [3]
    assert sum(map(len, held(model))) == 40
    model.update(X + 20.0, Y)
    assert model.num_models.tolist() == [3]


def test_far_from_all_data_is_the_prior() -> None:
    X, Y = data()
    kernel = ScaleKernel(KERNELS["rbf"]()).double()
    model = raw(X, Y, covar_module=kernel)
    T = torch.full((1, 2), 50.0, dtype=torch.float64, requires_grad=True)
    posterior = model.posterior(T)
    assert float(posterior.mean.detach()) == pytest.approx(MEAN)
    assert float(posterior.variance.detach()) == pytest.approx(float(kernel.outputscale.detach()))
    (gradient,) = torch.autograd.grad(posterior.variance.sum() + posterior.mean.sum(), T)
    assert bool(gradient.isfinite().all())


def test_awkward_data_need_no_jitter() -> None:
    X = torch.full((2000, 2), 0.5, dtype=torch.float64)
    Y = torch.randn(2000, 1).double()
    model = LocalGP(X, Y, torch.zeros_like(Y[:1]).expand_as(Y) + 1e-9)
    model.update(torch.full((1, 2), 1e6).double(), torch.ones(1, 1).double(), Y[:1] ** 2)
    flat = torch.rand(50, 2).double() * torch.tensor([1.0, 0.0])
    model.update(flat, torch.randn(50, 1).double(), torch.full((50, 1), 1e-9).double())
    posterior = model.posterior(torch.cat((X[:3], flat)))
    assert bool(posterior.mean.isfinite().all())
    assert bool((posterior.variance > 0.0).all())
    assert model.numerical_log == ()
    assert model.num_observations == 2051


def test_every_device(device: torch.device) -> None:
    X, Y = data(90)
    T = torch.rand(5, 2, dtype=torch.float64)
    models = [LocalGP(X[:30].to(place), Y[:30].to(place), max_size=9) for place in (device, "cpu")]
    for model in models:
        place = model.train_targets.device
        model.posterior(T.to(place))
        model.update(X[30:].to(place), Y[30:].to(place)).merge(copy.deepcopy(model))
    found, wanted = (model.posterior(T.to(model.train_targets.device)) for model in models)
    assert found.mean.device.type == device.type
    assert_close(found.mean.cpu(), wanted.mean)
    assert_close(found.variance.cpu(), wanted.variance)
    assert_close(models[0].to("cpu").posterior(T).mean, wanted.mean)


def test_centres_are_of_transformed_inputs() -> None:
    X, Y = data(20)
    bounds = torch.tensor([[0.0, 0.0], [2.0, 2.0]]).double()
    model = LocalGP(X, Y, input_transform=Normalize(2, bounds=bounds), w_gen=1e-9)
    assert_close(model.centres, (X / 2.0).mean(0).view(1, 1, 2))


def test_retracting_is_refused_and_changes_nothing() -> None:
    X, Y = data()
    model = LocalGP(X, Y)
    before = model.posterior(X[:5]).mean
    with pytest.raises(UnsupportedError, match="cannot retract"):
        model.retract(X[:2], Y[:2])
    assert torch.equal(model.posterior(X[:5]).mean, before)
    assert model.num_observations == 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_size": 0}, "max_size to be a whole number of at least 1, got 0"),
        ({"max_size": 2.5}, "max_size to be a whole number"),
        ({"nearest": 0}, "nearest to be a whole number"),
        ({"max_models": 0}, "max_models to be a whole number"),
        ({"w_gen": 1.0}, r"w_gen in \(0, 1\)"),
        ({"w_gen": math.nan}, r"w_gen in \(0, 1\)"),
    ],
)
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalGP(*data(), **options)


@pytest.mark.parametrize("name", ["rbf", "matern"])
def test_inputs_far_from_zero_lose_no_digits(name: str) -> None:
    X = torch.randint(128, (24, 2)).double() / 64.0  # adding the distance to it is exact
    Y, far = X.sum(-1, keepdim=True).sin(), 2.0**20
    T = X[:9] + 0.125
    here, there = (one_by_one(at, Y, covar_module=KERNELS[name]()) for at in (X, X + far))
    expected, actual = here.posterior(T), there.posterior(T + far)
    assert_close(actual.mean, expected.mean)
    assert_close(actual.variance, expected.variance)
    likelihood = there.log_marginal_likelihood()
    assert_close(likelihood / 24, here.log_marginal_likelihood() / 24)


def test_outcomes_are_compared_with_averages_when_another_model_is_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in each update, which solves one local model again."""
    compared: list[None] = []
    monkeypatch.setattr(local, "_warn_of_neighbours", lambda *_: compared.append(None))
    X, Y = data(30)
    model = LocalGP(X, Y, torch.ones_like(Y), max_models=64)
    model.posterior(X)
    for rows in (X[:2], X[2:4]):
        model.update(rows, Y[:2], torch.ones(2, 1).double()).posterior(X)
    assert len(compared) == 1
    far, models = 50.0 + X[:1], int(model.num_models)
    model.update(far, Y[:1], torch.ones(1, 1).double()).posterior(X)
    assert int(model.num_models) == models + 1
    assert len(compared) == 2
    model.covar_module.lengthscale = 0.1
    model.posterior(X)
    assert len(compared) == 3
