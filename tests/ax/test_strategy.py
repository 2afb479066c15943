"""Strategies for all kinds of parameters, metrics and acquisition functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ax.adapter.registry import Generators
from ax.api.client import Client
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig
from ax.core.trial_status import TrialStatus
from ax.generation_strategy.generator_spec import GeneratorSpec
from ax.generators.torch.botorch_modular.surrogate import SurrogateSpec
from ax.generators.torch.botorch_modular.utils import ModelConfig
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.errors import UnsupportedError
from botorch.models.model_list_gp_regression import ModelListGP
from gpytorch.kernels import MaternKernel

from bo_stream import OSGPR, WISKI, AutoGP, DirichletWISKI
from bo_stream.ax import ACQUISITIONS, check_versions, generation_strategy
from bo_stream.models.base import StreamingGP
from tests.ax.experiments import (
    BOX,
    NEARLY_WITHOUT_NOISE,
    QUICK,
    acquisition_of,
    after,
    family_of,
    loss,
    model_of,
    run,
    started,
    surrogate_of,
    two,
    watch,
)
from tests.ax.reloads import SEARCH_ENDS, from_json, next_candidate

pytestmark = NEARLY_WITHOUT_NOISE

ONE_OBJECTIVE = [name for name in ACQUISITIONS if name != "qLogNEHVI"]


@pytest.mark.parametrize("acquisition", [None, *ONE_OBJECTIVE])
def test_acquisitions(acquisition: str | None) -> None:
    client = started(acquisition=acquisition)
    run(client, 3)
    assert client.get_next_trials(2)
    if acquisition is not None:
        assert type(acquisition_of(client).acqf) is ACQUISITIONS[acquisition]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize(
    "acquisition", [None, pytest.param("qLogNEHVI", marks=pytest.mark.integration)]
)
def test_two_objectives_and_a_tracking_metric(acquisition: str | None) -> None:
    client = started(objective="-loss, -cost", acquisition=acquisition)
    client.configure_metrics([])
    run(client, 4, lambda p: {**two(p), "note": 1.0 + float(p["b"])})
    client.get_next_trials(1)
    surrogate = surrogate_of(client)
    assert isinstance(surrogate.model, ModelListGP)
    assert {len(stream.rows) for stream in surrogate._streams.values()} == {4}
    assert len(client.get_pareto_frontier()) > 0


def test_outcome_constraints() -> None:
    """The bowl's bottom, at 0.6, is not allowed. No cost is 0, by which Ax would divide."""

    def costly(parameters: Any) -> dict[str, float]:
        return {"loss": loss(parameters), "cost": 1.0 + float(parameters["a"])}

    client = after(7, costly, constraints=["cost >= 2.0"], acquisition=None)
    parameters, *_ = client.get_best_parameterization()
    assert 1.0 <= float(parameters["a"]) < 1.5


def mixed_parameters() -> list[Any]:
    return [
        RangeParameterConfig("rate", (1e-4, 1.0), parameter_type="float", scaling="log"),
        RangeParameterConfig("layers", (1, 4), parameter_type="int"),
        ChoiceParameterConfig("kind", ["p", "q", "r"], parameter_type="str", is_ordered=False),
        ChoiceParameterConfig("size", [8, 16, 32], parameter_type="int", is_ordered=True),
        RangeParameterConfig("fixed", (0.0, 1.0), parameter_type="float"),
    ]


def mixed_loss(parameters: Any) -> float:
    kind = {"p": 0.0, "q": 1.0, "r": 2.0}[parameters["kind"]]
    return abs(parameters["rate"] - 0.01) + kind + parameters["layers"] / parameters["size"]


@pytest.mark.parametrize("default", [AutoGP, OSGPR])
def test_parameters_of_all_kinds(default: type[StreamingGP]) -> None:
    """The default of an integrated variance is a model of points where there are many inputs."""
    acquisition = "qNIPV" if default is OSGPR else "qUCB"
    options = {"model_options": {"max_points": 64}, "acquisition": acquisition}
    client = started(mixed_parameters(), **options)
    run(client, 4, mixed_loss)
    assert isinstance(model_of(client), default)
    for trial in client._experiment.trials.values():
        assert trial.arms[0].parameters["kind"] in ("p", "q", "r")


def eight() -> list[Any]:
    names = [f"x{i}" for i in range(8)]
    return [RangeParameterConfig(name, (-1.0, 1.0), parameter_type="float") for name in names]


def few_kinds() -> list[Any]:
    """Three inputs, which a grid takes: float on a log scale, int, and an ordered choice."""
    rate, layers, _, size, _ = mixed_parameters()
    return [rate, layers, size]


def few_loss(parameters: Any) -> float:
    return abs(parameters["rate"] - 0.01) + parameters["layers"] / parameters["size"]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("parameters", "measure", "families"),
    [
        (few_kinds(), few_loss, ["exact", "WISKI", "WISKI"]),
        (mixed_parameters(), mixed_loss, ["exact", "OSGPR", "OSGPR"]),
        (eight(), lambda p: sum(x * x for x in p.values()), ["exact", "OSGPR", "OSGPR"]),
    ],
    ids=["few", "unordered", "eight"],
)
def test_the_default_goes_over_to_what_can_take_the_parameters_and_is_stored(
    parameters: list[Any], measure: Any, families: list[str], tmp_path: Path
) -> None:
    """A process that loads the strategy proposes the same next trial, before it and after."""
    client = started(parameters, model_options={"max_exact": 5}, refit=0.0)
    run(client, 3, measure)
    found = []
    for _ in range(3):
        run(client, 1, measure)
        other = from_json(client, tmp_path)
        assert next_candidate(other) == pytest.approx(next_candidate(client), abs=SEARCH_ENDS)
        for each in (client, other):
            assert isinstance(model_of(each), AutoGP)
        assert family_of(other) == family_of(client)
        found.append(family_of(client))
        (index,) = pending(client)
        client.complete_trial(
            index, {"loss": measure(client._experiment.trials[index].arm.parameters)}
        )
    assert found == families


def pending(client: Client) -> list[int]:
    return list(client._experiment.trial_indices_by_status[TrialStatus.RUNNING])


def test_outcomes_leave_the_default_before_and_after_it_is_on_a_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = after(4, model_options={"max_exact": 5})
    traffic = watch(monkeypatch)
    client.attach_data(2, {"loss": 7.0})
    run(client, 2)
    client.attach_data(2, {"loss": 1.0})
    client.get_next_trials(1)
    assert (traffic.entered, traffic.left, traffic.built) == ([1, 1, 2], [1, 1], [])
    assert family_of(client) == "WISKI"


@pytest.mark.filterwarnings("ignore:Parameterization .* is in out-of-design")
def test_the_default_takes_observations_that_a_grid_cannot_reach() -> None:
    client = started(refit=0.0, model_options={"max_exact": 5})
    run(client, 3)
    client.complete_trial(client.attach_trial({"a": 99.0, "b": 0.0}), {"loss": 9.0})
    run(client, 3)
    client.get_next_trials(1)
    assert model_of(client).num_observations == 7
    assert family_of(client) == "OSGPR"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": WISKI}, "are 7 inputs and a grid takes 4: pass model=OSGPR"),
        (
            {"model_options": {"grid_size": 10}, "acquisition": "qNIPV"},
            "does not take the model_options grid_size",
        ),
    ],
)
def test_a_model_that_cannot_serve_is_refused_before_the_first_trial(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A process that has loaded the strategy refuses it too."""
    client = from_json(started(mixed_parameters(), **options), tmp_path)
    with pytest.raises(UnsupportedError, match=message):
        client.get_next_trials(1)
    assert client._experiment.trials == {}


@pytest.mark.integration  # Ax searches a constrained space with all its raw samples
def test_parameter_constraints_and_fixed_parameters() -> None:
    names = [name for name, *_ in BOX]
    parameters = [
        RangeParameterConfig(name=name, bounds=(0.0, 1.0), parameter_type="float") for name in names
    ]
    client = Client(random_seed=0)
    client.configure_experiment(parameters, parameter_constraints=["a + b <= 1"], name="half")
    client.configure_optimization("loss")
    client.set_generation_strategy(
        generation_strategy(acquisition="qUCB", initialization=3, search={"num_restarts": 1})
    )
    run(client, 6)
    for _ in range(2):
        ((index, p),) = client.get_next_trials(1, fixed_parameters={"b": 0.25}).items()
        assert p["b"] == 0.25
        assert p["a"] + p["b"] <= 1.0 + 1e-8
        client.complete_trial(index, {"loss": loss(p)})


def test_the_first_trials_keep_fixed_parameters() -> None:
    ((_, parameters),) = started().get_next_trials(1, fixed_parameters={"b": 0.25}).items()
    assert parameters["b"] == 0.25


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:Yvar holds .* zero or less")
@pytest.mark.parametrize("sems", [(None,), (0.1,), (0.0,), (None, 0.1)])
@pytest.mark.parametrize("kind", [WISKI, OSGPR])
def test_axs_own_surrogate_takes_the_models(kind: Any, sems: tuple[float | None, ...]) -> None:
    """Ax needs nothing but the model class, as with any of BoTorch's."""
    spec = SurrogateSpec(model_configs=[ModelConfig(botorch_model_class=kind)])
    client = started()
    node = client._generation_strategy.nodes_by_name["Stream"]
    node.generator_specs = [
        GeneratorSpec(
            Generators.BOTORCH_MODULAR,
            generator_kwargs={"surrogate_spec": spec},
            generator_gen_kwargs={"model_gen_options": {"optimizer_kwargs": QUICK}},
        )
    ]
    for count in (3, 1, 1):
        for index, p in client.get_next_trials(count).items():
            sem = sems[index % len(sems)]
            client.complete_trial(index, {"loss": loss(p) if sem is None else (loss(p), sem)})
    assert type(model_of(client)) is kind


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acquisition": "qBest"}, "Expected acquisition to be a class or one of qUCB"),
        ({"initialization": 0}, "Expected initialization to be a whole number of at least 1"),
        ({"initialization": 2.5}, "Expected initialization to be a whole number .*, got 2.5"),
        ({"initialization": True}, "Expected initialization to be a whole number .*, got True"),
        ({"initialization": "3"}, "Expected initialization to be a whole number .*, got '3'"),
        ({"refit": 0.5}, "Expected refit above 1"),
        ({"refit": "1.5"}, "Expected refit above 1 .*, got '1.5'"),
        ({"seed": "x"}, "Expected seed to be a whole number .*, got 'x'"),
        (
            {"search": {"num_restarts": 0}},
            "Expected num_restarts to be a whole number of at least 1, got 0",
        ),
        (
            {"search": {"raw_samples": -5}},
            "Expected raw_samples to be a whole number of at least 1, got -5",
        ),
        ({"model_options": [1]}, "Expected model_options to be a mapping"),
        ({"acquisition_options": "beta"}, "Expected acquisition_options to be a mapping"),
        ({"search": {"num_restart": 4}}, "Expected search .*, got num_restart"),
        ({"search": "sphere"}, "box, region, or options of the search of the box, got 'sphere'"),
        ({"model_options": {"grid_sise": 8}}, "Expected model_options .*, got grid_sise"),
        ({"acquisition_options": {"betta": 1.0}}, "Expected acquisition_options .*, got betta"),
        (
            {"acquisition": "qUCB", "acquisition_options": {"eta": 1.0}},
            "some of .*beta, .* got eta",
        ),
        ({"acquisition": AcquisitionFunction}, "Expected an acquisition that Ax can construct"),
        ({"model": "WISKI"}, "Expected model to be a class of models.*, got 'WISKI'"),
        ({"model_options": {"covar_module": MaternKernel()}}, "Ax could not store this strategy"),
        ({"model": DirichletWISKI}, "Ax could not store this strategy"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generation_strategy(**options)


@pytest.mark.parametrize(
    ("acquisition", "options"),
    [(None, {"prune_baseline": False}), ("qUCB", {"beta": 1.0}), ("qLogNEHVI", {"alpha": 0.1})],
)
def test_good_options(acquisition: str | None, options: dict[str, Any]) -> None:
    generation_strategy(
        acquisition=acquisition,
        acquisition_options=options,
        search={"num_restarts": 2, "options": {"maxiter": 5}},
        model_options={"grid_size": 10},
    )


def test_unsupported_versions_are_named() -> None:
    with pytest.raises(ImportError, match=r"expects botorch<0\.1, but botorch \d"):
        check_versions({"botorch": "<0.1"})
    with pytest.raises(
        ImportError, match=r"it is not installed. Run pip install 'bo-stream\[ax\]'"
    ):
        check_versions({"no-such-distribution": ">=1"})
    check_versions({"botorch": ">0.1"})
