"""Closed loops by Ax's orchestrator, which does not sleep in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ax.api.client import Client
from ax.api.utils.storage import db_settings_from_storage_config
from ax.core.map_metric import MapMetric
from ax.core.metric import Metric
from ax.orchestration.orchestrator import Orchestrator
from ax.orchestration.orchestrator_options import OrchestratorOptions

from bo_stream.ax.process_metric import ProcessMetric
from bo_stream.ax.process_runner import ProcessRunner


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
