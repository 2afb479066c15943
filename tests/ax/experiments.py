"""Small experiments that Ax runs with a streaming strategy."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ax.api.client import Client
from ax.api.configs import RangeParameterConfig, StorageConfig
from ax.core.batch_trial import BatchTrial
from ax.core.data import Data
from botorch.exceptions.warnings import InputDataWarning
from botorch.settings import validate_input_scaling
from pandas import DataFrame

from bo_stream import WISKI, AutoGP
from bo_stream.ax import StreamSurrogate, generation_strategy
from bo_stream.ax.adapters import StreamAdapter
from bo_stream.ax.surrogate import DataRows
from bo_stream.models.base import StreamingGP

QUICK: dict[str, Any] = {"num_restarts": 1, "raw_samples": 8}
"""A search; of a box it ends after few iterations, but in integration tests."""
PLAIN = dict(QUICK)
NEARLY_WITHOUT_NOISE = [
    pytest.mark.filterwarnings("ignore:A not p.d."),
    pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short"),
    pytest.mark.filterwarnings("ignore:Optimization failed in:RuntimeWarning"),
]
"""Samples at neighbouring points need jitter then, of any model; rough fits are as they come; and a
search from a start that is an optimum up to rounding finds no better point on its first line."""

BOX = (("a", 0.0, 2.0), ("b", -1.0, 1.0))


def started(
    parameters: Any = None,
    objective: str = "-loss",
    constraints: list[str] | None = None,
    storage: StorageConfig | None = None,
    **options: Any,
) -> Client:
    """Return a client over a box in 2-D, or other parameters, with few Sobol trials.

    No outcome is clipped, so that only new ones change what a model has.
    """
    client = Client(storage, random_seed=0)
    if parameters is None:
        parameters = [
            RangeParameterConfig(name=name, bounds=(low, high), parameter_type="float")
            for name, low, high in BOX
        ]
    client.configure_experiment(parameters, name="small")
    client.configure_optimization(objective, outcome_constraints=constraints)
    settings = {
        "acquisition": "qUCB",
        "initialization": 3,
        "search": QUICK if parameters is None else PLAIN,
        "refit": 2.0,
        "winsorize": False,
    }
    client.set_generation_strategy(generation_strategy(**{**settings, **options}, seed=0))
    return client


def loss(parameters: Any) -> float:
    """Return a bowl with a ripple."""
    a, b = parameters["a"], parameters["b"]
    return float((a - 0.6) ** 2 + (b - 0.3) ** 2 + 0.1 * torch.sin(torch.tensor(9.0 * a)))


def run(client: Client, trials: int, measure: Callable[[Any], Any] = loss) -> None:
    """Run trials one after another, but Sobol's together."""
    done = 0
    while done < trials:
        first = sobol_left(client)
        for index, parameters in client.get_next_trials(max(1, min(first, trials - done))).items():
            client.complete_trial(index, raw_data(measure(parameters)))
            done += 1


def sobol_left(client: Client) -> int:
    """Return how many more trials come from Sobol's sequence."""
    strategy = client._generation_strategy
    if strategy.current_node_name != "Sobol":
        return 0
    (least, *_) = strategy.current_node.transition_criteria
    return least.threshold - len(client._experiment.trials)


def after(trials: int, measure: Any = loss, parameters: Any = None, **settings: Any) -> Client:
    """Return an experiment that has been asked for its next candidate."""
    client = started(parameters, **settings)
    run(client, trials, measure)
    client.get_next_trials(1)
    return client


def complete(trial: BatchTrial, measure: Callable[[Any], float], sem: float) -> None:
    """Complete a batch trial with an outcome of each of its arms."""
    trial.mark_running(no_runner_required=True)
    rows = [
        {
            "trial_index": trial.index,
            "arm_name": arm.name,
            "metric_name": "loss",
            "metric_signature": "loss",
            "mean": measure(arm.parameters),
            "sem": sem,
        }
        for arm in trial.arms
    ]
    trial.experiment.attach_data(Data(df=DataFrame(rows)))
    trial.mark_completed()


def warned(client: Client) -> str:
    """Return the warnings of the data when the next trial is asked for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client.get_next_trials(1)
    return " ".join(str(w.message) for w in caught if issubclass(w.category, InputDataWarning))


def raw_data(value: Any) -> Any:
    """Return what a client takes: a value of ``loss``, or a mapping as it is."""
    return value if isinstance(value, dict) else {"loss": value}


def two(parameters: Any) -> dict[str, float]:
    """Return the bowl, and a slope against it."""
    return {"loss": loss(parameters), "cost": float(parameters["a"])}


def adapter_of(client: Client) -> StreamAdapter:
    """Return the adapter behind the last candidate."""
    adapter = client._generation_strategy.adapter
    assert isinstance(adapter, StreamAdapter)
    return adapter


def acquisition_of(client: Client) -> Any:
    """Return the acquisition behind the last candidate."""
    generator: Any = adapter_of(client).generator
    return generator._acquisition


def surrogate_of(client: Client) -> StreamSurrogate:
    """Return the surrogate behind the last candidate."""
    generator: Any = client._generation_strategy.adapter.generator
    return generator.surrogate


def model_of(client: Client) -> StreamingGP:
    """Return the model of the only metric."""
    model = surrogate_of(client).model
    assert isinstance(model, StreamingGP)
    return model


def family_of(client: Client) -> str:
    """Return the family of the default model of the only metric."""
    model = model_of(client)
    assert isinstance(model, AutoGP)
    return model.family


@dataclass
class Traffic:
    """Rows that models were built of, and that entered and left them later."""

    built: list[int] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


def watch(monkeypatch: pytest.MonkeyPatch, kind: type[StreamingGP] = AutoGP) -> Traffic:
    """Count the rows of a class's models."""
    traffic = Traffic()
    build, update, retract = StreamSurrogate._built, kind.update, kind.retract

    def counted_build(self: Any, rows: DataRows, *args: Any) -> Any:
        traffic.built.append(len(rows))
        return build(self, rows, *args)

    def counted_update(self: Any, X: Any, *args: Any) -> Any:
        traffic.entered.append(len(X))
        return update(self, X, *args)

    def counted_retract(self: Any, X: Any, *args: Any) -> Any:
        traffic.left.append(len(X))
        return retract(self, X, *args)

    monkeypatch.setattr(StreamSurrogate, "_built", counted_build)
    monkeypatch.setattr(kind, "update", counted_update)
    monkeypatch.setattr(kind, "retract", counted_retract)
    return traffic


def assert_is_a_batch_of_the_data(client: Client) -> None:
    """Check that the model equals one built of all data, at the same hyperparameters."""
    surrogate = surrogate_of(client)
    for data in surrogate.training_data:
        own = surrogate._submodels[tuple(data.outcome_names)]
        assert isinstance(own, WISKI | AutoGP)
        grid = {"bounds": own.input_transform.bounds} if isinstance(own, WISKI) else {}
        rows = DataRows.of(data, surrogate.learned[", ".join(data.outcome_names)]["floor"])
        with validate_input_scaling(False):
            batch = type(own)(
                rows.X, rows.Y, rows.known_noise, input_transform=own.input_transform, **grid
            )
        batch.load_state_dict(own.state_dict())
        if isinstance(batch, WISKI) and isinstance(own, WISKI):
            batch.tolerance = own.tolerance
        low, high = data.X.amin(0), data.X.amax(0)
        X = low + (high - low) * torch.rand(7, data.X.shape[-1], dtype=data.X.dtype)
        ours, theirs = own.posterior(X), batch.posterior(X)
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-9, atol=1e-10)


class Said(logging.Handler):
    """What is said to those who listen."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{record.getMessage()}\n"
