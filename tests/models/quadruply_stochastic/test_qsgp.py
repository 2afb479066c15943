"""QSGP against dense formulas, its options, and what it refuses."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.acquisition.logei import qLogExpectedImprovement
from botorch.exceptions.errors import InputDataError, ModelFittingError, UnsupportedError
from botorch.models.transforms.input import Normalize
from botorch.models.utils.gpytorch_modules import get_gaussian_likelihood_with_lognormal_prior
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, StudentTLikelihood
from torch import Tensor
from torch.utils.data import TensorDataset

from bo_stream.likelihoods.outcome_model import LogisticLikelihood
from bo_stream.models.quadruply_stochastic import function_process
from bo_stream.models.quadruply_stochastic.memory import (
    Chevron,
    FourierFeatures,
    InducingAtData,
    MeanField,
)
from bo_stream.models.quadruply_stochastic.qsgp import QSGP
from bo_stream.testing.streams import assert_close, central_differences
from bo_stream.warnings import WideVarianceWarning
from tests.oracles.weight_space import WeightSpace
from tests.support.problems.weights import dense_precision

DIM = 2


def _data(n: int = 30, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    X = torch.rand(n, DIM, dtype=dtype)
    return X, torch.sin(4.0 * X.sum(-1, keepdim=True)) + 0.1 * torch.randn(n, 1, dtype=dtype)


def _kernel(scale: float = 1.3) -> ScaleKernel:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=DIM)).double()
    kernel.base_kernel.lengthscale = torch.tensor([0.5, 0.7])
    kernel.outputscale = scale
    return kernel


def _likelihood(noise: float = 0.05) -> GaussianLikelihood:
    likelihood = GaussianLikelihood().double()
    likelihood.noise = noise
    return likelihood


def _model(X: Tensor, Y: Tensor, **options: Any) -> QSGP:
    defaults: dict[str, Any] = {
        "likelihood": _likelihood(),
        "covar_module": _kernel(),
        "outcome_transform": None,
        "basis": FourierFeatures(10),
        "empirical_bayes": False,
        "update_steps": 0,
    }
    return QSGP(X, Y, **{**defaults, **options})


def _space(model: QSGP, X: Tensor, Y: Tensor) -> WeightSpace:
    """The model's weights, dense."""
    basis = model._memory.basis(model.covar_module)
    index = torch.arange(basis.size)
    functions, precision = basis.functions(X, index)[0], dense_precision(basis)[0]
    y = Y[:, 0] - model.mean_module.constant
    space = WeightSpace(functions, precision, y, model.likelihood.noise[0])
    return WeightSpace(*(part.detach() for part in vars(space).values()))


# --- what it converges to -----------------------------------------------------------------------


BASES = (FourierFeatures(10), InducingAtData(8))


@pytest.mark.parametrize("basis", BASES)
def test_with_all_columns_the_exact_posterior_is_the_optimum(basis: Any) -> None:
    """There the bound is the log marginal likelihood, its slope zero, and the process exact."""
    X, Y = _data()
    size = 10 if isinstance(basis, FourierFeatures) else 8
    model = _model(X, Y, basis=basis, covariance=Chevron(size))
    space, progress = _space(model, X, Y), model._memory.progress
    exact = space.posterior()
    root = torch.linalg.cholesky(exact.covariance)
    progress.coefficients[0] = torch.cat((exact.mean.unsqueeze(-1), root.tril(-1)), -1)
    progress.log_scale[0] = root.diagonal().log()
    assert_close(model.elbo(), space.log_marginal_likelihood(), factor=100)
    _, gradient = model.elbo_gradient_estimate(torch.Generator())
    for slope in (gradient.coefficients, gradient.log_scale):
        assert_close(slope, torch.zeros_like(slope), factor=1e4)
    T = torch.rand(5, DIM, dtype=torch.float64)
    functions = model._memory.basis(model.covar_module).functions(T, torch.arange(size))[0].detach()
    assert_close(model.process().mean(T)[0], functions @ exact.mean)
    if isinstance(basis, FourierFeatures):
        covariance = functions @ exact.covariance @ functions.mT
        assert_close(model.process().covariance(T)[0], covariance)


@pytest.mark.parametrize("basis", BASES)
def test_steps_lead_there(basis: Any) -> None:
    X, Y = _data()
    size = 10 if isinstance(basis, FourierFeatures) else 8
    kernel = ScaleKernel(MaternKernel(nu=0.5)).double()  # of a well conditioned matrix
    options = {"covariance": Chevron(size), "learning_rate": 0.5, "covar_module": kernel}
    model = _model(X, Y, basis=basis, **options)
    best, before = float(_space(model, X, Y).log_marginal_likelihood()), float(model.elbo())
    model.fit(steps=400, progress=False)
    assert best - 0.05 * (best - before) < float(model.elbo()) < best


def test_a_mean_field_has_the_diagonal_of_proposition_1() -> None:
    X, Y = _data()
    model = _model(X, Y)
    model.fit(steps=3, progress=False)
    weights = model.process().weights  # type: ignore[attr-defined]
    space = _space(model, X, Y)
    assert_close(weights.scale[0], space.best_diagonal())
    mean, C = weights.mean[0], torch.diag(weights.scale[0])
    assert_close(model.elbo(), space.bound(mean, C))


def test_the_estimated_bound_is_the_bound_on_average() -> None:
    X, Y = _data()
    model = _model(X, Y, batch_size=7, functions=4, covariance=Chevron(2), control_points=5)
    model.fit(steps=20, progress=False)
    generator = torch.Generator().manual_seed(0)
    estimates = torch.stack([model.elbo_estimate(generator) for _ in range(150)])
    error = float(estimates.std()) / 150**0.5
    assert abs(float(estimates.mean() - model.elbo())) < 4.0 * error
    torch.manual_seed(3)
    first = model.elbo_estimate()
    torch.manual_seed(3)
    assert torch.equal(first, model.elbo_estimate())


@pytest.mark.parametrize("basis", [FourierFeatures(10), InducingAtData(8)])
def test_the_bound_is_differentiable_in_the_hyperparameters(
    basis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, Y = _data()
    model = _model(X, Y, basis=basis, covariance=Chevron(2))
    model.fit(steps=5, progress=False)
    inference, basis = model._inference, model._memory.basis(model.covar_module)
    held = inference.moments(model._memory, model.prior, basis)
    monkeypatch.setattr(type(inference), "moments", lambda *_: held)
    raw = model.covar_module.base_kernel.raw_lengthscale

    def bound(value: Tensor) -> Tensor:
        with torch.no_grad():
            raw.copy_(value)
        return model.inference.objective(model.memory, None, model.prior)[0].sum()

    (slope,) = torch.autograd.grad(bound(raw.detach().clone()), raw)
    expected = central_differences(bound, raw.detach().clone())
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-4)


# --- inducing points ----------------------------------------------------------------------------


def test_the_variance_of_proposition_4() -> None:
    """That of one function more at the point, uncorrelated with the others."""
    X, Y = _data(12)
    model = _model(X, Y, basis=InducingAtData(), covar_module=_kernel())
    model.fit(steps=3, progress=False)
    space, T = _space(model, X, Y), torch.rand(4, DIM, dtype=torch.float64)
    kernel = model.covar_module
    for x in T:
        values = kernel(X, x.unsqueeze(0)).to_dense()[:, 0].detach()
        own = kernel(x.unsqueeze(0)).to_dense()[0, 0].detach()
        wide = space.with_function(values, values, own)  # its values at data are its row of S
        scale = wide.best_diagonal()[-1]
        inner = values.square() @ space.best_diagonal().square()
        found = model.posterior(x.unsqueeze(0)).variance.squeeze()
        assert_close(found, inner + scale.square() * own.square())


def test_far_from_all_points_the_variance_is_the_priors() -> None:
    X, Y = _data(12)
    model = _model(X, Y, basis=InducingAtData(), covar_module=_kernel(1.7))
    model.fit(steps=3, progress=False)
    far = torch.full((2, DIM), 50.0, dtype=torch.float64) + torch.eye(DIM, dtype=torch.float64)
    expected = model.covar_module(far).to_dense().detach()
    assert_close(model.posterior(far).distribution.covariance_matrix, expected)


def test_points_come_with_the_data_up_to_a_limit() -> None:
    X, Y = _data(20)
    model = _model(X[:5], Y[:5], basis=InducingAtData(12), functions=4, update_steps=4)
    sizes = [model._memory.layout.size]
    for rows in (slice(5, 9), slice(9, 20)):
        model.update(X[rows], Y[rows])
        sizes.append(model._memory.layout.size)
    assert sizes == [5, 9, 12]
    control = model._memory.progress.control
    assert control is not None
    everything = torch.arange(12)
    columns = model._memory.progress.dense_columns(everything)
    assert_close(control.values, control.functions(everything) @ columns)


# --- the process --------------------------------------------------------------------------------


@pytest.mark.parametrize("basis", [FourierFeatures(30), InducingAtData()])
def test_functions_that_are_not_kept_give_the_same(
    basis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, Y = _data()
    model = _model(X, Y, basis=basis, covariance=Chevron(3))
    model.fit(steps=20, progress=False)
    T = torch.rand(3, 4, DIM, dtype=torch.float64, requires_grad=True)
    found = []
    for kept, numbers in ((4096, 1 << 21), (0, 60)):
        monkeypatch.setattr(function_process, "KEPT", kept)
        monkeypatch.setattr(function_process, "NUMBERS", numbers)
        fantasy = model.fantasize(T, SobolQMCNormalSampler(torch.Size([2]), seed=1))
        parts = []
        for one in (model, fantasy):
            posterior = one.posterior(T.flip(0) + 0.01)
            parts += [posterior.mean, posterior.variance, posterior.distribution.covariance_matrix]
        slope = torch.autograd.grad(sum(part.sin().sum() for part in parts), T)[0]
        found.append([*(part.detach() for part in parts), slope])
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


def test_a_hundred_thousand_functions_predict_and_condition() -> None:
    X, Y = _data(dtype=torch.float32)
    model = QSGP(X, Y, basis=FourierFeatures(100_000), functions=1000, arithmetic=torch.float32)
    assert model._memory.progress.coefficients.dtype == torch.float32
    conditioned = model.condition_on_observations(X[:2], Y[:2])
    before, after = (m.posterior(X[:4]).variance for m in (model, conditioned))
    assert bool((after < before).all())
    assert after.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:A not p.d.")  # of two candidates that meet
@pytest.mark.parametrize("basis", [FourierFeatures(40), InducingAtData()])
def test_acquisition_functions_of_botorch(basis: Any) -> None:
    X, Y = _data()
    model = _model(X, Y, basis=basis, update_steps=30)
    bounds = torch.tensor([[0.0] * DIM, [1.0] * DIM], dtype=torch.float64)
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
    points = torch.rand(20, DIM, dtype=torch.float64)
    for acquisition in (
        qNegIntegratedPosteriorVariance(model, mc_points=points),
        qLogExpectedImprovement(model, best_f=0.5, sampler=sampler),
    ):
        start = torch.rand(1, 2, DIM, dtype=torch.float64)
        options = {"batch_initial_conditions": start, "num_restarts": 1, "raw_samples": None}
        best, value = optimize_acqf(acquisition, bounds, q=2, **options)
        assert float(value) > float(acquisition(start))
        assert best.shape == (2, DIM)


# --- learning -----------------------------------------------------------------------------------


def test_fits_go_on_where_they_stopped() -> None:
    X, Y = _data()
    options: dict[str, Any] = {"empirical_bayes": True, "initial_points": 0, "freeze_steps": 8}
    once, twice = (_model(X, Y, batch_size=9, **options) for _ in range(2))
    for model in (once, twice):  # the noise may be raised at the end of a call
        model.likelihood.noise_covar.raw_noise.requires_grad_(False)
    assert once.fit(steps=20, progress=False).steps == 20
    twice.fit(steps=11, progress=False)
    twice.fit(steps=9, progress=False)
    for one, other in zip(once.parameters(), twice.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(once.posterior(X).mean, twice.posterior(X).mean)
    moved = once.covar_module.base_kernel.lengthscale
    assert not torch.equal(moved, _kernel().base_kernel.lengthscale)


@pytest.mark.parametrize("covariance", [MeanField(), Chevron(3)])
def test_a_fit_raises_a_noise_that_is_too_small_for_its_errors(
    covariance: MeanField | Chevron,
) -> None:
    X, Y = _data()
    Y = torch.cat([Y, 3.0 * Y.flip(0) + 1.0], -1)  # the second one's noise is large enough
    likelihood = get_gaussian_likelihood_with_lognormal_prior(torch.Size([2])).double()
    likelihood.noise = torch.tensor([[1e-3], [20.0]])
    options: dict[str, Any] = {"outcome_transform": None, "initial_points": 0, "update_steps": 0}
    basis = FourierFeatures(10)
    model = QSGP(X, Y, likelihood, basis=basis, covariance=covariance, **options)
    model.fit(steps=6, progress=False)
    with torch.no_grad():
        posterior, noise = model.posterior(X), model.likelihood.noise.squeeze(-1)
        wrong = (Y - posterior.mean).square().mean(0)
        said = posterior.variance.mean(0) + noise.detach()
        assert float(noise[1]) == 20.0
    width = math.log(wrong[0] / 1e-3) / 2**7  # of the interval that was left
    assert abs(math.log(wrong[0] / said[0])) <= width


def test_more_functions_than_the_data_determine_are_warned_of() -> None:
    X, Y = _data(150)
    options: dict[str, Any] = {"update_steps": 0, "initial_points": 0, "learning_rate": 0.3}
    many = QSGP(X, Y, basis=FourierFeatures(4_000), **options)
    with pytest.warns(WideVarianceWarning, match=r"basis=FourierFeatures\(1000\)"):
        wide = many.fit(steps=60, progress=False)
    assert wide.coverage is not None
    assert wide.coverage > 0.97
    few = QSGP(X, Y, basis=FourierFeatures(20), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", WideVarianceWarning)
        few.fit(steps=60, progress=False)


@pytest.mark.parametrize("options", [{"hyper_rate": 0.0}, {"empirical_bayes": False}])
def test_a_noise_that_is_not_learned_stays(options: dict[str, Any]) -> None:
    X, Y = _data()
    likelihood = _likelihood(1e-3)
    model = QSGP(X, Y, likelihood, basis=FourierFeatures(10), initial_points=0, **options)
    model.fit(steps=6, progress=False)
    assert torch.equal(model.likelihood.noise, likelihood.noise)


def test_hyperparameters_begin_with_an_exact_gp() -> None:
    X, Y = _data(60)
    model = QSGP(X, Y, basis=FourierFeatures(60), update_steps=0)
    model.fit(steps=300, progress=False)
    noise = float(model.noise_level().detach() * model.outcome_scale().square())
    assert noise == pytest.approx(0.01, rel=0.8)
    T, expected = _data(200)
    assert float((model.posterior(T).mean - expected).std()) < 0.2


def test_updates_learn_and_a_bounded_store_counts_all() -> None:
    X, Y = _data(400)
    model = _model(X[:50], Y[:50], basis=FourierFeatures(60), max_rows=80, update_steps=30)
    before = float((model.posterior(X).mean - Y).std())
    for rows in torch.arange(50, 400).split(50):
        model.update(X[rows], Y[rows])
    assert model.num_observations == 400
    assert model._memory.replay.held == 80
    assert float((model.posterior(X).mean - Y).std()) < before


def test_a_data_set_is_read_a_minibatch_at_a_time() -> None:
    """In steps as from tensors: the same rows in the same units."""
    X, Y = _data(200)
    options: dict[str, Any] = {"basis": FourierFeatures(40), "update_steps": 0, "batch_size": 150}
    whole = QSGP(X, 3.0 + 2.0 * Y, empirical_bayes=False, **options)
    read = QSGP.from_dataset(TensorDataset(X, 3.0 + 2.0 * Y), empirical_bayes=False, **options)
    assert read.num_observations == 200
    scales = [model.outcome_scale() for model in (whole, read)]
    assert not torch.equal(*scales)  # of the first minibatch
    for model in (whole, read):
        model.fit(steps=150, progress=False)
    T, expected = _data(100)
    for model in (whole, read):
        assert float((model.posterior(T).mean - 3.0 - 2.0 * expected).std()) < 0.4
    assert bool(read.elbo().isfinite())
    with pytest.raises(UnsupportedError, match="Dataset takes no further"):
        read.update(X, Y)
    assert read.num_observations == 200
    assert read.clear().update(X, Y).num_observations == 200


def test_labels_are_told_apart() -> None:
    X = torch.rand(1000, DIM, dtype=torch.float64)
    X = X[(X.sum(-1) - 1.0).abs() > 0.15][:300]
    labels = (X.sum(-1, keepdim=True) > 1.0).double()
    model = QSGP(
        X,
        labels,
        LogisticLikelihood(),
        basis=FourierFeatures(100),
        input_transform=Normalize(DIM),
        initial_points=100,
    )
    model.fit(steps=200, progress=False)
    assert float(((model.predictive(X).mean > 0.5) == (labels > 0.5)).double().mean()) > 0.93


def test_outputs_learn_one_kernel_from_the_exact_process() -> None:
    X = torch.rand(200, DIM, dtype=torch.float64)
    Y = torch.cat(((9.0 * X[:, :1]).sin(), (9.0 * X[:, :1]).cos()), -1)
    model = QSGP(X, Y, basis=FourierFeatures(100), initial_points=100)
    before = model.covar_module.base_kernel.lengthscale.detach().clone()
    model.fit(steps=2, progress=False)
    short, *others = (model.covar_module.base_kernel.lengthscale.detach() / before)[0].tolist()
    assert all(short < 0.7 * other for other in others)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"likelihood": StudentTLikelihood()}, UnsupportedError, "concave.*Jensen.*OSVGP"),
        (
            {"basis": InducingAtData(), "empirical_bayes": True},
            UnsupportedError,
            "diagonal.*FourierFeatures",
        ),
        ({"covar_module": PeriodicKernel()}, UnsupportedError, "PeriodicKernel.*InducingAtData"),
        ({"covariance": Chevron(11)}, ValueError, "at most 10 columns"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate"),
        ({"hyper_rate": -1.0}, ValueError, "hyper_rate"),
        ({"half_life": 0.0}, ValueError, "half_life"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"functions": 0}, ValueError, "functions"),
        ({"functions": 11, "update_steps": 1}, ValueError, "functions.*at most the 10.*11"),
        ({"batch_size": 31, "update_steps": 1}, ValueError, "batch_size.*at most the 30.*31"),
        ({"arithmetic": torch.float16}, ValueError, "float32, torch.float64"),
    ],
)
def test_bad_options_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    X, Y = _data()
    with pytest.raises(error, match=message):
        _model(X, Y, **options)


def test_more_than_there_is_cannot_be_drawn() -> None:
    X, Y = _data()
    for options in ({"functions": 11}, {"batch_size": 31}):
        model = _model(X, Y, **options)
        for verb in (lambda model=model: model.fit(steps=1), model.elbo_estimate):
            with pytest.raises(ValueError, match="at most"):
                verb()


def test_batches_of_models_are_refused() -> None:
    X, Y = _data()
    with pytest.raises(UnsupportedError, match="no batches"):
        _model(X.expand(2, -1, -1), Y.expand(2, -1, -1))


@pytest.mark.parametrize("count", [0, 3, 2.5])
def test_fourier_features_are_even(count: Any) -> None:
    with pytest.raises(ValueError, match="count"):
        FourierFeatures(count)


def test_choices_of_a_covariance() -> None:
    assert MeanField().columns == 0
    with pytest.raises(ValueError, match="columns"):
        Chevron(0)
    with pytest.raises(ValueError, match="max_points"):
        InducingAtData(0)


def test_an_empty_stream_cannot_be_fitted() -> None:
    X, Y = _data()
    model = _model(X[:0], Y[:0])
    for verb in (model.fit, model.elbo_estimate):
        with pytest.raises(InputDataError, match="empty stream"):
            verb()
    assert model.num_observations == 0


def test_a_rate_that_is_too_large_is_found_out() -> None:
    X, Y = _data()
    model = _model(X, Y, learning_rate=1e200)
    good = model.elbo()
    with pytest.raises(ModelFittingError, match=r"learning_rate.*1e\+200"):
        model.fit(steps=100, progress=False)
    assert float(model.elbo()) == pytest.approx(float(good))
    assert bool(model.posterior(X).mean.isfinite().all())
    model = _model(X[:0], Y[:0], learning_rate=1e200, update_steps=20)
    with pytest.raises(ModelFittingError):
        model.update(X, Y)
    assert model.num_observations == 0


def test_a_rate_that_explodes_without_an_overflow_is_found_out() -> None:
    X, Y = _data()
    model = _model(X, Y, learning_rate=1e3)
    with pytest.raises(ModelFittingError, match=r"the bound fell.*learning_rate.*1000"):
        model.fit(steps=400, progress=False)
    assert model.num_steps < 100


@pytest.mark.parametrize("basis", BASES)
def test_a_cleared_model_keeps_its_functions_and_learns_anew(basis: Any) -> None:
    X, Y = _data()
    model = _model(X, Y, basis=basis, learning_rate=0.5)
    model.fit(steps=20, progress=False)
    fitted = float(model.elbo())
    assert model.clear().clear().num_observations == model.num_steps == 0
    assert model._memory.layout.size == model._memory.progress.size > 0
    constant = model.mean_module.constant.detach()
    assert_close(model.posterior(X).mean, constant.expand(30, 1))
    model.update(X, Y).fit(steps=20, progress=False)
    assert float(model.elbo()) == pytest.approx(fitted, rel=0.1)


def test_bad_updates_change_nothing() -> None:
    X, Y = _data()
    model = _model(X, Y, update_steps=3)
    before = model.posterior(X).mean
    with pytest.raises(UnsupportedError, match="Yvar"):
        model.update(X, Y, torch.ones_like(Y))
    with pytest.raises(InputDataError):
        model.update(X, Y / 0.0)
    for verb in (
        lambda: model.retract(X, Y),
        lambda: model.forget(0.5),
        lambda: model.merge(model),
    ):
        with pytest.raises(UnsupportedError):
            verb()
    assert torch.equal(model.posterior(X).mean, before)
    assert model.num_observations == 30
