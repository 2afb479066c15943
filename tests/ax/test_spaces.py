"""Search spaces and optimization configs: ours takes what Ax's default takes, and refuses the rest.

Each row of ``ROWS`` is run with both strategies. Ours goes over its model's hand-over on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from ax.api.client import Client
from ax.api.configs import ChoiceParameterConfig, DerivedParameterConfig, RangeParameterConfig
from ax.core.arm import Arm
from ax.core.data import Data
from ax.core.experiment import Experiment
from ax.core.parameter import (
    ChoiceParameter,
    DerivedParameter,
    FixedParameter,
    Parameter,
    ParameterType,
    RangeParameter,
)
from ax.core.parameter_constraint import ParameterConstraint
from ax.core.search_space import SearchSpace
from ax.exceptions.core import DataRequiredError, SearchSpaceExhausted, UserInputError
from botorch.exceptions.errors import UnsupportedError
from botorch.models.model import ModelList
from botorch.models.model_list_gp_regression import ModelListGP

from bo_stream.ax import generation_strategy
from bo_stream.ax.adapters import points_of
from tests.ax.experiments import NEARLY_WITHOUT_NOISE, PLAIN, acquisition_of, surrogate_of

pytestmark = [
    *NEARLY_WITHOUT_NOISE,
    pytest.mark.filterwarnings("ignore::ax.exceptions.core.AxWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),
    pytest.mark.filterwarnings("ignore:Unknown solver options"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:When all training points are infeasible"),
    pytest.mark.filterwarnings("ignore:Parameterization .* is in out-of-design"),
]

FIRST, MOST_EXACT = 3, 4
"""Sobol trials, and observations up to which our model is exact."""

FLOAT, INT = ParameterType.FLOAT, ParameterType.INT

Drive = Callable[[Client, "Row"], None]


def float_(name: str, low: float = 0.0, high: float = 1.0, **options: Any) -> RangeParameterConfig:
    return RangeParameterConfig(name, (low, high), parameter_type="float", **options)


def int_(name: str, low: int, high: int) -> RangeParameterConfig:
    return RangeParameterConfig(name, (low, high), parameter_type="int")


def choice(name: str, values: Any, kind: Any = "str", **options: Any) -> ChoiceParameterConfig:
    ordered = options.pop("is_ordered", False)
    return ChoiceParameterConfig(name, values, kind, is_ordered=ordered, **options)


SQUARE = (float_("a"), float_("b", -1.0, 1.0))
TREE = (
    choice("kind", ["p", "q", "r"], dependent_parameters={"p": ["x"], "q": ["sub"]}),
    float_("x"),
    choice("sub", [0, 1], "int", is_ordered=True, dependent_parameters={1: ["z"]}),
    float_("z", 1e-3, 1.0, scaling="log"),
    float_("w"),
)
SWITCH = (
    choice("on", [False, True], "bool", is_ordered=True, dependent_parameters={True: ["x"]}),
    float_("x"),
    float_("w"),
)
BASELINE = {"a": 0.5, "b": 0.5}


def value_of(setting: Any) -> float:
    return float(ord(setting[0]) % 5) if isinstance(setting, str) else float(setting)


def outcomes(parameters: Any, names: Sequence[str]) -> dict[str, float]:
    """Return a bowl, a slope and a parabola of the parameters that are there. None is ever 0."""
    values = [value_of(v) for _, v in sorted(parameters.items())]
    bowl = sum((0.1 * v + 0.1 * i - 0.3) ** 2 for i, v in enumerate(values))
    known = {"loss": 1.0 + bowl, "cost": 2.0 + 0.1 * sum(values), "size": 1.0 + values[0] ** 2}
    return {name: known[name] for name in names}


def one_by_one(client: Client, row: Row) -> None:
    for index, parameters in asked(client, row).items():
        client.complete_trial(index, outcomes(parameters, row.metrics))


def asked(client: Client, row: Row, count: int = 1) -> dict[int, Any]:
    """Ask for trials, and check that they are in the space, as fixed, and new."""
    before = set(client._experiment.arms_by_signature)
    trials = client.get_next_trials(count, fixed_parameters=row.fixed)
    for parameters in trials.values():
        check(client, parameters)
        assert {**parameters, **(row.fixed or {})} == parameters
    new = {Arm(parameters).signature for parameters in trials.values()}
    assert not before & new
    assert len(new) == len(trials)
    return trials


def check(client: Client, parameters: Any) -> None:
    """Check that the space, its hierarchy and its constraints included, has such a point."""
    space = client._experiment.search_space
    assert space.check_membership(parameters, raise_error=True)


def some_still_run(client: Client, row: Row) -> None:
    for place, (index, parameters) in enumerate(asked(client, row, 3).items()):
        if place > 0:
            client.complete_trial(index, outcomes(parameters, row.metrics))


def some_fail(client: Client, row: Row) -> None:
    ((index, parameters),) = asked(client, row).items()
    if index % 5 == 1:
        client.mark_trial_failed(index)
    elif index % 5 == 3:
        client.mark_trial_abandoned(index)
    else:
        client.complete_trial(index, outcomes(parameters, row.metrics))


def curves(client: Client, row: Row) -> None:
    """Attach an outcome at each of three steps; every third trial is stopped at the second."""
    ((index, parameters),) = asked(client, row).items()
    stopped = index % 3 == 1
    for step in range(1, 3 if stopped else 4):
        known = outcomes(parameters, row.metrics)
        client.attach_data(index, {k: v + 1.0 / step for k, v in known.items()}, progression=step)
    if stopped:
        client.mark_trial_early_stopped(index)
    else:
        client.complete_trial(index)


def some_metrics_missing(client: Client, row: Row) -> None:
    ((index, parameters),) = asked(client, row).items()
    left_out = (None, row.metrics[0], row.metrics[-1])[index % 3]
    client.complete_trial(
        index, outcomes(parameters, [name for name in row.metrics if name != left_out])
    )


def repeated(client: Client, row: Row) -> None:
    """Measure each point twice, with noise of known size."""
    ((index, parameters),) = asked(client, row).items()
    for each in (index, client.attach_trial(parameters)):
        known = outcomes(parameters, row.metrics).items()
        client.complete_trial(each, {name: (value, 0.1) for name, value in known})


def batches(client: Client, row: Row) -> None:
    experiment = client._experiment
    (runs,) = client._generation_strategy.gen(experiment, n=3)
    trial = experiment.new_batch_trial(generator_runs=runs)
    trial.mark_running(no_runner_required=True)
    rows = []
    for arm in trial.arms:
        check(client, arm.parameters)
        place = {"arm_name": arm.name, "trial_index": trial.index, "sem": 0.1}
        for name, value in outcomes(arm.parameters, row.metrics).items():
            metric = {"metric_name": name, "metric_signature": name, "mean": value}
            rows.append({**place, **metric})
    experiment.attach_data(Data(df=pd.DataFrame(rows)))
    trial.mark_completed()


@dataclass(frozen=True)
class Row:
    """An experiment, what is done with it, and whether Ax's default refuses it.

    Attributes:
        parameters: As a client takes them, or Ax's own.
        constraints: Of parameters.
        objective: As a client takes it.
        bounds: Outcome constraints and objective thresholds.
        metrics: Those that are reported.
        baseline: Parameters of the status quo.
        drive: One round of trials.
        rounds: Number of rounds.
        most_exact: Observations up to which our model is exact.
        fixed: Parameters that are fixed for each trial.
        refused: Errors with which both strategies refuse it.
    """

    parameters: Sequence[Any] = SQUARE
    constraints: tuple[str, ...] = ()
    objective: str = "-loss"
    bounds: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("loss",)
    baseline: dict[str, float] | None = None
    drive: Drive = one_by_one
    rounds: int = 7
    most_exact: int = MOST_EXACT
    fixed: dict[str, Any] | None = None
    refused: tuple[type[Exception], ...] = ()


TWO = {"objective": "-loss, -cost", "metrics": ("loss", "cost")}
ALL = {"metrics": ("loss", "cost", "size")}
COSTLY = {"bounds": ("cost >= 2.05",), "metrics": ("loss", "cost")}
TASK = ChoiceParameter("t", INT, [0, 1, 2], is_ordered=True, is_task=True, target_value=1)
FIDELITY = RangeParameter("s", FLOAT, 0.0, 1.0, is_fidelity=True, target_value=1.0)
KIND, SIGN = choice("kind", ["p", "q", "r"]), choice("sign", [-1, 1], "int", is_ordered=True)

QUICK_ROWS: dict[str, Row] = {
    "exhausted": Row((int_("i", 0, 2), SIGN), rounds=7, refused=(SearchSpaceExhausted,)),
    "fidelity": Row(
        (RangeParameter("a", FLOAT, 0.0, 1.0), FIDELITY), refused=(TypeError, UnsupportedError)
    ),
}

ROWS: dict[str, Row] = {
    "tree": Row(TREE),
    "relative": Row(
        bounds=("cost <= 1.01 * baseline",), metrics=("loss", "cost"), baseline=BASELINE
    ),
    "switch": Row(SWITCH),
    "tree, two objectives": Row(TREE, **TWO),
    "tree, pending": Row(TREE, drive=some_still_run, rounds=4),
    "tree, failing": Row(TREE, drive=some_fail, rounds=12),
    "task": Row((RangeParameter("a", FLOAT, 0.0, 1.0), TASK)),
    "log and logit": Row(
        (
            RangeParameter("a", FLOAT, 0.01, 0.99, logit_scale=True),
            RangeParameter("b", FLOAT, 0.0, 1.0, digits=2),
            RangeParameter("n", INT, 1, 1000, log_scale=True),
        )
    ),
    "derived": Row((*SQUARE, DerivedParameterConfig("c", "a + b", "float"))),
    "two objectives": Row(**TWO),
    "three objectives": Row(objective="-loss, -cost, size", **ALL),
    "scalarised": Row(objective="-loss - 2*cost", metrics=("loss", "cost")),
    "scalarised and another": Row(objective="-loss - 2*cost, size", **ALL),
    "thresholds": Row(bounds=("loss <= 2.0", "cost <= 2.3"), **TWO),
    "one threshold": Row(bounds=("cost <= 2.3",), **TWO),
    "relative thresholds": Row(
        bounds=("loss <= 1.1 * baseline", "cost <= 1.1 * baseline"), baseline=BASELINE, **TWO
    ),
    "two objectives, constraint": Row(objective="-loss, -cost", bounds=("size <= 1.5",), **ALL),
    "two objectives, relative constraint": Row(
        objective="-loss, -cost", bounds=("size <= 1.5 * baseline",), baseline=BASELINE, **ALL
    ),
    "constraints": Row(bounds=("cost >= 2.01", "size <= 1.5"), **ALL),
    "scalarised constraint": Row(bounds=("0.5*cost + 0.5*size <= 1.9",), **ALL),
    "relative, baseline outside": Row(
        bounds=("cost <= 1.01 * baseline",),
        metrics=("loss", "cost"),
        baseline={"a": 1.5, "b": 0.5},
    ),
    "relative and scalarised": Row(
        bounds=("0.5*cost + 0.5*size <= 1.1 * baseline",), baseline=BASELINE, **ALL
    ),
    "relative without baseline": Row(
        bounds=("cost <= 1.01 * baseline",),
        metrics=("loss", "cost"),
        refused=(DataRequiredError,),
    ),
    "infeasible": Row(bounds=("cost >= 50",), metrics=("loss", "cost")),
    "sums of integers": Row(
        (int_("i", 0, 10), int_("j", 0, 10), float_("a")), ("i + j <= 8", "a + i <= 5.5")
    ),
    "order of integers": Row((int_("i", 0, 10), int_("j", 0, 10)), ("i <= j",)),
    "sum, two objectives": Row((float_("a"), float_("b")), ("a + b <= 1",), **TWO),
    "few integers": Row((int_("i", 0, 3), int_("j", 0, 4)), rounds=16),
    "fixed float": Row((*SQUARE, int_("n", 1, 4)), fixed={"b": 0.25}),
    "fixed integer": Row((*SQUARE, int_("n", 1, 4)), fixed={"n": 2}),
    "fixed choice": Row((float_("a"), KIND), fixed={"kind": "q"}),
    "fixed, sum": Row((float_("a"), float_("b")), ("a + b <= 1",), fixed={"b": 0.5}),
    "fixed branch": Row(TREE, fixed={"kind": "q"}, refused=(SearchSpaceExhausted,)),
    "pending": Row(drive=some_still_run, rounds=4),
    "pending, two objectives": Row(drive=some_still_run, rounds=4, **TWO),
    "pending, constraint": Row(drive=some_still_run, rounds=4, **COSTLY),
    "failing": Row(drive=some_fail, rounds=12),
    "failing, two objectives": Row(drive=some_fail, rounds=12, **TWO),
    "curves": Row(drive=curves),
    "curves, two objectives": Row(drive=curves, **TWO),
    "missing": Row(drive=some_metrics_missing, rounds=9, **COSTLY),
    "missing, two objectives": Row(drive=some_metrics_missing, rounds=12, **TWO),
    "missing, scalarised": Row(
        drive=some_metrics_missing,
        rounds=12,
        objective="-loss - 2*cost",
        metrics=("loss", "cost"),
    ),
    "repeated": Row(drive=repeated, rounds=4),
    "batches": Row(drive=batches, rounds=5, most_exact=10),
    "batches, two objectives": Row(drive=batches, rounds=5, most_exact=10, **TWO),
    "batches, mixed": Row(
        (float_("a"), int_("n", 1, 9), KIND), drive=batches, rounds=5, most_exact=10
    ),
}


def client_of(row: Row) -> Client:
    client = Client(random_seed=0)
    if isinstance(row.parameters[0], Parameter):
        client.set_experiment(Experiment(SearchSpace([*row.parameters]), name="space"))
    else:
        client.configure_experiment(row.parameters, row.constraints, name="space")
    client.configure_optimization(row.objective, row.bounds)
    if row.baseline is not None:
        index = client.attach_baseline(row.baseline)
        client.complete_trial(index, outcomes(row.baseline, row.metrics))
    return client


def with_ours(row: Row) -> Client:
    client = client_of(row)
    options = {"max_exact": row.most_exact}
    strategy = generation_strategy(
        model_options=options, initialization=FIRST, search=PLAIN, refit=1.5, seed=0
    )
    client.set_generation_strategy(strategy)
    return client


def with_default(row: Row) -> Client:
    """Return a client with Ax's default strategy and a short search."""
    client = client_of(row)
    client.configure_generation_strategy(
        initialization_budget=FIRST,
        initialization_random_seed=0,
        initialize_with_center=False,
        allow_exceeding_initialization_budget=True,
    )
    (spec,) = client._generation_strategy.nodes_by_name["MBM"].generator_specs
    spec.generator_gen_kwargs["model_gen_options"] = {"optimizer_kwargs": PLAIN}
    return client


def families_of(client: Client) -> set[str]:
    """Return the families of the metrics' models behind the last candidate, if it had some."""
    if not hasattr(client._generation_strategy.adapter.generator, "surrogate"):
        return set()
    model = surrogate_of(client).model
    parts = model.models if isinstance(model, ModelList | ModelListGP) else [model]
    return {str(part.family) for part in parts}


@pytest.mark.parametrize(
    "name", [*QUICK_ROWS, *(pytest.param(name, marks=pytest.mark.integration) for name in ROWS)]
)
def test_ours_takes_what_axs_default_takes(name: str) -> None:
    """Its candidates are in the space and new, from exact models and from those taken after."""
    row = {**QUICK_ROWS, **ROWS}[name]
    client, families = with_ours(row), set()

    def run() -> None:
        for _ in range(row.rounds):
            row.drive(client, row)
            families.update(families_of(client))

    if row.refused:
        with pytest.raises(row.refused):
            run()
        return
    run()
    assert "exact" in families
    assert len(families) > 1


@pytest.mark.integration
@pytest.mark.parametrize("name", [*QUICK_ROWS, *ROWS])
def test_axs_default_takes_it_too(name: str) -> None:
    """Up to the first candidate of its model, where it refuses nothing."""
    row = {**QUICK_ROWS, **ROWS}[name]
    client = with_default(row)

    def goes_over() -> bool:
        for _ in range(row.rounds):
            row.drive(client, row)
            if client._generation_strategy.current_node_name == "MBM" and not row.refused:
                return True
        return False

    if row.refused:
        with pytest.raises(row.refused):
            goes_over()
    else:
        assert goes_over()


def test_fidelities_are_refused_before_the_first_trial() -> None:
    client = with_ours(QUICK_ROWS["fidelity"])
    with pytest.raises(UnsupportedError, match="AutoGP takes no fidelity parameters, got s"):
        client.get_next_trials(1)
    assert client._experiment.trials == {}


def test_a_finite_space_is_exhausted_at_once() -> None:
    """Ax would draw quasi-random points for a minute to find that none is new."""
    client = with_ours(Row((choice("kind", ["p", "q", "r", "s"]),)))
    for _ in range(4):
        ((index, parameters),) = client.get_next_trials(1).items()
        client.complete_trial(index, {"loss": value_of(parameters["kind"])})
    assert len(client._experiment.arms_by_signature) == 4
    with pytest.raises(SearchSpaceExhausted, match="All 4 points of the search space"):
        client.get_next_trials(1)


BITS = tuple(int_(f"b{i}", 0, 1) for i in range(12))


@pytest.mark.parametrize(
    ("parameters", "constraints", "count"),
    [
        ((choice("a", [True, False], "bool"), choice("b", [True, False], "bool")), (), 4),
        (BITS, (" + ".join(bit.name for bit in BITS) + " <= 1",), 13),
    ],
    ids=["in the Sobol trials", "few points of many keep a constraint"],
)
def test_the_last_points_of_a_finite_space_are_proposed_and_no_more(
    parameters: Sequence[Any], constraints: tuple[str, ...], count: int
) -> None:
    client = client_of(Row(parameters, constraints))
    client.set_generation_strategy(generation_strategy(initialization=count + 1, seed=0))
    for _ in range(count):
        ((index, point),) = client.get_next_trials(1).items()
        assert client._experiment.search_space.check_membership(point)
        client.complete_trial(index, {"loss": sum(map(float, point.values()))})
    assert len(client._experiment.arms_by_signature) == count
    with pytest.raises(SearchSpaceExhausted, match=f"All {count} points of the search space"):
        client.get_next_trials(1)


@pytest.mark.parametrize("value", [1, 1.0])
@pytest.mark.parametrize("search", ["region", None])
def test_points_with_fixed_parameters_are_counted_apart(value: float, search: str | None) -> None:
    """Also where a whole number is given as another type."""
    client = client_of(Row(BITS[:2]))
    first = 2 if search else 4
    client.set_generation_strategy(generation_strategy(initialization=first, search=search, seed=0))
    for _ in range(2):
        ((index, point),) = client.get_next_trials(1, fixed_parameters={"b0": 1}).items()
        client.complete_trial(index, {"loss": float(point["b1"])})
    with pytest.raises(SearchSpaceExhausted, match=r"All 2 points .* with the fixed parameters"):
        client.get_next_trials(1, fixed_parameters={"b0": value})


@pytest.mark.parametrize("search", ["region", PLAIN])
def test_parameters_that_are_fixed_outside_of_the_space_are_refused(search: Any) -> None:
    """Among the Sobol trials and afterwards; nothing is changed."""
    sizes = choice("k", [1, 2, 4], "int", is_ordered=True)
    client = client_of(Row((float_("a"), int_("i", 0, 3), sizes)))
    client.set_generation_strategy(generation_strategy(initialization=2, search=search, seed=0))
    wrong: list[tuple[str, Any]] = [("a", 7.0), ("a", None), ("i", 4), ("i", 1.5), ("i", "x")]
    wrong += [("a", math.nan), ("i", np.float32(1.5)), ("i", torch.tensor(2.5))]
    for _ in range(3):
        for name, value in [*wrong, ("k", 3)]:
            with pytest.raises(UserInputError, match=f"fixed parameter {name} to be .*, got"):
                client.get_next_trials(1, fixed_parameters={name: value})
        ends = {"i": 3.0, "k": 4.0}
        ((index, point),) = client.get_next_trials(1, fixed_parameters=ends).items()
        assert (point["i"], point["k"]) == (3, 4)
        client.complete_trial(index, {"loss": float(point["a"])})
    assert len(client._experiment.trials) == 3


def test_points_that_a_call_has_proposed_are_counted_apart() -> None:
    client = client_of(Row(BITS[:3]))
    client.set_generation_strategy(generation_strategy(initialization=2, search="region", seed=0))
    for _ in range(2):
        for index, point in client.get_next_trials(3).items():
            client.complete_trial(index, {"loss": float(sum(point.values()))})
    with pytest.raises(SearchSpaceExhausted, match=r"All 8 points .*, 2 of them for this call"):
        client.get_next_trials(3)
    assert len(client.get_next_trials(2)) == 2


@pytest.mark.parametrize("fixed", [{}, {"a": 1}])
def test_all_points_of_a_space_are_listed(fixed: dict[str, Any]) -> None:
    space = SearchSpace(
        [
            RangeParameter("a", INT, 0, 2),
            ChoiceParameter("b", ParameterType.STRING, ["p", "q"]),
            FixedParameter("c", INT, 7),
            DerivedParameter("d", INT, expression_str="2 * a"),
        ]
    )
    found = [arm.parameters for arm in points_of(space, fixed)]
    assert found == [
        {"a": a, "b": b, "c": 7, "d": 2 * a}
        for a in ([1] if fixed else range(3))
        for b in ("p", "q")
    ]
    limits = [ParameterConstraint(inequality="a <= 0")]
    bounded = SearchSpace(list(space.parameters.values()), limits)
    assert len(points_of(bounded, fixed)) == (0 if fixed else 2)


def test_no_point_is_proposed_twice() -> None:
    """The best of a monotone function is a corner, which a search finds again and again."""
    client = with_ours(Row((float_("a"),)))
    for _ in range(7):
        ((index, parameters),) = client.get_next_trials(1).items()
        client.complete_trial(index, {"loss": 1.0 - parameters["a"]})
    tried = [trial.arms[0].parameters["a"] for trial in client._experiment.trials.values()]
    assert 1.0 in tried
    assert len(set(tried)) == len(tried)


@pytest.mark.integration
def test_a_relative_bound_is_one_of_the_measured_baseline() -> None:
    """Of nine noisy outcomes the first, the baseline's, is far off, and the model knows better."""
    row = ROWS["relative"]
    client = client_of(Row(bounds=row.bounds, metrics=row.metrics))
    client.set_generation_strategy(generation_strategy(initialization=3, search=PLAIN, seed=0))
    index = client.attach_baseline(BASELINE)
    client.complete_trial(index, {"loss": (1.0, 0.0), "cost": (9.0, 5.0)})
    for _ in range(6):
        one_by_one(client, row)
    (A, b), units = acquisition_of(client).config.outcome_constraints, surrogate_of(client).units
    assert float(b.abs() * units["cost"]) == pytest.approx(1.01 * 9.0)
    assert float(A.abs().sum()) == 1.0
