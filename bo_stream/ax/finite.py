"""Outcomes that are no numbers are set aside."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from ax.adapter.base import Adapter
from ax.adapter.data_utils import ExperimentData
from ax.adapter.transforms.base import Transform
from botorch.exceptions.warnings import InputDataWarning
from pandas import DataFrame


class FiniteOutcomes(Transform):
    """Takes infinite outcomes, and those of infinite standard error, for not reported.

    A warning names each one's trial and metric. Other metrics of the trial stay.

    Attributes:
        set_aside: Trial, arm and metric of each.
    """

    set_aside: list[tuple[int, str, str]]

    def __init__(
        self,
        search_space: Any = None,
        experiment_data: Any = None,
        adapter: Adapter | None = None,
        config: Any = None,
    ) -> None:
        """Find them."""
        super().__init__(search_space, experiment_data, adapter, config)
        self.set_aside = []
        if experiment_data is not None:
            self.set_aside = _infinite(experiment_data)
        if self.set_aside:
            named = ", ".join(f"{metric} of trial {trial}" for trial, _, metric in self.set_aside)
            warnings.warn(
                f"Infinite outcomes or standard errors are set aside: {named}. To replace one, "
                "report it anew by client.attach_data.",
                InputDataWarning,
                stacklevel=2,
            )

    def transform_experiment_data(self, experiment_data: ExperimentData) -> ExperimentData:
        """Without them; a copy where there are any."""
        observed = experiment_data.observation_data
        infinite = {metric: _is_infinite(observed, metric) for metric in _metrics(experiment_data)}
        if not any(rows.any() for rows in infinite.values()):
            return experiment_data
        observed = observed.copy()
        for metric, rows in infinite.items():
            observed.loc[rows, [("mean", metric), ("sem", metric)]] = np.nan
        return ExperimentData(experiment_data.arm_data, observed)


def _metrics(data: ExperimentData) -> list[str]:
    return [] if data.observation_data.empty else list(data.observation_data["mean"])


def _is_infinite(observed: DataFrame, metric: str) -> Any:
    values = observed[[("mean", metric), ("sem", metric)]].to_numpy(dtype=float)
    return np.isinf(values).any(-1)


def _infinite(data: ExperimentData) -> list[tuple[int, str, str]]:
    observed = data.observation_data
    return [
        (int(row[0]), str(row[1]), metric)
        for metric in _metrics(data)
        for row in observed.index[_is_infinite(observed, metric)]
    ]
