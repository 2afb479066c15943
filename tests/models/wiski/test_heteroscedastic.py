"""The noise that HeteroscedasticWISKI learns, and what it does with it.

What it shares with all models is in the contract; its arithmetic is compared to dense processes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.acquisition import (
    qLogNoisyExpectedImprovement,
    qNegIntegratedPosteriorVariance,
    qUpperConfidenceBound,
)
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms.outcome import Log
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import AdditiveKernel, Kernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import (
    WISKI,
    FeatureNIPV,
    HeteroscedasticWISKI,
    LinearStem,
    PoolSelector,
    select_from_pool,
)
from bo_stream.models.base import StreamingGP
from bo_stream.models.wiski.heteroscedastic import FIRST_ROWS
from bo_stream.models.wiski.heteroscedastic_inference import Entry
from bo_stream.testing.streams import assert_close, assert_gradient, assert_untouched, fingerprint
from tests.oracles.gaussian_process import (
    DenseGP,
    condition_in_turn,
    heteroscedastic_stream,
    integrated_posterior_variance,
)
from tests.oracles.interpolation import interpolated_kernel
from tests.support.smooth_points import smooth_points

UNIT = torch.tensor([[0.0], [1.0]])


def deviation(X: Tensor) -> Tensor:
    """Standard deviation of the noise, tenfold over the box."""
    return 0.05 * 10.0 ** X.mean(-1, keepdim=True)


def function(X: Tensor) -> Tensor:
    return torch.sin(5.0 * X).sum(-1, keepdim=True) + X[..., :1] ** 2


def draw(n: int, dim: int = 1, sigma: Callable[[Tensor], Tensor] = deviation) -> tuple[Any, Any]:
    X = torch.rand(n, dim, dtype=torch.float64)
    return X, function(X) + sigma(X) * torch.randn(n, 1, dtype=torch.float64)


def rbf(lengthscale: float) -> Kernel:
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.base_kernel.lengthscale, kernel.outputscale = lengthscale, 1.3
    return kernel


def model_of(X: Tensor, Y: Tensor, Yvar: Tensor | None = None, **options: Any) -> Any:
    """A small model whose hyperparameters are given."""
    defaults: dict[str, Any] = {
        "covar_module": rbf(0.3),
        "noise_covar_module": rbf(0.5),
        "bounds": torch.tensor([[0.0], [1.0]]).expand(2, X.shape[-1]),
        "grid_size": 12,
        "noise_grid_size": 10,
        "tolerance": 0.0,
        "rounds": 0,
    }
    return HeteroscedasticWISKI(X, Y, Yvar, **{**defaults, **options})


def fit(model: StreamingGP) -> None:
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))


# --- exact, given the noise ---------------------------------------------------------------------


def prior(model: HeteroscedasticWISKI) -> tuple[DenseGP, DenseGP]:
    """The two dense processes of a model with one output in original units, before any data."""
    none, gps = torch.empty(0).double(), []
    for part in (model, model.noise_model):
        bounds = part.bounds.double()
        kernel = interpolated_kernel(part.covar_module, bounds, part.grid_size, part.rank)
        mean = part.mean_module.constant.detach().reshape(1)
        gps.append(DenseGP(kernel, mean, none.reshape(0, bounds.shape[-1]), none, none))
    return gps[0], gps[1]


@pytest.mark.usefixtures("in_features")  # in which the noise model leaves a part out
@pytest.mark.parametrize("dim", [1, 2])
def test_a_stream_is_that_of_dense_processes(dim: int) -> None:
    X, Y = draw(30, dim)
    model = model_of(X[:8], Y[:8], outcome_transform=None)
    sizes = (8, 1, 1, 15, 5)
    batches = list(zip(X.split(sizes), Y.squeeze(-1).split(sizes), strict=True))
    mean, noise = heteroscedastic_stream(*prior(model), batches)
    entries = [model.observe(x, y.unsqueeze(-1)) for x, y in batches[1:]]
    D = torch.cat([entry.observations.noise.squeeze(0) for entry in entries])
    assert_close(D, mean.noise[8:])
    T = torch.rand(6, dim).double()
    posterior, expected = model.posterior(T, observation_noise=True), mean.posterior(T)
    g, uncertainty = noise.posterior(T)
    variances = torch.exp(g + 0.5 * uncertainty.diagonal())
    assert_close(posterior.mean.squeeze(-1), expected[0])
    assert_close(posterior.variance.squeeze(-1), expected[1].diagonal() + variances)
    assert_close(model.log_marginal_likelihood(), mean.log_marginal_likelihood())
    assert_close(
        model.noise_model.log_marginal_likelihood(), noise.log_marginal_likelihood(), factor=10
    )


def plain_twin(model: HeteroscedasticWISKI, X: Tensor, Y: Tensor, entries: list[Entry]) -> WISKI:
    """WISKI with the noises that entered as known ones."""
    return WISKI(
        X,
        Y,
        torch.cat([entry.observations.noise for entry in entries], -1).mT,
        covar_module=copy.deepcopy(model.covar_module),
        outcome_transform=copy.deepcopy(model._modules.get("outcome_transform")),
        bounds=model.bounds,
        grid_size=model.grid_size,
        tolerance=0.0,
    )


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_mean_is_wiskis_with_the_noises_that_entered(rounds: int) -> None:
    X, Y = draw(90, 2)
    model = model_of(X[:0], Y[:0], rounds=rounds)
    entries = [model.observe(x, y) for x, y in zip(X.split(30), Y.split(30), strict=True)]
    plain, T = plain_twin(model, X, Y, entries), torch.rand(5, 2).double()
    ours, theirs = model.train().posterior(T), plain.posterior(T)
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-10, atol=1e-10)
    assert_close(model.log_marginal_likelihood(), plain.log_marginal_likelihood(), factor=10)


def test_many_rows_are_predicted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    X, Y = draw(60)
    model = model_of(X[:30], Y[:30])
    whole = copy.deepcopy(model).observe(X[30:], Y[30:])
    monkeypatch.setattr("bo_stream.process.ROWS", 7)
    parts = model.observe(X[30:], Y[30:])
    assert_close(parts.observations.noise, whole.observations.noise)
    assert_close(parts.log_squares.targets, whole.log_squares.targets)


# --- memory -------------------------------------------------------------------------------------


def noise_of(model: HeteroscedasticWISKI, T: Tensor) -> Tensor:
    """Learned noise variances in original units, ``m x t``."""
    return model.noise_at(T) * model.outcome_scale().unsqueeze(-1).square()


def assert_same(a: HeteroscedasticWISKI, b: HeteroscedasticWISKI, T: Tensor) -> None:
    for ours, theirs in zip(outcomes(a, T), outcomes(b, T), strict=True):
        assert_close(ours, theirs)


def outcomes(model: HeteroscedasticWISKI, T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    posterior = model.posterior(T)
    return posterior.mean, posterior.variance, noise_of(model, T)


def test_withdrawing_undoes_observing_in_both_memories() -> None:
    (X, Y), T = draw(40), torch.rand(5, 1).double()
    model = model_of(X[:20], Y[:20])
    never = copy.deepcopy(model)
    entry = model.observe(X[20:], Y[20:])
    assert bool((noise_of(model, T) - noise_of(never, T)).abs().max() > 1e-4)
    assert model.withdraw(entry) is model
    assert_same(model, never, T)
    assert model.num_observations == model.noise_model.num_observations == 20
    nothing = model.observe(X[:0], Y[:0])
    before = fingerprint(model)
    model.withdraw(nothing)
    assert_untouched(model, before)


def test_what_was_learned_is_not_retracted_by_halves() -> None:
    X, Y = draw(40)
    model = model_of(X[:20], Y[:20])
    model.posterior(X, observation_noise=True)
    entry, before = model_of(X, Y).observe(X, Y), fingerprint(model)
    with pytest.raises(UnsupportedError, match=r"entry = model.observe\(X, Y\)"):
        model.retract(X[:20], Y[:20])
    with pytest.raises(UnsupportedError, match="Yvar"):
        model.retract(X[:2], Y[:2], torch.tensor([[0.1], [torch.nan]]).double())
    with pytest.raises(InputDataError, match="at most the 20 observations"):
        model.withdraw(entry)
    conditioned = model.condition_on_observations(X[:1], Y[:1])
    with pytest.raises(UnsupportedError, match="hypothetical"):
        conditioned.withdraw(entry)
    assert_untouched(model, before)


def test_a_refused_withdrawal_changes_neither_memory() -> None:
    model, T = model_of(*draw(400), rounds=0), torch.rand(5, 1).double()
    x, y = torch.tensor([[0.5]]).double(), torch.tensor([[0.6]]).double()
    entry = model.observe(x, y)
    model.update(x, y, entry.observations.noise.mT)  # to the mean's memory alone
    model.forget(0.5)
    model._cache = None
    before = outcomes(model, T)
    with pytest.raises(InputDataError, match="The model is as it was"):
        model.withdraw(entry)
    model._cache = None
    for now, then in zip(outcomes(model, T), before, strict=True):
        torch.testing.assert_close(now, then, rtol=1e-10, atol=1e-12)


def log_squares_of(entries: list[Entry], model: HeteroscedasticWISKI, share: float) -> DenseGP:
    """The dense process of the log noise variance, each measurement counted ``share`` times."""
    parts = [entry.log_squares for entry in entries]
    inputs = torch.cat([part.X for part in parts])
    measured, noise = (
        torch.cat([getattr(part, name).squeeze(0) for part in parts], -1)
        for name in ("targets", "noise")
    )
    return prior(model)[1].condition(inputs, measured, noise / share)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_merging_and_forgetting_reach_the_noise(share: float) -> None:
    (X, Y), T = draw(50), torch.rand(5, 1).double()
    left, right = model_of(X[:0], Y[:0]), model_of(X[:0], Y[:0])
    entries = [left.observe(X[:20], Y[:20]), right.observe(X[20:], Y[20:])]
    before = fingerprint(right)
    left.merge(right).forget(share)
    assert_untouched(right, before)
    g, uncertainty = log_squares_of(entries, left, share).posterior(T)
    assert_close(noise_of(left, T)[0], torch.exp(g + 0.5 * uncertainty.diagonal()))
    assert left.num_observations == left.noise_model.num_observations == pytest.approx(50 * share)


def test_a_failed_merge_changes_nothing() -> None:
    X, Y = draw(30)
    left, right = model_of(X[:15], Y[:15]), model_of(X[15:], Y[15:])
    left.posterior(X, observation_noise=True)
    before = left.noise_model.num_observations
    far = model_of(50.0 + X, Y, bounds=None)
    with pytest.raises(InputDataError, match="too far outside"):
        left.merge(far)
    assert left.noise_model.num_observations == left.num_observations == before
    with pytest.raises(UnsupportedError, match="class"):
        left.merge(WISKI(X, Y))
    assert left.merge(right).num_observations == 30


def test_clearing_leaves_the_prior_and_refining_the_noise() -> None:
    (X, Y), T = draw(40), torch.rand(5, 1).double()
    model = model_of(X, Y)
    noise = noise_of(model, T)
    assert_close(noise_of(model.refine(20), T), noise)
    assert model.grid_size == (20,)
    model.clear()
    assert model.num_observations == model.noise_model.num_observations == 0
    constant = model.noise_model.mean_module.constant + 0.5 * 1.3
    torch.testing.assert_close(noise_of(model, T), constant.exp().expand(1, 5), rtol=1e-2, atol=0.0)


def test_input_that_one_of_both_cannot_take_changes_neither() -> None:
    X, Y = draw(20)
    model = model_of(X, Y)
    model.posterior(X, observation_noise=True)
    before = fingerprint(model)
    for bad in (X + 50.0, X / 0.0):
        with pytest.raises(InputDataError, match=r"\bX\b"):
            model.update(bad, Y)
    with pytest.raises(InputDataError, match=r"\bYvar\b"):
        model.update(X, Y, -torch.ones_like(Y))
    assert_untouched(model, before)


def test_known_rows_must_be_the_same_in_a_batch() -> None:
    X, Y = draw(10)
    X, Y = X.expand(2, 10, 1), Y.expand(2, 10, 1)
    Yvar = torch.full_like(Y, 0.1)
    Yvar[0, 3] = torch.nan
    with pytest.raises(UnsupportedError, match="NaN in the same rows of Yvar"):
        model_of(X, Y, Yvar)


def test_known_noise_teaches_nothing() -> None:
    X, Y = draw(30)
    Yvar = torch.full_like(Y, 0.02)
    Yvar[10:] = torch.nan
    model = model_of(X[:0], Y[:0])
    entry = model.observe(X, Y, Yvar)
    assert_close(entry.observations.noise[:, :10], Yvar[:10].mT)
    assert torch.equal(entry.log_squares.X, X[10:])
    assert model.num_observations == 30
    assert model.noise_model.num_observations == 20


@pytest.mark.parametrize("first", [0, 20])
def test_given_noise_is_predicted_as_wiski_does(first: int, tmp_path: Path) -> None:
    (X, Y), T = draw(80), torch.rand(5, 1).double()
    Y, Yvar = torch.cat((Y, -2.0 * Y), -1), torch.cat((deviation(X), 2.0 * deviation(X)), -1) ** 2
    parts = [slice(first), slice(first, 40), slice(40, 60)]
    (model, *others), (plain, *twins) = (
        [
            build(X[part], Y[part], Yvar[part], covar_module=rbf(0.3), bounds=UNIT, grid_size=12)
            for part in (parts[0], parts[2], slice(0))
        ]
        for build in (model_of, WISKI)
    )

    def assert_wiskis(ours: StreamingGP, theirs: StreamingGP) -> None:
        assert_close(ours.noise_at(T), theirs.noise_at(T).expand(2, 5))
        for one, other in (
            (ours, theirs),
            (ours.subset_output([1]), theirs.subset_output([1])),
            (each.condition_on_observations(T, T.expand(5, 2)) for each in (ours, theirs)),
        ):
            noisy = one.posterior(T, observation_noise=True).variance
            assert_close(noisy, other.posterior(T, observation_noise=True).variance)

    model.update(X[parts[1]], Y[parts[1]], Yvar[parts[1]])
    plain.update(X[parts[1]], Y[parts[1]], Yvar[parts[1]])
    assert_wiskis(model, plain)
    for other, twin in zip(others, twins, strict=True):
        assert_wiskis(model.merge(other), plain.merge(twin))
    model.save(tmp_path / "model.safetensors")
    assert_wiskis(HeteroscedasticWISKI.load(tmp_path / "model.safetensors"), plain)
    assert_wiskis(model.retract(X[:5], Y[:5], Yvar[:5]), plain.retract(X[:5], Y[:5], Yvar[:5]))
    entry = model.observe(X[60:], Y[60:])
    assert_close(entry.observations.noise, Yvar[5:60].mean(0).unsqueeze(-1).expand(2, 20))
    assert bool((noise_of(model, T) - Yvar[5:60].mean(0).unsqueeze(-1)).abs().max() > 1e-4)
    assert_wiskis(model.withdraw(entry), plain)


def test_given_noise_is_the_mean_of_the_prior() -> None:
    (X, Y), T = draw(20), torch.rand(5, 1).double()
    Yvar = deviation(X).square()
    cleared = noise_of(model_of(X, Y, Yvar).clear(), T)
    torch.testing.assert_close(cleared, Yvar.mean().expand(1, 5), rtol=1e-2, atol=0.0)


def test_what_is_hypothetical_keeps_its_noise() -> None:
    X, Y = draw(30)
    model, T = model_of(X[:20], Y[:20]), torch.tensor([[0.2], [1.1]]).double()
    conditioned = model.condition_on_observations(X[:2], Y[:2], noise=torch.full_like(Y[:2], 0.1))
    before = noise_of(conditioned, T[:1])
    model.update(X[20:], 5.0 * Y[20:])
    assert torch.equal(noise_of(conditioned, T[:1]), before)
    assert not torch.equal(noise_of(model, T[:1]), before)
    assert conditioned.fantasize(T[:1], SobolQMCNormalSampler(torch.Size([2]))).num_outputs == 1


def test_outputs_have_noises_of_their_own() -> None:
    X, Y = draw(60)
    Y = torch.cat((Y, 3.0 * function(X) + deviation(1.0 - X) * torch.randn_like(Y)), -1)
    model = model_of(X, Y, covar_module=None, noise_covar_module=None)
    for i in range(2):
        part = model.subset_output([i])
        alone = model_of(X, Y[:, [i]], covar_module=None, noise_covar_module=None)
        assert_close(noise_of(part, X), noise_of(model, X)[[i]])
        assert_close(noise_of(alone, X), noise_of(model, X)[[i]])


# --- units and options --------------------------------------------------------------------------


def test_noise_is_that_of_transformed_outcomes() -> None:
    X, Y = draw(30)
    Y, T = 4.0 + Y, torch.rand(5, 1).double()
    logs = model_of(X, Y, outcome_transform=Log())
    plain = model_of(X, Y.log(), outcome_transform=None)
    assert_close(noise_of(logs, T), noise_of(plain, T))
    scaled = model_of(X, 100.0 * Y)
    assert_close(noise_of(scaled, T) / 1e4, noise_of(model_of(X, Y), T))


def test_noise_depends_on_what_a_stem_projects() -> None:
    X, Y = draw(40, 4)
    stem = LinearStem(4, 1).double().calibrate(X)
    model = model_of(X, Y, stem=stem, bounds=None)
    with torch.no_grad():
        Z = stem(X)
    plain = model_of(Z, Y)
    assert_close(model.noise_at(model.transform_inputs(X)), plain.noise_at(Z))
    assert_close(model.posterior(X).variance, plain.posterior(Z).variance)


def test_a_stem_that_learns_needs_known_noise() -> None:
    X, Y = draw(40, 4)
    model = model_of(X, Y, stem=LinearStem(4, 1), bounds=None)
    with pytest.raises(InputDataError, match=r"Yvar for every observation.*depends on the inputs"):
        model.reproject(X, Y, model.coordinates(X))


def test_single_precision_is_near_double_on_any_device(device: torch.device) -> None:
    X, Y = (values.to(device) for values in draw(200))
    T = torch.rand(5, 1).double().to(device)
    model, single = (
        model_of(X.to(t), Y.to(t), covar_module=rbf(0.3).to(t), noise_covar_module=rbf(0.5).to(t))
        for t in (torch.float64, torch.float32)
    )
    noisy = single.posterior(T.float(), observation_noise=True)
    assert noisy.variance.dtype == torch.float32
    assert_close(noisy.variance, model.posterior(T, observation_noise=True).variance)


def test_many_inputs_need_a_kernel_of_the_noise() -> None:
    X = torch.rand(12, 5).double()

    def additive() -> AdditiveKernel:
        return AdditiveKernel(*[ScaleKernel(RBFKernel(active_dims=(i,))) for i in range(5)])

    Y = X.sum(-1, keepdim=True)
    with pytest.raises(UnsupportedError, match=r"noise_covar_module with 5 inputs.* Give a sum"):
        HeteroscedasticWISKI(X, Y, covar_module=additive())
    model = HeteroscedasticWISKI(X, Y, covar_module=additive(), noise_covar_module=additive())
    assert noise_of(model.update(X, Y), X).shape == (1, 12)


def test_rounds_are_counted() -> None:
    X, Y = draw(10)
    with pytest.raises(ValueError, match="rounds of at least 0, got -1"):
        model_of(X, Y, rounds=-1)


# --- learning -----------------------------------------------------------------------------------


def test_first_noise_is_learned_and_hyperparameters_stay() -> None:
    X, Y = draw(400)
    model = model_of(X[:0], Y[:0], rounds=2)
    same = {name: p.detach().clone() for name, p in model.named_parameters()}
    learned = model.observe(X, Y).observations.noise.squeeze(0).sqrt()
    assert float((learned / deviation(X).squeeze(-1) - 1.0).abs().median()) < 0.2
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, same[name])


def test_few_first_observations_have_the_prior_noise() -> None:
    X, Y = draw(FIRST_ROWS - 1)
    model = model_of(X[:0], Y[:0], rounds=2)
    expected = noise_of(model, X).detach()
    assert_close(model.observe(X, Y).observations.noise, expected)


def test_a_fit_learns_the_hyperparameters_of_both() -> None:
    X, Y = draw(60)
    model = model_of(X, Y)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)

    def loss() -> Tensor:
        return model.compute_custom_loss(mll)

    model.train()
    names = dict(model.named_parameters())
    assert sum(name.startswith("noise_model.") for name in names) == 3
    gradients = torch.autograd.grad(loss(), list(names.values()))
    for parameter, gradient in zip(names.values(), gradients, strict=True):
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.add_(step)
                values.append(float(loss()))
                parameter.sub_(step)
        assert float(gradient) == pytest.approx((values[0] - values[1]) / 2e-5, abs=1e-7, rel=1e-5)


def nlpd(model: StreamingGP, T: Tensor, Y: Tensor, noise: Tensor | None = None) -> float:
    """Negative log predictive density, with the model's noise or with the true one."""
    with torch.no_grad():
        posterior = model.posterior(T.unsqueeze(-2), observation_noise=noise is None)
        variance = posterior.variance.squeeze(-1) + (0.0 if noise is None else noise)
        error = Y - posterior.mean.squeeze(-1)
        density = error.square() / variance + variance.log() + math.log(2.0 * math.pi)
    return float(0.5 * density.mean())


def streamed(model: Any, X: Tensor, Y: Tensor, Yvar: Tensor | None, first: int) -> Any:
    """In batches of 25, hyperparameters learned at the beginning, half way and at the end."""
    fit(model)
    for i in range(first, len(X), 25):
        rows = slice(i, i + 25)
        model.update(X[rows], Y[rows], None if Yvar is None else Yvar[rows])
        if i == first + 500:
            fit(model)
    fit(model)
    return model


@pytest.mark.integration
@pytest.mark.parametrize(("dim", "n"), [(1, 2_000), (2, 3_000)])
@pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")
def test_the_noise_of_a_stream_is_found(dim: int, n: int) -> None:
    (X, Y), (T, TY) = draw(n, dim), draw(4_000, dim)
    box, first = torch.tensor([[0.0] * dim, [1.0] * dim]), 200
    start = X[:first], Y[:first]
    Yvar, noise = deviation(X).square(), deviation(T).square()
    learned = streamed(HeteroscedasticWISKI(*start, bounds=box), X, Y, None, first)
    plain = streamed(WISKI(*start, bounds=box), X, Y, None, first)
    known = streamed(WISKI(*start, Yvar[:first], bounds=box), X, Y, Yvar, first)
    batch = HeteroscedasticWISKI(X, Y, bounds=box)
    fit(batch)
    for model in (learned, batch):
        found = noise_of(model, T).squeeze(0).sqrt().detach() / deviation(T).squeeze(-1)
        assert float((found - 1.0).abs().median()) < 0.15
    ours, best = nlpd(learned, T, TY), nlpd(known, T, TY, noise)
    assert ours < nlpd(plain, T, TY) - 0.15
    assert ours < best + 0.02
    assert abs(ours - nlpd(batch, T, TY)) < 0.01


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")
def test_noise_that_is_the_same_everywhere_costs_little() -> None:
    (X, Y), (T, TY) = (draw(n, 1, lambda X: torch.full_like(X, 0.3)) for n in (1_000, 4_000))
    learned = streamed(HeteroscedasticWISKI(X[:200], Y[:200], bounds=UNIT), X, Y, None, 200)
    plain = streamed(WISKI(X[:200], Y[:200], bounds=UNIT), X, Y, None, 200)
    assert nlpd(learned, T, TY) < nlpd(plain, T, TY) + 0.01


# --- acquisition --------------------------------------------------------------------------------


def acquisitions(model: StreamingGP, T: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    sampler = SobolQMCNormalSampler(torch.Size([8]), seed=3)
    return {
        "qNIPV": qNegIntegratedPosteriorVariance(model, T),
        "FeatureNIPV": FeatureNIPV(model, mc_points=T),
        "qUCB": qUpperConfidenceBound(model, 0.3, sampler=sampler),
        "qLogNEI": qLogNoisyExpectedImprovement(model, T[:4], sampler=sampler),
        "fantasies": lambda X: (
            model.fantasize(X, sampler).posterior(T, observation_noise=True).variance.mean()
        ),
    }


@pytest.mark.parametrize("name", ["qNIPV", "FeatureNIPV", "qUCB", "qLogNEI", "fantasies"])
def test_gradients_flow_through_the_noise(name: str) -> None:
    X, Y = draw(40, 2)
    model, T = model_of(X, Y).eval(), torch.rand(6, 2).double()
    acquisition = acquisitions(model, T)[name]
    assert_gradient(lambda X: acquisition(X).sum(), smooth_points(model, 1, 2))


def test_integrated_variance_is_that_of_the_noise_at_the_candidates() -> None:
    X, Y = draw(40, 2)
    model, T = model_of(X[:0], Y[:0], outcome_transform=None), torch.rand(6, 2).double()
    entry, candidates = model.observe(X, Y), torch.rand(3, 2).double()
    dense = prior(model)[0].condition(X, Y.squeeze(-1), entry.observations.noise[0])
    noise = model.noise_at(candidates)[0]
    expected = -integrated_posterior_variance(dense, candidates, noise, T)
    for name in ("qNIPV", "FeatureNIPV"):
        assert_close(acquisitions(model, T)[name](candidates.unsqueeze(0))[0], expected)


def test_picks_from_a_pool_have_the_noise_of_each() -> None:
    X, Y = draw(60, 2)
    model, T = model_of(X, Y, rounds=1, outcome_transform=None), torch.rand(20, 2).double()
    pool, picks = torch.rand(15, 2).double(), []
    selector = PoolSelector(model, pool, T)
    joint = model.posterior(torch.cat((pool, T)))
    mean, covariance = joint.mean.squeeze(-1).detach(), joint.covariance_matrix.detach()
    noise = model.noise_at(pool)[0]
    for _ in range(4):
        gains = covariance[15:, :15].square().mean(0) / (covariance.diagonal()[:15] + noise)
        best = int(gains.index_fill(0, torch.tensor(picks, dtype=torch.long), -1.0).argmax())
        picks.append(best)
        mean, covariance = condition_in_turn(mean, covariance, [best], mean[[best]], noise[[best]])
    assert selector.select(4).tolist() == picks
    model.update(pool[picks], function(pool[picks]))
    assert torch.equal(selector.select(4), select_from_pool(model, pool, 4, T))
