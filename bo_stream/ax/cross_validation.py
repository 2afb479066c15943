"""Cross-validation by Ax in closed form: rows are left out of the present models.

:class:`CrossValidatingAdapter` is the adapter that does it. It gives Ax its training data as
:class:`DividedData`, so that a fold remembers which rows it has instead of copying them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from ax.adapter.adapter_utils import array_to_observation_data
from ax.adapter.data_utils import ExperimentData
from ax.adapter.torch import TorchAdapter
from ax.core.observation import Observation, ObservationData, ObservationFeatures
from ax.core.search_space import SearchSpace
from ax.generators.torch.botorch_modular.generator import BoTorchGenerator
from numpy.typing import NDArray
from pandas import DataFrame

from bo_stream.ax.surrogate import StreamSurrogate

Chosen = NDArray[np.bool_]


class CrossValidatingAdapter(TorchAdapter):
    """A Torch adapter of Ax whose cross-validation leaves rows out of the present models.

    Ax's own builds each model anew for each fold, from data that it transforms anew. Here a fold of
    one row is looked up in what :func:`bo_stream.diagnostics.leave_one_out` finds for all of them,
    O(n r²) once; one of k rows costs O(k r² + k³). Equal to models that are built of the fold at
    the same hyperparameters, standardisation and number of features. Folds of other data, models
    that do not allow it and ``refit_on_cv`` are left to Ax. Neither way disturbs the models.
    """

    _transformed: DividedData | None = None

    def get_training_data(self, filter_in_design: bool = False) -> DividedData:
        """Return the training data; overrides ``Adapter.get_training_data`` for cheap folds."""
        return DividedData.of(super().get_training_data(filter_in_design))

    def _transform_inputs_for_cv(
        self, cv_training_data: ExperimentData, cv_test_points: list[ObservationFeatures]
    ) -> tuple[ExperimentData, list[ObservationFeatures], SearchSpace]:
        """Return a fold, its test points and the search space as the model takes them.

        Overrides ``Adapter._transform_inputs_for_cv``, which transforms each fold anew: the rows of
        the present data have been transformed already.
        """
        data = cv_training_data
        fold = self._present_rows(data)
        if fold is None:
            data = data.copied() if isinstance(data, Part) else data
            return super()._transform_inputs_for_cv(data, cv_test_points)
        points, space = deepcopy(cv_test_points), self._model_space.clone()
        for transform in self.transforms.values():
            points = transform.transform_observation_features(points)
            space = transform.transform_search_space(space)
        return fold, points, space

    def _present_rows(self, data: ExperimentData) -> Part | None:
        """Return a part of the training data as one of the transformed; None: of other data."""
        present = self._last_experiment_data
        if not isinstance(data, Part) or present is None:
            return None
        whole = data.whole
        if not (
            whole.arm_data.index.equals(present.arm_data.index)
            and whole.observation_data.index.equals(present.observation_data.index)
        ):
            return None
        kept = self._transformed
        if kept is None or kept.observation_data is not present.observation_data:
            kept = self._transformed = DividedData.of(present)
        return Part(kept, data.level, data.values)

    def _cross_validate(
        self,
        search_space: SearchSpace,
        cv_training_data: ExperimentData,
        cv_test_points: list[ObservationFeatures],
        use_posterior_predictive: bool = False,
    ) -> list[ObservationData]:
        """Predict test points from a fold.

        Overrides ``TorchAdapter._cross_validate``, which builds models of the fold, and takes it
        for the data that the adapter was fitted to.
        """
        present, fold = self._last_experiment_data, cv_training_data
        if isinstance(fold, Part):
            found = self._left_out(fold, cv_test_points, use_posterior_predictive)
            if found is not None:
                return found
        try:
            return super()._cross_validate(
                search_space, fold, cv_test_points, use_posterior_predictive
            )
        finally:
            self._last_experiment_data = present

    def _left_out(
        self, fold: Part, points: Sequence[ObservationFeatures], observation_noise: bool
    ) -> list[ObservationData] | None:
        """Predict points in closed form; None: some model does not allow it."""
        generator = self.generator
        if not isinstance(generator, BoTorchGenerator) or generator.refit_on_cv:
            return None
        surrogate = generator.surrogate
        if not isinstance(surrogate, StreamSurrogate):
            return None
        X = self._array_to_tensor(
            np.array([[point.parameters[name] for name in self.parameters] for point in points])
        )
        metrics = []
        for outcome in self.outcomes:
            gone = torch.from_numpy(~fold.rows[fold.whole.observed[outcome]])
            found = surrogate.predict_without(outcome, gone, X, observation_noise)
            if found is None:
                return None
            metrics.append(found)
        mean, variance = (torch.stack(part, -1).cpu() for part in zip(*metrics, strict=True))
        covariance = torch.diag_embed(variance)  # t x m x m: metrics are independent
        return array_to_observation_data(mean.numpy(), covariance.numpy(), self.outcomes)


class DividedData(ExperimentData):
    """Ax's experiment data, whose parts are evaluated when they are looked at.

    Cross-validation takes two parts of the data for each fold and turns one into observations. In
    Ax each part copies the frames, and an observation takes milliseconds of pandas.
    """

    @classmethod
    def of(cls, data: ExperimentData) -> DividedData:
        """Wrap data, which are not copied."""
        return cls(data.arm_data, data.observation_data)

    def filter_by_arm_names(self, arm_names: Iterable[str]) -> Part:
        """Return the part of some arms, which ``ExperimentData.filter_by_arm_names`` copies."""
        return Part(self, "arm_name", set(arm_names))

    def filter_by_trial_index(self, trial_indices: Iterable[int]) -> Part:
        """Return the part of some trials, which ``ExperimentData.filter_by_trial_index`` copies."""
        return Part(self, "trial_index", set(trial_indices))

    @cached_property
    def arms(self) -> dict[str, list[Any]]:
        """Return name and trial of each arm."""
        return _levels(self.arm_data)

    @cached_property
    def rows(self) -> dict[str, list[Any]]:
        """Return name and trial of each row of observations."""
        return _levels(self.observation_data)

    @cached_property
    def observed(self) -> dict[str, Chosen]:
        """Return which rows have an outcome, by metric."""
        means = self.observation_data["mean"]
        return {name: means[name].notna().to_numpy() for name in self.metric_signatures}

    def convert_to_list_of_observations(self) -> list[Observation]:
        """Return Ax's observations, a hundred times as fast where each arm has one row.

        Overrides ``ExperimentData.convert_to_list_of_observations``.
        """
        if self.table is None:
            return super().convert_to_list_of_observations()
        return self.table.observations(range(len(self.arm_data)))

    @cached_property
    def table(self) -> Table | None:
        """Return the data as plain values; None: an arm has several rows, or none."""
        arms, rows = self.arm_data.index, self.observation_data.index
        one_row_each = rows.nlevels == 2 and rows.is_unique and arms.is_unique
        if not one_row_each or len(arms) != len(rows):
            return None
        places: NDArray[np.int_] = rows.get_indexer(arms)
        return None if bool((places < 0).any()) else Table.of(self, places)


class Part(ExperimentData):
    """Some arms or trials of experiment data, with frames that are made when they are needed.

    Attributes:
        whole: The data.
        level: ``"arm_name"`` or ``"trial_index"``.
        values: Names or indices of those in the part.
    """

    def __init__(self, whole: DividedData, level: str, values: set[Any]) -> None:
        """Choose arms or trials; overrides ``ExperimentData.__init__``, which takes the frames."""
        self.whole = whole
        self.level = level
        self.values = values

    @cached_property
    def arms(self) -> Chosen:
        """Return which of the arms are in the part."""
        return _members(self.whole.arms[self.level], self.values)

    @cached_property
    def rows(self) -> Chosen:
        """Return which of the rows of observations are in the part."""
        return _members(self.whole.rows[self.level], self.values)

    @cached_property
    def arm_data(self) -> DataFrame:  # type: ignore[override]
        """Return the part's arms; a field of ``ExperimentData``."""
        return self.whole.arm_data[self.arms]

    @cached_property
    def observation_data(self) -> DataFrame:  # type: ignore[override]
        """Return the part's observations; a field of ``ExperimentData``."""
        return self.whole.observation_data[self.rows]

    def copied(self) -> ExperimentData:
        """Return the part as data of its own."""
        return ExperimentData(self.arm_data.copy(), self.observation_data.copy())

    def convert_to_list_of_observations(self) -> list[Observation]:
        """Return Ax's observations; see :meth:`DividedData.convert_to_list_of_observations`."""
        table = self.whole.table
        if table is None:
            return self.copied().convert_to_list_of_observations()
        return table.observations(np.flatnonzero(self.arms).tolist())


@dataclass(frozen=True)
class Table:
    """Data with one row of observations an arm, as plain values.

    Attributes:
        index: Trial and name of each arm.
        columns: Names of the arms' columns.
        values: Their values, for each arm.
        missing: Which of the values are missing.
        metrics: Names of the m metrics.
        means: Outcomes, ``n x m``; NaN: not observed.
        sems: Their standard errors, ``n x m``.
    """

    index: list[tuple[int, str]]
    columns: list[str]
    values: list[list[Any]]
    missing: list[list[bool]]
    metrics: list[str]
    means: NDArray[np.float64]
    sems: NDArray[np.float64]

    @classmethod
    def of(cls, data: ExperimentData, places: NDArray[np.int_]) -> Table:
        """Make the table of data whose arms have the rows of observations at some places."""
        arms, observed = data.arm_data, data.observation_data.iloc[places]
        metrics = data.metric_signatures
        return cls(
            arms.index.tolist(),
            arms.columns.tolist(),
            arms.to_numpy(dtype=object).tolist(),
            arms.isna().to_numpy().tolist(),
            metrics,
            observed["mean"][metrics].to_numpy(dtype=np.float64),
            observed["sem"][metrics].to_numpy(dtype=np.float64),
        )

    def observations(self, arms: Sequence[int]) -> list[Observation]:
        """Return the observations of some arms; those without any metric are left out."""
        observed = ~np.isnan(self.means)
        return [self._observation(i, observed[i]) for i in arms if observed[i].any()]

    def _observation(self, i: int, observed: Chosen) -> Observation:
        trial, name = self.index[i]
        known = zip(self.columns, self.values[i], self.missing[i], strict=True)
        values = {column: value for column, value, missing in known if not missing}
        metadata = values.pop("metadata").copy()
        metrics = [metric for metric, there in zip(self.metrics, observed, strict=True) if there]
        return Observation(
            features=ObservationFeatures(values, trial_index=trial, metadata=metadata),
            data=ObservationData(
                metrics, self.means[i, observed], np.diag(self.sems[i, observed] ** 2)
            ),
            arm_name=name,
        )


def _levels(frame: DataFrame) -> dict[str, list[Any]]:
    names = ("arm_name", "trial_index")
    return {name: frame.index.get_level_values(name).tolist() for name in names}


def _members(values: Sequence[Any], chosen: set[Any]) -> Chosen:
    return np.fromiter(map(chosen.__contains__, values), np.bool_, len(values))
