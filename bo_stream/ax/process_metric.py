"""A metric whose values a :class:`ProcessRunner` has kept with the trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from ax.core.base_trial import BaseTrial
from ax.core.data import Data
from ax.core.metric import Metric, MetricFetchE, MetricFetchResult
from ax.utils.common.result import Err, Ok

RECORD = "bo_stream.ax.ProcessRunner"
"""Key in a trial's metadata."""


class ProcessMetric(Metric):
    """Reads what a function returned from the metadata of the trial."""

    def __init__(self, name: str, lower_is_better: bool | None = None) -> None:
        """As Ax's metrics.

        Args:
            name: As the function that is evaluated calls it.
            lower_is_better: Where the direction is known.
        """
        super().__init__(name, lower_is_better)

    def fetch_trial_data(self, trial: BaseTrial, **kwargs: Any) -> MetricFetchResult:
        """A row for each arm, or why there is none."""
        outcomes = trial.run_metadata.get(RECORD, {}).get("outcomes", {})
        missing = [arm.name for arm in trial.arms if self.name not in outcomes.get(arm.name, {})]
        if missing:
            reason = (
                f"trial {trial.index} has no value of {self.name} for {', '.join(missing)}: only "
                "a ProcessRunner leaves them, see bo_stream.ax.run_trials"
            )
            return Err(MetricFetchE(message=reason, exception=None))
        rows = [self._row(trial.index, arm.name, outcomes[arm.name]) for arm in trial.arms]
        return Ok(Data(df=pd.DataFrame(rows)))

    def _row(self, trial: int, arm: str, values: Mapping[str, Any]) -> dict[str, Any]:
        mean, sem = values[self.name]
        return {
            "trial_index": trial,
            "arm_name": arm,
            "metric_name": self.name,
            "metric_signature": self.signature,
            "mean": mean,
            "sem": float("nan") if sem is None else sem,
        }
