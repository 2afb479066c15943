"""Limits in which a streaming model must equal an exact computation or somebody else's."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import Normalize
from botorch.models.transforms.outcome import Standardize
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import GridInterpolationKernel, RBFKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import WISKI
from bo_stream.models.fitting import hyperparameters, set_hyperparameters
from bo_stream.models.lbfgs import fit_in_logarithms
from bo_stream.testing.streams import assert_close, assert_gradient, joint_covariance
from tests.oracles.gaussian_process import integrated_posterior_variance
from tests.oracles.interpolation import interpolated_kernel
from tests.oracles.kernels import dense_kernel
from tests.oracles.reference import reference, reference_posterior
from tests.support.problems import Observations, kernel, observations
from tests.support.smooth_points import smooth_points

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")

FINE = 1e4
"""In units of the tolerance: what a fine grid leaves of the interpolation error."""


def data_of(n: int, outputs: int = 1, noise: str = "learned", dim: int = 2) -> Observations:
    return observations(n, dim, outputs).with_noise(noise)


def sampler() -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([4]), seed=3)


# --- the exact Gaussian process -----------------------------------------------------------------


def pair(data: Observations, **options: Any) -> tuple[WISKI, SingleTaskGP]:
    """A fine-grid model fed in two parts, and BoTorch's exact one, of the same hyperparameters."""
    exact = SingleTaskGP(*data.astuple(), **{k: v for k, v in options.items() if k != "bounds"})
    with torch.no_grad():
        exact.covar_module.lengthscale = 0.4 + 0.3 * torch.rand_like(exact.covar_module.lengthscale)
        exact.mean_module.constant = torch.randn_like(exact.mean_module.constant)
        if not isinstance(exact.likelihood, FixedNoiseGaussianLikelihood):
            exact.likelihood.noise = 0.05
    model = WISKI(*data[:6].astuple(), grid_size=64, tolerance=1e-13, **options)
    model.load_state_dict(exact.state_dict())
    model.update(*data[6:].astuple()).train()
    return model, exact


OPTIONS = [
    pytest.param(1, "learned", {}, id="one output"),
    pytest.param(1, "known", {}, id="known noise"),
    pytest.param(2, "learned", {}, id="two outputs"),
    pytest.param(2, "known", {}, id="two outputs, known noise"),
    pytest.param(1, "learned", {"outcome_transform": None}, id="as measured"),
    pytest.param(
        1,
        "learned",
        {"input_transform": Normalize(2, bounds=torch.tensor([[-0.2, 0.0], [1.5, 1.1]]).double())},
        id="normalised inputs",
    ),
]


@pytest.mark.filterwarnings("ignore:Data \\(outcome observations\\) is not standardized")
@pytest.mark.parametrize(("outputs", "noise", "options"), OPTIONS)
def test_a_fine_grid_is_the_exact_process(
    outputs: int, noise: str, options: dict[str, Any]
) -> None:
    model, exact = pair(data_of(20, outputs, noise), **options)
    T = torch.rand(6, 2).double()
    for observation_noise in (False, torch.full((6, outputs), 0.3).double()):
        own = model.posterior(T, observation_noise=observation_noise)
        theirs = exact.posterior(T, observation_noise=observation_noise)
        assert_close(own.mean, theirs.mean, FINE)
        assert_close(joint_covariance(own), joint_covariance(theirs), FINE)


@pytest.mark.filterwarnings("ignore:Data \\(outcome observations\\) is not standardized")
@pytest.mark.parametrize(("outputs", "noise", "options"), OPTIONS)
def test_fantasies_on_a_fine_grid_are_the_exact_ones(
    outputs: int, noise: str, options: dict[str, Any]
) -> None:
    model, exact = pair(data_of(20, outputs, noise), **options)
    X, T = torch.rand(2, 3, 2).double(), torch.rand(2, 5, 2).double()
    exact.posterior(T)
    own = model.fantasize(X, sampler()).posterior(T)
    theirs = exact.fantasize(X, sampler()).posterior(T)
    assert own.mean.shape == theirs.mean.shape
    assert_close(own.mean, theirs.mean, FINE)
    assert_close(own.variance.expand_as(theirs.variance), theirs.variance, FINE)


def test_marginal_likelihood_on_a_fine_grid_is_the_exact_one() -> None:
    model, exact = pair(data_of(20))
    mll = ExactMarginalLogLikelihood(exact.likelihood, exact)
    exact.train()
    with torch.no_grad():
        value = mll(exact(*exact.train_inputs), exact.train_targets)
        own = model.compute_custom_loss(ExactMarginalLogLikelihood(model.likelihood, model))
    assert_close(-own, value, FINE)


# --- gpytorch's grid interpolation --------------------------------------------------------------


def grid_bounds(lower: float, upper: float, size: int) -> tuple[float, float]:
    """The bounds for which gpytorch's grid has the nodes of ours.

    gpytorch adds a margin of ``width / (size − 2)`` on each side and spreads its nodes over it.
    """
    spacing = (upper - lower) / (size - 3)
    width = (size - 1) * spacing * (size - 2) / size
    middle = (lower + upper) / 2.0
    return middle - width / 2.0, middle + width / 2.0


@pytest.mark.filterwarnings("ignore")
def test_gpytorchs_wiski_is_ours() -> None:
    """Posterior and fantasies of gpytorch's grid interpolation, by its own WISKI strategy."""
    data, size = data_of(25), 12
    witness = GridInterpolationKernel(
        RBFKernel(), grid_size=size, num_dims=2, grid_bounds=[grid_bounds(0.0, 1.0, size)] * 2
    )
    theirs = SingleTaskGP(data.X, data.Y, covar_module=witness, outcome_transform=None)
    theirs.covar_module.base_kernel.lengthscale = 0.45
    theirs.likelihood.noise = 0.05
    theirs.mean_module.constant.data.fill_(3.0)
    theirs.requires_grad_(False)
    theirs.eval()
    own = WISKI(
        data.X,
        data.Y,
        covar_module=RBFKernel(),
        outcome_transform=None,
        grid_size=size,
        tolerance=0.0,
    )
    own.covar_module.lengthscale = 0.45
    own.likelihood.noise = 0.05
    own.mean_module.constant.data.fill_(3.0)
    T, X = torch.rand(5, 2).double(), torch.rand(2, 2).double()
    for mine, other in (
        (own.posterior(T), theirs.posterior(T)),
        (own.fantasize(X, sampler()).posterior(T), theirs.fantasize(X, sampler()).posterior(T)),
    ):
        assert_close(mine.mean, other.mean, factor=1e3)
        assert_close(joint_covariance(mine), joint_covariance(other), factor=1e3)


# --- standardising and growing ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Data \\(outcome observations\\) is not standardized")
@pytest.mark.parametrize("batch_shape", [(), (2,)])
@pytest.mark.parametrize("outputs", [None, [1]])
def test_restandardising_a_stream_is_standardising_all_outcomes(
    batch_shape: tuple[int, ...], outputs: list[int] | None
) -> None:
    data = observations(60, 2, 2, batch_shape)
    drift = torch.linspace(0.0, 50.0, 60, dtype=torch.float64).unsqueeze(-1)
    Y = 1e4 + data.Y + drift
    transform = Standardize(m=2, outputs=outputs, batch_shape=torch.Size(batch_shape))
    model = WISKI(data.X[..., :5, :], Y[..., :5, :], outcome_transform=transform, grid_size=8)
    for start in range(5, 60, 11):
        rows = slice(start, start + 11)
        model.update(data.X[..., rows, :], Y[..., rows, :])
    model.train()
    expected = Standardize(m=2, outputs=outputs, batch_shape=torch.Size(batch_shape))
    expected(Y)
    for name in ("means", "stdvs", "_stdvs_sq"):
        actual = getattr(model.outcome_transform, name)
        torch.testing.assert_close(actual, getattr(expected, name), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("noise", ["learned", "mixed"])
def test_a_grown_grid_is_the_larger_grid(noise: str) -> None:
    """Growing by whole cells gives the model that was built on the larger box."""
    data, T = data_of(20, 1, noise), torch.rand(5, 2).double()
    spread = Observations(data.X * torch.tensor([1.5, 1.9]) - 0.35, data.Y, data.Yvar)
    options = {"covar_module": kernel("product", 2), "tolerance": 0.0}
    near = ((spread.X >= 0) & (spread.X <= 1)).all(-1)
    first = Observations(*(None if v is None else v[near] for v in spread.astuple()))
    rest = Observations(*(None if v is None else v[~near] for v in spread.astuple()))
    assert len(rest) > 3
    model = WISKI(*first.astuple(), grid_size=8, **options)
    model.posterior(T)
    model.update(*rest.astuple()).train()
    cells = ((model.bounds[1] - model.bounds[0]) * 5.0).round().long().tolist()
    sizes = tuple(c + 3 for c in cells)
    assert model.grid_size == sizes
    larger = WISKI(*spread.astuple(), bounds=model.bounds, grid_size=sizes, **options)
    for X in (T, spread.X):
        assert_close(model.posterior(X).mean, larger.posterior(X).mean)
        assert_close(joint_covariance(model.posterior(X)), joint_covariance(larger.posterior(X)))
    assert_close(model.log_marginal_likelihood(), larger.log_marginal_likelihood())


def test_looking_beyond_the_box_does_not_change_what_is_inside() -> None:
    data, T = data_of(20), torch.rand(5, 2).double()
    model = WISKI(*data.astuple(), covar_module=kernel("scaled", 2), grid_size=8, tolerance=0.0)
    mean, covariance = reference_posterior(model, data.X, data.Y, T)
    box = torch.tensor([[0.0, 0.0], [1.8, 1.8]]).double()
    wide = interpolated_kernel(model.covar_module, box, (12, 12))
    before = model.bounds, model.grid_size
    beyond = model.posterior(T + 0.7)
    expected = reference_posterior(model, data.X, data.Y, T + 0.7, kernel=wide)
    assert_close(beyond.mean, expected[0])
    assert_close(joint_covariance(beyond), expected[1])
    fantasy = model.fantasize(T + 0.5, sampler())
    assert fantasy.posterior(T).mean.shape == (4, 5, 1)
    assert_close(model.posterior(T).mean, mean)
    assert_close(joint_covariance(model.posterior(T)), covariance)
    assert torch.equal(model.bounds, before[0])
    assert model.grid_size == before[1]


# --- learning hyperparameters -------------------------------------------------------------------


def mll_of(model: WISKI) -> ExactMarginalLogLikelihood:
    return ExactMarginalLogLikelihood(model.likelihood, model)


@pytest.mark.parametrize(
    ("outputs", "noise"), [(1, "learned"), (1, "known"), (1, "mixed"), (2, "learned")]
)
def test_fitting_from_statistics_is_fitting_the_dense_process(outputs: int, noise: str) -> None:
    """The same optimiser ends at the same hyperparameters, from the same start."""
    data = data_of(25, outputs, noise)

    def build() -> WISKI:
        model = WISKI(*data[:9].astuple(), grid_size=10, tolerance=0.0, max_rank=200)
        return model.update(*data[9:].astuple())

    model, dense = build(), build()
    dense.train()
    parameters = [p for p in mll_of(dense).parameters() if p.requires_grad]

    def closure() -> tuple[Tensor, list[Tensor]]:
        likelihood = reference(dense, *data.astuple()).log_marginal_likelihood()
        loss = -mll_of(dense)._add_other_terms(likelihood.clone(), []).sum() / len(data)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss, list(gradients)

    options = {"ftol": 1e-10}
    fit_gpytorch_mll(mll_of(model), optimizer_kwargs={"options": options})
    fit_in_logarithms(mll_of(dense), closure, options=options)
    with torch.no_grad():
        own = model.compute_custom_loss(mll_of(model)).sum()
        best = closure_value(dense, data)
    assert_close(own, best, factor=1e3)
    for a, b in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def closure_value(model: WISKI, data: Observations) -> Tensor:
    likelihood = reference(model, *data.astuple()).log_marginal_likelihood()
    return -mll_of(model)._add_other_terms(likelihood.clone(), []).sum() / len(data)


def test_fitting_on_a_fine_grid_is_fitting_the_exact_process() -> None:
    model, exact = pair(data_of(30))
    options = {"options": {"ftol": 1e-10}}
    fit_gpytorch_mll(mll_of(model), optimizer_kwargs=options)
    set_hyperparameters(exact, hyperparameters(model))  # of several maxima the same one
    likelihood = ExactMarginalLogLikelihood(exact.likelihood, exact)
    fit_gpytorch_mll(likelihood, optimizer_kwargs=options)
    T = torch.rand(6, 2).double()
    assert_close(model.posterior(T).mean, exact.posterior(T).mean, factor=1e5)
    own, theirs = dict(model.named_parameters()), dict(exact.named_parameters())
    assert own.keys() == theirs.keys()
    for name, value in own.items():
        torch.testing.assert_close(value, theirs[name], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("noise", ["learned", "mixed"])
def test_one_gradient_step_lowers_the_loss(noise: str) -> None:
    data = data_of(30, 2, noise)
    model = WISKI(*data.astuple(), grid_size=10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        model.train()
        optimizer.zero_grad()
        loss = model.compute_custom_loss(mll_of(model)).sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
    model.eval()
    mean, _ = reference_posterior(model, data.X, data.Y, data.X, data.Yvar)
    assert_close(model.posterior(data.X).mean, mean, factor=FINE)


def test_the_data_are_gone_once_they_are_in_memory() -> None:
    """No tensor of the data is kept alive, and a refit needs none of them."""
    data = data_of(25, 1, "mixed")
    kept = Observations(*(None if v is None else v.clone() for v in data.astuple()))
    model = WISKI(*data[:9].astuple(), grid_size=10)
    model.posterior(data.X)
    model.update(*data[9:].astuple())
    assert data.Yvar is not None
    traces = [weakref.ref(tensor.untyped_storage()) for tensor in (data.X, data.Y, data.Yvar)]
    for tensor in (data.X, data.Y, data.Yvar):
        tensor.fill_(torch.nan)
    del data, tensor
    gc.collect()
    assert [trace() for trace in traces] == [None, None, None]
    fit_gpytorch_mll(mll_of(model))
    untouched = WISKI(*kept[:9].astuple(), grid_size=10)
    untouched.update(*kept[9:].astuple())
    fit_gpytorch_mll(mll_of(untouched))
    assert_close(model.posterior(kept.X).mean, untouched.posterior(kept.X).mean)


# --- many points --------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 2])
def test_marginal_variances_of_a_hundred_thousand_points(outputs: int) -> None:
    """An n x n matrix would take 75 GiB."""
    model = WISKI(*data_of(12, outputs).astuple(), grid_size=8)
    model = model.condition_on_observations(*data_of(2, outputs).astuple()[:2])
    X = torch.rand(100_000, 2).double()
    posterior = model.posterior(X, observation_noise=True)
    some = torch.arange(0, 100_000, 997)
    few = model.posterior(X[some], observation_noise=True)
    assert_close(posterior.mean[some], few.mean)
    assert_close(posterior.variance[some], few.variance)


@pytest.mark.parametrize("outputs", [1, 2])
def test_draws_of_many_points_have_the_posteriors_moments(outputs: int) -> None:
    """Beyond the dense limit the covariance is lazy; its draws must be the same process's."""
    data, few = data_of(20, outputs), data_of(3, outputs)
    model = WISKI(*data.astuple(), covar_module=RBFKernel(), grid_size=8)
    model = model.condition_on_observations(few.X, few.Y)
    X = torch.rand(600, 2).double()
    posterior = model.posterior(X)
    draws = posterior.rsample(torch.Size([4_000]))[..., :3, :].detach()
    dense = model.posterior(X[:3])
    scale = dense.variance.detach().sqrt()
    standard = (draws - dense.mean.detach()) / scale
    assert float(standard.mean(0).abs().max()) < 0.1
    for output in range(outputs):
        own = joint_covariance(dense)[output].detach() / (scale[:, output] * scale[:, output, None])
        assert_close(torch.cov(standard[..., output].mT), own, factor=1e7)


# --- BoTorch's acquisition on top ---------------------------------------------------------------


@pytest.mark.parametrize("noise", ["learned", "known"])
def test_integrated_posterior_variance_is_the_dense_formula(noise: str) -> None:
    """BoTorch's qNIPV through our fantasies, with gradients that are those of differences."""
    data, points = data_of(20, 1, noise), torch.rand(15, 2).double()
    model = WISKI(*data.astuple(), covar_module=kernel("RBF", 2), grid_size=9, tolerance=0.0)
    acquisition = qNegIntegratedPosteriorVariance(model, mc_points=points)
    X = smooth_points(model, 2, 3)
    level = model.noise_level().expand(3)
    expected = torch.stack(
        [
            integrated_posterior_variance(reference(model, *data.astuple()), x, level, points)
            for x in X
        ]
    )
    scale = model.outcome_scale().square()
    assert_close(acquisition(X), -scale * expected)
    assert_gradient(lambda X: acquisition(X).sum(), X)


def test_the_interpolated_kernel_is_the_kernel_on_a_fine_grid() -> None:
    data = data_of(10)
    module = kernel("RBF", 2)
    model = WISKI(*data.astuple(), covar_module=module, grid_size=64, tolerance=1e-13)
    z = model.feature_process().basis.features(data.X)
    assert_close((z @ z.mT)[0], dense_kernel(module, data.X, data.X), FINE / 10)
    assert model.interpolation_error() < 1e-4
