"""Ax's transforms for streaming models: a row of the data changes only when its outcome does.

Ax's own transforms of outcomes are learned again at every trial and so change every row; these
store their parameters in the generator, and Ax stores them with it. Further transforms check the
data, and restore the values of a pool's candidates.
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
from bo_stream.loops.optimization.optimizer import is_off, unit_of
from bo_stream.loops.optimization.trials import LARGEST


class FiniteOutcomes(Transform):
    """A transform that treats infinite outcomes, or of too large an error, as not reported.

    The square of a standard error above ``LARGEST`` overflows in a model. A warning names the trial
    and the metric of each. Other metrics of the trial stay.

    Attributes:
        set_aside: Trial, arm and metric of each such outcome.
    """

    set_aside: list[tuple[int, str, str]]

    def __init__(self, *, experiment_data: ExperimentData | None = None, **others: Any) -> None:
        """Find these outcomes."""
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
                f"Outcomes that are infinite, or of a standard error above {LARGEST:g}, are set "
                f"aside: {named}. To replace one, report it again by client.attach_data.",
                InputDataWarning,
                stacklevel=2,
            )

    def transform_experiment_data(self, experiment_data: ExperimentData) -> ExperimentData:
        """Return the data without these outcomes, a copy where there are any.

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
    """Return which rows have such an outcome or standard error, by metrics that have some."""
    infinite = {
        metric: np.isinf(observed["mean", metric].to_numpy(float))
        | (np.abs(observed["sem", metric].to_numpy(float)) > LARGEST)
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
    """Return the advice of an error about metrics that no trial has reported."""
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
        units: dict[str, float] = getattr(generator, "units", {})
        for metric in self.Ymean:
            outcomes = experiment_data.observation_data["mean"][metric].dropna().tolist()
            if metric not in units or is_off(units[metric], outcomes):
                units[metric] = unit_of(outcomes)
            self.Ymean[metric], self.Ystd[metric] = 0.0, units[metric]


MOVED = 0.5
"""Cutoffs stay until they are off by this fraction of the distance from the median."""


class SteadyWinsorize(Winsorize):
    """A clipping of outcomes far on the bad side, by Tukey's rule as in Ax (q3 + 1.5 (q3 - q1)).

    The cutoffs of Ax's ``Winsorize`` move with each outcome, and each clipped row of the data with
    them. Here they stay until they are off by far, so that they move a number of times that is
    logarithmic in the spread. Then the clipped rows are taken out of the models, and put in again
    with their new values. Nothing is clipped where the quartiles coincide, nor where the strategy
    forbids it, nor for an integrated variance, which learns the function everywhere.
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
        stored: dict[str, list[float | None]] = getattr(generator, "cutoffs", {})
        for metric, fresh in self.cutoffs.items():
            means = experiment_data.observation_data["mean"]
            outcomes = means[metric].dropna().to_numpy(dtype=float)
            if len(outcomes) == 0 or np.ptp(np.quantile(outcomes, (0.25, 0.75))) == 0.0:
                low, high = -math.inf, math.inf
            else:
                previous, middle = stored.get(metric) or (None, None), float(np.median(outcomes))
                low, high = (_steady(*pair, middle) for pair in zip(previous, fresh, strict=True))
            self.cutoffs[metric] = low, high
            stored[metric] = [None if math.isinf(value) else value for value in (low, high)]


def _steady(previous: float | None, fresh: float, middle: float) -> float:
    """Return the previous cutoff where it is near a fresh one, else the fresh one."""
    if previous is None or math.isinf(fresh):
        return float(fresh)
    return previous if abs(previous - fresh) <= MOVED * abs(fresh - middle) else float(fresh)


class ExactCandidates(Transform):
    """A transform whose inverse, the last of all, gives a proposal of a pool the pool's own values.

    Returned from a logarithm they would have another last digit, and no candidate would equal them.
    """

    no_op_for_experiment_data = True

    def untransform_observation_features(
        self, observation_features: list[ObservationFeatures]
    ) -> list[ObservationFeatures]:
        """Set the parameters of proposals whose metadata name a candidate.

        Overrides ``Transform.untransform_observation_features``, the identity. Previous trials are
        untransformed too, to be predicted, in a process that may not know their pool.
        """
        for proposal in observation_features:
            metadata = proposal.metadata or {}
            pool = known_pool(str(metadata.get(POOL)))
            if pool is not None and metadata.get(CANDIDATE) in pool.frame.index:
                proposal.parameters.update(pool.parameters_of(metadata[CANDIDATE]))
        return observation_features


TRANSFORMS = (ExactCandidates, FiniteOutcomes, OutcomeUnits, ReportedMetrics, SteadyWinsorize)
"""Transforms that Ax stores by name."""
