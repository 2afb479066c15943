"""One gradient step an observation, against the dense marginal likelihood."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    UnsupportedError,
)
from botorch.models.transforms.outcome import (
    Bilog,
    ChainedOutcomeTransform,
    Log,
    OutcomeTransform,
    Power,
    Standardize,
)
from torch.utils.flop_counter import FlopCounterMode

from bo_stream import WISKI, BinomialLikelihood, DirichletWISKI, HeteroscedasticWISKI
from bo_stream.bases.kernels import LinearStem, MLPStem, Stem
from bo_stream.learning import (
    LEFT_OUT,
    OnlineLearner,
    OnlineObjective,
    pretrain,
)
from bo_stream.testing.streams import assert_close, assert_untouched, fingerprint
from tests.learning.test_pretraining import ridge
from tests.oracles.reference import reference
from tests.support.problems import Observations, OpenStem, observations

pytestmark = pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")

D = 4
HYPERPARAMETERS = ("covar_module", "mean_module", "likelihood")
RATES = ("learning_rate", "stem_learning_rate")


def model_with(stem: Stem, noise: str = "learned", outputs: int = 1) -> WISKI:
    data = observations(15, D, outputs).with_noise(noise)
    model = WISKI(*data.astuple(), stem=stem, grid_size=8, tolerance=0.0)
    return model.eval()


def standardised(data: Observations, n: int) -> tuple[Observations, Observations]:
    """The first n and the others, in units of the first."""
    Y = (data.Y - data.Y[:n].mean()) / data.Y[:n].std()
    return replace(data, Y=Y)[:n], replace(data, Y=Y)[n:]


@pytest.mark.parametrize("stem", [LinearStem(D, 2), MLPStem(D, 5, 2)], ids=["linear", "MLP"])
def test_the_stems_gradient_is_that_of_the_newest_points_alone(stem: Stem) -> None:
    """Eq. 18: the likelihood of all observations, the earlier projections held fixed."""
    data, more = standardised(observations(17, D), 15)
    model = WISKI(
        *data.astuple(), stem=stem, grid_size=8, tolerance=0.0, outcome_transform=None
    ).eval()
    parameters = list(stem.parameters())
    own = OnlineObjective(model, left_out=0.0).log_density(*more.astuple())
    actual = torch.autograd.grad(own, parameters)
    before, new = stem(data.X).detach(), stem(more.X)
    both = reference(model, torch.cat((before, new)), torch.cat((data.Y, more.Y)))
    past = reference(model, before, data.Y)
    dense = both.log_marginal_likelihood() - past.log_marginal_likelihood()
    assert_close(own, dense)
    for a, e in zip(actual, torch.autograd.grad(dense, parameters), strict=True):
        assert_close(a, e, factor=10)


def test_the_stems_gradient_with_few_features_is_within_a_tenth() -> None:
    """By default those are left out that carry a thousandth of the noise variance."""
    X, Y = ridge(402)
    model = WISKI(X[:400], Y[:400], stem=LinearStem(D, 2), grid_size=16, tolerance=0.0).eval()
    few, every = (
        torch.autograd.grad(
            OnlineObjective(one, left_out).log_density(X[400:], Y[400:]), one.stem.weight
        )[0]
        for one, left_out in ((copy.deepcopy(model), LEFT_OUT), (model, 0.0))
    )
    assert 0.0 < (few - every).norm() < 0.1 * every.norm()


@pytest.mark.parametrize("noise", ["learned", "known"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_density_is_in_units_of_the_outcomes(noise: str, outputs: int) -> None:
    model = model_with(LinearStem(D, 2), noise, outputs)
    more = observations(3, D, outputs).with_noise(noise)
    own = OnlineObjective(model, left_out=0.0).log_density(*more.astuple())
    variances = True if more.Yvar is None else more.Yvar / model.outcome_scale().square()
    posterior = model.posterior(more.X, observation_noise=variances)
    assert_close(own, posterior.distribution.log_prob(more.Y.squeeze(-1)), factor=1e3)


@pytest.mark.parametrize(
    "transform",
    [Log(), Power(0.5), Power(-2.0), Bilog(), ChainedOutcomeTransform(a=Bilog(), b=Power(2.0))],
    ids=["log", "square root", "inverse square", "bilog", "chain"],
)
def test_density_is_in_units_of_the_outcomes_before_a_fixed_transform(
    transform: OutcomeTransform,
) -> None:
    data, standardize = observations(15, 2), Standardize(1)
    Y = data.Y.abs() + 0.1
    chain = ChainedOutcomeTransform(fixed=transform, standardize=standardize)
    model = WISKI(data.X[:12], Y[:12], grid_size=8, outcome_transform=chain).eval()
    targets = transform(Y)[0]
    plain = WISKI(data.X[:12], targets[:12], grid_size=8).eval()
    new = Y[12:].clone().requires_grad_()
    (slope,) = torch.autograd.grad(transform(new)[0].sum(), new)
    expected = OnlineObjective(plain).log_density(data.X[12:], targets[12:])
    own = OnlineObjective(model).log_density(data.X[12:], Y[12:])
    assert_close(own, expected + slope.abs().log().sum())


def test_a_step_is_one_of_each() -> None:
    """Stem by the density before, memory by the new stem, kernel by the likelihood after."""
    stem = LinearStem(D, 2)
    model, more = model_with(stem), observations(1, D)
    by_hand = copy.deepcopy(model)
    learner = OnlineLearner(model, learning_rate=0.01, stem_learning_rate=0.02)
    density = learner.step(*more.astuple())

    parameters = list(by_hand.stem.parameters())
    own = OnlineObjective(by_hand).log_density(*more.astuple())
    gradients = torch.autograd.grad(own, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.add_(0.02 * gradient.sign())  # Adam's first step
    by_hand.update(*more.astuple())
    assert density == pytest.approx(own.item())
    assert_close(stem.weight, by_hand.stem.weight, factor=1e3)
    lengthscale = model.covar_module.lengthscale.log() - by_hand.covar_module.lengthscale.log()
    assert_close(lengthscale.abs(), torch.full_like(lengthscale, 0.01), factor=1e4)
    constant = model.mean_module.constant - by_hand.mean_module.constant
    assert_close(constant.abs(), torch.full_like(constant, 0.01), factor=1e4)
    assert model.num_observations == 16


@pytest.mark.integration
def test_learning_along_pays() -> None:
    """Against the same stream with the stem and the hyperparameters as they were."""
    X, Y = ridge(240)
    densities = []
    for rate in (0.0, 0.02):
        model = WISKI(X[:20], Y[:20], stem=LinearStem(D, 1, seed=1), grid_size=16)
        learner = OnlineLearner(model, rate, rate)
        each = [learner.step(X[i : i + 2], Y[i : i + 2]) for i in range(20, 240, 2)]
        densities.append(sum(each[-50:]) / 50)
    assert densities[1] > densities[0] + 0.3


def test_a_refused_step_changes_nothing_that_learns() -> None:
    """Led out of the cube by one batch, the stem goes on as if that had not come."""
    X, learners = torch.rand(30, D).double(), []
    for _ in range(2):
        model = WISKI(X[:20], X[:20].sum(-1, keepdim=True), stem=OpenStem(D), grid_size=8)
        learners.append(OnlineLearner(model, 0.0, 0.01))
    for learner in learners:
        learner.step(X[20:22], X[20:22].sum(-1, keepdim=True))
    refused = learners[0]
    refused._stem.set_rate(100.0)
    before = fingerprint(refused.model)
    with pytest.raises(InputDataError, match="unit cube"):
        refused.step(X[22:24], 9.0 * X[22:24].sum(-1, keepdim=True))
    assert_untouched(refused.model, before)
    refused._stem.set_rate(0.01)
    for learner in learners:
        learner.step(X[24:26], X[24:26].sum(-1, keepdim=True))
    first, second = (list(learner.model.parameters()) for learner in learners)
    assert all(map(torch.equal, first, second))


def test_a_model_without_a_stem_learns_its_kernel() -> None:
    data = observations(30, 2)
    model = WISKI(*data[:20].astuple(), grid_size=8)
    before = model.likelihood.noise.item()
    OnlineLearner(model).step(*data[20:].astuple())
    assert model.likelihood.noise.item() != before


@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
def test_refreshing_all_is_building_anew(noise: str) -> None:
    data = observations(24, D).with_noise(noise)
    stem = LinearStem(D, 2)
    model = WISKI(*data[:10].astuple(), stem=stem, grid_size=8, tolerance=0.0)
    learner = OnlineLearner(model, 0.05, 0.3, keep=24)
    learner.offer(*data[:10].astuple())
    for i in range(10, 24, 2):
        learner.step(*data[i : i + 2].astuple())
    T = torch.rand(4, D).double()
    anew = copy.deepcopy(model).clear().update(*data.astuple())
    assert (model.posterior(T).mean - anew.posterior(T).mean).abs().max().item() > 1e-3
    learner.refresh()
    assert_close(model.posterior(T).mean, anew.posterior(T).mean)
    assert_close(model.posterior(T).variance, anew.posterior(T).variance)
    learner.refresh()
    assert_close(model.posterior(T).mean, anew.posterior(T).mean)


def test_refreshing_takes_rows_of_known_noise_with_rows_of_none() -> None:
    data = observations(20, D).with_noise("known")
    assert data.Yvar is not None
    model = WISKI(data.X[:5], data.Y[:5], stem=LinearStem(D, 2), grid_size=8, tolerance=0.0)
    learner = OnlineLearner(model, 0.0, 0.3, keep=20)
    learner.offer(data.X[:5], data.Y[:5])
    learner.step(*data[5:15].astuple())
    learner.step(data.X[15:], data.Y[15:])
    learner.refresh()
    Yvar = data.Yvar.clone()
    Yvar[:5], Yvar[15:] = torch.nan, torch.nan
    anew = copy.deepcopy(model).clear().update(data.X, data.Y, Yvar)
    T = torch.rand(4, D).double()
    assert_close(model.posterior(T).mean, anew.posterior(T).mean)
    assert_close(model.posterior(T).variance, anew.posterior(T).variance)


def test_relearning_from_all_is_pretraining_on_all() -> None:
    data = observations(24, D).with_noise("mixed")
    model = WISKI(*data[:10].astuple(), stem=LinearStem(D, 1), grid_size=8, tolerance=0.0)
    learner = OnlineLearner(model, 0.0, 0.0, keep=24)
    learner.offer(*data[:10].astuple())
    learner.step(*data[10:].astuple())
    expected = copy.deepcopy(model)
    learner.relearn(maxiter=5)
    pretrain(expected, *data.astuple(), maxiter=5)
    T = torch.rand(4, D).double()
    assert_close(model.posterior(T).mean, expected.posterior(T).mean)
    assert_close(model.posterior(T).variance, expected.posterior(T).variance)
    assert_close(model.coordinates(T), expected.coordinates(T))


def test_relearning_from_some_keeps_the_others() -> None:
    data = observations(40, D)
    model = WISKI(*data[:20].astuple(), stem=LinearStem(D, 1), grid_size=8)
    learner = OnlineLearner(model, 0.0, 0.0, keep=12)
    with pytest.raises(InputDataError, match="kept observations, got none"):
        learner.relearn()
    learner.step(*data[20:].astuple())
    before = model.coordinates(data.X)
    learner.relearn(maxiter=5)
    assert model.num_observations == 40
    assert not torch.allclose(model.coordinates(data.X), before)


def test_refreshing_some_moves_those() -> None:
    data = observations(20, D)
    model = WISKI(*data[:10].astuple(), stem=LinearStem(D, 2), grid_size=8, tolerance=0.0)
    learner = OnlineLearner(model, 0.0, 0.3, keep=10)
    learner.step(*data[10:].astuple())
    expected = copy.deepcopy(model)
    former = learner._stored[0].coordinates
    with torch.no_grad():
        for parameter in (*model.stem.parameters(), *expected.stem.parameters()):
            parameter.mul_(1.3)
    learner.refresh(1)
    expected.reproject(data.X[10:11], data.Y[10:11], former.unsqueeze(0))
    T = torch.rand(4, D).double()
    assert_close(model.posterior(T).mean, expected.posterior(T).mean)
    with pytest.raises(ValueError, match="n_kept from 0 to the 10 kept, got 11"):
        learner.refresh(11)
    with pytest.raises(ValueError, match=r"n_kept to be a whole number.* got 1.5"):
        learner.refresh(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["forget", "retract", "clear"])
def test_what_was_stored_before_observations_left_is_not_learned_from(verb: str) -> None:
    data, T = observations(60, D), torch.rand(4, D).double()
    model = WISKI(*data[:20].astuple(), stem=LinearStem(D, 1), grid_size=8, tolerance=0.0)
    learner = OnlineLearner(model, 0.0, 0.3, keep=60)
    learner.offer(*data[:20].astuple())
    for i in range(20, 40):
        learner.step(*data[i : i + 1].astuple())
    {"forget": lambda: model.forget(0.9), "clear": model.clear}.get(
        verb, lambda: model.retract(*data[39:40].astuple())
    )()
    before = model.posterior(T)
    learner.refresh()  # nothing is stored any more
    assert torch.equal(model.posterior(T).mean, before.mean)
    learner.step(*data[40:60].astuple())
    rest, former = copy.deepcopy(model), copy.deepcopy(learner._stored)
    assert len(former) == 20  # those since
    learner.refresh()
    rest.reproject(data.X[40:], data.Y[40:], torch.stack([one.coordinates for one in former]))
    assert_close(model.posterior(T).mean, rest.posterior(T).mean)
    assert_close(model.posterior(T).variance, rest.posterior(T).variance)


def test_labels_may_be_offered_in_a_column_or_without() -> None:
    X, labels = torch.rand(40, 3).double(), torch.arange(40) % 2
    models = [
        DirichletWISKI(X[:20], labels[:20], stem=LinearStem(3, 1), grid_size=8) for _ in range(2)
    ]
    for model, column in zip(models, (labels[:20, None], labels[:20]), strict=True):
        learner = OnlineLearner(model, 0.0, 0.1, keep=40)
        learner.offer(X[:20], column)
        learner.step(X[20:], labels[20:])
        learner.refresh()
    one, other = models
    assert_close(one.posterior(X).mean, other.posterior(X).mean)


def test_refreshing_without_a_stem_takes_inputs_outside_the_unit_cube() -> None:
    data, bounds = observations(20, 2), torch.tensor([[-2.0, -2.0], [3.0, 3.0]]).double()
    X = 5.0 * data.X - 2.0
    model = WISKI(X[:10], data.Y[:10], grid_size=8, bounds=bounds)
    learner = OnlineLearner(model, 0.0, keep=20)
    learner.step(X[10:], data.Y[10:])
    before = model.posterior(X)
    learner.refresh()
    assert_close(model.posterior(X).mean, before.mean)
    assert_close(model.posterior(X).variance, before.variance)


@pytest.mark.parametrize("verb", ["refine", "retract", "clear"])
def test_a_relearning_that_is_refused_changes_nothing(verb: str) -> None:
    """Once the memory no longer holds the stored observations on one grid."""
    data, T = observations(40, D), torch.rand(4, D).double()
    model = WISKI(*data[:10].astuple(), stem=LinearStem(D, 1), grid_size=8, tolerance=0.0)
    learner = OnlineLearner(model, 0.0, 0.0, keep=400)
    for _ in range(10):  # more than are stored as rows
        learner.step(*data.astuple())
    if verb == "refine":
        model.refine(10).update(*data.astuple())
    else:
        model.retract(*data.astuple()) if verb == "retract" else model.clear()
    before, state = model.posterior(T), copy.deepcopy(model.state_dict())
    with pytest.raises((InputDataError, UnsupportedError)):
        learner.relearn(maxiter=3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(model.posterior(T).mean, before.mean)
    assert not model.training


def test_a_model_that_is_built_empty_is_standardised_by_the_first_batch() -> None:
    data, bounds = observations(30, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    Y = 1e4 * data.Y + 3e4
    models = [WISKI(data.X[:n], Y[:n], bounds=bounds, grid_size=8) for n in (0, 12)]
    learner = OnlineLearner(models[0], learning_rate=0.0)
    learner.step(data.X[:12], Y[:12])
    assert_close(models[0].outcome_scale(), models[1].outcome_scale())
    densities = [OnlineLearner(model).step(data.X[12:], Y[12:]) for model in models]
    assert densities[0] == pytest.approx(densities[1])
    scale = models[0].outcome_scale()
    learner.step(data.X[:12], Y[:12])
    OnlineLearner(models[0].clear()).step(data.X[:1], Y[:1])
    assert torch.equal(models[0].outcome_scale(), scale)


def test_a_model_that_is_built_empty_is_standardised_by_its_first_points_one_at_a_time() -> None:
    data, bounds = observations(3, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
    Y = 1e4 * data.Y + 3e4
    model = WISKI(data.X[:0], Y[:0], bounds=bounds, grid_size=8)
    learner = OnlineLearner(model, learning_rate=0.0)
    for i in range(3):
        learner.step(data.X[i : i + 1], Y[i : i + 1])
    assert_close(model.outcome_scale().squeeze(), Y[:2].std())


def test_what_is_kept_is_a_uniform_sample_of_bounded_size() -> None:
    counts, Y = torch.zeros(12), torch.arange(12.0).double().unsqueeze(-1)
    model = WISKI(*observations(15, 2).astuple(), grid_size=8)
    for seed in range(400):
        learner = OnlineLearner(model, keep=3, seed=seed)
        learner.offer(torch.rand(12, 2).double(), Y)
        chosen = [int(stored.Y) for stored in learner._stored]
        assert len(set(chosen)) == 3
        counts[chosen] += 1
    assert (counts - 100).abs().max() < 40  # sd 8.7


def test_reprojecting_bad_input_changes_nothing() -> None:
    data, model = observations(15, D), model_with(LinearStem(D, 2))
    before = fingerprint(model)
    with pytest.raises(BotorchTensorDimensionError, match="former of shape"):
        model.reproject(data.X, data.Y, data.X)
    more = observations(16, D)
    coordinates = model.coordinates(more.X)
    with pytest.raises(InputDataError, match="at most the 15 observations"):
        model.reproject(more.X, more.Y, coordinates)
    assert_untouched(model, before)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, rate) for name in RATES for rate in (-1.0, math.nan, math.inf)),
        *(("keep", number) for number in (-1, 1.5, math.nan)),
    ],
)
def test_rates_and_a_budget_out_of_range(name: str, wrong: Any) -> None:
    model = model_with(LinearStem(D, 1))
    with pytest.raises(ValueError, match=rf"Expected {name} to be .*got {wrong}"):
        OnlineLearner(model, **{name: wrong})


@pytest.mark.parametrize("fault", ["NaN", "too wide", "out of the grid"])
def test_a_step_that_fails_changes_nothing(fault: str) -> None:
    X = torch.rand(20, D).double()
    model = WISKI(X, X.sum(-1, keepdim=True), stem=OpenStem(D), grid_size=8)
    learner = OnlineLearner(model, stem_learning_rate=2.0 if fault == "out of the grid" else 0.01)
    new_X, new_Y, T = X[:1] + 0.01, torch.full((1, 1), 9.0).double(), torch.rand(5, D).double()
    if fault != "out of the grid":
        new_X, new_Y = (new_X, new_Y / 0.0) if fault == "NaN" else (X[:1, 1:], new_Y)
    before, state = model.posterior(T), copy.deepcopy(model.state_dict())
    with pytest.raises((InputDataError, BotorchTensorDimensionError)):
        learner.step(new_X, new_Y)
    assert model.num_observations == 20
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(model.posterior(T).mean, before.mean)


@pytest.mark.parametrize(
    "frozen", [(*HYPERPARAMETERS, "stem"), HYPERPARAMETERS, ("stem",), ("likelihood",)], ids=len
)
@pytest.mark.parametrize("begun", [False, True])
def test_what_is_frozen_later_stays_while_the_rest_learns(
    frozen: tuple[str, ...], begun: bool
) -> None:
    model, more = model_with(LinearStem(D, 2)), observations(6, D)
    learner = OnlineLearner(model, 0.05, 0.05)
    if begun:
        learner.step(*more[:2].astuple())
    for part in frozen:
        getattr(model, part).requires_grad_(False)
    fixed = {name for name, p in model.named_parameters() if not p.requires_grad}
    before, count = copy.deepcopy(model.state_dict()), model.num_observations
    learner.step(*more[2:].astuple())
    assert model.num_observations == count + 4
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name in fixed), name


@pytest.mark.parametrize("begun", [False, True])
def test_a_model_may_be_moved_to_another_dtype_between_steps(begun: bool) -> None:
    model, more = model_with(LinearStem(D, 2)), observations(6, D)
    learner = OnlineLearner(model, 0.05, 0.05)
    if begun:
        learner.step(*more[:2].astuple())
    before, count = copy.deepcopy(model.float().state_dict()), model.num_observations
    learner.step(more.X[2:].float(), more.Y[2:].float())
    assert model.num_observations == count + 4
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert not torch.equal(parameter, before[name]), name


def test_a_step_of_no_points_changes_nothing() -> None:
    data = observations(12, D)
    model = WISKI(data.X, data.Y, stem=LinearStem(D, 2), grid_size=8)
    learner = OnlineLearner(model, 0.1, 0.1)
    learner.step(*observations(2, D).astuple())
    before = fingerprint(model)
    assert learner.step(data.X[:0], data.Y[:0]) == 0.0
    assert_untouched(model, before)
    with pytest.raises(BotorchTensorDimensionError):
        learner.step(data.X[:0, 1:], data.Y[:0])


def test_the_work_of_a_step_does_not_grow_with_the_stream() -> None:
    work = []
    for n in (20, 2_000):
        model = model_with(LinearStem(D, 2)).update(*observations(n, D).astuple())
        learner, more = OnlineLearner(model, keep=5), observations(2, D)
        learner.step(*observations(1, D).astuple())
        with FlopCounterMode(display=False) as counter:
            learner.step(*more.astuple())
        work.append((counter.get_total_flops(), model._cache.subspace.basis.rank))
    per_rank = [flops / rank**3 for flops, rank in work]
    assert per_rank[1] < 1.5 * per_rank[0]
    assert work[1][1] <= 64  # of the grid's 8 x 8 nodes


def test_other_models_are_refused() -> None:
    data = observations(12)
    with pytest.raises(UnsupportedError, match="WISKI or a DirichletWISKI, got a HeteroscedasticW"):
        OnlineLearner(HeteroscedasticWISKI(data.X, data.Y, grid_size=8))  # type: ignore[arg-type]
    counts = torch.cat((data.Y.abs().round(), torch.full_like(data.Y, 9.0)), -1)
    with pytest.raises(UnsupportedError, match=r"normal noise.* got a WISKI with a Binomial"):
        OnlineLearner(WISKI(data.X, counts, likelihood=BinomialLikelihood(), grid_size=8))


def test_a_budget_for_a_batch_of_models_is_refused() -> None:
    data = observations(12, 2, 1, (2,))
    model = WISKI(data.X, data.Y, grid_size=8)
    with pytest.raises(UnsupportedError, match=r"keep = 0 for a model with a batch shape, \(2,\)"):
        OnlineLearner(model, keep=3)
    OnlineLearner(model).step(data.X[:, :2] + 0.01, data.Y[:, :2])
    assert model.num_observations == 14
