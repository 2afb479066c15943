"""A Bayesian last layer against linear regression on the same features."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from botorch.cross_validation import batch_cross_validation, gen_loo_cv_folds
from botorch.exceptions.errors import (
    BotorchTensorDimensionError,
    InputDataError,
    ModelFittingError,
    UnsupportedError,
)
from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms.input import Warp
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.nn import BatchNorm1d, Dropout, Linear, Module, Sequential, Tanh

from bo_stream import BayesianLastLayer
from bo_stream.models.last_layer.inference import (
    RIDGE,
    WIDTH,
    default_network,
    likelihood_from,
)
from bo_stream.models.last_layer.last_layer import LayerSteps
from bo_stream.testing.streams import (
    assert_close,
    assert_same_posterior,
    assert_untouched,
    fingerprint,
    moments,
)
from tests.oracles.last_layer import LinearRegression, carried_features
from tests.support.problems import Observations, observations

NOISE, MEAN, SCALE = 0.05, 0.3, 1.7
UNITS = 5


class Waves(Module):
    """A class that the package does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.frequency = torch.nn.Parameter(torch.linspace(1.0, 4.0, UNITS).double())

    def forward(self, X: Tensor) -> Tensor:
        return (X.sum(-1, keepdim=True) * self.frequency).sin()


def raw(
    data: Observations, network: Module | None = None, window: int = 100, **options: object
) -> BayesianLastLayer:
    """A model whose units are those of the data, with hyperparameters that a test knows."""
    network = default_network(2, UNITS) if network is None else network
    none = data[:0]
    model = BayesianLastLayer(
        none.X, none.Y, network, none.Yvar, outcome_transform=None, window=window, **options
    )
    with torch.no_grad():
        model.mean_module.constant.fill_(MEAN)
        model.covar_module.outputscale = torch.tensor(SCALE, dtype=torch.float64)
        if isinstance(model.likelihood, GaussianLikelihood):
            model.likelihood.noise = torch.tensor([NOISE], dtype=torch.float64)
    return model.eval().update(*data.astuple())


def phi(network: Module, X: Tensor) -> Tensor:
    return torch.cat((network(X), torch.ones_like(X[..., :1])), -1)


def regression(model: BayesianLastLayer, data: Observations, features: Tensor) -> LinearRegression:
    """What the model must be of some observations with these features."""
    noise = torch.full_like(data.Y, NOISE) if data.Yvar is None else data.Yvar.nan_to_num(NOISE)
    variance = torch.tensor(SCALE / features.shape[-1], dtype=torch.float64)
    return LinearRegression(features, data.Y[:, 0] - MEAN, noise[:, 0], variance)


def dense(model: BayesianLastLayer, data: Observations) -> LinearRegression:
    return regression(model, data, phi(model.network, data.X).detach())


def assert_is(model: BayesianLastLayer, expected: LinearRegression, T: Tensor) -> None:
    mean, covariance = expected.posterior(phi(model.network, T).detach())
    found = moments(model, T)
    assert_close(found[0][:, 0], mean + MEAN)
    assert_close(found[1][0], covariance)


def data_of(n: int, noise: str = "learned") -> Observations:
    return observations(n).with_noise(noise)


POINTS = torch.quasirandom.SobolEngine(2).draw(6, dtype=torch.float64)


# --- the posterior ------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", ["learned", "known", "mixed"])
@pytest.mark.parametrize("window", [100, 4, 0])
def test_a_stream_is_linear_regression_on_features(noise: str, window: int) -> None:
    data = data_of(30, noise)
    options = {"likelihood": GaussianLikelihood()} if noise == "mixed" else {}
    model = raw(data[:12], window=window, **options)
    model.posterior(POINTS)
    for rows in (slice(12, 13), slice(13, 20), slice(20, 30)):
        model.update(*data[rows].astuple())
    expected = dense(model, data)
    assert_is(model, expected, POINTS)
    assert_close(model.log_marginal_likelihood().detach(), expected.log_marginal_likelihood())
    assert model.num_rows == min(window, 30)


def test_fantasies_are_regression_on_more_data() -> None:
    data, more = data_of(20), data_of(4)
    model = raw(data)
    fantasy = model.condition_on_observations(more.X, more.Y)
    both = Observations(torch.cat((data.X, more.X)), torch.cat((data.Y, more.Y)))
    assert_is(fantasy, dense(model, both), POINTS)


def test_the_prior_is_the_kernel() -> None:
    model = raw(data_of(0))
    expected = SCALE * phi(model.network, POINTS) @ phi(model.network, POINTS).mT / model.rank
    with torch.no_grad():
        assert_close(model.covar_module(POINTS).to_dense(), expected)
        assert_close(model.covar_module(POINTS, diag=True), expected.diagonal())
    assert_close(moments(model, POINTS)[1][0], expected.detach())


def test_features_of_each_output_have_a_scale_of_their_own() -> None:
    data = observations(15, outputs=2)
    both = BayesianLastLayer(data.X, data.Y, default_network(2, UNITS))
    with torch.no_grad():
        both.covar_module.outputscale = torch.tensor([0.5, 3.0])
        both.likelihood.noise = torch.tensor([[0.1], [0.02]])
    for i in range(2):
        one = BayesianLastLayer(data.X, data.Y[:, i : i + 1], default_network(2, UNITS))
        one.load_state_dict(both.subset_output([i]).state_dict())
        assert_same_posterior(both.subset_output([i]), one, POINTS)


def test_a_layer_as_wide_as_there_are_outputs_is_not_cut() -> None:
    data = observations(15, outputs=2)
    model = BayesianLastLayer(data.X, data.Y, Sequential(Linear(2, 2), Tanh(), Linear(2, 3)))
    mean, _ = moments(model, POINTS)
    part = model.subset_output([1])
    assert part.network[0].weight.shape == (2, 2)
    assert_close(moments(part, POINTS)[0], mean[..., 1:])


# --- the network changes ------------------------------------------------------------------------


def moved(model: BayesianLastLayer, size: float = 0.3) -> BayesianLastLayer:
    """With other parameters of the network."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def test_rows_that_are_held_follow_the_network_exactly() -> None:
    data, more = data_of(20), data_of(5)
    model = moved(raw(data))
    assert_is(model, dense(model, data), POINTS)
    model.update(*more.astuple())
    both = Observations(torch.cat((data.X, more.X)), torch.cat((data.Y, more.Y)))
    assert_is(model, dense(model, both), POINTS)
    weighed = copy.deepcopy(model).forget(0.5)
    again = moved(copy.deepcopy(weighed), size=-0.2)
    expected = dense(again, both)
    halved = LinearRegression(
        expected.features, expected.y, 2.0 * expected.noise, expected.variance
    )
    assert_is(again, halved, POINTS)


@pytest.mark.parametrize("window", [12, 3, 0])
def test_what_came_before_the_window_counts_with_features_fitted_to_it(window: int) -> None:
    data = data_of(40)
    model = raw(data, window=window)
    former = phi(model.network, data.X).detach()
    moved(model)
    features = phi(model.network, data.X).detach()
    old, held = slice(0, 40 - window), slice(40 - window, 40)
    others = carried_features(former[old], features[held], former[held], RIDGE)
    expected = regression(model, data, torch.cat((others, features[held])))
    for each in (model, copy.deepcopy(model).train().eval()):
        assert_is(each, expected, POINTS)
        found = each.log_marginal_likelihood().detach()
        assert_close(found, expected.log_marginal_likelihood())
    assert model.num_observations == 40


def test_the_objectives_gradient_is_that_of_the_dense_likelihood() -> None:
    data = data_of(25)
    model = raw(data)
    parameters = [*model.network.parameters()]
    found = torch.autograd.grad(model.log_marginal_likelihood(), parameters)
    expected = regression(model, data, phi(model.network, data.X)).log_marginal_likelihood()
    for own, theirs in zip(found, torch.autograd.grad(expected, parameters), strict=True):
        assert_close(own, theirs, factor=100.0)


def test_merging_takes_over_what_another_network_saw() -> None:
    data, other = data_of(20), data_of(15)
    model, theirs = raw(data), moved(raw(other))
    before = fingerprint(theirs)
    model.merge(theirs)
    both = Observations(torch.cat((data.X, other.X)), torch.cat((data.Y, other.Y)))
    assert_is(model, dense(model, both), POINTS)
    assert model.num_rows == 35
    assert_untouched(theirs, before)


# --- learning -----------------------------------------------------------------------------------


def test_fit_learns_the_network() -> None:
    data = data_of(60)
    model = BayesianLastLayer(data.X, data.Y)
    before = float(model.log_marginal_likelihood().detach())
    weights = model.network[0].weight.detach().clone()
    training = model.fit(steps=60, batch_size=40, learning_rate=0.01, progress=False)
    assert training.steps == 60
    assert not model.training
    assert not torch.equal(weights, model.network[0].weight)
    assert float(model.log_marginal_likelihood().detach()) > before + 5.0
    assert model.fit(seconds=0.0, progress=False).steps == 0


def test_few_rows_of_many_inputs_are_not_learned_by_heart() -> None:
    """Without rows held out squared errors are some 450 times the predicted variances."""
    X = torch.rand(500, 12, dtype=torch.float64)
    Y = 2.0 * X[:, :1].sin() + torch.randn(500, 1, dtype=torch.float64)
    model = BayesianLastLayer(X[:300], Y[:300], default_network(12, 32))
    training = model.fit(steps=400, learning_rate=0.02, progress=False)
    assert training.is_kept
    assert training.steps < 400
    predicted = model.posterior(X[300:], observation_noise=True)
    squares = (predicted.mean - Y[300:]).square()
    assert float((squares / predicted.variance).mean().detach()) < 6.0
    assert float(model.noise_level().detach()) > 0.1


@pytest.mark.parametrize("noise", ["learned", "mixed"])
def test_a_network_is_judged_by_rows_held_out_given_the_others(noise: str) -> None:
    data = data_of(40, noise)
    options = {"likelihood": GaussianLikelihood()} if noise == "mixed" else {}
    model = raw(data, **options)
    learner = LayerSteps(model._memory, model.prior, 1e-3, 16, held_out=12, seed=3)
    others = learner._index
    assert others is not None
    assert len(others.unique()) == 28
    all_rows, rest = (dense(model, each).log_marginal_likelihood() for each in (data, data[others]))
    assert learner.score() == pytest.approx(float(all_rows - rest), rel=1e-9)
    model.likelihood.noise = 100.0 * NOISE  # of a scale that the first step mends
    learner = LayerSteps(model._memory, model.prior, 1e-3, 16, held_out=12, seed=3)
    first = learner.score()
    learner.take_step()
    assert not learner.look()
    assert learner.keep_best()
    best = learner.score(), [parameter.detach().clone() for parameter in model.parameters()]
    assert best[0] > first
    with torch.no_grad():
        model.network[0].weight.mul_(-3.0)
    assert learner.score() < best[0]
    assert learner.keep_best()
    assert learner.score() == best[0]
    assert all(map(torch.equal, best[1], model.parameters()))


def test_a_head_is_at_a_maximum_near_where_it_was() -> None:
    model = raw(data_of(40))
    learner = LayerSteps(model._memory, model.prior, 1e-3, 16, held_out=12, seed=3)
    head = [
        p for name, p in model.named_parameters() if p.requires_grad and ".network." not in name
    ]
    start = [p.detach().clone() for p in head]

    def steepness() -> float:
        others, whole = learner._statistics()
        judged = likelihood_from(whole, model.prior) - likelihood_from(others, model.prior)
        moves = sum((p - at).square().sum() for p, at in zip(head, start, strict=True))
        raised = judged.sum() + learner._hyper.log_prior() - 0.5 * moves
        return max(float(slope.abs().max()) for slope in torch.autograd.grad(raised, head))

    before = steepness()
    learner.judge_head()
    assert before > 1.0
    assert steepness() < 0.05 * before
    assert max(float((p - at).detach().abs()) for p, at in zip(head, start, strict=True)) < 3.0


def test_a_training_ends_after_three_looks_at_what_is_clearly_worse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = raw(data_of(40))
    learner = LayerSteps(model._memory, model.prior, 1e-3, 16, held_out=12, seed=3)
    best = learner._best
    for gain, worse in (
        (1.0, 0), (0.0, 0), (-2.5, 1), (-1.0, 1), (-9.0, 2), (2.0, 0), (-5.0, 1), (math.nan, 2),
    ):  # fmt: skip
        learner.num_steps = learner._next
        monkeypatch.setattr(learner, "score", lambda gain=gain: best + gain)
        assert not learner.look()
        assert learner._worse == worse
    learner.num_steps = learner._next
    monkeypatch.setattr(learner, "score", lambda: best - 2.0)
    assert learner.look()
    assert learner._best == best + 2.0


def test_without_other_observations_no_features_are_regressed_on_others() -> None:
    data = data_of(40)
    whole, cut = raw(data)._memory.carried(), raw(data, window=30)._memory.carried()
    assert whole.former is None
    assert whole.only(torch.arange(10)).former is None
    assert cut.former is not None
    assert cut.only(torch.arange(10)).former is not None


def test_few_rows_are_all_learned_from() -> None:
    data = data_of(60)
    twins = [BayesianLastLayer(data.X, data.Y, default_network(2, UNITS)) for _ in range(2)]
    for twin, share in zip(twins, (0.0, 0.1), strict=True):
        twin.fit(steps=3, held_out=share, progress=False)
    assert_same_posterior(*twins, POINTS, bits=True)
    for share in (-0.1, 0.6, float("nan")):
        with pytest.raises(ValueError, match="held_out"):
            twins[0].fit(steps=1, held_out=share)


def test_fits_are_repeatable_and_leave_the_generator_alone() -> None:
    data = data_of(30)
    state = torch.get_rng_state()
    ends = []
    for _ in range(2):
        model = BayesianLastLayer(data.X, data.Y, default_network(2, UNITS))
        model.fit(steps=5, batch_size=10, progress=False)
        ends.append(fingerprint(model))
    assert torch.equal(state, torch.get_rng_state())
    for path, value in ends[0].items():
        assert not isinstance(value, Tensor) or torch.equal(value, ends[1][path])


def test_botorchs_fit_learns_the_network_too() -> None:
    data = data_of(40)
    model = BayesianLastLayer(data.X, data.Y, default_network(2, UNITS))
    before, weights = model.log_marginal_likelihood().detach(), model.network[0].weight.clone()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    fit_gpytorch_mll(mll, optimizer_kwargs={"options": {"maxiter": 20}})
    assert float(model.log_marginal_likelihood().detach() - before) > 5.0
    assert not torch.equal(weights, model.network[0].weight)


def test_the_head_is_learned_alone_from_statistics_alone() -> None:
    data = data_of(200)
    model = BayesianLastLayer(data.X, data.Y, default_network(2, UNITS), window=0)
    whole = BayesianLastLayer(data.X, data.Y, default_network(2, UNITS), window=200)
    for each in (model, whole):
        each.network.requires_grad_(False)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(each.likelihood, each))
    assert_close(model.log_marginal_likelihood(), whole.log_marginal_likelihood(), factor=1e4)
    assert_close(model.noise_level().detach(), whole.noise_level().detach(), factor=1e6)


def test_a_network_is_not_learned_from_the_data_of_several_elements() -> None:
    Y = torch.randn(2, 6, 1, dtype=torch.float64)
    model = BayesianLastLayer(POINTS.expand(2, 6, 2), Y, default_network(2, UNITS))
    model.posterior(POINTS)
    twin, before = copy.deepcopy(model), fingerprint(model)
    with pytest.raises(UnsupportedError, match=r"requires_grad_\(False\)"):
        model.fit(steps=1)
    assert_untouched(model, before)
    with pytest.raises(UnsupportedError, match=r"batch_shape \(2,\).* one model per"):
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    assert_same_posterior(model, twin, POINTS, bits=True)


def test_what_is_held_out_of_a_fold_does_not_reach_its_fit() -> None:
    network = default_network(2, UNITS).requires_grad_(False)
    X, Y = POINTS, torch.randn(6, 1, dtype=torch.float64)
    changed = torch.cat((Y[:1] + 3.0, Y[1:]))
    first, other = (
        batch_cross_validation(
            BayesianLastLayer,
            ExactMarginalLogLikelihood,
            gen_loo_cv_folds(X, each),
            model_init_kwargs={"network": network},
        ).posterior
        for each in (Y, changed)
    )
    assert_close(first.mean[0], other.mean[0])
    assert_close(first.variance[0], other.variance[0])
    assert not torch.allclose(first.mean[1], other.mean[1])


def test_a_fit_that_diverges_leaves_the_model_as_it_was() -> None:
    data = data_of(30)
    model = BayesianLastLayer(data.X, data.Y, default_network(2, UNITS)).eval()
    model.posterior(POINTS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ModelFittingError, match="diverged"):
        model.fit(steps=50, learning_rate=1e12, progress=False)
    after = model.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def test_there_must_be_rows_to_learn_from() -> None:
    data = data_of(5)
    with pytest.raises(InputDataError, match="window=0"):
        BayesianLastLayer(data.X, data.Y, window=0).fit(steps=1)
    with pytest.raises(InputDataError, match="update first"):
        BayesianLastLayer(data.X[:0], data.Y[:0]).fit(steps=1)
    model = BayesianLastLayer(data.X, data.Y)
    with pytest.raises(UnsupportedError, match="fit"):
        model.condition_on_observations(data.X, data.Y).fit(steps=1)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("batch_size", 0),
        ("steps", -1),
        ("steps", 2.5),
        ("seconds", -1.0),
        ("learning_rate", -1.0),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
    ],
)
def test_a_number_out_of_range_is_named_and_changes_nothing(name: str, wrong: float) -> None:
    data = data_of(20)
    model = BayesianLastLayer(data.X[:5], data.Y[:5]).eval()
    model.update(data.X[5:], 9.0 * data.Y[5:])
    before = fingerprint(model)
    with pytest.raises(ValueError, match=rf"Expected {name}\b"):
        model.fit(**{"steps": 1, name: wrong})
    assert_untouched(model, before)


def test_rows_that_are_taken_out_are_not_learned_from() -> None:
    data = data_of(12)
    model = BayesianLastLayer(data.X, data.Y, default_network(2, UNITS))
    model.retract(data.X[3:5], data.Y[3:5])
    assert model.num_rows == 10
    left = [i for i in range(12) if i not in (3, 4)]
    assert_close(model._memory.rows.X, data.X[left])


@pytest.mark.parametrize("window", [5, 100])
def test_rows_are_found_after_rounding(window: int) -> None:
    data = data_of(12)
    model = BayesianLastLayer(data.X, data.Y, default_network(2, UNITS), window=window)
    model.to(torch.float32)
    model.retract(data.X[10:11].float(), data.Y[10:11].float())
    left = [i for i in range(12 - window, 12) if i >= 0 and i != 10]
    assert_close(model._memory.rows.X, data.X[left])
    assert model._memory.weight.sum() == len(left)


def test_one_is_taken_from_several_that_count_less() -> None:
    data = data_of(12)
    again, Y = torch.cat((data.X, data.X[:1], data.X[:1])), torch.cat((data.Y, data.Y[[0, 0]]))
    model = BayesianLastLayer(again, Y, default_network(2, UNITS)).forget(0.5)
    model.retract(data.X[:1], data.Y[:1])
    memory, rows = model._memory, model._memory.rows
    assert memory.weight.tolist() == [0.5] * 12
    expected = memory.statistics.scale(0.0)
    expected = expected.observed(memory.features(rows.X), rows).scale(0.5)
    assert_close(memory.statistics.learned.gram, expected.learned.gram)


# --- networks -----------------------------------------------------------------------------------


class ByBatch(Module):
    def forward(self, X: Tensor) -> Tensor:
        return X - X.mean(-2, keepdim=True)


class AlwaysDropping(Module):
    def forward(self, X: Tensor) -> Tensor:
        return torch.nn.functional.dropout(X, 0.5)


class Flat(Module):
    def forward(self, X: Tensor) -> Tensor:
        return X.sum(-1)


class Logarithm(Module):
    def forward(self, X: Tensor) -> Tensor:
        return (X - 10.0).log()


BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a function": (lambda: torch.tanh, UnsupportedError, "network"),
    "a class": (lambda: Tanh, UnsupportedError, "the class Tanh"),
    "of the batch": (ByBatch, UnsupportedError, "other inputs of a batch"),
    "random": (AlwaysDropping, UnsupportedError, "random"),
    "no features": (Flat, BotorchTensorDimensionError, "x r"),
    "not finite": (Logarithm, UnsupportedError, "finite"),
    "of other inputs": (lambda: Linear(3, 4), BotorchTensorDimensionError, "network"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_network_of_each_input_is_refused(name: str) -> None:
    build, error, message = BAD[name]
    data = data_of(8)
    with pytest.raises(error, match=message):
        BayesianLastLayer(data.X, data.Y, build())


def test_a_learnable_transform_is_refused() -> None:
    data = data_of(8)
    with pytest.raises(UnsupportedError, match="Warp"):
        BayesianLastLayer(data.X, data.Y, input_transform=Warp(2, [0, 1]))


def test_normalisation_and_dropout_are_in_evaluation_mode_always() -> None:
    data = data_of(30)
    network = Sequential(Linear(2, 8), BatchNorm1d(8), Tanh(), Dropout(0.5))
    model = BayesianLastLayer(data.X, data.Y, network)
    running = network[1].running_mean.clone()
    model.fit(steps=3, progress=False)
    model.train()
    assert not any(part.training for part in network.modules())
    assert torch.equal(running, network[1].running_mean)
    assert_same_posterior(model, copy.deepcopy(model), POINTS, bits=True)


@pytest.mark.parametrize("given", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_takes_the_dtype_of_the_data(given: torch.dtype, dtype: torch.dtype) -> None:
    data = observations(20, dtype=dtype)
    model = BayesianLastLayer(data.X, data.Y, default_network(2, UNITS).to(given))
    assert {p.dtype for p in model.network.parameters()} == {dtype}
    model.fit(steps=2, progress=False)
    posterior = model.posterior(POINTS.to(dtype))
    assert posterior.mean.dtype == dtype
    exact = observations(20)
    other = BayesianLastLayer(exact.X, exact.Y).posterior(POINTS)
    assert other.mean.dtype == torch.float64


def test_the_default_network_is_always_the_same() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = default_network(3).state_dict()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    for name, value in default_network(3).state_dict().items():
        assert torch.equal(value, first[name])
    model = BayesianLastLayer(POINTS, POINTS[:, :1])
    assert model.rank == WIDTH + 1


def test_a_network_of_the_users_own_is_loaded_if_trusted(tmp_path: Path) -> None:
    data = data_of(10)
    model = BayesianLastLayer(data.X, data.Y, Waves())
    model.save(tmp_path / "model.pt")
    with pytest.raises(ValueError, match="Waves"):
        BayesianLastLayer.load(tmp_path / "model.pt")
    loaded = BayesianLastLayer.load(tmp_path / "model.pt", trusted=[Waves])
    assert_same_posterior(loaded, model, POINTS, bits=True)
    assert "covar_module.base_kernel.network.frequency" in loaded.state_dict()
