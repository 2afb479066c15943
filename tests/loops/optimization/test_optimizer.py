from __future__ import annotations

import math
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from botorch.acquisition import UpperConfidenceBound, qUpperConfidenceBound
from botorch.exceptions.errors import ModelFittingError
from botorch.exceptions.warnings import OptimizationWarning
from torch import Tensor

from bo_stream import WISKI, AutoGP
from bo_stream.acquisition import sample_paths
from bo_stream.errors import UsageError
from bo_stream.loops.models import KERNELS, MODELS
from bo_stream.loops.optimization import (
    OptimizationSettings,
    Optimizer,
    load_optimizer,
    save_optimizer,
)
from bo_stream.loops.optimization import acquisition as acquisition_module
from bo_stream.loops.optimization.acquisition import ACQUISITIONS, Situation, best_points
from bo_stream.loops.optimization.optimizer import LEFT_OUT
from bo_stream.loops.run import from_record
from bo_stream.models.auto.auto import family_model
from tests.loops.functions import bowl
from tests.loops.optimizing import QUICK, REGION, points, started, tell_all

pytestmark = [
    pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short"),
]

TWO_INPUTS = replace(QUICK, bounds=((-2.0, 3.0), (0.0, 2.0)), grid=(12, 10))


def own_builder(situation: Situation) -> UpperConfidenceBound:
    return UpperConfidenceBound(situation.model, beta=situation.beta)


def forgetful_builder(situation: Situation) -> qUpperConfidenceBound:
    return qUpperConfidenceBound(situation.model, beta=2.0, sampler=situation.sampler())


def test_points_of_a_batch_keep_apart_whatever_a_builder_of_ones_own_does() -> None:
    name = "tests.loops.optimization.test_optimizer:forgetful_builder"
    told, forgetful = (
        points(started(replace(QUICK, acquisition=acquisition), steps=2).ask(3))
        for acquisition in ("qUCB", name)
    )
    assert forgetful == told


RARELY = [pytest.param(name, marks=pytest.mark.integration) for name in ("qLogNEI", "qUCB")]


@pytest.mark.parametrize("acquisition", ["qLogEI", "TS", *RARELY])
@pytest.mark.usefixtures("whole_fits")
def test_finds_the_minimum(acquisition: str) -> None:
    best = started(replace(QUICK, acquisition=acquisition), steps=6).best()
    assert best.trial.X[0] == pytest.approx(0.7, abs=0.05)
    assert best.mean == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize(
    ("settings", "batches"), [(QUICK, (4, 1, 2)), (REGION, (6, 4, 1, 4, 5))], ids=["box", "region"]
)
def test_to_maximise_is_to_minimise_the_negative(
    settings: OptimizationSettings, batches: tuple[int, ...]
) -> None:
    least, most = Optimizer(settings), Optimizer(replace(settings, maximize=True))
    for q in batches:
        asked = least.ask(q), most.ask(q)
        assert points(asked[0]) == points(asked[1])
        for trial in asked[0]:
            value = bowl(list(trial.X))
            least.tell(trial.key, value)
            most.tell(trial.key, -value)
    assert least.best().trial.key == most.best().trial.key
    assert least.best().mean == -(most.best().mean or 0.0)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "acquisition", [*ACQUISITIONS, "tests.loops.optimization.test_optimizer:own_builder"]
)
def test_each_acquisition_goes_on_to_the_same_points_after_a_stop(
    acquisition: str, tmp_path: Path
) -> None:
    optimizer = started(replace(TWO_INPUTS, acquisition=acquisition), steps=2)
    optimizer.ask()
    optimizer.fail(optimizer.ask()[0].key, "no power")
    save_optimizer(tmp_path, optimizer)
    torch.manual_seed(1)
    loaded, _ = load_optimizer(tmp_path, trusted=[acquisition])
    single = ":" in acquisition  # an analytic one chooses a point at a time
    for q in (1, 1 if single else 3):
        torch.rand(1)
        asked = optimizer.ask(q)
        assert points(asked) == points(loaded.ask(q))
        assert len(set(points(asked))) == q
        for trial in asked:
            bounds = zip(trial.X, TWO_INPUTS.bounds, strict=True)
            assert all(low <= x <= high for x, (low, high) in bounds)
        for one in (optimizer, loaded):
            tell_all(one, asked)


@pytest.mark.matrix
@pytest.mark.parametrize("acquisition", ["qLogEI", "qLogNEI", "qUCB", "TS"])
@pytest.mark.parametrize("factor", [2.0**-40, 2.0**70])
def test_outcomes_may_have_any_unit(acquisition: str, factor: float) -> None:
    optimizers = []
    for unit in (1.0, factor):
        optimizer = Optimizer(replace(QUICK, acquisition=acquisition))
        for count in (4, 1, 1):
            for trial in optimizer.ask(count):
                optimizer.tell(trial.key, unit * bowl(list(trial.X)))
        optimizers.append(optimizer)
    one, other = optimizers
    assert points(one.ask(2)) == points(other.ask(2))
    assert other.best().mean == factor * (one.best().mean or 0.0)


def test_outcomes_of_another_order_begin_the_model_anew(tmp_path: Path) -> None:
    optimizer = Optimizer(QUICK)
    for trial in optimizer.ask(4):
        optimizer.tell(trial.key, 1e-9 * bowl(list(trial.X)))
    optimizer.ask()
    small = optimizer.surrogate.unit
    outlier = optimizer.tell(optimizer.register([2.0]).key, 1e9)
    assert optimizer.best().trial.key != outlier.key
    assert optimizer.surrogate.unit > 1e12 * small
    assert of(optimizer).posterior(torch.rand(1, 1).double()).mean.abs() < 10.0
    save_optimizer(tmp_path, optimizer)
    optimizer, _ = load_optimizer(tmp_path)
    optimizer.withdraw(outlier.key)
    optimizer.ask()
    assert optimizer.surrogate.unit == small
    assert set(optimizer.surrogate.held) == {0, 1, 2, 3}


def test_torch_s_random_state_is_neither_used_nor_changed() -> None:
    first = started(steps=2)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    second = started(steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert points(first.ledger) == points(second.ledger)
    assert points(first.ledger) != points(started(replace(QUICK, seed=1), steps=2).ledger)


def test_outcomes_may_come_in_any_order() -> None:
    forward, backward = started(steps=0), Optimizer(QUICK)
    tell_all(backward, reversed(backward.ask(4)))
    for optimizer in (forward, backward):
        asked = optimizer.ask(3)
        tell_all(optimizer, asked if optimizer is forward else asked[::-1])
    assert points(forward.ask(2)) == points(backward.ask(2))


def test_late_outcomes_are_learned_and_points_without_one_are_avoided() -> None:
    optimizer = started()
    first = optimizer.ask()[0]
    second = optimizer.ask()[0]
    assert abs(first.X[0] - second.X[0]) > 1e-3
    tell_all(optimizer, [second])
    tell_all(optimizer, optimizer.ask())
    assert [trial.key for trial in optimizer.pending] == [first.key]
    tell_all(optimizer, [first])
    optimizer.best()
    assert set(optimizer.surrogate.held) == set(range(len(optimizer.ledger)))


@pytest.mark.parametrize("acquisition", ["qLogEI", "qLogNEI", "qUCB"])
def test_the_model_never_sees_a_failure_and_its_point_is_left_alone(acquisition: str) -> None:
    optimizer = started(replace(QUICK, acquisition=acquisition))
    failed = optimizer.ask()[0]
    optimizer.fail(failed.key, "no power")
    for _ in range(3):
        trial = optimizer.ask()[0]
        assert abs(trial.X[0] - failed.X[0]) > 1e-4
        tell_all(optimizer, [trial])
    optimizer.best()
    model = optimizer.surrogate.model
    assert failed.key not in optimizer.surrogate.held
    assert model is not None
    assert round(model.num_observations) == len(optimizer.ledger) - 1


def rebuilt(optimizer: Optimizer) -> WISKI:
    """A model of the told outcomes, built at once, with the same hyperparameters."""
    told, settings = optimizer.ledger.with_status("told"), optimizer.settings
    X = settings.to_unit_cube(points(told))
    unit, noise = optimizer.surrogate.unit, [[trial.Yvar] for trial in told]
    Y = -torch.tensor([[trial.Y] for trial in told], dtype=torch.float64) / unit
    Yvar = torch.tensor(noise, dtype=torch.float64) / unit**2 if any(v for (v,) in noise) else None
    bounds = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    model = WISKI(X, Y, Yvar, covar_module=KERNELS[settings.kernel](1), bounds=bounds, grid_size=24)
    model.load_state_dict(of(optimizer).state_dict())
    return model


def of(optimizer: Optimizer) -> WISKI:
    assert optimizer.surrogate.model is not None
    return optimizer.surrogate.model


def test_amended_and_withdrawn_outcomes_leave_the_model_of_a_rebuild() -> None:
    optimizer = started(replace(QUICK, refit=0.0), steps=3)
    optimizer.amend(1, 7.5)
    optimizer.withdraw(2)
    late = optimizer.ask()[0]
    optimizer.withdraw(late.key)
    failed = optimizer.ask()[0]
    optimizer.fail(failed.key, "no power")
    optimizer.amend(failed.key, 0.3)
    optimizer.amend(1, 5.5)
    optimizer.best()
    X = torch.linspace(0, 1, 40, dtype=torch.float64).unsqueeze(-1)
    got, expected = of(optimizer).posterior(X), rebuilt(optimizer).posterior(X)
    torch.testing.assert_close(got.mean, expected.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(got.variance, expected.variance, rtol=1e-8, atol=1e-8)
    assert set(optimizer.surrogate.held) == {0, 1, 3, 4, 5, 6, failed.key}
    assert optimizer.surrogate.held[1] == 5.5


def test_known_noise_is_that_of_the_model(tmp_path: Path) -> None:
    """Through an amended outcome, and after a run was saved and loaded."""
    optimizer = Optimizer(replace(QUICK, refit=0.0))
    for trial in optimizer.ask(4):
        optimizer.tell(trial.key, bowl(list(trial.X)), Yvar=0.1 + trial.key)
    (late,) = optimizer.ask()
    optimizer.tell(late.key, bowl(list(late.X)), Yvar=3.0)
    optimizer.best()
    optimizer.amend(1, 0.5, Yvar=2.0)
    optimizer.amend(2, float(optimizer.ledger[2].Y or 0.0), Yvar=0.7)  # the same outcome
    optimizer.best()
    save_optimizer(tmp_path, optimizer)
    loaded, _ = load_optimizer(tmp_path)
    X = torch.linspace(0, 1, 40, dtype=torch.float64).unsqueeze(-1)
    expected = rebuilt(optimizer).posterior(X)
    for one in (optimizer, loaded):
        assert one.surrogate.noise == {0: 0.1, 1: 2.0, 2: 0.7, 3: 3.1, late.key: 3.0}
        torch.testing.assert_close(of(one).posterior(X).mean, expected.mean, rtol=1e-8, atol=1e-8)
    assert points(loaded.ask(2)) == points(optimizer.ask(2))


@pytest.mark.parametrize(
    "options", [{"search": "region"}, *({"model": m} for m in MODELS if m != "osvgp")], ids=str
)
def test_a_lucky_outcome_of_much_noise_is_not_recommended(options: dict[str, Any]) -> None:
    """Were it told as precise, it would be the best."""
    plane = replace(QUICK, bounds=QUICK.bounds * 2, grid=None, initial=12)
    best = []
    for Yvar in (1e-4, 100.0):
        optimizer = Optimizer(replace(plane, **options))
        for trial in optimizer.ask(12):
            optimizer.tell(trial.key, bowl(list(trial.X)), Yvar=1e-4)
        lucky = max(optimizer.ledger, key=lambda trial: float(trial.Y or 0.0))
        optimizer.amend(lucky.key, -3.0, Yvar)
        best.append(optimizer.best().trial.key == lucky.key)
    assert best == [True, False]


@pytest.mark.parametrize("model", ["auto", "wiski"])
def test_noise_beyond_single_precision_tells_nothing_of_its_outcome(model: str) -> None:
    optimizer = started(replace(QUICK, model=model, dtype="float32"), steps=0)
    lucky = optimizer.ask(1)[0]
    optimizer.tell(lucky.key, -1e3, Yvar=1e140)
    mean = optimizer.best().mean
    assert mean is not None
    assert mean > -10.0
    optimizer.withdraw(lucky.key)
    tell_all(optimizer, optimizer.ask(1))


def test_known_noise_of_outcomes_whose_squares_are_no_floats() -> None:
    best = []
    for unit, Yvar in ((1.0, 2.0**12), (2.0**-543, 2.0**-1074)):
        optimizer = Optimizer(QUICK)
        for trial in optimizer.ask(4):
            optimizer.tell(trial.key, unit * bowl(list(trial.X)), Yvar=Yvar)
        best.append(optimizer.best())
    assert best[1].trial.key == best[0].trial.key
    assert best[1].mean == (best[0].mean or 0.0) * unit


def test_noise_that_is_none() -> None:
    optimizer = started(steps=0)
    for wrong in (-1.0, math.nan, math.inf, 1e160, "small"):
        with pytest.raises(
            UsageError, match=r"noise variance of trial 0 as a finite number of at least 0"
        ):
            optimizer.amend(0, 1.0, wrong)  # type: ignore[arg-type]
    before = optimizer.amend(0, 1.0, 0.25)
    assert optimizer.tell(0, 1.0, Yvar=0.25) == before
    with pytest.raises(UsageError, match=r"told 1 with a noise variance of 0\.25 .*, got 1\. To"):
        optimizer.tell(0, 1.0)
    assert optimizer.ledger[0] == before
    assert optimizer.withdraw(0).Yvar is None
    robust = Optimizer(replace(QUICK, grid=None, model="osvgp"))
    (trial,) = robust.ask(1)
    with pytest.raises(UsageError, match="osvgp has a likelihood of its own"):
        robust.tell(trial.key, 1.0, Yvar=0.1)
    assert robust.pending == [trial]


def test_all_outcomes_withdrawn_is_a_fresh_start() -> None:
    optimizer = started(steps=0)
    for trial in list(optimizer.ledger):
        optimizer.withdraw(trial.key)
    with pytest.raises(UsageError, match="no outcome was told"):
        optimizer.best()
    trials = optimizer.ask(4)
    assert {trial.origin for trial in trials} == {"sobol"}
    assert not set(points(trials)) & {trial.X for trial in optimizer.ledger if trial.key < 4}
    tell_all(optimizer, trials)
    optimizer.ask()
    assert set(optimizer.surrogate.held) == {4, 5, 6, 7}


def test_points_of_one_s_own() -> None:
    optimizer = started()
    trial = optimizer.register([0.7])
    optimizer.tell(trial.key, 0.0)
    optimizer.best()
    assert optimizer.surrogate.held[trial.key] == 0.0
    assert (trial.X, trial.origin) == ((0.7,), "hand")
    for X in ([3.5], [0.1, 0.2], []):
        with pytest.raises(UsageError, match="Expected 1 numbers within"):
            optimizer.register(X)
    before = list(optimizer.ledger)
    for wrong in ("a", "1", 0.5, [None], ["0.5"], {0.5: 1.0}):
        with pytest.raises(UsageError, match="Expected 1 numbers, got"):
            optimizer.register(wrong)  # type: ignore[arg-type]
    for q in (0, 1.5, "2"):
        with pytest.raises(UsageError, match=f"Expected q .*of at least 1, got '?{q}"):
            optimizer.ask(q)  # type: ignore[arg-type]
    assert list(optimizer.ledger) == before


@pytest.mark.usefixtures("whole_fits")
def test_the_best_point_is_of_the_posterior_mean_not_of_the_luckiest_outcome() -> None:
    optimizer = started(steps=3)
    X = [0.7, 0.7, 0.7, 0.7, 2.9, 2.9, 2.9, 2.9, 2.9]
    Y = [0.0, 0.01, -0.01, 0.0, 4.8, 4.9, -0.5, 4.7, 5.0]
    for x, y in zip(X, Y, strict=True):
        optimizer.tell(optimizer.register([x]).key, y)
    assert optimizer.best().trial.X[0] == pytest.approx(0.7, abs=0.3)


@pytest.mark.parametrize("q", [40, 200])
def test_thompson_sampling_of_many_points_at_once(q: int) -> None:
    asked = started(replace(TWO_INPUTS, acquisition="TS")).ask(q)
    assert len(set(points(asked))) > q // 2


@pytest.mark.parametrize(("kind", "options"), [("auto", {"max_exact": 2}), ("wiski", {})])
@pytest.mark.usefixtures("whole_fits")
def test_the_model_has_as_few_features_as_the_noise_allows(
    kind: str, options: dict[str, int]
) -> None:
    model = of(started(replace(TWO_INPUTS, model=kind, model_options=options), steps=2))
    assert isinstance(model, AutoGP | WISKI)
    noise, view = model.noise_level().item(), family_model(model)
    assert isinstance(view, WISKI)
    assert 0.0 < view.tolerance <= LEFT_OUT * noise
    rank, whole = view.rank, family_model(model.truncate(0.0))
    assert isinstance(whole, WISKI)
    assert rank < whole.rank


def test_a_line_search_that_stalls_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    original = acquisition_module.gen_candidates_scipy

    def stalling(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("always", OptimizationWarning)  # as BoTorch does
            warnings.warn("Optimization failed: ABNORMAL", OptimizationWarning, stacklevel=2)
        return original(*args, **kwargs)

    monkeypatch.setattr(acquisition_module, "gen_candidates_scipy", stalling)
    with warnings.catch_warnings(record=True) as caught:
        assert len(started(replace(TWO_INPUTS, acquisition="TS")).ask(3)) == 3
        assert len(started(replace(TWO_INPUTS, grid=None, search="region")).ask(3)) == 3
    assert not any(issubclass(each.category, OptimizationWarning) for each in caught)


@pytest.mark.usefixtures("whole_searches")
@pytest.mark.parametrize("q", [20, acquisition_module.MANY])
def test_thompson_sampling_finds_the_maximum_of_each_function(q: int) -> None:
    model = of(started(TWO_INPUTS, steps=2))
    grid = torch.cartesian_prod(*2 * [torch.linspace(0.0, 1.0, 101, dtype=torch.float64)])
    situation = Situation(model, grid[:1], 0.0, None, beta=2.0, seed=3)
    found = best_points(replace(TWO_INPUTS, acquisition="TS"), situation, q)
    functions = sample_paths(model, q, seed=3)
    reached = functions(found.unsqueeze(-2)).flatten()
    assert bool((reached >= functions(grid).squeeze(-1).amax(-1) - 1e-6).all())


def test_both_dtypes(dtype: torch.dtype) -> None:
    optimizer = started(replace(QUICK, dtype=str(dtype).removeprefix("torch.")), steps=3)
    assert of(optimizer).posterior(torch.tensor([[0.5]], dtype=dtype)).mean.dtype == dtype
    assert optimizer.best().trial.X[0] == pytest.approx(0.7, abs=0.2)


def test_a_refit_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = started()
    former = {
        name: value.clone() for name, value in of(optimizer).covar_module.state_dict().items()
    }

    def fail(model: WISKI) -> None:
        model.train()
        raise ModelFittingError("All attempts to fit the model have failed.")

    monkeypatch.setattr("bo_stream.models.fitting.learn_hyperparameters", fail)
    tell_all(optimizer, optimizer.ask(3))
    with pytest.warns(RuntimeWarning, match="could not be relearned and stay as they were"):
        optimizer.best()
    for name, value in of(optimizer).covar_module.state_dict().items():
        assert torch.equal(value, former[name])
    assert [event.what for event in of(optimizer).numerical_log] == ["a refit that failed"]
    assert optimizer.ask()[0].origin == "model"


def told(optimizer: Optimizer, X: Tensor) -> None:
    """Waves, which to a kernel with a long lengthscale are all noise."""
    for x in X.tolist():
        optimizer.tell(optimizer.register([x]).key, math.sin(18.0 * x))


@pytest.mark.parametrize("settings", [QUICK, REGION], ids=["box", "region"])
def test_gradients_that_are_switched_off_change_nothing(settings: OptimizationSettings) -> None:
    expected = started(settings, steps=2)
    with torch.no_grad():
        optimizer = started(settings, steps=2)
        assert [trial.X for trial in optimizer.ledger] == [t.X for t in expected.ledger]
        assert optimizer.best() == expected.best()


@pytest.mark.parametrize("few", [50, 10])
def test_a_poor_maximum_is_left(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few outcomes race from two starts; of more, the other start is better at once."""
    monkeypatch.setattr("bo_stream.models.fitting.FEW_PER_INPUT", few)
    optimizer = Optimizer(OptimizationSettings(bounds=((0.0, 1.0),), kernel="rbf", grid=(60,)))
    told(optimizer, torch.linspace(0.0, 1.0, 25))
    optimizer.best()
    with torch.no_grad():
        of(optimizer).covar_module.lengthscale = 1.0
        of(optimizer).likelihood.noise = 1.0
    told(optimizer, torch.linspace(0.02, 0.98, 9))
    optimizer.best()
    assert optimizer.surrogate.refits == [25, 34]
    assert of(optimizer).covar_module.lengthscale.item() < 0.2


@pytest.mark.cuda
@pytest.mark.integration
@pytest.mark.parametrize("acquisition", ACQUISITIONS)
def test_on_cuda(acquisition: str, tmp_path: Path) -> None:
    optimizer = started(replace(TWO_INPUTS, device="cuda", acquisition=acquisition), steps=2)
    save_optimizer(tmp_path, optimizer)
    again, expected = points(load_optimizer(tmp_path)[0].ask(2)), points(optimizer.ask(2))
    torch.testing.assert_close(torch.tensor(again), torch.tensor(expected))  # sums have no order


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bounds": ((0.0, 1.0),) * 5}, "at most 4 inputs on a grid, got 5"),
        ({"bounds": ()}, "bounds of at least one input"),
        ({"bounds": ((1.0, 1.0),)}, "input 0 to be finite, low < high"),
        ({"bounds": ((0.0, float("inf")),)}, "input 0 to be finite"),
        ({"initial": 1}, "initial to be a whole number of at least 2, got 1"),
        ({"q": 0}, "q to be a whole number of at least 1"),
        ({"q": 1.5}, "q to be a whole number of at least 1, got 1.5"),
        ({"initial": "4"}, "initial to be a whole number of at least 2, got '4'"),
        ({"raw_samples": 1}, "raw_samples to be a whole number of at least 2"),
        ({"seed": -1}, "seed to be a whole number of at least 0, got -1"),
        ({"seed": 2**70}, r"Expected seed from 0 to 2\*\*63 - 1, got 1180591620717411303424"),
        ({"kernel": "cubic"}, "kernel to be one of"),
        ({"refit": 1.0}, "refit above 1"),
        ({"beta": -1.0}, "beta of at least 0"),
        ({"grid": (8, 8)}, "grid to be one number or 1"),
        ({"acquisition": "EI"}, "acquisition to be one of qUCB, .* got 'EI'"),
        ({"acquisition": "nowhere:f"}, "module 'nowhere' cannot be imported"),
        ({"device": "abacus"}, "Device 'abacus'"),
    ],
)
def test_each_setting_is_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Optimizer(replace(QUICK, **wrong))


def test_a_model_that_cannot_be_built_is_refused_before_anything_is_evaluated() -> None:
    with pytest.raises(UsageError, match=r"cannot be built: .*grid_size"):
        started(replace(QUICK, grid=(2,)), steps=0)


def test_settings_survive_json() -> None:
    for settings in (QUICK, TWO_INPUTS, replace(QUICK, grid=None)):
        assert from_record(OptimizationSettings, asdict(settings)) == settings
