"""Counts in OSVGP: against Laplace and long chains, in streams, as fantasies, and bad ones."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.sampling import SobolQMCNormalSampler
from botorch.utils.datasets import SupervisedDataset
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.means import ZeroMean
from scipy.special import expit
from scipy.stats import betabinom, binom
from torch import Tensor

from bo_stream import OSGPR, OSVGP, BinomialLikelihood, prevalence
from bo_stream.diagnostics.validation import predict_batch
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import assert_untouched, fingerprint
from tests.oracles.counts import elliptical_slices, laplace

N = 16


def surveys(most: int) -> tuple[Tensor, Tensor]:
    """Inputs and counts of 1 to so many examined."""
    random = torch.Generator().manual_seed(0)
    X = torch.rand(N, 2, dtype=torch.float64, generator=random)
    examined = torch.randint(1, most + 1, (N,), generator=random).double()
    chance = (3.0 * torch.sin(4.0 * X[:, 0]) - 2.0).sigmoid()
    positives = (examined * chance).round()
    return X, torch.stack((positives, examined), -1)


def small_surveys() -> tuple[Tensor, Tensor]:
    """400 inputs and counts of at most 5 examined."""
    random = torch.Generator().manual_seed(0)
    X = torch.rand(400, 2, dtype=torch.float64, generator=random)
    examined = torch.randint(1, 6, (400,), generator=random).double()
    chance = (3.0 * torch.sin(4.0 * X[:, 0]) - 2.0).sigmoid()
    return X, torch.stack(((examined * chance).round(), examined), -1)


def orders(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three orders of rows: as they are, from west to east, and backwards from the middle on."""
    rows = torch.arange(len(X))
    return rows, X[:, 0].argsort(), rows.roll(len(X) // 2).flip(0)


def largest_gap(
    build: Callable[[Tensor, Tensor], StreamingGP], X: Tensor, Y: Tensor, batch: StreamingGP
) -> float:
    """Return how far streams in tens end from a batch, in its deviations, in three orders."""
    mean, deviation = logits(batch, X)
    gaps = []
    for order in orders(X):
        stream = build(X[:0], Y[:0]).eval()
        for rows in order.split(10):
            stream.update(X[rows], Y[rows])
        gaps.append((np.abs(logits(stream, X)[0] - mean) / deviation).max())
    return float(max(gaps))


def count_kernel() -> ScaleKernel:
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 4.0, 0.5
    return kernel


def count_model(
    X: Tensor, Y: Tensor, points: Tensor, overdispersed: bool = False, **options: Any
) -> OSVGP:
    likelihood = BinomialLikelihood(overdispersion=overdispersed)
    return OSVGP(X, Y, likelihood, count_kernel(), ZeroMean(), inducing_points=points, **options)


def logits(model: StreamingGP, X: Tensor) -> tuple[np.ndarray, np.ndarray]:
    posterior = model.posterior(X)
    return posterior.mean[:, 0].detach().numpy(), posterior.stddev.detach().numpy().reshape(-1)


def _gram(X: Tensor) -> np.ndarray:
    return count_kernel()(X).to_dense().detach().numpy()


def test_many_examined_end_where_laplace_ends() -> None:
    X, Y = surveys(40)
    Y = 50.0 * Y
    mean, deviation = logits(count_model(X, Y, X), X)
    mode, covariance = laplace(_gram(X), *Y.T.numpy())
    spread = np.sqrt(np.diag(covariance))
    inside = torch.minimum(Y[:, 0], Y[:, 1] - Y[:, 0]).numpy() > 20  # else Laplace itself is rough
    assert np.abs(mean - mode)[inside].max() < 0.02
    assert deviation[inside] == pytest.approx(spread[inside], rel=0.03)


@pytest.mark.parametrize(
    "overdispersed", [False, pytest.param(True, marks=pytest.mark.integration)]
)
def test_a_batch_ends_where_long_chains_end(overdispersed: bool) -> None:
    """Within a tenth of a deviation and four standard errors: the posterior is taken for normal."""
    X, Y = surveys(60)
    positives, examined = Y.T.numpy()
    mean, deviation = logits(count_model(X, Y, X, overdispersed), X)

    def log_likelihood(f: np.ndarray) -> np.ndarray:
        if overdispersed:
            p = 50.0 * expit(f), 50.0 * expit(-f)
            return betabinom.logpmf(positives, examined, *p).sum(-1)
        return (positives * f - examined * np.logaddexp(0.0, f)).sum(-1)

    drawn = elliptical_slices(_gram(X), log_likelihood, chains=150, steps=300)
    spread, error = drawn.std((0, 1)), drawn.mean(0).std(0) / math.sqrt(drawn.shape[1])
    assert (np.abs(mean - drawn.mean((0, 1))) < 0.1 * spread + 4.0 * error).all()
    assert deviation == pytest.approx(spread, rel=0.15)


@pytest.mark.parametrize(("most", "overdispersed"), [(8, True), (60, False)])
@pytest.mark.parametrize("batch", [1, 5])
def test_streams_in_any_order_end_near_the_batch(
    most: int, overdispersed: bool, batch: int
) -> None:
    """Within a quarter of a deviation: sites of earlier rows stay as they were found."""
    X, Y = surveys(most)
    whole = count_model(X, Y, X, overdispersed)
    mean, deviation = logits(whole, X)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(batch))
    stream = count_model(X[:0], Y[:0], X, overdispersed, window=0)
    for rows in order.split(batch):
        stream.update(X[rows], Y[rows])
    found, spread = logits(stream, X)
    assert (np.abs(found - mean) < 0.25 * deviation).all()
    assert spread == pytest.approx(deviation, rel=0.2)


@pytest.mark.integration
def test_by_default_a_stream_ends_at_its_batch() -> None:
    """Of many small surveys, whose errors add up where each site stays as it was found."""
    X, Y = small_surveys()
    Z = torch.rand(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = count_model(X, Y, Z)
    assert largest_gap(partial(count_model, points=Z), X, Y, whole) < 0.005
    assert largest_gap(partial(count_model, points=Z, window=100), X, Y, whole) > 0.03


@pytest.mark.integration
def test_points_that_follow_a_stream_are_as_good_as_its_batchs() -> None:
    X, Y = small_surveys()

    def build(X: Tensor, Y: Tensor) -> OSVGP:
        return OSVGP(X, Y, BinomialLikelihood(), count_kernel(), ZeroMean())

    assert largest_gap(build, X, Y, build(X, Y)) < 0.005


def test_only_counts_are_held_by_default() -> None:
    X, Y = surveys(5)
    assert count_model(X, Y, X).window == 300
    assert OSVGP(X, (Y[:, :1] > 1.0).double(), BernoulliLikelihood()).window == 0
    assert count_model(X, Y, X, window=0)._memory.held is None


@pytest.mark.parametrize("window", [0, 4])
def test_what_an_update_carries_along_is_what_it_would_solve_for(window: int) -> None:
    """The posterior before the window and its features, as rows settle and are taken out."""
    X, Y = surveys(5)
    model = count_model(X[:10], Y[:10], X, window=window)
    assert solved_as_anew(model, X)
    for i in range(10, N):
        anew = copy.deepcopy(model)
        anew._cache = None
        for each in (model, anew):
            each.update(X[i : i + 1], Y[i : i + 1])
        assert solved_as_anew(model, X)
        assert logits(model, X)[0] == pytest.approx(logits(anew, X)[0], abs=1e-7)
    if window:
        model.retract(X[-1:], Y[-1:]).update(X[:1], Y[:1])
        assert solved_as_anew(model, X)
    model.forget(0.5).update(X[:1], Y[:1])
    assert solved_as_anew(model, X)
    model.covar_module.outputscale = 2.0
    model.update(X[:1], Y[:1])
    assert solved_as_anew(model, X)


def solved_as_anew(model: OSVGP, X: Tensor) -> bool:
    """Say whether the posterior is that of the memory solved without a cache."""
    anew = copy.deepcopy(model)
    anew._cache = None
    pairs = zip(logits(model, X), logits(anew, X), strict=True)
    return all(a == pytest.approx(b, abs=1e-8) for a, b in pairs)


def held_model(n: int, window: int, **options: Any) -> tuple[OSVGP, Tensor, Tensor]:
    X, Y = surveys(5)
    model = OSVGP(
        X[:n], Y[:n], BinomialLikelihood(), count_kernel(), ZeroMean(), window=window, **options
    )
    return model, X, Y


def test_outcomes_of_the_window_are_taken_out_exactly_and_others_not() -> None:
    model, X, Y = held_model(N, N)
    rest, *_ = held_model(12, N, inducing_points=model.inducing_points)
    model.retract(X[12:], Y[12:])
    for a, b in zip(logits(model, X), logits(rest, X), strict=True):
        assert a == pytest.approx(b, abs=1e-6)
    few, *_ = held_model(N, 4)
    before = fingerprint(few)
    with pytest.raises(UnsupportedError, match="outcomes in the model's window"):
        few.retract(X[10:], Y[10:])
    assert_untouched(few, before)


def test_a_window_that_is_merged_or_forgotten_stays_as_it_was_found() -> None:
    model, X, Y = held_model(12, 4)
    other, *_ = held_model(0, 4)
    other.update(X[12:], Y[12:])
    both, counted = model.merge(other), float(model._memory.counts.sum())
    assert counted == float(N)
    assert both._memory.held is None
    both.update(X[:3], Y[:3])
    assert len(both._memory.held.data) == 3
    both.forget(0.5)
    assert both._memory.held is None
    assert both.posterior(X).mean.isfinite().all()


def test_hyperparameters_are_learned_from_the_window_and_the_batch() -> None:
    model, X, Y = held_model(6, 4, hyper_steps=3)
    before = model.covar_module.outputscale.item()
    model.update(X[6:], Y[6:])
    assert model.covar_module.outputscale.item() != before
    assert len(model._memory.held.data) == 4
    assert logits(model, X)[1].max() < 4.0


def test_a_survey_of_many_is_as_many_of_one() -> None:
    X, Y = torch.full((10, 2), 0.3).double(), torch.ones(10, 2).double()
    Y[:7, 0] = 0.0
    together = count_model(X[:1], torch.tensor([[3.0, 10.0]]).double(), X[:1])
    apart = count_model(X, Y, X[:1])
    for a, b in zip(logits(together, X[:1]), logits(apart, X[:1]), strict=True):
        assert a == pytest.approx(b, rel=1e-6)


def test_predictions_are_of_counts_at_the_trials_of_a_hypothetical_survey() -> None:
    X, Y = surveys(60)
    model = count_model(X, Y, X)
    mean_examined = round(float(Y[:, 1].mean()))
    rates = prevalence(model, X)
    counts = model.predictive(X)
    assert torch.allclose(counts.mean, mean_examined * rates.mean, rtol=1e-4)
    within = mean_examined * (rates.mean * (1.0 - rates.mean) - rates.variance)
    assert torch.allclose(counts.variance, within + mean_examined**2 * rates.variance, rtol=1e-3)
    every = torch.stack((torch.arange(21.0), torch.full((21,), 20.0)), -1).double()
    total = model.log_predictive(X[:1].expand(21, -1), every).exp().sum()
    assert float(total) == pytest.approx(1.0, abs=1e-5)
    likelihood = BinomialLikelihood(trials=7)
    few = OSVGP(X, Y, likelihood, count_kernel(), ZeroMean(), inducing_points=X)
    assert torch.allclose(few.predictive(X).mean, 7.0 * rates.mean, rtol=1e-4)


@pytest.mark.parametrize("overdispersed", [False, True])
def test_draws_have_the_moments_of_the_likelihood(overdispersed: bool) -> None:
    likelihood = BinomialLikelihood(20, overdispersed).double()
    logit = torch.tensor([-3.0, 0.5], dtype=torch.float64)
    law = likelihood.requires_grad_(False)(logit)
    torch.manual_seed(0)
    drawn = law.sample(torch.Size([20_000])).numpy()
    for i, chance in enumerate(expit(logit.numpy())):
        exact = betabinom(20, 50 * chance, 50 * (1 - chance)) if overdispersed else None
        exact = binom(20, chance) if exact is None else exact
        assert float(law.mean[i]) == pytest.approx(exact.mean(), rel=1e-5)
        assert float(law.variance[i]) == pytest.approx(exact.var(), rel=1e-5)
        error = exact.std() / math.sqrt(len(drawn))
        assert abs(drawn[:, i].mean() - exact.mean()) < 5.0 * error
        assert drawn[:, i].var() == pytest.approx(exact.var(), rel=0.08)


def test_fantasies_draw_counts() -> None:
    X, Y = surveys(60)
    model = count_model(X, Y, X)
    sampler = SobolQMCNormalSampler(torch.Size([64]), seed=1)
    after = model.fantasize(X[:2] + 0.1, sampler)
    before = model.posterior(X)
    assert bool((after.posterior(X).variance <= before.variance + 1e-12).all())
    gap = after.posterior(X).mean.mean(0) - before.mean
    assert bool((gap.abs() < 0.25 * before.variance.sqrt()).all())
    told = model.condition_on_observations(X[:2], Y[:2])
    assert told.num_outputs == 1


def test_the_concentration_is_learned() -> None:
    random = np.random.default_rng(0)
    X = torch.rand(150, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positives = torch.as_tensor(betabinom.rvs(40, 1.0, 3.0, size=150, random_state=random))
    Y = torch.stack((positives.double(), torch.full((150,), 40.0).double()), -1)
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, 0.5
    likelihood = BinomialLikelihood(overdispersion=True)
    points = torch.linspace(0.0, 1.0, 6).double().unsqueeze(-1)
    options = {"inducing_points": points, "hyper_steps": 25, "learning_rate": 0.15}
    model = OSVGP(X, Y, likelihood, kernel, **options)
    concentration = model.likelihood.concentration
    assert concentration is not None
    assert 2.5 < float(concentration) < 6.5


def test_data_sets_hold_counts_in_two_columns() -> None:
    X, Y = surveys(60)
    data = SupervisedDataset(
        X, Y, feature_names=["x", "y"], outcome_names=["positives", "examined"]
    )
    arguments = OSVGP.construct_inputs(data, likelihood=BinomialLikelihood())
    assert OSVGP(**arguments).num_outputs == 1


BAD = {
    "more positives than examined": (4.0, 3.0, r"as examined.*Y\[2, 0\] = 4, row 2, column 0"),
    "nobody examined": (0.0, 0.0, r"1 or more examined.*Y\[2, 1\] = 0, row 2, column 1"),
    "per cent": (45.0, 40.0, r"per cent.*row 2, column 0"),
    "a prevalence": (0.45, 40.0, r"whole number of positives.*row 2, column 0"),
    "half a person": (4.0, 10.5, r"whole number of examined.*row 2, column 1"),
    "negative": (-1.0, 10.0, r"0 or more positives.*row 2, column 0"),
    "not known": (math.nan, 10.0, r"Y.*finite"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_counts_are_named_and_change_nothing(fault: str) -> None:
    X, Y = surveys(60)
    positives, examined, message = BAD[fault]
    model, spoilt = count_model(X, Y, X), Y[:5].clone()
    spoilt[2] = torch.tensor([positives, examined])
    model.posterior(X)
    before = fingerprint(model)
    for verb in (model.update, model.condition_on_observations, model.log_predictive):
        with pytest.raises(InputDataError, match=message):
            verb(X[:5], spoilt)
    if fault != "not known":
        with pytest.raises(InputDataError, match=message):
            count_model(X[:5], spoilt, X)
    assert_untouched(model, before)


def test_one_column_is_refused() -> None:
    X, Y = surveys(60)
    with pytest.raises(BotorchTensorDimensionError, match="two columns"):
        count_model(X, Y[:, :1], X)
    model = count_model(X, Y, X)
    before = fingerprint(model)
    with pytest.raises(BotorchTensorDimensionError, match="`16 x 2`"):
        model.update(X, Y[:, :1])
    with pytest.raises(UnsupportedError, match="no Yvar"):
        model.update(X, Y, torch.ones_like(Y))
    assert_untouched(model, before)


def test_a_hypothetical_survey_needs_a_number_to_examine() -> None:
    X, Y = surveys(60)
    with pytest.raises(UnsupportedError, match=r"trials=100"):
        count_model(X[:0], Y[:0], X).predictive(X)
    with pytest.raises(ValueError, match="trials"):
        BinomialLikelihood(trials=0)
    with pytest.raises(UnsupportedError, match="one output"):
        prevalence(OSVGP(X, Y), X)


def test_the_noise_of_a_hypothetical_survey_is_what_its_fantasies_have() -> None:
    """A survey takes ``v² / (v + noise)`` from a logit's variance v, whatever it finds."""
    X, Y = surveys(20)
    model, at = count_model(X, Y, X), torch.tensor([[0.9, 0.1]]).double()
    with torch.no_grad():
        moments = tuple(moment[0, 0] for moment in model.process(at).marginals(at))
        noise = float(model.noise_given(at, *moments, torch.tensor([30.0]).double()))
        before = float(model.posterior(at).variance)
        for positives in (2.0, 20.0):
            survey = torch.tensor([[positives, 30.0]]).double()
            after = float(model.condition_on_observations(at, survey).posterior(at).variance)
            assert after == pytest.approx(before - before**2 / (before + noise), rel=1e-6)
    gaussian = OSGPR(X, Y[:, :1])
    with pytest.raises(UnsupportedError, match="trials only of a model of counts"):
        gaussian.noise_given(at, *moments, torch.ones(1))
    assert torch.equal(gaussian.noise_given(at, at[:, 0], at[:, 1]), gaussian.noise_at(at))


def test_validation_expects_positives_of_those_examined() -> None:
    X, Y = surveys(60)
    model = count_model(X[:10], Y[:10], X)
    found = predict_batch(model, X[10:], Y[10:])
    expected = prevalence(model, X[10:]).mean * Y[10:, 1:]
    assert found.mean == pytest.approx(expected.detach().numpy())
    assert found.outcome == pytest.approx(Y[10:, :1].numpy())
    density = model.log_predictive(X[10:], Y[10:]).detach().numpy()
    assert found.log_density == pytest.approx(density)
