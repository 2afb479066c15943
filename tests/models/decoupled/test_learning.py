"""How decoupled models learn: growth, steps, optima, trainings that go on, and bad input."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.exceptions.errors import InputDataError, ModelFittingError, UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Log, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.mlls import VariationalELBO
from torch import Tensor
from torch.utils.data import TensorDataset

from bo_stream import DecoupledGP
from bo_stream.models.decoupled.learner import DecoupledLearner
from bo_stream.models.stochastic import training
from bo_stream.testing.streams import (
    assert_gradient,
    assert_same_posterior,
    assert_untouched,
    fingerprint,
    joint_covariance,
)
from tests.oracles.inducing import SGPR
from tests.oracles.kernels import dense_kernel
from tests.support.problems.likelihoods import LIKELIHOODS, OTHERS, outcomes

D = 2
NOISE = 0.01


def data(n: int = 200, outputs: int = 1) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, D, dtype=torch.float64)
    phase = 6.0 * X[:, :1] + torch.arange(outputs)
    return X, phase.sin() + X[:, 1:] ** 2 + NOISE**0.5 * torch.randn(n, outputs).double()


def small(X: Tensor, Y: Tensor, **options: Any) -> DecoupledGP:
    """Learning from the median trick on; what comes before steps is tested in ``test_start``."""
    defaults = {"num_mean": 40, "num_covar": 10, "num_added": 8, "initial_points": 0}
    return DecoupledGP(X, Y, **{**defaults, **options})


def fixed_kernel() -> ScaleKernel:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=D)).double()
    kernel.base_kernel.lengthscale = 0.4
    return kernel.requires_grad_(False)


def sizes(model: DecoupledGP) -> tuple[int, int]:
    posterior = model._memory.posterior
    return len(posterior.alpha), posterior.covariance.weights()[1].shape[-1]


# --- growth -------------------------------------------------------------------------------------


@pytest.mark.parametrize("parametrization", ["spectral", "hybrid", "direct"])
def test_bases_grow_by_the_minibatch_to_their_caps(parametrization: str) -> None:
    X, Y = data()
    model = small(X[:0], Y[:0], parametrization=parametrization)
    assert sizes(model) == (0, 0)
    found = [sizes(model.update(X[i : i + 20], Y[i : i + 20])) for i in range(0, 160, 20)]
    assert found[0] == (8, 8)
    for before, after in pairwise(found):
        assert all(0 <= b - a <= 8 for a, b in zip(before, after, strict=True))
    assert found[-1] == (40, 10)
    model.fit(3)
    assert sizes(model) == (40, 10)


def test_growth_changes_no_posterior_and_repeats_no_point() -> None:
    X, Y = data()
    model = small(X, Y, update_steps=0, num_mean=30, parametrization="hybrid")
    model.fit(1, progress=False)
    before = model.posterior(X[:5])
    inference = model._inference
    sizes = inference.growth, inference.schedule
    learner = DecoupledLearner(model._memory, model.prior, *sizes, growing=True)
    learner.grow(X[:, :].flip(0))
    learner.grow(X.flip(0))
    model._set_memory(learner.memory)
    after = model.posterior(X[:5])
    torch.testing.assert_close(after.mean, before.mean)
    torch.testing.assert_close(joint_covariance(after), joint_covariance(before))
    posterior = model._memory.posterior
    points = torch.cat((posterior.alpha.points, posterior.beta.points), -2)[0]
    assert len(points.unique(dim=0)) == len(points) == 40


def test_a_direct_model_begins_both_bases_at_the_same_inputs() -> None:
    X, Y = data()
    model = small(X, Y, parametrization="direct", update_steps=0)
    posterior = model._memory.posterior
    assert torch.equal(posterior.alpha.points, posterior.beta.points)


def test_the_median_trick() -> None:
    X, Y = data()
    X = X * torch.tensor([10.0, 1.0])
    model = small(X, 3.0 * Y, update_steps=0)
    scale = X.std(0)
    median = torch.pdist(X / scale).median()
    torch.testing.assert_close(model.covar_module.base_kernel.lengthscale[0], median * scale)
    torch.testing.assert_close(model.covar_module.outputscale, 9.0 * Y.var())
    torch.testing.assert_close(model.likelihood.noise[0], 9.0 * Y.var())
    torch.testing.assert_close(model.mean_module.constant, 3.0 * Y.mean())


def test_hyperparameters_that_are_given_are_kept() -> None:
    X, Y = data()
    kernel, likelihood = fixed_kernel(), LIKELIHOODS["gaussian"]()
    noise = likelihood.noise.clone()
    model = small(X, Y, covar_module=kernel, likelihood=likelihood, update_steps=0)
    assert torch.equal(model.covar_module.base_kernel.lengthscale, kernel.base_kernel.lengthscale)
    assert torch.equal(model.likelihood.noise, noise)


# --- steps --------------------------------------------------------------------------------------


def test_one_whole_step_is_the_best_covariance() -> None:
    """All data at a natural rate of 1: Titsias's optimum, as batch SGPR has it."""
    X, Y = data(60)
    likelihood, kernel = LIKELIHOODS["gaussian"]().requires_grad_(False), fixed_kernel()
    kernel.base_kernel.lengthscale = 0.1
    options: dict[str, Any] = {"learning_rate": 0.0, "natural_rate": 1.0}
    model = small(X, Y, likelihood=likelihood, covar_module=kernel, **options)
    Z, noise = model._memory.posterior.beta.points[0], torch.full((60,), float(likelihood.noise))
    cross, inner = dense_kernel(kernel, X, Z), dense_kernel(kernel, Z, Z)
    oracle = SGPR(dense_kernel(kernel, X, X), cross, inner, Y[:, 0], noise.double())
    T = torch.rand(5, D).double()
    _, covariance = oracle.predict(dense_kernel(kernel, T, Z), dense_kernel(kernel, T, T))
    found = joint_covariance(model.posterior(T))[0]
    torch.testing.assert_close(found, covariance, rtol=1e-8, atol=1e-8)


@pytest.mark.matrix
@pytest.mark.fixed_seed
@pytest.mark.parametrize("parametrization", ["spectral", "hybrid", "direct"])
def test_the_mean_reaches_the_best_in_both_bases(parametrization: str) -> None:
    """Given hyperparameters and points: subset-of-regressors regression on all of them."""
    X, Y = data(60)
    likelihood = LIKELIHOODS["gaussian"]().requires_grad_(False)
    model = small(
        X,
        Y,
        likelihood=likelihood,
        covar_module=fixed_kernel(),
        learning_rate=0.0,
        natural_rate=0.5,
        mean_rate=0.5,
        parametrization=parametrization,
        num_columns=15,
        num_mean=20,
    )
    model.fit(300, progress=False)
    posterior = model._memory.posterior
    Z = torch.cat((posterior.alpha.points[0], posterior.beta.points[0])).unique(dim=0)
    cross, inner = (dense_kernel(model.covar_module, A, Z) for A in (X, Z))
    constant, noise = float(model.mean_module.constant.detach()), float(likelihood.noise)
    target = cross.mT @ (Y[:, 0] - constant) / noise
    best = torch.linalg.solve(inner + cross.mT @ cross / noise, target)
    expected = constant + cross @ best
    torch.testing.assert_close(model.posterior(X).mean[:, 0], expected, rtol=0, atol=1e-2)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"parametrization": "direct"},
        pytest.param(  # of seven seeds two had not passed the bound of their start after 200 steps
            {"parametrization": "direct", "preconditioner": "jacobi"},
            marks=pytest.mark.fixed_seed,
        ),
        {"preconditioner": None},
        {"parametrization": "hybrid"},
        {"parametrization": "hybrid", "lengthscale_factors": True},
        {"learn_mean_points": True},
        {"learn_mean_points": True, "lengthscale_factors": True},
        {"covar_module": "matern"},
    ],
    ids=str,
)
def test_training_raises_the_bound_and_predicts_better(options: dict[str, Any]) -> None:
    X, Y = data(300)
    if "covar_module" in options:
        options = {"covar_module": ScaleKernel(MaternKernel(ard_num_dims=D)).double()}
    model = small(X[:250], Y[:250], batch_size=100, num_columns=20, initial_points=80, **options)
    before, error = float(model.elbo()), (model.posterior(X[250:]).mean - Y[250:]).square().mean()
    model.fit(100, progress=False)
    assert float(model.elbo()) > before + 50.0
    after = (model.posterior(X[250:]).mean - Y[250:]).square().mean()
    assert float(after) < 0.5 * float(error) or float(after) < 2.0 * NOISE
    assert float(model.posterior(X).variance.min()) > 0.0


@pytest.mark.matrix
@pytest.mark.parametrize("name", OTHERS)
def test_learns_under_any_likelihood(name: str) -> None:
    X = torch.rand(200, D, dtype=torch.float64)
    Y = outcomes(name, X)
    model = small(X, Y, likelihood=LIKELIHOODS[name](), batch_size=80)
    before = float(model.elbo())
    model.fit(40, progress=False)
    assert float(model.elbo()) > before + 5.0
    assert bool(model.predictive(X[:4]).variance.gt(0.0).all())
    assert bool(model.log_predictive(X[:4], Y[:4]).isfinite().all())


def test_all_hyperparameters_are_learned_and_fixed_ones_are_not() -> None:
    X, Y = data()
    model = small(X, Y, update_steps=0)
    model.mean_module.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.fit(5, progress=False)
    moved = {n: not torch.equal(p, before[n]) for n, p in model.named_parameters()}
    assert moved.pop("mean_module.raw_constant") is False
    assert all(moved.values()), moved


def test_botorch_fits_hyperparameters_to_the_bound() -> None:
    X, Y = data(80)
    model = small(X, Y)
    model.fit(20, progress=False)
    before = float(model.elbo())
    mll = VariationalELBO(model.likelihood, model, 80)
    fit_gpytorch_mll(
        mll,
        optimizer_kwargs={"options": {"maxiter": 5}},
        max_attempts=1,
        warning_handler=lambda _: True,
    )
    assert float(model.elbo()) > before


# --- trainings ----------------------------------------------------------------------------------


def test_two_trainings_are_one() -> None:
    """Minibatches, moments, growth and schedules go on where they ended."""
    X, Y = data()
    once, twice = small(X, Y, batch_size=50), small(X, Y, batch_size=50)
    once.fit(30, progress=False)
    twice.fit(11, progress=False)
    assert twice.fit(19, progress=False).trace[-1][0] == twice.num_steps == 31
    assert_same_posterior(once, twice, X[:6], factor=10)
    torch.testing.assert_close(once.elbo(), twice.elbo(), rtol=1e-8, atol=1e-8)


def test_a_diverging_training_goes_back_and_says_so() -> None:
    X, Y = data()
    model = small(X, Y, learning_rate=1e4, update_steps=0)
    with pytest.raises(ModelFittingError, match=r"learning_rate.*got 10000.*smaller"):
        model.fit(500, progress=False)
    assert bool(model.elbo().isfinite())
    assert bool(model.posterior(X[:5]).mean.isfinite().all())


def test_an_update_that_breaks_hyperparameters_changes_nothing() -> None:
    X, Y = data()
    model = small(X[:0], Y[:0], learning_rate=1e4)
    before = fingerprint(model)
    with pytest.raises(ModelFittingError, match=r"no longer finite.*learning_rate.*got 10000"):
        model.update(X, Y)
    assert_untouched(model, before)


def test_an_interrupt_leaves_a_model_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    X, Y = data()
    model = small(X, Y)
    steps = iter(range(1000))
    clock = training.time.monotonic

    def monotonic() -> float:
        if next(steps) == 60:
            raise KeyboardInterrupt
        return clock()

    monkeypatch.setattr(training.time, "monotonic", monotonic)
    with pytest.raises(KeyboardInterrupt):
        model.fit(500, progress=False)
    monkeypatch.undo()
    assert model.num_steps == 51
    assert model.fit(4, progress=False).steps == 4
    assert bool(model.elbo().isfinite())


def test_a_failed_update_changes_nothing() -> None:
    X, Y = data()
    model = small(X, Y, batch_size=100)
    model.posterior(X[:2])
    before = fingerprint(model)
    other = small(X[:0], Y[:0], batch_size=100)
    empty = fingerprint(other)
    with pytest.raises(ValueError, match="minibatch of 1 to 20"):
        other.update(X[:20], Y[:20])
    assert_untouched(other, empty)
    with pytest.raises(InputDataError):
        model.update(X[:3], Y[:3] / 0.0)
    assert_untouched(model, before)


@pytest.mark.parametrize("parametrization", ["spectral", "hybrid", "direct"])
def test_a_cleared_model_keeps_its_functions_and_learns_anew(parametrization: str) -> None:
    X, Y = data()
    model = small(X, Y, parametrization=parametrization)
    model.fit(10, progress=False)
    points = model._memory.posterior.alpha.points
    assert model.clear().num_observations == model.num_steps == 0
    assert torch.equal(model._memory.posterior.alpha.points, points)
    mean = model.posterior(X[:5]).mean
    torch.testing.assert_close(mean, model.mean_module.constant.detach().expand_as(mean))
    model.update(X, Y).fit(40, progress=False)
    assert float((model.posterior(X).mean - Y).square().mean()) < 3.0 * NOISE


# --- data ---------------------------------------------------------------------------------------


def test_a_sample_of_the_stream_stands_for_all_of_it() -> None:
    """The bound of a bounded store is, on average over samples, that of everything."""
    X, Y = data(120)
    whole = small(X, Y, update_steps=0)
    bounds = []
    for seed in range(20):
        part = small(X, Y, update_steps=0, max_rows=30, seed=seed)
        part._set_memory(
            copy.copy(part._memory).__class__(
                **{**part._memory.__dict__, "posterior": whole._memory.posterior}
            )
        )
        assert part.num_observations == 120
        assert part._memory.replay.held == 30
        bounds.append(part.elbo())
    draws = torch.stack(bounds)
    error = float(draws.std()) / len(draws) ** 0.5
    assert abs(float(draws.mean() - whole.elbo())) < 4.0 * error


def test_learns_from_a_data_set() -> None:
    X, Y = data()
    model = DecoupledGP.from_dataset(
        TensorDataset(X, Y),
        num_mean=40,
        num_covar=10,
        batch_size=60,
        initial_points=50,
        outcome_transform=Standardize(1),
    )
    assert model.num_observations == 200
    before = float(model.elbo())
    model.fit(30, progress=False)
    assert float(model.elbo()) > before
    assert float((model.posterior(X).mean - Y).square().mean()) < 3.0 * NOISE
    with pytest.raises(UnsupportedError, match="ConcatDataset"):
        model.update(X[:3], Y[:3])
    spoilt = DecoupledGP.from_dataset(TensorDataset(X, Y), num_mean=40, num_covar=10)
    Y[50] = torch.nan
    with pytest.raises(InputDataError, match="Y to be finite"):
        spoilt.fit(5, progress=False)


def test_units_do_not_matter() -> None:
    """Standardised outcomes and normalised inputs: the same model in other units.

    The units differ by powers of two and inputs have few digits, so that not one rounding differs:
    training takes decisions that a rounding can turn.
    """
    X, Y = data()
    X = (2.0**20 * X).round() / 2.0**20
    plain = small(X, Y, outcome_transform=Standardize(1))
    scaled = small(
        4.0 + 16.0 * X,
        8.0 * Y,
        outcome_transform=Standardize(1),
        input_transform=Normalize(D, bounds=torch.tensor([[4.0, 4.0], [20.0, 20.0]]).double()),
    )
    for model in (plain, scaled):
        model.fit(10, progress=False)
    first, second = plain.posterior(X[:5]), scaled.posterior(4.0 + 16.0 * X[:5])
    torch.testing.assert_close(second.mean, 8.0 * first.mean)
    torch.testing.assert_close(second.variance, 64.0 * first.variance)


def test_outputs_are_learned_each_alone() -> None:
    X, Y = data(outputs=2)
    both, alone = (small(X, y, initial_points=0) for y in (Y, Y[:, 1:]))
    for model in (both, alone):
        model.fit(10, progress=False)
    assert_same_posterior(both.subset_output([1]), alone, X[:5])


# --- acquisition --------------------------------------------------------------------------------


def test_acquisition_functions_can_be_optimised() -> None:
    X, Y = data(100)
    model = small(X, Y)
    model.fit(30, progress=False)
    bounds = torch.tensor([[0.0] * D, [1.0] * D]).double()
    sampler = SobolQMCNormalSampler(torch.Size([8]), seed=0)
    functions = (
        qNegIntegratedPosteriorVariance(model, torch.rand(16, D).double()),
        qLogExpectedImprovement(model, best_f=Y.max(), sampler=sampler),
    )
    points = torch.rand(1, 2, D).double()
    for function in functions:
        assert_gradient(lambda X, function=function: function(X).sum(), points)
        chosen, value = optimize_acqf(
            function, bounds, 2, num_restarts=1, raw_samples=2, options={"maxiter": 3}
        )
        assert chosen.shape == (2, D)
        assert bool(value.isfinite())


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_columns": 41}, ValueError, "num_columns of at most num_mean = 40, got 41"),
        ({"num_mean": 9}, ValueError, "num_mean of at least num_covar = 10, got 9"),
        ({"num_mean": -1}, ValueError, "num_mean"),
        ({"num_added": 0}, ValueError, "num_added"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": 300}, ValueError, "minibatch of 1 to 200 observations.*got 300"),
        ({"batch_size": 30, "max_rows": 20}, ValueError, "batch_size of at most max_rows = 20"),
        ({"max_rows": 0}, ValueError, "max_rows"),
        ({"update_steps": -1}, ValueError, "update_steps"),
        ({"learning_rate": -0.1}, ValueError, "learning_rate"),
        ({"natural_rate": 0.0}, ValueError, "natural_rate"),
        ({"natural_rate": 1.5}, ValueError, "natural_rate"),
        ({"parametrization": "other"}, ValueError, "parametrization"),
        ({"preconditioner": "full"}, ValueError, "preconditioner"),
        ({"lengthscale_factors": True}, ValueError, "learn_mean_points.*or the parametriz"),
        ({"num_span": 9}, ValueError, "num_span of num_covar = 10 to num_mean = 40, got 9"),
        ({"num_span": 41}, ValueError, "num_span"),
        ({"mean_rate": 0.0}, ValueError, "mean_rate"),
        (
            {
                "lengthscale_factors": True,
                "parametrization": "hybrid",
                "covar_module": MaternKernel(),
            },
            UnsupportedError,
            "RBFKernel.*got MaternKernel",
        ),
        ({"outcome_transform": Log()}, UnsupportedError, "outcome_transform"),
        ({"likelihood": BernoulliLikelihood()}, InputDataError, "Y that a BernoulliLikelihood"),
    ],
    ids=str,
)
def test_refuses(options: dict[str, Any], error: type[Exception], match: str) -> None:
    X, Y = data()
    with pytest.raises(error, match=match):
        small(X, Y, **options)


def test_refuses_to_learn_from_nothing() -> None:
    X, Y = data()
    model = small(X[:0], Y[:0])
    for verb in (model.fit, model.elbo_estimate):
        with pytest.raises(InputDataError, match="empty stream"):
            verb()
    assert float(model.elbo()) == 0.0


def test_says_what_it_cannot_do() -> None:
    X, Y = data()
    model = small(X, Y)
    model.posterior(X[:2])
    before = fingerprint(model)
    for verb, match in (
        (lambda: model.retract(X[:2], Y[:2]), "cannot retract"),
        (lambda: model.forget(0.5), "forget.*max_rows"),
        (lambda: model.merge(small(X, Y)), "cannot be merged"),
        (lambda: model.condition_on_observations(X[:1], Y[:1]).fit(1), "hypothetical"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            verb()
    assert_untouched(model, before)


def test_on_a_device(device: torch.device, dtype: torch.dtype) -> None:
    X, Y = (t.to(device, dtype) for t in data())
    model = small(X, Y)
    model.fit(10, progress=False)
    posterior = model.posterior(X[:4])
    assert (posterior.mean.device.type, posterior.mean.dtype) == (device.type, dtype)
    assert bool(model.elbo_estimate().isfinite())
