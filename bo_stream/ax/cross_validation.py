"""Cross-validation by Ax in closed form: rows are left out of the present models.

:class:`CrossValidatingAdapter` gives Ax its training data as :class:`DividedData`, so that a fold
remembers its rows instead of copying them.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import cached_property
from itertools import compress
from typing import Any, Protocol, cast

import numpy as np
import torch
from ax.adapter.adapter_utils import array_to_observation_data
from ax.adapter.data_utils import ExperimentData
from ax.adapter.torch import TorchAdapter
from ax.core.observation import Observation, ObservationData, ObservationFeatures
from ax.core.search_space import SearchSpace
from numpy.typing import NDArray
from pandas import DataFrame, Index
from torch import Tensor

Chosen = NDArray[np.bool_]


class LeavesRowsOut(Protocol):
    """A generator whose present models can predict without some of their rows.

    Attributes:
        refit_on_cv: Whether hyperparameters are learned again for each fold.
    """

    refit_on_cv: bool

    def predict_without(
        self, name: str, gone: Tensor, X: Tensor, observation_noise: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Predict a metric given all its rows except some, or None if that cannot be said."""


class CrossValidatingAdapter(TorchAdapter):
    """A Torch adapter of Ax whose cross-validation leaves rows out of the present models.

    Ax's own builds each model again for each fold, from data that it transforms again. Here a fold
    of one row is looked up in :func:`bo_stream.diagnostics.leave_one_out` of all rows, O(n r²)
    once; a fold of k rows costs O(k r² + k³). Equal to models that are built of the fold at the
    same hyperparameters, standardisation and number of features. Folds of other data, models that
    do not allow it and ``refit_on_cv`` are left to Ax. Neither way disturbs the models.
    """

    _transformed: DividedData | None = None

    def get_training_data(self, filter_in_design: bool = False) -> DividedData:
        """Return the training data; overrides ``Adapter.get_training_data`` for cheap folds.

        Metrics that are not to be modelled are left out: Ax would look for their predictions.
        """
        data, config = super().get_training_data(filter_in_design), self._optimization_config
        observed = data.observation_data
        if not (self._fit_tracking_metrics or config is None or observed.empty):
            metrics = observed.columns.get_level_values(1)
            observed = observed.loc[:, metrics.isin(config.metric_names)]
        return DividedData(data.arm_data, observed)

    def _transform_inputs_for_cv(
        self, cv_training_data: ExperimentData, cv_test_points: list[ObservationFeatures]
    ) -> tuple[ExperimentData, list[ObservationFeatures], SearchSpace]:
        """Return a fold, its test points and the search space in the model's transformed form.

        Overrides ``Adapter._transform_inputs_for_cv``, which transforms each fold again: the rows
        of the present data have been transformed already.
        """
        data, present, known = cv_training_data, self._last_experiment_data, self._transformed
        if present is None:
            known = None
        elif known is None or known.observation_data is not present.observation_data:
            known = self._transformed = DividedData(present.arm_data, present.observation_data)
        if (
            known is None
            or not isinstance(data, FoldData)
            or not all(a.equals(b) for a, b in zip(data.whole.indices, known.indices, strict=True))
        ):
            frames = ExperimentData(data.arm_data, data.observation_data)  # Ax copies them
            return super()._transform_inputs_for_cv(frames, cv_test_points)
        fold = FoldData(known, data.level, data.values)
        points, space = deepcopy(cv_test_points), self._model_space.clone()
        for transform in self.transforms.values():
            points = transform.transform_observation_features(points)
            space = transform.transform_search_space(space)
        return fold, points, space

    def _cross_validate(
        self,
        search_space: SearchSpace,
        cv_training_data: ExperimentData,
        cv_test_points: list[ObservationFeatures],
        use_posterior_predictive: bool = False,
    ) -> list[ObservationData]:
        """Predict test points from a fold, in closed form where every model allows it.

        Overrides ``TorchAdapter._cross_validate``, which builds models of the fold, and sets the
        adapter's data to the fold.
        """
        present, fold = self._last_experiment_data, cv_training_data
        generator = cast(LeavesRowsOut, self.generator)
        if isinstance(fold, FoldData) and not generator.refit_on_cv:
            points = [
                [each.parameters[name] for name in self.parameters] for each in cv_test_points
            ]
            X, gone, metrics = self._array_to_tensor(np.array(points)), ~fold.chosen("rows"), []
            for outcome in self.outcomes:
                rows = torch.from_numpy(gone[fold.whole.observed[outcome]])
                moments = generator.predict_without(outcome, rows, X, use_posterior_predictive)
                if moments is None:
                    break
                metrics.append(moments)
            else:
                mean, variance = (
                    torch.stack(part, -1).cpu() for part in zip(*metrics, strict=True)
                )
                covariance = torch.diag_embed(variance)  # t x m x m: metrics are independent
                return array_to_observation_data(mean.numpy(), covariance.numpy(), self.outcomes)
        try:
            return super()._cross_validate(
                search_space, fold, cv_test_points, use_posterior_predictive
            )
        finally:
            self._last_experiment_data = present


class DividedData(ExperimentData):
    """Ax's experiment data, whose parts are evaluated when they are used.

    Cross-validation takes two parts of the data for each fold and turns one into observations. In
    Ax each part copies the frames, and an observation takes milliseconds of pandas.
    """

    def filter_by_arm_names(self, arm_names: Iterable[str]) -> FoldData:
        """Return the data of some arms, which ``ExperimentData.filter_by_arm_names`` copies."""
        return FoldData(self, "arm_name", set(arm_names))

    def filter_by_trial_index(self, trial_indices: Iterable[int]) -> FoldData:
        """Return the data of some trials, which ``ExperimentData.filter_by_trial_index`` copies."""
        return FoldData(self, "trial_index", set(trial_indices))

    @cached_property
    def indices(self) -> tuple[Index, Index]:
        """Return sorted indices of arms and of rows; some of Ax's transforms change their order."""
        return self.arm_data.index.sort_values(), self.observation_data.index.sort_values()

    @cached_property
    def keys(self) -> dict[tuple[str, str], list[Any]]:
        """Return names and trials of arms, and of rows of observations."""
        indices = {"arms": self.arm_data.index, "rows": self.observation_data.index}
        return {
            (kind, level): index.get_level_values(level).tolist()
            for kind, index in indices.items()
            for level in ("arm_name", "trial_index")
        }

    @cached_property
    def observed(self) -> dict[str, Chosen]:
        """Return which rows have an outcome, by metric."""
        means = self.observation_data["mean"]
        return {name: means[name].notna().to_numpy() for name in self.metric_signatures}

    def convert_to_list_of_observations(self) -> list[Observation]:
        """Return Ax's observations, a hundred times as fast where each arm has one row.

        Overrides ``ExperimentData.convert_to_list_of_observations``.
        """
        if self.by_arm is None:
            return super().convert_to_list_of_observations()
        return [deepcopy(each) for each in self.by_arm if each is not None]

    @cached_property
    def by_arm(self) -> list[Observation | None] | None:
        """Return each arm's observation, or None; None: an arm has several rows, or none."""
        arms, rows = self.arm_data, self.observation_data
        one_row_each = rows.index.nlevels == 2 and rows.index.is_unique and arms.index.is_unique
        if not one_row_each or len(arms) != len(rows):
            return None
        positions: NDArray[np.int_] = rows.index.get_indexer(arms.index)
        if bool((positions < 0).any()):
            return None
        names, metrics = [str(name) for name in arms], np.array(self.metric_signatures)
        values, known = arms.to_numpy(dtype=object), arms.notna().to_numpy()
        means, sems = (rows[kind][metrics].to_numpy(float)[positions] for kind in ("mean", "sem"))
        observations: list[Observation | None] = []
        for (trial, arm), row, is_known, mean, sem in zip(
            arms.index, values, known, means, sems, strict=True
        ):
            own = dict(compress(zip(names, row, strict=True), is_known))
            features = ObservationFeatures(own, trial_index=trial, metadata=own.pop("metadata"))
            there = ~np.isnan(mean)
            data = ObservationData(metrics[there].tolist(), mean[there], np.diag(sem[there] ** 2))
            observations.append(Observation(features, data, arm) if there.any() else None)
        return observations


class FoldData(ExperimentData):
    """Some arms or trials of experiment data, with frames that are made when they are needed.

    Attributes:
        whole: The data.
        level: ``"arm_name"`` or ``"trial_index"``.
        values: Names of the arms, or indices of the trials.
    """

    def __init__(self, whole: DividedData, level: str, values: set[Any]) -> None:
        """Choose arms or trials; overrides ``ExperimentData.__init__``, which takes the frames."""
        self.whole = whole
        self.level = level
        self.values = values

    def chosen(self, kind: str) -> Chosen:
        """Return which ``"arms"``, or ``"rows"`` of observations, of the data are in this part."""
        keys = self.whole.keys[kind, self.level]
        return np.fromiter(map(self.values.__contains__, keys), np.bool_, len(keys))

    @cached_property
    def arm_data(self) -> DataFrame:  # type: ignore[override]
        """Return the part's arms; a field of ``ExperimentData``."""
        return self.whole.arm_data[self.chosen("arms")]

    @cached_property
    def observation_data(self) -> DataFrame:  # type: ignore[override]
        """Return the part's observations; a field of ``ExperimentData``."""
        return self.whole.observation_data[self.chosen("rows")]

    def convert_to_list_of_observations(self) -> list[Observation]:
        """Return Ax's observations; see :meth:`DividedData.convert_to_list_of_observations`."""
        known = self.whole.by_arm
        if known is None:
            frames = ExperimentData(self.arm_data, self.observation_data)
            return frames.convert_to_list_of_observations()
        chosen = compress(known, self.chosen("arms"))
        return [deepcopy(each) for each in chosen if each is not None]
