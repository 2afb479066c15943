"""Transforms of Ax that stream: a row of the data changes only when its outcome does.

Ax's own transforms of outcomes are learned anew at every trial and so change every row; these keep
what they have learned on the generator, which stores it. Beside them are checks of the data, and
the way back of a pool's candidates.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from ax.adapter.base import Adapter
from ax.adapter.data_utils import ExperimentData
from ax.adapter.transforms.base import Transform
from ax.adapter.transforms.standardize_y import StandardizeY
from ax.adapter.transforms.winsorize import Winsorize
from ax.core.observation import ObservationFeatures
from ax.exceptions.core import AxOptimizationWarning, DataRequiredError
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.exceptions.warnings import InputDataWarning
from numpy.typing import NDArray
from pandas import DataFrame

from bo_stream.ax.acquisition import INTEGRATED
from bo_stream.ax.pool import CANDIDATE, POOL, known_pool
from bo_stream.loops.optimization.surrogate import is_off, unit_of


class FiniteOutcomes(Transform):
    """A transform that takes outcomes of infinite value or standard error for not reported.

    A warning names each one's trial and metric. Other metrics of the trial stay.

    Attributes:
        set_aside: Trial, arm and metric of each.
    """

    set_aside: list[tuple[int, str, str]]

    def __init__(self, *, experiment_data: ExperimentData | None = None, **others: Any) -> None:
        """Find the infinite outcomes."""
        super().__init__(experiment_data=experiment_data, **others)
        observed = DataFrame() if experiment_data is None else experiment_data.observation_data
        self.set_aside = [
            (int(row[0]), str(row[1]), metric)
            for metric, rows in _infinite(observed).items()
            for row in observed.index[rows]
        ]
        if self.set_aside:
            named = ", ".join(f"{metric} of trial {trial}" for trial, _, metric in self.set_aside)
            warnings.warn(
                f"Infinite outcomes or standard errors are set aside: {named}. To replace one, "
                "report it anew by client.attach_data.",
                InputDataWarning,
                stacklevel=2,
            )

    def transform_experiment_data(self, experiment_data: ExperimentData) -> ExperimentData:
        """Return the data without infinite outcomes, a copy where there are any.

        Overrides ``Transform.transform_experiment_data``, by which Ax transforms all data at once.
        """
        infinite = _infinite(experiment_data.observation_data)
        if not infinite:
            return experiment_data
        observed = experiment_data.observation_data.copy()
        for metric, rows in infinite.items():
            observed.loc[rows, [("mean", metric), ("sem", metric)]] = np.nan
        return ExperimentData(experiment_data.arm_data, observed)


def _infinite(observed: DataFrame) -> dict[str, NDArray[np.bool_]]:
    """Return which rows have an infinite outcome or standard error, by metrics that have some."""
    infinite = {
        metric: np.isinf(observed[[("mean", metric), ("sem", metric)]].to_numpy(float)).any(-1)
        for metric in ([] if observed.empty else observed["mean"])
    }
    return {str(metric): rows for metric, rows in infinite.items() if rows.any()}


class ReportedMetrics(Transform):
    """A check that each metric has outcomes, before transforms of Ax fail where there are none."""

    no_op_for_experiment_data = True

    def __init__(
        self,
        *,
        experiment_data: ExperimentData | None = None,
        adapter: Adapter | None = None,
        **others: Any,
    ) -> None:
        """Look for outcomes of each metric of the objectives and constraints.

        Raises:
            DataRequiredError: A metric has none.
        """
        super().__init__(experiment_data=experiment_data, adapter=adapter, **others)
        config = None if adapter is None else adapter._optimization_config
        if config is None or experiment_data is None:
            return
        observed = experiment_data.observation_data
        means: Any = observed if observed.empty else observed["mean"]
        silent = sorted(config.metric_names - set(means.dropna(axis="columns", how="all")))
        if silent:
            raise DataRequiredError(
                f"No completed trial has reported {', '.join(silent)}, and no model can be built "
                f"without. {how_to_report(silent)}"
            )


def how_to_report(metrics: list[str]) -> str:
    """Return what a user can do about metrics that no trial has reported."""
    values = ", ".join(f"{name!r}: ..." for name in metrics)
    return (
        f"Report by client.complete_trial(index, {{{values}}}), or see that the metrics that "
        "should fetch them do."
    )


class OutcomeUnits(StandardizeY):
    """A division of each metric by a power of two near its spread, without a shift.

    Acquisition functions are optimised to absolute tolerances, so that outcomes of 1e-6 would look
    flat to them. Ax's ``StandardizeY`` would change all rows of the data at every trial; here the
    unit stays until the spread is of another order.
    """

    def __init__(
        self, *, experiment_data: ExperimentData, adapter: Adapter | None = None, **others: Any
    ) -> None:
        """Find the units, or take those that the adapter's generator remembers."""
        super().__init__(experiment_data=experiment_data, adapter=adapter, **others)
        generator = None if adapter is None else adapter.generator
        kept: dict[str, float] = getattr(generator, "units", {})
        for metric in self.Ymean:
            outcomes = experiment_data.observation_data["mean"][metric].dropna().tolist()
            if metric not in kept or is_off(kept[metric], outcomes):
                kept[metric] = unit_of(outcomes)
            self.Ymean[metric], self.Ystd[metric] = 0.0, kept[metric]


MOVED = 0.5
"""Cutoffs stay until they are off by this part of the distance from the median."""


class SteadyWinsorize(Winsorize):
    """A clipping of outcomes far on the bad side, by Tukey's rule as in Ax (q3 + 1.5 (q3 - q1)).

    The cutoffs of Ax's ``Winsorize`` move with each outcome, and each clipped row of the data with
    them. Here they stay until they are off by far, so that they move a number of times that is
    logarithmic in the spread. Then the clipped rows, as they were put in, are taken out of the
    models, and go in anew. Nothing is clipped where the quartiles coincide, nor where the strategy
    says so, nor where the criterion is an integrated variance: that learns the function everywhere.
    """

    def __init__(
        self,
        *,
        experiment_data: ExperimentData | None = None,
        adapter: Adapter | None = None,
        **others: Any,
    ) -> None:
        """Find the cutoffs, or take those that the adapter's generator remembers."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AxOptimizationWarning)
            super().__init__(experiment_data=experiment_data, adapter=adapter, **others)
        generator: Any = None if adapter is None else adapter.generator
        kind = getattr(generator, "_botorch_acqf_class", None) or AcquisitionFunction
        clips = getattr(generator, "winsorize", True) and not issubclass(kind, INTEGRATED)
        if experiment_data is None or not clips:
            self.cutoffs = {}
            return
        kept: dict[str, list[float | None]] = getattr(generator, "cutoffs", {})
        for metric, fresh in self.cutoffs.items():
            means = experiment_data.observation_data["mean"]
            outcomes = means[metric].dropna().to_numpy(dtype=float)
            if len(outcomes) == 0 or np.ptp(np.quantile(outcomes, (0.25, 0.75))) == 0.0:
                low, high = -math.inf, math.inf
            else:
                stored, middle = kept.get(metric) or (None, None), float(np.median(outcomes))
                low, high = (_steady(*pair, middle) for pair in zip(stored, fresh, strict=True))
            self.cutoffs[metric] = low, high
            kept[metric] = [None if math.isinf(value) else value for value in (low, high)]


def _steady(kept: float | None, fresh: float, middle: float) -> float:
    """Return a kept cutoff where it is near a fresh one."""
    if kept is None or math.isinf(fresh):
        return float(fresh)
    return kept if abs(kept - fresh) <= MOVED * abs(fresh - middle) else float(fresh)


class ExactCandidates(Transform):
    """A transform whose inverse, the last of all, gives a proposal of a pool the pool's own values.

    They would come back from a logarithm with another last digit, and would not be found again.
    """

    no_op_for_experiment_data = True

    def untransform_observation_features(
        self, observation_features: list[ObservationFeatures]
    ) -> list[ObservationFeatures]:
        """Set the parameters of those that say which candidate they are.

        Overrides ``Transform.untransform_observation_features``, the identity. Former trials come
        here too, to be predicted, in a process that may not know their pool.
        """
        for proposal in observation_features:
            metadata = proposal.metadata or {}
            pool = known_pool(str(metadata.get(POOL)))
            if pool is not None and metadata.get(CANDIDATE) in pool.frame.index:
                proposal.parameters.update(pool.parameters_of(metadata[CANDIDATE]))
        return observation_features
