"""Closed loops by Ax's orchestrator, which does not sleep in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ax.adapter.base import Adapter
from ax.api.client import Client
from ax.api.utils.storage import db_settings_from_storage_config
from ax.core.arm import Arm
from ax.core.experiment import Experiment
from ax.core.generator_run import GeneratorRun
from ax.core.map_metric import MapMetric
from ax.core.metric import Metric
from ax.core.observation import ObservationFeatures
from ax.core.optimization_config import OptimizationConfig
from ax.core.search_space import SearchSpace
from ax.core.trial_status import TrialStatus
from ax.generators.types import TConfig
from ax.orchestration.orchestrator import Orchestrator
from ax.orchestration.orchestrator_options import OrchestratorOptions

from bo_stream.ax.processes import ProcessMetric, ProcessRunner

Pending = dict[str, list[ObservationFeatures]]

REMEMBERED = 64
"""Failed points that are taken as pending, the latest ones; a joint sample has one value each."""


class AvoidsFailures(Adapter):
    """Takes failed points as pending ones.

    Ax forgets them. Where nothing else has come, a deterministic model then proposes a failed point
    again for ever. As pending points they are what a criterion expects an outcome of, so that
    neither they nor their neighbourhood are worth much.
    """

    def gen(
        self,
        n: int,
        search_space: SearchSpace | None = None,
        optimization_config: OptimizationConfig | None = None,
        pending_observations: Pending | None = None,
        fixed_features: ObservationFeatures | None = None,
        model_gen_options: TConfig | None = None,
    ) -> GeneratorRun:
        """As Ax's."""
        return super().gen(
            n=n,
            search_space=search_space,
            optimization_config=optimization_config,
            pending_observations=self._with_failures(pending_observations or {}),
            fixed_features=fixed_features,
            model_gen_options=model_gen_options,
        )

    def _with_failures(self, pending: Pending) -> Pending:
        space = self._search_space
        failed = [arm for arm in self.failed if space.check_membership(arm.parameters)]
        latest = [ObservationFeatures.from_arm(arm) for arm in failed[-REMEMBERED:]]
        if not latest:
            return pending
        metrics = {*self._experiment.metrics, *pending}
        return {metric: [*pending.get(metric, []), *latest] for metric in metrics}

    @property
    def failed(self) -> list[Arm]:
        """Distinct arms of which no outcome is to be expected, in order of their trials."""
        return failed_arms(self._experiment)


def failed_arms(experiment: Experiment) -> list[Arm]:
    """Distinct arms of failed trials that no other trial has evaluated, in order of the trials.

    Ax names equal points alike.
    """
    indices = sorted(experiment.trial_indices_by_status[TrialStatus.FAILED])
    failed = {arm.name: arm for index in indices for arm in experiment.trials[index].arms}
    if failed:
        for trial in experiment.trials_by_status[TrialStatus.COMPLETED]:
            for arm in trial.arms:
                failed.pop(arm.name, None)
    return list(failed.values())


def orchestrator_options(workers: int, **options: Any) -> OrchestratorOptions:
    """Settings with which Ax's orchestrator starts a trial whenever a worker is free.

    By its own it sleeps a second after each. The runner's poll should wait, as that of
    :class:`ProcessRunner` does; otherwise give ``init_seconds_between_polls``.

    Args:
        workers: Most trials that run at once.
        options: Others of ``OrchestratorOptions``, or instead of these.
    """
    ours = {
        "max_pending_trials": workers,
        "run_trials_in_batches": True,
        "min_seconds_before_poll": 0.0,
        "init_seconds_between_polls": 0,
    }
    return OrchestratorOptions(**{**ours, **options})


def run_trials(
    client: Client,
    function: str | Callable[[dict[str, Any]], Any],
    max_trials: int,
    workers: int = 1,
    timeout: float | None = None,
    retries: int = 0,
    **options: Any,
) -> None:
    """As ``client.run_trials``, with a function that is evaluated in worker processes.

    A script that calls it needs its code under ``if __name__ == "__main__":``.

    Args:
        client: With parameters, objective and strategy. Its runner is replaced, and so are those
            metrics that do not report anything by themselves.
        function: See :class:`ProcessRunner`.
        max_trials: How many more.
        workers: Most processes.
        timeout: Seconds that one attempt may take; None: any time.
        retries: How often a failed attempt is made again.
        options: Of Ax's ``OrchestratorOptions``, such as ``tolerated_trial_failure_rate``.

    Raises:
        UsageError: An argument is out of range, or other processes would not find the function.
        FailureRateExceededError: Of Ax: more than half of the trials, five at least, have failed.
        UnsupportedError: Of Ax: a trial is running that something else must complete.

    Example:
        >>> run_trials(client, evaluate, max_trials=40, workers=4, timeout=60.0)
    """
    runner = ProcessRunner(function, workers, timeout, retries)
    client._set_runner(runner)
    client._set_metrics(_reporting(client))
    storage = client._storage_config
    orchestrator = Orchestrator(
        client._experiment,
        client._generation_strategy_or_choose(),
        orchestrator_options(workers, **options),
        None if storage is None else db_settings_from_storage_config(storage),
    )
    try:
        orchestrator.run_n_trials(max_trials)
    finally:
        runner.close()


def _reporting(client: Client) -> list[Metric]:
    metrics = client._experiment.metrics.values()
    silent = [metric for metric in metrics if type(metric) in (Metric, MapMetric)]
    return [ProcessMetric(metric.name, metric.lower_is_better) for metric in silent]
