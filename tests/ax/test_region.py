"""A search of a region in Ax: in many parameters, integers and constraints among them."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
import torch
from ax.adapter.base import Adapter
from ax.adapter.cross_validation import compute_model_fit_metrics_from_adapter
from ax.api.client import Client
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig, StorageConfig
from ax.core.observation import ObservationFeatures
from ax.core.trial_status import TrialStatus
from ax.exceptions.core import SearchSpaceExhausted, UserInputError
from botorch.exceptions.errors import UnsupportedError
from torch.quasirandom import SobolEngine

from bo_stream.ax import adapters, close_storage, generation_strategy, storage_config
from bo_stream.ax.region import RegionGenerator
from bo_stream.loops.optimization import region as regions
from bo_stream.loops.optimization import region_search
from tests.ax.experiments import Said, warned
from tests.ax.reloads import SEARCH_ENDS, from_database, from_json, next_candidate

FIRST = 4
"""Sobol trials, where their number is not what is tested."""


def floats(count: int) -> list[Any]:
    names = [f"x{i}" for i in range(count)]
    return [RangeParameterConfig(name, (-1.0, 2.0), parameter_type="float") for name in names]


def integers(count: int) -> list[Any]:
    names = [f"i{i}" for i in range(count)]
    return [RangeParameterConfig(name, (0, 10), parameter_type="int") for name in names]


def bits(count: int) -> list[Any]:
    return [RangeParameterConfig(f"i{i}", (0, 1), parameter_type="int") for i in range(count)]


def mixed() -> list[Any]:
    """Twelve parameters of all kinds that have an order."""
    return [
        *floats(4),
        *integers(4),
        RangeParameterConfig("rate", (1e-4, 1.0), parameter_type="float", scaling="log"),
        RangeParameterConfig("width", (1, 256), parameter_type="int", scaling="log"),
        ChoiceParameterConfig("size", [8, 16, 32, 64], parameter_type="int", is_ordered=True),
        ChoiceParameterConfig("grade", ["a", "b", "c"], parameter_type="str", is_ordered=True),
    ]


def bowl(p: Any) -> float:
    """Return a separable quadratic of parameters as above, in 1,024ths: exact in decimal digits."""
    values = [(v - 0.8) / 3.0 for n, v in p.items() if n.startswith("x")]
    values += [(v - 7.0) / 10.0 for n, v in p.items() if n.startswith("i")]
    if "rate" in p:
        values += [(math.log10(p["rate"]) + 2.0) / 4.0, (math.log2(p["width"]) - 5.0) / 8.0]
        values += [(math.log2(p["size"]) - 4.0) / 3.0, ("abc".index(p["grade"]) - 1.0) / 2.0]
    return round(1024.0 * sum(v * v for v in values)) / 1024.0


def started(
    parameters: list[Any],
    objective: str = "-loss",
    constraints: list[str] | None = None,
    outcomes: list[str] | None = None,
    storage: StorageConfig | None = None,
    **options: Any,
) -> Client:
    client = Client(storage, random_seed=0)
    client.configure_experiment(parameters, name="small", parameter_constraints=constraints)
    client.configure_optimization(objective, outcome_constraints=outcomes)
    settings = {"initialization": FIRST, "seed": 0, **options}
    client.set_generation_strategy(generation_strategy(**settings))
    return client


def run(client: Client, batches: int, q: int = 2) -> None:
    for _ in range(batches):
        for index, parameters in client.get_next_trials(q).items():
            client.complete_trial(index, {"loss": bowl(parameters)})


def in_region(parameters: list[Any], batches: int = 2, **options: Any) -> Client:
    """Return an experiment after its Sobol trials and some batches of a region."""
    client = begun(parameters) if not options else begin(parameters, **options)
    run(client, batches - 1)
    assert node_of(client) == "Region"
    return client


def begin(parameters: list[Any], **options: Any) -> Client:
    """Return an experiment after its Sobol trials and a batch of a region."""
    client = started(parameters, **options)
    run(client, 1, FIRST)
    run(client, 1)
    return client


BEGUN: dict[str, Client] = {}


def begun(parameters: list[Any]) -> Client:
    """Return one of its own, which is begun once for all with the same parameters."""
    key = repr(parameters)
    if key not in BEGUN:
        BEGUN[key] = begin(parameters)
    return deepcopy(BEGUN[key])


def node_of(client: Client) -> str:
    """Return the generation node of the last trial."""
    trial = client._experiment.trials[max(client._experiment.trials)]
    return str(trial.generator_runs[0]._generation_node_name)


def generator_of(client: Client) -> RegionGenerator:
    generator: Any = adapter_of(client).generator
    assert isinstance(generator, RegionGenerator)
    return generator


def adapter_of(client: Client) -> Adapter:
    adapter = client._generation_strategy.adapter
    assert adapter is not None
    return adapter


def arms_of(client: Client) -> list[Any]:
    trials = client._experiment.trials
    return [trials[index].arms[0].parameters for index in sorted(trials)]


# --- what it finds -------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_mixed_space_is_searched_better_than_by_sobol_points() -> None:
    client = started(mixed(), initialization=None)
    run(client, 4, 6)
    assert node_of(client) == "Sobol"
    run(client, 16, 6)
    assert node_of(client) == "Region"
    values = [bowl(arm) for arm in arms_of(client)]
    assert median(values[-24:]) < min(values[:24])  # most of the last are better than all Sobol's


def test_every_candidate_is_in_the_space_and_new() -> None:
    client = in_region(mixed(), batches=4)
    arms = arms_of(client)
    for parameters in arms:
        assert client._experiment.search_space.check_membership(parameters, raise_error=True)
        assert all(isinstance(parameters[name], int) for name in ("i0", "width", "size"))
    assert len({repr(sorted(each.items())) for each in arms}) == len(arms)


def test_a_space_of_few_points_is_searched_without_repetitions() -> None:
    """The best corner is found at once, and is then not proposed again."""
    client = in_region(bits(12), batches=1)
    run(client, 5, q=3)
    arms = arms_of(client)
    assert len({tuple(each.values()) for each in arms}) == len(arms)


def test_large_outcomes_are_good_where_the_objective_says_so() -> None:
    client = started(floats(12), objective="gain")
    for _ in range(4):
        for index, parameters in client.get_next_trials(FIRST).items():
            client.complete_trial(index, {"gain": -bowl(parameters)})
    values = [bowl(each) for each in arms_of(client)]
    assert mean(values[-FIRST:]) < mean(values[:FIRST])


def test_a_metric_beside_the_objective_is_not_modelled() -> None:
    """Ax would look for its predictions, to say how well it is predicted."""
    client = started(floats(12))
    for count in (FIRST, 2, 2):
        for index, parameters in client.get_next_trials(count).items():
            beside = {"seconds": 3.0 + index} if index % 3 else {}
            client.complete_trial(index, {"loss": bowl(parameters), **beside})
    assert node_of(client) == "Region"
    _, prediction, _, _ = client.get_best_parameterization()
    assert set(prediction) == {"loss"}
    adapter: Any = client._generation_strategy.adapter
    for errors in compute_model_fit_metrics_from_adapter(adapter).values():
        assert set(errors) == {"loss"}


def test_parameters_that_are_fixed_for_some_trials_are_so() -> None:
    client = in_region(mixed())
    given: dict[str, Any] = {"x0": 1.5, "i1": 2, "grade": "c"}
    for parameters in client.get_next_trials(2, fixed_parameters=given).values():
        assert {name: parameters[name] for name in given} == given


def test_points_of_a_large_space_with_fixed_parameters_are_exhausted() -> None:
    client = started(bits(13))
    given: dict[str, Any] = {f"i{i}": i % 2 for i in range(12)}
    assert len(client.get_next_trials(2, fixed_parameters=given)) == 2
    with pytest.raises(SearchSpaceExhausted, match=r"All 2 points .* with the fixed parameters"):
        client.get_next_trials(1, fixed_parameters=given)


def test_points_with_other_values_than_the_fixed_ones_do_not_exhaust_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapters, "MOST_LISTED", 0)
    client = started(bits(3))
    for i in range(4):
        client.attach_trial({"i0": 0, "i1": i // 2, "i2": i % 2})
    (point,) = client.get_next_trials(1, fixed_parameters={"i0": 1}).values()
    assert point["i0"] == 1


# --- constraints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "constraint"),
    [
        (floats(12), " + ".join(f"x{i}" for i in range(12)) + " <= 2.0"),
        (mixed(), "i0 + i1 + i2 + i3 <= 12"),
        (mixed(), "x0 + x1 + i0 <= 4"),
        (integers(12), "i0 + i1 + i2 <= 6"),
    ],
)
def test_a_constraint_of_sums_is_kept(parameters: list[Any], constraint: str) -> None:
    """The least value of all is on the other side.

    Ax rounds first trials at random, and in an order that differs from process to process: eight
    batches were better than these in each of 60 processes, four not in all.
    """
    client = in_region(parameters, batches=8, constraints=[constraint])
    arms = arms_of(client)
    for each in arms:
        assert client._experiment.search_space.check_membership(each)
    found, first = min(map(bowl, arms)), min(map(bowl, arms[:FIRST]))
    assert found < first


@pytest.mark.parametrize("told", [1, FIRST], ids=["Sobol points", "of a model"])
@pytest.mark.parametrize(
    ("parameters", "constraint", "given"),
    [
        (floats(11), "x0 + x1 <= 1", {"x1": 1.75}),
        (mixed(), "x0 + x1 + i0 <= 4", {"i0": 5}),
        (mixed(), "i0 + i1 + i2 <= 7", {"i1": 7, "grade": "c"}),
    ],
)
def test_parameters_are_fixed_within_constraints(
    parameters: list[Any], constraint: str, given: dict[str, Any], told: int
) -> None:
    client = started(parameters, constraints=[constraint])
    for index, point in list(client.get_next_trials(FIRST).items())[:told]:
        client.complete_trial(index, {"loss": bowl(point)})
    for point in client.get_next_trials(4, fixed_parameters=given).values():
        assert {name: point[name] for name in given} == pytest.approx(given)
        assert client._experiment.search_space.check_membership(point, raise_error=True)
    origins = {trial.origin for trial in list(generator_of(client).ledger)[FIRST:]}
    assert origins == {"sobol" if told == 1 else "model"}


def test_fixed_parameters_that_leave_no_point_are_refused() -> None:
    client = in_region(floats(11), constraints=["x0 + x1 <= 0.5"])
    state, known = deepcopy(generator_of(client).region), arms_of(client)
    with pytest.raises(UserInputError, match=r"got values of x1, x2 that leave none: fix other"):
        client.get_next_trials(1, fixed_parameters={"x2": 0.0, "x1": 1.75})
    assert generator_of(client).region == state
    assert arms_of(client) == known
    client.get_next_trials(1, fixed_parameters={"x1": 1.25})
    assert node_of(client) == "Region"


# --- which search it is --------------------------------------------------------------------------


def test_by_default_a_region_begins_after_twice_as_many_trials_as_parameters(
    tmp_path: Path,
) -> None:
    client = from_json(started(floats(11), initialization=None), tmp_path)
    run(client, 1, 22)
    assert node_of(client) == "Sobol"
    run(client, 1, 1)
    assert node_of(client) == "Region"


MIDDLE = {
    **{f"x{i}": 0.5 for i in range(4)},
    **{f"i{i}": 5 for i in range(4)},
    "rate": 0.01,
    "width": 11,
    "size": 32,
    "grade": "b",
}
"""Of the mixed space; Ax adds a half at both ends of an integer's range before its logarithm."""


def test_the_first_trial_of_a_region_is_the_middle_of_the_space(tmp_path: Path) -> None:
    client = from_json(started(mixed()), tmp_path)
    first, second = client.get_next_trials(2).values()
    assert first == pytest.approx(MIDDLE)
    assert second["x0"] != 0.5
    (fixed,) = started(floats(12)).get_next_trials(1, fixed_parameters={"x1": 2.0}).values()
    assert fixed == {**dict.fromkeys((f"x{i}" for i in range(12)), 0.5), "x1": 2.0}


def test_a_batch_that_has_the_middle_begins_with_it() -> None:
    for seed in range(10):
        client = started(bits(2), search="region", seed=seed)
        run = client._generation_strategy.gen_single_trial(client._experiment, n=4)
        points = [tuple(arm.parameters.values()) for arm in run.arms]
        assert len(set(points)) == 4
        assert points[0] == (0, 0)


@pytest.mark.parametrize(
    ("parameters", "constraints", "is_attached", "options"),
    [
        (12, ["x0 + x1 <= 0.5"], False, {}),
        (12, None, True, {}),
        (12, None, False, {"search": "box"}),
        (10, None, False, {}),
    ],
)
def test_others_begin_with_a_sobol_point(
    parameters: int, constraints: list[str] | None, is_attached: bool, options: dict[str, Any]
) -> None:
    client = started(floats(parameters), constraints=constraints, **options)
    if is_attached:
        client.attach_trial(dict.fromkeys((f"x{i}" for i in range(parameters)), 1.0))
    (first,) = client.get_next_trials(1).values()
    assert first["x2"] != 0.5


@pytest.mark.parametrize(("dim", "first"), [(15, 30), (30, 40), (45, 45)])
def test_in_many_parameters_there_are_fewer_sobol_trials(dim: int, first: int) -> None:
    client = started(floats(dim), initialization=None)
    for trials, name in ((first - 1, "Sobol"), (1, "Sobol"), (1, "Region")):
        for index in client.get_next_trials(trials):
            client.complete_trial(index, {"loss": float(index)})
        assert node_of(client) == name


OF_WHOLE = "12 parameters: the search is of the whole space"


@pytest.mark.parametrize(
    ("parameters", "objective", "options", "text"),
    [
        (floats(10), "-loss", {}, ""),
        (
            [*floats(11), ChoiceParameterConfig("kind", ["p", "q", "r"], "str", is_ordered=False)],
            "-loss",
            {},
            f"{OF_WHOLE}, as there are unordered choices, kind.\n",
        ),
        (
            floats(12),
            "-loss, -cost",
            {},
            f"{OF_WHOLE}, as the objective is not one metric.\n",
        ),
        (
            floats(12),
            "-loss",
            {"outcomes": ["cost <= 1.0"]},
            f"{OF_WHOLE}, as there are constraints of outcomes.\n",
        ),
        (floats(11), "-loss", {"search": "box"}, ""),
        (floats(11), "-loss", {"search": "box", "acquisition": "qUCB"}, ""),
        (floats(11), "-loss", {"refit": 2.0}, ""),
    ],
)
def test_where_a_region_does_not_suit_the_whole_space_is_searched(
    parameters: list[Any],
    objective: str,
    options: dict[str, Any],
    text: str,
    said: Said,
) -> None:
    client = started(parameters, objective, **{"initialization": None, **options})
    for index in client.get_next_trials(5):
        client.complete_trial(index, {"loss": 1.0 + index, "cost": 0.5 * index})
    strategy = client._generation_strategy
    strategy._maybe_transition_to_next_node()
    assert strategy.current_node_name == "Stream"
    assert said.text == text


def test_a_named_region_is_taken_in_few_parameters() -> None:
    in_region(floats(3), batches=1, search="region")


@pytest.mark.parametrize(
    ("parameters", "objective", "reason"),
    [
        (floats(3), "-loss, -cost", "the objective is not one metric"),
        ([ChoiceParameterConfig("k", list("pqr"), "str", is_ordered=False)], "-loss", "choices, k"),
    ],
)
def test_a_named_region_that_does_not_suit_is_refused_before_the_first_trial(
    parameters: list[Any], objective: str, reason: str
) -> None:
    client = started(parameters, objective, search="region")
    with pytest.raises(UnsupportedError, match=f"{reason}. Leave search='region' out"):
        client.get_next_trials(1)
    assert client._experiment.trials == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": "sphere"}, "or options of the search of the box, got 'sphere'"),
        ({"search": "region", "acquisition": "qUCB"}, "leave out acquisition, or search the box"),
    ],
)
def test_bad_searches(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generation_strategy(**options)


def test_a_goal_that_a_region_cannot_have_ends_it() -> None:
    client = in_region(floats(11), batches=1)
    client.configure_optimization("-loss", outcome_constraints=["cost <= 1.0"])
    for index in client._experiment.trials:
        client.attach_data(index, {"cost": 0.5 + 0.1 * (index % 3)})
    client.get_next_trials(1)
    assert node_of(client) == "Stream"


# --- trials of all statuses ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Outcomes that are infinite")
def test_failed_trials_are_bad_ones_and_abandoned_ones_none() -> None:
    client = in_region(mixed(), batches=1)
    first, second, third = client.get_next_trials(3)
    client.mark_trial_failed(first)
    client.mark_trial_abandoned(second)
    client.complete_trial(third, {"loss": math.inf})
    known = arms_of(client)
    run(client, 3)
    statuses = [trial.status for trial in generator_of(client).ledger]
    assert [statuses[key] for key in (first, second, third)] == ["failed", "withdrawn", "failed"]
    assert generator_of(client).search is not None
    assert not any(each in known for each in arms_of(client)[len(known) :])


@pytest.mark.parametrize("worst_first", [False, True])
def test_of_many_attached_trials_the_best_is_found_in_any_order(
    worst_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_search, "ROWS", 20)
    client = started(floats(11))
    draws = 3.0 * SobolEngine(11, seed=0).draw(40, dtype=torch.float64) - 1.0
    names = [f"x{i}" for i in range(11)]
    attached = [dict(zip(names, row, strict=True)) for row in draws.tolist()]
    for parameters in sorted(attached, key=bowl, reverse=worst_first):
        client.complete_trial(client.attach_trial(parameters), {"loss": 1.0 + bowl(parameters)})
    client.get_next_trials(1)
    best, *_ = client.get_best_parameterization()
    assert bowl(best) == min(map(bowl, attached))


def test_an_outcome_of_before_may_be_corrected() -> None:
    client = in_region(floats(11))
    client.attach_data(0, {"loss": -9.0})
    client.get_next_trials(1)
    best, prediction, *_ = client.get_best_parameterization()
    assert best == arms_of(client)[0]
    assert first_of(prediction["loss"]) < -1.0


def test_standard_errors_are_known_noise() -> None:
    """Of the outcomes that have one, as also in what cross-validation predicts."""
    client = in_region(floats(11))
    client.attach_data(0, {"loss": (2.0, 0.5)})
    client.attach_data(1, {"loss": (1.0, 0.0)})
    client.get_next_trials(1)
    generator = generator_of(client)
    assert [trial.Yvar for trial in list(generator.ledger)[:3]] == [0.25, 0.0, None]
    assert generator.search is not None
    local = generator.search.local
    assert local is not None
    assert local.Yvar is not None
    known = [key for key, value in zip(local.keys, local.Yvar, strict=True) if not value.isnan()]
    assert known == [0, 1]
    gone = torch.zeros(len(local.keys), dtype=torch.bool)
    gone[0] = True
    x = torch.tensor([generator.ledger[0].X], dtype=torch.float64)
    pairs = [generator.predict_without("loss", gone, x, noisy) for noisy in (False, True)]
    assert pairs[0] is not None
    assert pairs[1] is not None
    assert float(pairs[1][1]) > float(pairs[0][1])


def test_a_standard_error_whose_square_overflows_is_set_aside() -> None:
    client = in_region(floats(11), batches=1)
    client.attach_data(0, {"loss": (2.0, 1e200)})
    assert "are set aside: loss of trial 0." in warned(client)
    assert generator_of(client).ledger[0].status == "failed"


def test_outcomes_too_large_for_a_model_count_as_failures_with_a_warning() -> None:
    client = in_region(floats(11), batches=1)
    client.attach_data(0, {"loss": -1e100})
    assert "count as failures: loss of trial 0." in warned(client)
    assert generator_of(client).ledger[0].status == "failed"


def test_pending_trials_are_passed_over_and_not_proposed_again() -> None:
    client = in_region(mixed(), batches=1)
    waiting = [p for _ in range(3) for p in client.get_next_trials(2).values()]
    assert len({repr(sorted(each.items())) for each in waiting}) == 6
    for index in sorted(client._experiment.trial_indices_by_status[TrialStatus.RUNNING])[::-1]:
        client.complete_trial(index, {"loss": bowl(arms_of(client)[index])})
    client.get_next_trials(1)
    assert generator_of(client).region["ended"] == FIRST + 2 + 6


def test_a_region_that_has_collapsed_begins_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Sobol points keep the constraint and have whole numbers, too."""
    monkeypatch.setattr(regions, "SHORTEST", 10.0)
    client = started(mixed(), constraints=["i0 + i1 <= 9"])
    for _ in range(5):
        for index, parameters in client.get_next_trials(FIRST).items():
            assert client._experiment.search_space.check_membership(parameters)
            client.complete_trial(index, {"loss": 1.0})
    assert len(generator_of(client).region["found"]) > 0
    assert any(trial.origin == "sobol" for trial in generator_of(client).ledger)


@pytest.mark.parametrize(("promises", "count"), [(False, 3), (True, 0)])
def test_points_whose_functions_promise_nothing_are_counted(
    promises: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are asked for, of the ones that are drawn together."""
    client = in_region(floats(12))
    before = generator_of(client).region["unpromising"]
    monkeypatch.setattr(region_search, "improves", lambda *values: promises)
    client.get_next_trials(3)
    assert generator_of(client).region["unpromising"] == (count + before if count else 0)


# --- storage -------------------------------------------------------------------------------------


def assert_goes_on(client: Client, other: Client) -> None:
    """Check that two clients propose the same trials, however often, batches among them."""
    for _ in range(2):
        ours, theirs = next_candidate(client), next_candidate(other)
        assert theirs == pytest.approx(ours, abs=SEARCH_ENDS)
        for each in (client, other):
            index = max(each._experiment.trials)
            each.complete_trial(index, {"loss": bowl(ours)})
    batches = (list(each.get_next_trials(3).values()) for each in (client, other))
    for mine, their in zip(*batches, strict=True):
        assert their == pytest.approx(mine, abs=SEARCH_ENDS)


def test_a_reloaded_experiment_goes_on_to_the_same_points(tmp_path: Path) -> None:
    client = in_region(floats(12), batches=3)
    other = from_json(client, tmp_path)
    assert_goes_on(client, other)
    ours, theirs = generator_of(client).region, generator_of(other).region
    assert all(theirs[name] == ours[name] for name in ("region", "rows", "asked", "leaps"))


@pytest.mark.integration
def test_so_does_one_from_a_database(tmp_path: Path) -> None:
    close_storage()
    file = tmp_path / "experiments.db"
    client = in_region(floats(12), batches=3, storage=storage_config(file))
    other = from_database(file)
    ours, theirs = next_candidate(client), dict(other.get_next_trials(1))
    close_storage()
    (their,) = theirs.values()
    assert their == pytest.approx(ours, abs=SEARCH_ENDS)


def first_of(pair: Any) -> float:
    """Return the mean of a mean and its standard error."""
    return float(pair[0])


# --- predictions ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("whole_fits")
def test_predictions_are_in_units_of_the_outcomes_and_change_nothing(tmp_path: Path) -> None:
    client = in_region(floats(11), batches=1)
    run(client, 3, q=4)
    other = from_json(client, tmp_path)
    best, prediction, *_ = client.get_best_parameterization()
    assert best in arms_of(client)
    assert first_of(prediction["loss"]) == pytest.approx(bowl(best), abs=0.1)
    (predicted,) = client.predict([best])
    assert first_of(predicted["loss"]) == pytest.approx(bowl(best), abs=0.1)
    assert len(client.summarize()) == len(client._experiment.trials)
    assert next_candidate(other) == pytest.approx(next_candidate(client), abs=SEARCH_ENDS)


def test_cross_validation_leaves_a_row_out(tmp_path: Path) -> None:
    """A row's prediction is that of a model without it: an outcome far off is not reproduced."""
    client = in_region(floats(11), batches=2)
    client.attach_data(0, {"loss": 50.0})
    client.get_next_trials(1)
    adapter = adapter_of(client)
    data = adapter.get_training_data()
    (name,) = (arm for trial, arm in data.arm_data.index if trial == 0)
    test = ObservationFeatures(dict(client._experiment.trials[0].arms[0].parameters))
    fold = data.filter_by_arm_names({arm for _, arm in data.arm_data.index} - {name})
    (left_out,) = adapter.cross_validate(cv_training_data=fold, cv_test_points=[test])
    (known,) = adapter.predict([test])[0]["loss"]
    assert abs(known - 50.0) < abs(left_out.means[0] - 50.0)


def test_cross_validation_leaves_all_trials_of_a_point_out() -> None:
    client = in_region(floats(11), batches=2)
    client.attach_data(0, {"loss": 50.0})
    arm = dict(client._experiment.trials[0].arms[0].parameters)
    client.complete_trial(client.attach_trial(arm), {"loss": 49.0})
    client.get_next_trials(1)
    adapter = adapter_of(client)
    data, name = adapter.get_training_data(), client._experiment.trials[0].arms[0].name
    tests = [ObservationFeatures(arm)] * 2
    fold = data.filter_by_arm_names({each for _, each in data.arm_data.index} - {name})
    left_out = adapter.cross_validate(cv_training_data=fold, cv_test_points=tests)
    assert len(left_out) == 2
    (known,) = adapter.predict(tests[:1])[0]["loss"]
    for each in left_out:
        assert abs(known - 50.0) < abs(each.means[0] - 50.0)
    best, *_ = client.get_best_parameterization()
    assert best in arms_of(client)


def test_importances_are_of_each_parameter() -> None:
    client = in_region(floats(11), batches=1)
    importances = adapter_of(client).feature_importances("loss")
    assert list(importances) == [f"x{i}" for i in range(11)]
    assert sum(importances.values()) == pytest.approx(1.0)


def test_a_generator_without_a_model_says_so() -> None:
    with pytest.raises(RuntimeError, match="has followed no trials"):
        RegionGenerator().predict(torch.zeros(1, 3, dtype=torch.float64))


def test_an_amended_outcome_far_away_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each proposal follows trials of a new ledger, of which it has seen no change."""
    monkeypatch.setattr(region_search, "ROWS", 8)
    client = in_region(floats(11), batches=4)
    rows = generator_of(client).region["rows"]
    away = next(key for key in range(FIRST + 8) if key not in rows)
    client.attach_data(away, {"loss": -50.0})
    client.get_next_trials(1)
    _, _, trial, _ = client.get_best_parameterization()
    assert trial == away
    run(client, 2)
    assert generator_of(client).region["centre"] == away
