"""Every model that a loop offers, in both loops."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from botorch.models import SingleTaskGP
from gpytorch.kernels import MaternKernel, RBFKernel

from bo_stream import ProductMatern
from bo_stream.allocation import OIPS
from bo_stream.diagnostics.cross_validation import retracts_exactly
from bo_stream.errors import UsageError
from bo_stream.loops.models import KERNELS, MODELS, OPTIONS, build_model, checked_model
from bo_stream.loops.optimization import (
    OptimizationSettings,
    Optimizer,
    load_optimizer,
    save_optimizer,
)
from bo_stream.loops.run import from_record, predict, predict_mean
from bo_stream.loops.sampling.campaign import Campaign, PoolSplit, SamplingReplay
from bo_stream.loops.sampling.results import write_results
from bo_stream.loops.sampling.settings import Settings
from bo_stream.models.auto import families, inference
from bo_stream.models.auto.families import MAX_RANK
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import hyperparameters, set_hyperparameters
from bo_stream.models.inducing.inference import MAX_POINTS
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.testing.streams import assert_close
from tests.loops import optimizing
from tests.loops.optimizing import points, started
from tests.loops.small import QUICK, small_map, write_npz

pytestmark = [
    pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short"),
    pytest.mark.filterwarnings("ignore:The 7 features .max_rank. leave out"),
]

OTHERS = tuple(name for name in MODELS if name != "wiski")
FEWER: dict[str, dict[str, Any]] = {
    "auto": {"max_rank": 7},
    "wiski": {"max_rank": 7},
    "osgpr": {"max_points": 4, "window": 0},
    "osvgp": {"max_points": 4, "likelihood": "gaussian", "hyper_steps": 1},
    "clustered": {"resolution": 0.4},
    "local": {"max_size": 3, "w_gen": 0.9},
}

BRIEF: dict[str, dict[str, Any]] = {"osvgp": {"hyper_steps": 1}}
"""What shortens the training of a model that learns with each outcome."""


def optimization(name: str, **changes: Any) -> OptimizationSettings:
    bounds, options = ((-2.0, 3.0), (0.0, 2.0)), BRIEF.get(name, {})
    settings = replace(
        optimizing.QUICK, bounds=bounds, initial=6, grid=None, model=name, model_options=options
    )
    return replace(settings, **changes)


def sampling(name: str, **changes: Any) -> SamplingReplay:
    options = {"model_options": BRIEF.get(name, {}), **changes}
    data, settings = small_map(), replace(QUICK, model=name, grid=None, **options)
    resolved = settings.resolved(*data.X.shape)
    return SamplingReplay(PoolSplit.of(data, resolved), resolved)


def of(optimizer: Optimizer) -> StreamingGP:
    assert optimizer.surrogate.model is not None
    return optimizer.surrogate.model


# --- optimization -------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("whole_fits")
def test_each_finds_a_minimum(name: str) -> None:
    optimizer = started(optimization(name), steps=8)
    assert isinstance(of(optimizer), MODELS[name].model)
    assert pytest.approx(0.0, abs=0.1) == optimizer.best().trial.Y
    if name != "local":  # averages of models that know a few outcomes each
        assert optimizer.best().mean == pytest.approx(optimizer.best().trial.Y, abs=0.2)


@pytest.mark.matrix
@pytest.mark.parametrize("acquisition", ["qLogEI", "TS"])
@pytest.mark.parametrize("name", OTHERS)
def test_each_goes_on_to_the_same_points_after_a_stop(
    name: str, acquisition: str, tmp_path: Path
) -> None:
    optimizer = started(optimization(name, acquisition=acquisition), steps=2)
    save_optimizer(tmp_path, optimizer)
    again, _ = load_optimizer(tmp_path)
    assert isinstance(of(again), MODELS[name].model)
    asked = points(optimizer.ask(3))
    assert points(again.ask(3)) == asked
    assert len(set(asked)) == 3


@torch.no_grad()
def test_points_tell_apart_what_a_search_crowds() -> None:
    """Too few inducing points there leave the spread many times too large, and a search stuck."""
    crowd = 0.5 + 0.05 * torch.rand(15, 3, dtype=torch.float64)
    X = torch.cat((torch.rand(30, 3, dtype=torch.float64), crowd))
    Y = (X - 0.5).square().sum(-1, keepdim=True)
    kernel = KERNELS["matern52"](3).double()
    exact = SingleTaskGP(X, Y, covar_module=deepcopy(kernel))
    exact.likelihood.noise = 0.01
    coarse = OSGPR(X, Y, covar_module=deepcopy(kernel), allocator=OIPS(0.8))
    default = build_model("osgpr", {}, X, Y, deepcopy(kernel), None)
    spreads = {}
    for name, model in {"default": default, "coarse": coarse}.items():
        model.likelihood.noise = 0.01
        ratio = model.posterior(crowd).variance / exact.posterior(crowd).variance
        spreads[name] = float(ratio.max().sqrt())
    assert spreads["default"] == pytest.approx(1.0, abs=1e-4)
    assert spreads["coarse"] > 3.0


@pytest.mark.matrix
@pytest.mark.parametrize("name", OTHERS)
def test_amended_and_withdrawn_outcomes_leave_the_model_of_a_rebuild(name: str) -> None:
    optimizer = started(optimization(name, refit=0.0), steps=3)
    former = hyperparameters(of(optimizer))
    of(optimizer).log_event("a trial")
    optimizer.amend(1, 7.5)
    optimizer.withdraw(2)
    optimizer.best()
    keys = [0, 1, 3, 4, 5, 6, 7]
    assert sorted(optimizer.surrogate.held) == [*keys, 8]
    settings, ledger = optimizer.settings, optimizer.ledger
    kernel = KERNELS[settings.kernel](2).double()
    kernel.load_state_dict(of(optimizer).covar_module.state_dict())
    X = settings.to_unit_cube([ledger[key].X for key in [*keys, 8]])
    Y = -torch.tensor([ledger[key].Y for key in [*keys, 8]], dtype=X.dtype).unsqueeze(-1)
    Y = Y / optimizer.surrogate.unit
    expected = build_model(name, settings.model_options, X, Y, kernel, None)
    set_hyperparameters(expected, former)
    if retracts_exactly(of(optimizer)):  # it is not built anew: the standardisation stays
        expected.outcome_transform.load_state_dict(of(optimizer).outcome_transform.state_dict())
    test = torch.rand(20, 2, dtype=torch.float64)
    assert_close(of(optimizer).posterior(test).mean, expected.posterior(test).mean)
    assert_close(of(optimizer).posterior(test).variance, expected.posterior(test).variance)
    assert optimizer.surrogate.refits == [6]
    assert "a trial" in {event.what for event in of(optimizer).numerical_log}
    for key, value in hyperparameters(of(optimizer)).items():
        assert torch.equal(value, former[key])


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_refits_begin_at_the_first_kernel_too_after_a_change_of_the_past(name: str) -> None:
    optimizer = started(optimization(name), steps=2)
    optimizer.best()
    first = {key: v.clone() for key, v in of(optimizer)._first_values.items()}
    last = of(optimizer)._last_fit
    optimizer.amend(optimizer.ledger.with_status("told")[0].key, 0.5)
    optimizer.best()
    assert of(optimizer)._last_fit is last
    assert last is not None or name == "osvgp"
    learned = dict(of(optimizer).named_parameters())
    kernel = {key for key in learned if key.startswith("covar_module.")}
    assert kernel
    assert kernel <= of(optimizer)._first_values.keys()
    for key in kernel:
        assert torch.equal(of(optimizer)._first_values[key], first[key])
        assert not torch.equal(first[key], learned[key])


@pytest.mark.matrix
@pytest.mark.parametrize("name", OTHERS)
def test_more_inputs_than_a_grid_takes(name: str) -> None:
    optimizer = started(optimization(name, bounds=((-2.0, 3.0),) * 6, initial=8), steps=1)
    assert len(optimizer.ask()[0].X) == 6


@pytest.mark.parametrize(
    ("inputs", "family"),
    [(2, "WISKI"), pytest.param(6, "OSGPR", marks=pytest.mark.integration)],
    ids=["on a grid", "of points"],
)
def test_the_default_goes_over_and_a_stop_before_or_after_it_changes_nothing(
    inputs: int, family: str, tmp_path: Path
) -> None:
    settings = optimization("auto", bounds=((-2.0, 3.0),) * inputs, model_options={"max_exact": 7})
    assert settings.model == OptimizationSettings(settings.bounds).model
    optimizer = started(settings, steps=0)
    families = []
    for step in range(4):
        optimizer.best()
        families.append(MODELS["auto"].describe(of(optimizer))["family"])
        save_optimizer(tmp_path / str(step), optimizer)
        again, _ = load_optimizer(tmp_path / str(step))
        trials = optimizer.ask()
        assert points(again.ask()) == points(trials)
        optimizing.tell_all(optimizer, trials)
    assert families == ["exact", "exact", family, family]
    (move,) = MODELS["auto"].describe(of(optimizer))["hand_overs"]
    assert (move["observations"], move["before"], move["after"]) == (8, "exact", family)
    json.dumps(move, allow_nan=False)


@pytest.mark.parametrize("inputs", [2, 6])
def test_an_outcome_that_is_withdrawn_leaves_the_default_after_it_went_over(inputs: int) -> None:
    bounds = ((-2.0, 3.0),) * inputs
    optimizer = started(optimization("auto", bounds=bounds, model_options={"max_exact": 4}), 1)
    optimizer.best()
    optimizer.withdraw(2)
    optimizer.best()
    assert of(optimizer).num_observations == len(optimizer.surrogate.held) == 6


def test_a_grid_puts_the_default_on_it_from_the_start() -> None:
    optimizer = started(optimization("auto", grid=(9,)))
    assert MODELS["auto"].describe(of(optimizer))["family"] == "WISKI"


@pytest.mark.integration
@pytest.mark.usefixtures("whole_fits")
def test_thompson_sampling_comes_near_the_best() -> None:
    optimizer = started(optimization("osgpr", acquisition="TS", q=4), steps=6)
    assert pytest.approx(0.0, abs=0.05) == optimizer.best().trial.Y


# --- sampling -----------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("whole_fits")
def test_each_learns_a_map(name: str) -> None:
    loop = sampling(name, steps=12)
    list(loop.run())
    assert len(set(loop.state.picks)) == loop.sampling.observations == 41
    assert loop.curve[-1].rmse < 0.7 * loop.curve[0].rmse
    assert 0.5 <= loop.curve[-1].coverage <= 1.0


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_each_survives_a_stop_and_says_what_it_is(name: str, tmp_path: Path) -> None:
    path = write_npz(tmp_path / "map.npz", small_map())
    settings = replace(QUICK, model=name, grid=None, model_options=FEWER[name])
    whole = Campaign.begin(path, None, None, settings, ("chosen",))
    list(whole.run())
    part = Campaign.begin(path, None, None, replace(settings, steps=2), ("chosen",))
    list(part.run())
    part.save(tmp_path)
    resumed = Campaign.resume(tmp_path, steps=4)
    assert resumed.main.settings.model_options == FEWER[name]
    list(resumed.run())
    assert resumed.main.state.picks == whole.main.state.picks
    write_results(whole, tmp_path, [])
    record = json.loads((tmp_path / "run.json").read_text())["strategies"]["chosen"]["model"]
    assert record["class"] == MODELS[name].model.__name__
    assert record["kernel"]
    assert record["likelihood"]


@pytest.mark.parametrize(
    ("name", "what", "most"),
    [
        ("wiski", "rank", 7),
        ("osgpr", "inducing_points", 4),
        ("osvgp", "inducing_points", 4),
        ("clustered", "centres", 9),
    ],
)
def test_options_reach_the_model(name: str, what: str, most: int) -> None:
    loop = sampling(name, steps=1, model_options=FEWER[name])
    list(loop.run())
    assert 0 < MODELS[name].describe(loop.sampling.model)[what] <= most


def test_the_default_samples_exactly_at_first() -> None:
    data, settings = small_map(), replace(QUICK, grid=None)
    loop = SamplingReplay(PoolSplit.of(data, settings.resolved(120, 2)), settings.resolved(120, 2))
    loop.advance()
    assert MODELS["auto"].describe(loop.sampling.model)["family"] == "exact"
    assert settings.resolved(120, 2).outliers == 8.0
    assert settings.resolved(120, 5).outliers == 0.0
    with pytest.raises(UsageError, match="got outliers 3 with 5 inputs"):
        replace(settings, outliers=3.0).resolved(120, 5)


def test_more_local_models_where_they_are_small() -> None:
    loop = sampling("local", model_options={**FEWER["local"], "nearest": 1})
    list(loop.run())
    assert MODELS["local"].describe(loop.sampling.model)["local_models"] > 2


@pytest.mark.parametrize(
    ("name", "d", "kind"),
    [
        ("auto", 1, MaternKernel),
        ("auto", 2, ProductMatern),
        ("auto", 4, ProductMatern),
        ("auto", 5, MaternKernel),
        ("wiski", 3, ProductMatern),
        ("osgpr", 2, MaternKernel),
    ],
)
def test_a_kernel_is_a_product_where_a_grid_is_or_follows(name: str, d: int, kind: type) -> None:
    """From the first outcome on, and without a warning, which would be an error here."""
    X = torch.rand(8, d, dtype=torch.float64)
    model = build_model(name, {}, X, X[:, :1], KERNELS["matern52"](d).double(), None)
    assert type(model.covar_module.base_kernel) is kind
    assert [part for *_, part, _, _ in model.covar_module.named_priors()]
    if name == "auto":
        assert ("WISKI" in model.families) == (d <= 4)


# --- predictions --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_predictions_are_the_posterior_s(name: str) -> None:
    X = torch.rand(9, 2, dtype=torch.float64)
    Y = 5.0 + 3.0 * X.sum(-1, keepdim=True)
    model = build_model(name, BRIEF.get(name, {}), X, Y, KERNELS["matern52"](2).double(), None)
    test = torch.rand(9, 2, dtype=torch.float64)
    posterior = model.posterior(test)
    mean, variance = predict(model, test)
    assert_close(mean, posterior.mean.squeeze(-1).detach())
    assert_close(variance, posterior.variance.squeeze(-1).detach())
    assert_close(predict_mean(model, test), mean)


# --- bad settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("svgp", {}, "Expected model to be one of auto, wiski, osgpr, .* got 'svgp'"),
        ("wiski", {"rho": 0.5}, r"Expected options of wiski \(max_rank\), got 'rho'"),
        ("osgpr", {"max_points": "many"}, "max_points of model osgpr to be a whole number"),
        ("osgpr", {"max_points": 2.5}, "max_points of model osgpr to be a whole number"),
        ("osgpr", {"max_points": "2.5"}, "max_points of model osgpr to be a whole number"),
        ("clustered", {"resolution": "fine"}, "resolution of model clustered to be a number"),
    ],
)
def test_options_are_checked(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checked_model(name, given)
    with pytest.raises(UsageError, match=message):
        Settings(model=name, model_options=given)
    with pytest.raises(UsageError, match=message):
        optimization(name, model_options=given)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("osgpr", {"max_points": 0}, "cannot be built: .*max_points"),
        ("auto", {"max_exact": -1}, "cannot be built: .*max_exact"),
        ("osgpr", {"window": -1}, "cannot be built: .*window"),
        ("osvgp", {"hyper_steps": -1}, "cannot be built: .*hyper_steps .* got -1"),
        ("osvgp", {"likelihood": "poisson"}, "likelihood to be one of gaussian, laplace, student"),
        ("clustered", {"resolution": -1.0}, "cannot be built: .*resolution"),
        ("local", {"w_gen": 2.0}, "cannot be built: .*w_gen"),
    ],
)
def test_what_a_model_refuses_is_the_user_s_to_mend(
    name: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        sampling(name, model_options=given)
    with pytest.raises(UsageError, match=message):  # before anything is evaluated
        Optimizer(optimization(name, model_options=given))


def test_a_grid_is_for_a_model_on_a_grid() -> None:
    with pytest.raises(UsageError, match=r"model auto, wiski, got .* with model osgpr"):
        replace(QUICK, model="osgpr")
    with pytest.raises(UsageError, match="A grid is for model auto, wiski"):
        optimization("local", grid=(9,))


@pytest.mark.parametrize("grid", [12, [12], np.int64(12), (np.int64(12),)])
def test_a_grid_may_be_one_number(grid: Any) -> None:
    assert optimization("wiski", grid=grid).grid == (12,)
    assert replace(QUICK, model="wiski", grid=grid).grid == (12,)


@pytest.mark.parametrize("grid", ["ab", 12.5, 0, (0,), (12.5,), (12, "9"), (True,)])
def test_a_grid_of_anything_but_whole_numbers_is_refused(grid: Any) -> None:
    with pytest.raises(UsageError, match="Expected grid to be a whole number of at least 1, got"):
        optimization("wiski", grid=grid)


def test_too_many_inputs_name_the_models_that_take_them() -> None:
    message = "at most 4 inputs with model wiski, .* got 5. .* auto, osgpr, osvgp, clustered, local"
    with pytest.raises(UsageError, match=message):
        optimization("wiski", bounds=((0.0, 1.0),) * 5)
    with pytest.raises(UsageError, match=message):
        replace(QUICK, grid=None, model="wiski").resolved(1_000, 5)
    with pytest.raises(UsageError, match="at most 4 inputs on a grid, got 5"):
        QUICK.resolved(1_000, 5)
    assert checked_model("osvgp", {"max_points": "64", "likelihood": "laplace"}) == {
        "max_points": 64,
        "likelihood": "laplace",
    }


@pytest.mark.filterwarnings("ignore::bo_stream.HandOverWarning")
def test_a_default_is_no_choice_of_a_user() -> None:
    """Points given are the most there are; by default a hand-over that errs takes twice as many."""
    defaults = {"max_exact": 0, "max_rank": MAX_RANK, "max_points": MAX_POINTS}
    assert MODELS["auto"].options == defaults
    for name in ("wiski", "osgpr", "local"):
        arguments = signature(MODELS[name].model).parameters
        listed = MODELS[name].options
        assert listed == {key: arguments[key].default for key in listed}
    X = torch.rand(40, 5, dtype=torch.float64)
    Y = (9.0 * X.sum(-1, keepdim=True)).sin()
    kernel = RBFKernel(ard_num_dims=5).double()
    kernel.lengthscale = 0.3
    most = {}
    few = [mock.patch.object(module, "MAX_POINTS", 10) for module in (families, inference)]
    with few[0], few[1]:
        for name, given in {"default": {}, "given": {"max_points": 10}}.items():
            model = build_model("auto", {"max_exact": 20, **given}, X, Y, deepcopy(kernel), None)
            most[name] = model._memory.inference.max_points
    assert most == {"default": 20, "given": 10}


def test_the_help_names_every_option() -> None:
    for kind in MODELS.values():
        for name in kind.options:
            assert name in OPTIONS


def test_settings_survive_json() -> None:
    for settings in (optimization("osgpr", model_options={"window": 9}), optimization("local")):
        record = json.loads(json.dumps(asdict(settings)))
        assert from_record(OptimizationSettings, _tuples(record)) == settings
    chosen = Settings(model="clustered", model_options={"resolution": 0.1})
    assert from_record(Settings, json.loads(json.dumps(asdict(chosen)))) == chosen


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "bounds": tuple(map(tuple, record["bounds"]))}
