"""Predictions, best points, frontiers and analyses that Ax gives of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ax.analysis.diagnostics import DiagnosticAnalysis
from ax.analysis.plotly.cross_validation import CrossValidationPlot
from ax.analysis.plotly.sensitivity import SensitivityAnalysisPlot
from ax.api.client import Client
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig
from ax.core.analysis_card import AnalysisCardBase, ErrorAnalysisCard
from ax.core.arm import Arm
from ax.core.data import Data
from botorch.utils.multi_objective.pareto import is_non_dominated
from pandas import DataFrame

from bo_stream import OSGPR
from bo_stream.ax import StreamSurrogate, analyses
from bo_stream.diagnostics import leave_one_out
from tests.ax.experiments import (
    BOX,
    NEARLY_WITHOUT_NOISE,
    loss,
    model_of,
    raw_data,
    started,
    surrogate_of,
    watch,
)

pytestmark = [
    *NEARLY_WITHOUT_NOISE,
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor"),  # in Ax, of thresholds
]

RANGES = [
    RangeParameterConfig(name, (low, high), parameter_type="float") for name, low, high in BOX
]


def two(parameters: Any) -> dict[str, float]:
    """Return a bowl, and a slope against it."""
    return {"loss": loss(parameters), "cost": float(parameters["a"]) + 0.1 * loss(parameters)}


def completed(measure: Callable[[Any], Any] = loss, trials: int = 8, **options: Any) -> Client:
    """Return an experiment whose models hold all trials, and one trial more that runs."""
    client = started(**{"initialization": trials, "refit": 0.0, **options})
    for index, parameters in client.get_next_trials(trials).items():
        client.complete_trial(index, raw_data(measure(parameters)))
    client.get_next_trials(1)
    return client


def inputs_of(client: Client) -> torch.Tensor:
    return surrogate_of(client).training_data[0].X


def unit_of(client: Client, metric: str = "loss") -> float:
    return surrogate_of(client).units[metric]


def cards_of(card: AnalysisCardBase) -> Iterator[AnalysisCardBase]:
    """Return cards, those within groups of them too."""
    children = getattr(card, "children", None)
    if children is None:
        yield card
    else:
        for child in children:
            yield from cards_of(child)


def computed(client: Client, analyses: Any = None) -> dict[str, list[AnalysisCardBase]]:
    """Return cards by name, none of which is an error."""
    found: dict[str, list[AnalysisCardBase]] = {}
    for card in client.compute_analyses(analyses, display=False):
        for part in cards_of(card):
            assert not isinstance(part, ErrorAnalysisCard), part.blob
            found.setdefault(part.name, []).append(part)
    return found


@pytest.fixture(autouse=True)
def no_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where Ax copies the surrogate to build a model of a fold."""
    monkeypatch.setattr(
        StreamSurrogate, "clone_reset", lambda self: pytest.fail("A model is built for a fold.")
    )


def test_predictions_are_the_models() -> None:
    client = completed()
    found = client.predict([{"a": 0.3, "b": 0.5}, {"a": 1.9, "b": -1.0}])
    X = torch.tensor([[0.3, 0.5], [1.9, -1.0]], dtype=torch.float64)
    posterior, unit = model_of(client).posterior(X), unit_of(client)
    for i, outcomes in enumerate(found):
        mean, deviation = outcomes["loss"]
        assert mean == pytest.approx(unit * float(posterior.mean[i]), rel=1e-10)
        assert deviation == pytest.approx(unit * float(posterior.variance[i].sqrt()), rel=1e-8)


def test_the_best_trial_by_the_model_and_by_the_outcomes() -> None:
    noise = torch.randn(30, generator=torch.Generator().manual_seed(0)).mul(0.05).tolist()
    client = completed(lambda p: loss(p) + noise.pop(), 25)
    X, outcomes = inputs_of(client), surrogate_of(client).training_data[0].Y
    means = model_of(client).posterior(X).mean
    for predicted, values in ((True, means), (False, outcomes)):
        parameters, said, index, _ = client.get_best_parameterization(predicted)
        best = int(values.argmin())
        assert index == best
        assert [parameters["a"], parameters["b"]] == pytest.approx(X[best].tolist())
        assert said["loss"][0] == pytest.approx(unit_of(client) * float(values[best]))


def test_the_best_trial_keeps_the_constraints() -> None:
    client = completed(two, 12, constraints=["cost >= 1.0"])
    *_, index, _ = client.get_best_parameterization()
    surrogate = surrogate_of(client)
    means = surrogate.predict(inputs_of(client))[0]
    mean = {name: unit_of(client, name) * means[:, i] for i, name in enumerate(surrogate.outcomes)}
    allowed = mean["loss"].where(mean["cost"] >= 1.0, torch.inf)
    assert index == int(allowed.argmin())


def test_the_frontier_of_the_model_and_of_the_outcomes() -> None:
    client = completed(two, 12, objective="-loss, -cost")
    surrogate = surrogate_of(client)
    means = surrogate.predict(inputs_of(client))[0]
    outcomes = torch.cat([data.Y for data in surrogate.training_data], -1)
    for predicted, values in ((True, means), (False, outcomes)):
        front = is_non_dominated(-values).nonzero().flatten().tolist()
        found = {index for _, _, index, _ in client.get_pareto_frontier(predicted)}
        assert found
        assert found <= set(front)


def test_more_trials_than_a_dense_covariance_holds() -> None:
    client = completed(two, 6, objective="-loss, -cost")
    generator = torch.Generator().manual_seed(0)
    for a, b in torch.rand(520, 2, generator=generator).tolist():
        parameters = {"a": 2.0 * a, "b": 2.0 * b - 1.0}
        client._experiment.new_trial().add_arm(Arm(parameters=parameters))
    rows = []
    for index, trial in client._experiment.trials.items():
        if index > 6:
            trial.mark_running(no_runner_required=True).mark_completed()
            for metric, value in two(trial.arms[0].parameters).items():
                rows.append((index, trial.arms[0].name, metric, metric, value, float("nan")))
    columns = ["trial_index", "arm_name", "metric_name", "metric_signature", "mean", "sem"]
    client._experiment.attach_data(Data(df=DataFrame(rows, columns=columns)))
    client.get_next_trials(1)
    assert len(inputs_of(client)) == 526
    assert client.get_pareto_frontier()
    assert len(client.predict([{"a": 0.1, "b": i / 600} for i in range(600)])) == 600


def test_a_summary_has_every_trial() -> None:
    client = completed(two, 6, objective="-loss, -cost")
    table = client.summarize()
    assert table["trial_index"].tolist() == list(range(7))
    outcomes = [two(trial.arms[0].parameters) for trial in client._experiment.trials.values()]
    for metric in ("loss", "cost"):
        assert table[metric].tolist()[:6] == pytest.approx([o[metric] for o in outcomes[:6]])


def test_cross_validation_on_a_card() -> None:
    client = completed()
    (card, *_) = computed(client, [CrossValidationPlot()])["CrossValidationPlot"]
    data = surrogate_of(client).training_data[0]  # the card is in the model's units
    found = leave_one_out(model_of(client), data.X, data.Y, observation_noise=False)
    table = card.df.sort_values(
        "arm_name", key=lambda names: names.str.split("_").str[0].astype(int)
    )
    assert table["observed"].tolist() == pytest.approx(data.Y.flatten().tolist())
    predicted = found.posterior.mean.flatten().tolist()
    assert table["predicted"].tolist() == pytest.approx(predicted)


def test_diagnostics_and_sensitivity_of_points() -> None:
    client = completed(model=OSGPR)
    found = computed(client, [DiagnosticAnalysis(), SensitivityAnalysisPlot(metric_name="loss")])
    assert found.keys() >= {"CrossValidationPlot", "SensitivityAnalysisPlot"}


def test_analyses_of_many_trials() -> None:
    client = completed(two, 8, objective="-loss, -cost")
    found = computed(client, analyses("loss", "cost"))
    assert found.keys() >= {"UtilityProgressionAnalysis", "BestTrials", "CrossValidationPlot"}
    assert len(found["SensitivityAnalysisPlot"]) == 2
    assert not found.keys() & {"ContourPlot", "ArmEffectsPlot"}


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["one", "two", "constraint", "choice"])
def test_all_cards_and_the_trial_after_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = ChoiceParameterConfig("c", ["p", "q", "r"], parameter_type="str", is_ordered=False)
    measure, options = {
        "one": (loss, {}),
        "two": (two, {"objective": "-loss, -cost"}),
        "constraint": (two, {"constraints": ["cost >= 0.5"]}),
        "choice": (loss, {"parameters": [*RANGES, choice]}),
    }[kind]
    client = completed(measure, 12, **options)
    found = computed(client)
    expected = {"ArmEffectsPlot", "SensitivityAnalysisPlot", "CrossValidationPlot", "Summary"}
    assert found.keys() >= expected
    traffic = watch(monkeypatch, type(surrogate_of(client)._streams[("loss",)].model))
    client.complete_trial(12, raw_data(measure(client._experiment.trials[12].arms[0].parameters)))
    client.get_next_trials(1)
    metrics = 1 if measure is loss else 2
    assert (traffic.built, traffic.entered, traffic.left) == ([], [1] * metrics, [])
