"""A clear word when a metric has reported nothing."""

from __future__ import annotations

from typing import Any

from ax.adapter.base import Adapter
from ax.adapter.transforms.base import Transform
from ax.exceptions.core import DataRequiredError


class ReportedMetrics(Transform):
    """Changes nothing; comes before the transforms of Ax that fail where there are no data."""

    no_op_for_experiment_data = True

    def __init__(
        self,
        search_space: Any = None,
        experiment_data: Any = None,
        adapter: Adapter | None = None,
        config: Any = None,
    ) -> None:
        """Look for outcomes of each metric of the objectives and constraints.

        Raises:
            DataRequiredError: One has none.
        """
        super().__init__(search_space, experiment_data, adapter, config)
        config_of_metrics = None if adapter is None else adapter._optimization_config
        if config_of_metrics is None or experiment_data is None:
            return
        reported = _reported(experiment_data.observation_data)
        silent = sorted(config_of_metrics.metric_names - reported)
        if silent:
            values = ", ".join(f"{name!r}: ..." for name in silent)
            raise DataRequiredError(
                f"No completed trial has reported {', '.join(silent)}, and no model can be built "
                f"without. Report them by client.complete_trial(index, {{{values}}}), or see that "
                "the metrics that should fetch them do."
            )


def _reported(observations: Any) -> set[str]:
    if observations.empty:
        return set()
    means = observations["mean"]
    return {str(metric) for metric in means if bool(means[metric].notna().any())}
