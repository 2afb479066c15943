"""Proposals with exactly the parameters that a pool has."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from ax.adapter.base import Adapter
from ax.adapter.data_utils import ExperimentData
from ax.adapter.transforms.base import Transform
from ax.adapter.transforms.standardize_y import StandardizeY
from ax.adapter.transforms.winsorize import Winsorize
from ax.core.observation import ObservationFeatures
from ax.exceptions.core import AxOptimizationWarning, DataRequiredError
from ax.generators.torch.botorch_modular.generator import BoTorchGenerator
from botorch.exceptions.warnings import InputDataWarning
from pandas import DataFrame

from bo_stream.ax.nipv import INTEGRATED
from bo_stream.ax.pool import Name, known_pool
from bo_stream.loops.units import is_off, unit_of


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


class KeepsUnits:
    """A generator that remembers the units of the metrics, and where their outliers are clipped.

    Attributes:
        units: By metric.
        cutoffs: By metric: lower and upper one; None: there is none.
        winsorize: Whether any is clipped.
    """

    units: dict[str, float]
    cutoffs: dict[str, list[float | None]]
    winsorize: bool


class GaussianOutcomes(StandardizeY):
    """Divides each metric by a power of two near its spread, and shifts nothing.

    Acquisition functions are optimised to absolute tolerances, so that outcomes of 1e-6 would look
    flat to them. The unit stays until the spread is of another order: a transform that is learned
    anew at every trial, as Ax's, would change all rows of the data, and nothing could stream.
    """

    def __init__(
        self,
        search_space: Any = None,
        experiment_data: Any = None,
        adapter: Adapter | None = None,
        config: Any = None,
    ) -> None:
        """Find the units, or those that the adapter's generator remembers."""
        super().__init__(search_space, experiment_data, adapter, config)
        generator = None if adapter is None else adapter.generator
        kept: dict[str, float] = generator.units if isinstance(generator, KeepsUnits) else {}
        means = experiment_data.observation_data["mean"]
        for metric in self.Ymean:
            outcomes = means[metric].dropna().tolist()
            if metric not in kept or is_off(kept[metric], outcomes):
                kept[metric] = unit_of(outcomes)
            self.Ymean[metric], self.Ystd[metric] = 0.0, kept[metric]


Cutoffs = tuple[float, float]

MOVED = 0.5
"""Cutoffs stay until they are off by this part of the distance from the median."""


class SteadyWinsorize(Winsorize):
    """Clips outcomes far on the bad side, by Tukey's rule as Ax does (q3 + 1.5 (q3 - q1)).

    Ax's cutoffs move with each outcome, and each clipped row of the data with them. Here they stay
    until they are off by far, so that they move a number of times that is logarithmic in the
    spread. Then the clipped rows, as they were put in, are taken out of the models, and go in anew.
    Nothing is clipped where the quartiles coincide, nor where the strategy says so, nor where the
    criterion is an integrated variance: that learns the function everywhere.
    """

    def __init__(
        self,
        search_space: Any = None,
        experiment_data: Any = None,
        adapter: Adapter | None = None,
        config: Any = None,
    ) -> None:
        """Find the cutoffs, or those that the adapter's generator remembers."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AxOptimizationWarning)
            super().__init__(search_space, experiment_data, adapter, config)
        generator = None if adapter is None else adapter.generator
        if experiment_data is None or _takes_all(generator):
            self.cutoffs = {}
            return
        kept: dict[str, list[float | None]] = (
            generator.cutoffs if isinstance(generator, KeepsUnits) else {}
        )
        means = experiment_data.observation_data["mean"]
        for metric, fresh in self.cutoffs.items():
            outcomes = means[metric].dropna().to_numpy(dtype=float)
            self.cutoffs[metric] = _steady(_read(kept.get(metric)), _rounded(fresh), outcomes)
            kept[metric] = _written(self.cutoffs[metric])


def _takes_all(generator: Any) -> bool:
    if isinstance(generator, KeepsUnits) and not generator.winsorize:
        return True
    kind = generator._botorch_acqf_class if isinstance(generator, BoTorchGenerator) else None
    return kind is not None and issubclass(kind, INTEGRATED)


def _steady(kept: Cutoffs | None, fresh: Cutoffs, outcomes: Any) -> Cutoffs:
    if len(outcomes) == 0 or np.ptp(np.quantile(outcomes, (0.25, 0.75))) == 0.0:
        return -math.inf, math.inf
    if kept is None:
        return fresh
    middle = float(np.median(outcomes))
    return _side(kept[0], fresh[0], middle), _side(kept[1], fresh[1], middle)


def _side(kept: float, fresh: float, middle: float) -> float:
    if math.isinf(kept) or math.isinf(fresh):
        return fresh
    return kept if abs(kept - fresh) <= MOVED * abs(fresh - middle) else fresh


def _rounded(cutoffs: Cutoffs) -> Cutoffs:
    low, high = cutoffs
    return float(low), float(high)


def _written(cutoffs: Cutoffs) -> list[float | None]:
    """As Ax can store them; None: no cutoff."""
    return [None if math.isinf(value) else value for value in cutoffs]


def _read(stored: Sequence[float | None] | None) -> Cutoffs | None:
    if stored is None:
        return None
    low, high = stored
    return -math.inf if low is None else low, math.inf if high is None else high


POOL = "pool"
"""Option of an acquisition: the pool's name."""

CANDIDATE = "candidate"
"""In the metadata of a proposal: the candidate's name."""


def metadata_of(pool: str, candidate: Name) -> dict[str, Any]:
    """What Ax keeps with a proposal.

    Args:
        pool: Its name.
        candidate: Its name in the pool.
    """
    return {POOL: pool, CANDIDATE: candidate}


class ExactCandidates(Transform):
    """Gives a proposal of a pool the pool's own values, when all other transforms are undone.

    They would come back from a logarithm with another last digit, and would not be found again.
    """

    no_op_for_experiment_data = True

    def __init__(
        self,
        search_space: Any = None,
        experiment_data: Any = None,
        adapter: Adapter | None = None,
        config: Any = None,
    ) -> None:
        """Nothing is learned."""
        super().__init__(search_space, experiment_data, adapter, config)

    def untransform_observation_features(
        self, observation_features: list[ObservationFeatures]
    ) -> list[ObservationFeatures]:
        """Of those that say which candidate they are.

        Former trials come here too, to be predicted, in a process that may not know their pool.
        """
        for proposal in observation_features:
            metadata = proposal.metadata or {}
            pool = known_pool(str(metadata.get(POOL)))
            if pool is not None and metadata.get(CANDIDATE) in pool.frame.index:
                proposal.parameters.update(pool.parameters_of(metadata[CANDIDATE]))
        return observation_features
