"""An adapter of Ax whose cross-validation builds no models."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from ax.adapter.adapter_utils import array_to_observation_data
from ax.adapter.data_utils import ExperimentData
from ax.adapter.torch import TorchAdapter
from ax.core.observation import ObservationData, ObservationFeatures
from ax.core.search_space import SearchSpace
from ax.generators.torch.botorch_modular.generator import BoTorchGenerator
from numpy.typing import NDArray

from bo_stream.ax.left_out import Moments
from bo_stream.ax.parts import DividedData, Part
from bo_stream.ax.surrogate import StreamSurrogate


class LeavesRowsOut(TorchAdapter):
    """Cross-validation leaves rows out of the present models, in closed form.

    Ax's own builds each model anew for each fold, from data that it transforms anew. Here a fold of
    one row is looked up in what :func:`bo_stream.diagnostics.leave_one_out` finds for all of them,
    O(n r²) once; one of k rows costs O(k r² + k³). Equal to models that are built of the fold at
    the same hyperparameters, standardisation and number of features. Folds of other data, models
    that do not allow it and ``refit_on_cv`` go Ax's way. Neither disturbs the models.
    """

    _transformed: DividedData | None = None

    def get_training_data(self, filter_in_design: bool = False) -> DividedData:
        """As Ax's, with parts that cost nothing."""
        return DividedData.of(super().get_training_data(filter_in_design))

    def _transform_inputs_for_cv(
        self, cv_training_data: ExperimentData, cv_test_points: list[ObservationFeatures]
    ) -> tuple[ExperimentData, list[ObservationFeatures], SearchSpace]:
        """As Ax's, but rows of the present data are not transformed again."""
        fold = self._present_rows(cv_training_data)
        if fold is None:
            data = cv_training_data
            data = data.copied() if isinstance(data, Part) else data
            return super()._transform_inputs_for_cv(data, cv_test_points)
        points, space = deepcopy(cv_test_points), self._model_space.clone()
        for transform in self.transforms.values():
            points = transform.transform_observation_features(points)
            space = transform.transform_search_space(space)
        return fold, points, space

    def _present_rows(self, data: ExperimentData) -> Part | None:
        """A part of the training data as one of the transformed; None: it is of other data."""
        present = self._last_experiment_data
        if not isinstance(data, Part) or present is None:
            return None
        pairs = (
            (data.whole.arm_data, present.arm_data),
            (data.whole.observation_data, present.observation_data),
        )
        if not all(before.index.equals(after.index) for before, after in pairs):
            return None
        return data.within(self._divided(present))

    def _divided(self, data: ExperimentData) -> DividedData:
        """The same data; kept."""
        kept = self._transformed
        if kept is None or kept.observation_data is not data.observation_data:
            kept = self._transformed = DividedData.of(data)
        return kept

    def _cross_validate(
        self,
        search_space: SearchSpace,
        cv_training_data: ExperimentData,
        cv_test_points: list[ObservationFeatures],
        use_posterior_predictive: bool = False,
    ) -> list[ObservationData]:
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
            self._last_experiment_data = present  # Ax takes the fold for what was fitted

    def _left_out(
        self, fold: Part, points: Sequence[ObservationFeatures], observation_noise: bool
    ) -> list[ObservationData] | None:
        surrogate = self._surrogate()
        if surrogate is None:
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
        return array_to_observation_data(*_arrays(metrics), self.outcomes)

    def _surrogate(self) -> StreamSurrogate | None:
        """Whose models may leave rows out."""
        generator = self.generator
        if not isinstance(generator, BoTorchGenerator) or generator.refit_on_cv:
            return None
        surrogate = generator.surrogate
        return surrogate if isinstance(surrogate, StreamSurrogate) else None


def _arrays(metrics: Sequence[Moments]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means ``t x m`` and covariances ``t x m x m`` of independent metrics."""
    mean, variance = (torch.stack(part, -1).cpu() for part in zip(*metrics, strict=True))
    return mean.numpy(), torch.diag_embed(variance).numpy()
