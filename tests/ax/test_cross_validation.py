"""Cross-validation without building models, against Ax's own, which builds one a fold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
import torch
from ax.adapter.cross_validation import (
    CVResult,
    cross_validate,
    gen_trial_split,
    get_fit_and_std_quality_and_generalization_dict,
)
from ax.adapter.data_utils import ExperimentData
from ax.api.client import Client
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig
from ax.core.data import Data
from ax.core.experiment import Experiment
from ax.core.metric import Metric
from ax.core.objective import Objective
from ax.core.optimization_config import OptimizationConfig
from ax.core.parameter import ParameterType, RangeParameter
from ax.core.search_space import SearchSpace
from pandas import MultiIndex

from bo_stream import OSGPR, WISKI, ClusteredGP, HeteroscedasticWISKI, LocalGP
from bo_stream.ax import StreamSurrogate, generation_strategy
from bo_stream.ax.adapters import StreamAdapter
from bo_stream.ax.cross_validation import CrossValidatingAdapter, DividedData
from bo_stream.ax.surrogate import DataRows, LeaveOutModel
from bo_stream.testing.streams import assert_close
from tests.ax.experiments import (
    NEARLY_WITHOUT_NOISE,
    adapter_of,
    assert_is_a_batch_of_the_data,
    complete,
    loss,
    model_of,
    raw_data,
    started,
    surrogate_of,
    watch,
)
from tests.support.problems import observations

pytestmark = [*NEARLY_WITHOUT_NOISE, pytest.mark.integration]

CHEAP = ["cost <= 1.5"]
Report = Callable[[int, Any], Any]

REPORTS: dict[str, Report] = {
    "no errors": lambda i, p: loss(p),
    "errors": lambda i, p: {"loss": (loss(p), 0.05 + 0.01 * i)},
    "some errors": lambda i, p: {"loss": (loss(p), 0.1)} if i % 2 else {"loss": loss(p)},
}


def completed(trials: int, report: Report = REPORTS["no errors"], **options: Any) -> Client:
    """Return an experiment whose models hold all trials, on a grid with all features."""
    settings = {"model_options": {"tolerance": 0.0}, "initialization": trials, **options}
    client = started(**settings)
    for index, parameters in client.get_next_trials(trials).items():
        client.complete_trial(index, raw_data(report(index, parameters)))
    client.get_next_trials(1)
    for stream in surrogate_of(client)._streams.values():
        if isinstance(stream.model, WISKI):
            stream.model.truncate(0.0)
    return client


@contextmanager
def axs_way() -> Iterator[None]:
    """Let Ax build a model for each fold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(CrossValidatingAdapter, "get_training_data")
        yield


def fold_by_fold(adapter: StreamAdapter, **options: Any) -> list[CVResult]:
    with axs_way():
        np.random.seed(1)  # noqa: NPY002  Ax shuffles with it
        return cross_validate(adapter, **options)


def in_closed_form(adapter: StreamAdapter, **options: Any) -> list[CVResult]:
    """Cross-validate, and fail where a model is built for a fold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamSurrogate, "clone_reset", lambda self: pytest.fail("A model is built."))
        np.random.seed(1)  # noqa: NPY002  Ax shuffles with it
        return cross_validate(adapter, **options)


def assert_same(found: list[CVResult], expected: list[CVResult]) -> None:
    assert len(found) == len(expected) > 0
    named = {(r.observed.arm_name, r.observed.features.trial_index): r for r in expected}
    for result in found:
        other = named[result.observed.arm_name, result.observed.features.trial_index]
        assert result.observed.features == other.observed.features
        for ours, theirs in (
            (result.observed.data, other.observed.data),
            (result.predicted, other.predicted),
        ):
            assert ours.metric_signatures == theirs.metric_signatures
            np.testing.assert_allclose(ours.means, theirs.means, rtol=1e-8, atol=1e-8)
            np.testing.assert_allclose(ours.covariance, theirs.covariance, rtol=1e-7, atol=1e-9)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("report", "untransform"),
    [("no errors", True), ("errors", True), ("some errors", True), ("some errors", False)],
)
def test_each_trial_left_out(report: str, untransform: bool) -> None:
    client = completed(9, REPORTS[report])
    found = in_closed_form(adapter_of(client), untransform=untransform)
    assert_same(found, fold_by_fold(adapter_of(client), untransform=untransform))
    assert len(found) == 9


def test_folds_of_several_trials_and_their_outcomes() -> None:
    client = completed(10)
    assert_same(
        in_closed_form(adapter_of(client), folds=3), fold_by_fold(adapter_of(client), folds=3)
    )
    options = {"folds": 3, "use_posterior_predictive": True}
    assert_same(
        in_closed_form(adapter_of(client), **options), fold_by_fold(adapter_of(client), **options)
    )


@pytest.mark.parametrize("dim", [2, 12])
def test_arms_of_a_batch_in_another_order_than_their_names(dim: int) -> None:
    """Ax has arm 0_10 before 0_2 in some of its tables, and after it in others."""
    names = [f"x{i}" for i in range(dim)]
    space = SearchSpace([RangeParameter(name, ParameterType.FLOAT, 0.0, 1.0) for name in names])
    objective = Objective("-loss", metric_name_to_signature={"loss": "loss"})
    experiment = Experiment(space, name="batches", tracking_metrics=[Metric("loss")])
    experiment.optimization_config = OptimizationConfig(objective)
    search = {"num_restarts": 1, "raw_samples": 8}
    strategy = generation_strategy(seed=0, initialization=1, search=search)
    for n in (11, 11, 1):
        trial = experiment.new_batch_trial(strategy.gen(experiment, n=n)[0][0])
        complete(trial, lambda arm: sum((x - 0.3) ** 2 for x in arm.values()), 0.1)
    strategy.gen(experiment, n=1)
    adapter = cast(StreamAdapter, strategy.adapter)
    found = in_closed_form(adapter)
    assert len(found) == 23
    if dim == 2:
        assert_same(found, fold_by_fold(adapter))
    observed, predicted = (
        torch.tensor([side.means[0] for side in sides])
        for sides in zip(*((r.observed.data, r.predicted) for r in found), strict=True)
    )
    assert float(torch.corrcoef(torch.stack((observed, predicted)))[0, 1]) > 0.8


def test_folds_that_the_caller_makes() -> None:
    client = completed(9)
    options = {
        "fold_generator": lambda data: gen_trial_split(data, [2, 5]),
        "test_selector": lambda observation: observation.features.trial_index == 5,
    }
    assert_same(
        in_closed_form(adapter_of(client), **options), fold_by_fold(adapter_of(client), **options)
    )


def test_an_arm_that_ran_twice_leaves_twice() -> None:
    client = completed(7)
    parameters = client._experiment.trials[2].arms[0].parameters
    client.complete_trial(client.attach_trial(parameters), {"loss": 0.7})
    client.get_next_trials(1)
    found = in_closed_form(adapter_of(client))
    assert_same(found, fold_by_fold(adapter_of(client)))
    assert len(found) == 8


def test_several_metrics_of_which_some_trials_lack_one() -> None:
    client = completed(8, lambda i, p: {"loss": loss(p), "cost": float(p["a"])}, constraints=CHEAP)
    frame = client._experiment.lookup_data().full_df
    missing = (frame["metric_name"] == "cost") & frame["trial_index"].isin((3, 6))
    client._experiment.data = Data(df=frame[~missing])
    client.get_next_trials(1)
    assert sorted(len(s.rows) for s in surrogate_of(client)._streams.values()) == [6, 8]
    assert_same(in_closed_form(adapter_of(client)), fold_by_fold(adapter_of(client)))


def test_points_and_choices() -> None:
    parameters = [
        *(RangeParameterConfig(name, (0.0, 1.0), parameter_type="float") for name in "xyz"),
        ChoiceParameterConfig("kind", ["p", "q", "r"], parameter_type="str", is_ordered=False),
    ]
    client = completed(
        9,
        lambda i, p: p["x"] + (p["kind"] == "q"),
        parameters=parameters,
        model=OSGPR,
        model_options={"inducing_points": torch.rand(5, 6, dtype=torch.float64)},
    )
    assert_same(in_closed_form(adapter_of(client)), fold_by_fold(adapter_of(client)))


def test_rows_that_a_model_of_points_holds_no_longer() -> None:
    """The rows enter anew at its points, for a model that would have held them all."""
    data = observations(12, 2)
    rows = DataRows(data.X, data.Y, torch.full_like(data.Y, torch.nan))
    model = OSGPR(data.X, data.Y, window=4, max_points=5).eval()
    model.covar_module.lengthscale = 0.4
    left_out = LeaveOutModel(model, rows)
    for i in range(12):
        left = [j for j in range(12) if j != i]
        other = OSGPR(data.X[left], data.Y[left], max_points=5)
        other.load_state_dict(model.state_dict())
        expected = other.place_points(model.inducing_points).eval().posterior(data.X[[i]])
        mean, variance = left_out.predict(torch.arange(12) == i, data.X[[i]], False) or ()
        assert_close(mean, expected.mean[0])
        assert_close(variance, expected.variance[0])
    assert model.window == 4
    assert left_out.predict(torch.ones(12, dtype=torch.bool), data.X, False) is None


def test_the_next_trial_is_as_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = completed(7), completed(7)
    data = adapter_of(client)._last_experiment_data
    for options in ({}, {"folds": 3}, {"untransform": False}):
        cross_validate(adapter_of(client), **options)
    fold_by_fold(adapter_of(client))
    assert adapter_of(client)._last_experiment_data is data
    X = torch.rand(5, 2, dtype=torch.float64)
    ours, theirs = (model_of(c).posterior(X) for c in (client, other))
    assert torch.equal(ours.mean, theirs.mean)
    assert torch.equal(ours.variance, theirs.variance)
    traffic = watch(monkeypatch)
    client.complete_trial(7, {"loss": 0.5})
    client.get_next_trials(1)
    assert (traffic.built, traffic.entered, traffic.left) == ([], [1], [])
    assert_is_a_batch_of_the_data(client)


def test_after_new_data_it_is_of_those(monkeypatch: pytest.MonkeyPatch) -> None:
    client = completed(6)
    in_closed_form(adapter_of(client))
    client.attach_data(2, {"loss": 3.0})
    client.complete_trial(6, {"loss": 0.5})
    client.get_next_trials(1)
    found = in_closed_form(adapter_of(client))
    assert len(found) == 7
    assert_same(found, fold_by_fold(adapter_of(client)))
    model = model_of(client)
    model.covar_module.lengthscale = 2.0 * model.covar_module.lengthscale
    assert_same(in_closed_form(adapter_of(client)), fold_by_fold(adapter_of(client)))


_JUMPS = pytest.mark.filterwarnings("ignore:Optimization failed:RuntimeWarning")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "kind", [ClusteredGP, pytest.param(LocalGP, marks=_JUMPS), HeteroscedasticWISKI]
)
def test_other_models_are_built_for_each_fold(kind: type) -> None:
    client = completed(6, model=kind, model_options={})
    data = adapter_of(client)._last_experiment_data
    found = cross_validate(adapter_of(client))
    assert_same(found, fold_by_fold(adapter_of(client)))
    assert adapter_of(client)._last_experiment_data is data


def test_hyperparameters_that_are_learned_for_each_fold() -> None:
    client = completed(6)
    present = in_closed_form(adapter_of(client))
    adapter_of(client).generator.refit_on_cv = True  # type: ignore[attr-defined]
    found = cross_validate(adapter_of(client))
    assert len(found) == 6
    pairs = zip(found, present, strict=True)
    assert any(abs(a.predicted.means[0] - b.predicted.means[0]) > 1e-6 for a, b in pairs)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [WISKI, OSGPR, ClusteredGP])
def test_noise_is_not_predicted(kind: type) -> None:
    """Neither in closed form nor by models that load the state of the one that knows all."""
    noise = torch.randn(25, generator=torch.Generator().manual_seed(3)).tolist()
    client = completed(
        25, lambda i, p: noise[i], model=kind, model_options={}, refit=0.0, acquisition="qUCB"
    )
    ways = [cross_validate, fold_by_fold] if kind is WISKI else [cross_validate]
    for found in (way(adapter_of(client)) for way in ways):
        observed = torch.tensor([r.observed.data.means[0] for r in found])
        predicted = torch.tensor([r.predicted.means[0] for r in found])
        assert float(torch.corrcoef(torch.stack((observed, predicted)))[0, 1]) < 0.4


def test_a_state_is_of_the_same_size_whatever_the_data() -> None:
    few, many = (
        {name: value.shape for name, value in model_of(completed(n)).state_dict().items()}
        for n in (5, 11)
    )
    assert few == many


def test_axs_own_summary_of_the_fit() -> None:
    client = completed(12)
    found = get_fit_and_std_quality_and_generalization_dict(adapter_of(client))
    with axs_way():
        expected = get_fit_and_std_quality_and_generalization_dict(adapter_of(client))
    assert found == pytest.approx(expected, rel=1e-6)
    assert None not in found.values()


class TestDividedData:
    """Parts and observations as Ax makes them."""

    @staticmethod
    def data(client: Client) -> tuple[DividedData, ExperimentData]:
        own = adapter_of(client).get_training_data(filter_in_design=True)
        return own, ExperimentData(own.arm_data.copy(), own.observation_data.copy())

    def assert_equal(self, own: ExperimentData, axs: ExperimentData) -> None:
        assert own == axs
        assert own.convert_to_list_of_observations() == axs.convert_to_list_of_observations()

    def test_equals_axs(self) -> None:
        parameters = [
            RangeParameterConfig("rate", (1e-4, 1.0), parameter_type="float", scaling="log"),
            RangeParameterConfig("layers", (1, 4), parameter_type="int"),
            ChoiceParameterConfig("kind", ["p", "q"], parameter_type="str", is_ordered=False),
            ChoiceParameterConfig("on", [True, False], parameter_type="bool", is_ordered=True),
        ]

        def report(i: int, p: Any) -> dict[str, Any]:
            return {"loss": (p["rate"], 0.1) if i % 2 else p["rate"], "note": 1.0 * p["layers"]}

        client = completed(
            6, report, parameters=parameters, model=OSGPR, model_options={}, initialization=6
        )
        own, axs = self.data(client)
        self.assert_equal(own, axs)
        names = own.arm_data.index.get_level_values("arm_name")[[4, 1]]
        self.assert_equal(own.filter_by_arm_names(names), axs.filter_by_arm_names(names))
        self.assert_equal(own.filter_by_trial_index([0, 5]), axs.filter_by_trial_index([0, 5]))

    def test_steps_of_a_metric_are_axs_own(self) -> None:
        own, axs = self.data(completed(5))
        for data in (own, axs):
            frame = data.observation_data
            keys = [(*key, 1.0) for key in frame.index]
            names = [*frame.index.names, "step"]
            frame.index = MultiIndex.from_tuples(keys, names=names)
        self.assert_equal(own, axs)
        self.assert_equal(own.filter_by_trial_index([3]), axs.filter_by_trial_index([3]))
