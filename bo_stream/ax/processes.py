"""Closed loops of Ax whose trials are evaluated in worker processes, or on a cluster.

:func:`run_trials` puts together a :class:`ProcessRunner`, which starts and polls trials,
:class:`ProcessMetric`, which reads their outcomes, and an orchestrator that does not sleep.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any, TypeAlias

import pandas as pd
from ax.api.client import Client
from ax.api.utils.storage import db_settings_from_storage_config
from ax.core.base_trial import BaseTrial
from ax.core.data import Data
from ax.core.experiment import Experiment
from ax.core.map_metric import MapMetric
from ax.core.metric import Metric, MetricFetchE, MetricFetchResult
from ax.core.runner import Runner
from ax.core.trial_status import TrialStatus
from ax.exceptions.core import UnsupportedError
from ax.orchestration.orchestrator import Orchestrator
from ax.orchestration.orchestrator_options import OrchestratorOptions
from ax.utils.common.result import Err, Ok

from bo_stream.errors import UsageError, check_whole
from bo_stream.executors.processes import executor_of, places
from bo_stream.loops.optimization.executed import Executed, check_timeout, worker_processes
from bo_stream.loops.optimization.objectives import (
    FunctionOfParameters,
    NoOutcomeError,
    Outcome,
    Report,
    Task,
    complete,
)

RECORD = "bo_stream.ax.ProcessRunner"
"""Key in a trial's metadata: outcomes by arm and metric, and an error if there is one."""

PATIENCE = 1.0
"""Seconds for which a poll waits for an outcome."""

_ArmKey: TypeAlias = tuple[int, str]
"""Index of a trial and name of one of its arms."""


def run_trials(
    client: Client,
    function: str | Callable[[dict[str, Any]], Any],
    max_trials: int,
    workers: int | None = None,
    timeout: float | None = None,
    retries: int = 0,
    executor: str | Executor | None = None,
    **options: Any,
) -> None:
    """Run trials as ``client.run_trials`` does, with a function evaluated by workers.

    A script that calls it needs its code under ``if __name__ == "__main__":``.

    Args:
        client: A client with parameters, objective and strategy. Its runner is replaced, and so are
            those metrics that do not report anything by themselves.
        function: Function of a dict of parameters that returns a dict of metrics, each a number or
            a tuple of mean and standard error, or one such value where there is one metric. At the
            top level of a module, or by name: ``package.module:function``.
        max_trials: Number of further trials.
        workers: Largest number of trials at once, and of processes. None: as many as the executor
            has places when the run begins; 1 without an executor.
        timeout: Seconds that one attempt may take; None: any time.
        retries: Number of further attempts after one has failed.
        executor: Where trials are evaluated instead of in processes of this machine:
            ``threads:N``, ``dask:ADDRESS``, ``ray``, or any executor of ``concurrent.futures``; see
            ``bo_stream.executors.executor_of``.
        options: Settings of ``OrchestratorOptions``, such as ``tolerated_trial_failure_rate``.

    Raises:
        UsageError: An argument is out of range, other processes would not find the function, or
            the executor is not available.
        FailureRateExceededError: Of Ax: more than half of the trials, five at least, have failed.
        UnsupportedError: Of Ax: a trial is running that something else must complete.

    Example:
        >>> run_trials(client, evaluate, max_trials=40, workers=4, timeout=60.0)
    """
    runner = ProcessRunner(function, workers, timeout, retries)
    if executor is not None:
        runner.use(executor)
    client._set_runner(runner)
    silent = _silent(client._experiment)
    client._set_metrics([ProcessMetric(each.name, each.lower_is_better) for each in silent])
    storage = client._storage_config
    orchestrator = Orchestrator(
        client._experiment,
        client._generation_strategy_or_choose(),
        orchestrator_options(runner._places, **options),
        None if storage is None else db_settings_from_storage_config(storage),
    )
    try:
        orchestrator.run_n_trials(max_trials)
    finally:
        runner.close()


def orchestrator_options(workers: int, **options: Any) -> OrchestratorOptions:
    """Return settings with which Ax's orchestrator starts a trial whenever a worker is free.

    By default it sleeps for a second after each trial. The runner's poll should wait instead, as in
    :class:`ProcessRunner`; with another runner give ``init_seconds_between_polls``.

    Args:
        workers: Largest number of trials that run at once.
        options: Other settings of ``OrchestratorOptions``, or other values of these.
    """
    ours = {
        "max_pending_trials": workers,
        "run_trials_in_batches": True,
        "min_seconds_before_poll": 0.0,
        "init_seconds_between_polls": 0,
    }
    return OrchestratorOptions(**{**ours, **options})


class ProcessMetric(Metric):
    """A metric of Ax whose values a :class:`ProcessRunner` has put into a trial's metadata."""

    def __init__(self, name: str, lower_is_better: bool | None = None) -> None:
        """Make a metric by its name in the function's results, with its direction if known."""
        super().__init__(name, lower_is_better)

    def fetch_trial_data(self, trial: BaseTrial, **kwargs: Any) -> MetricFetchResult:
        """Return a row for each arm, or why there is none.

        Overrides ``Metric.fetch_trial_data``, by which Ax reads the outcomes of a trial.
        """
        outcomes = trial.run_metadata.get(RECORD, {}).get("outcomes", {})
        missing = [arm.name for arm in trial.arms if self.name not in outcomes.get(arm.name, {})]
        if missing:
            reason = (
                f"trial {trial.index} has no value of {self.name} for {', '.join(missing)}: only "
                "a ProcessRunner leaves them, see bo_stream.ax.run_trials"
            )
            return Err(MetricFetchE(message=reason, exception=None))
        rows = [
            {
                "trial_index": trial.index,
                "arm_name": arm.name,
                "metric_name": self.name,
                "metric_signature": self.signature,
                "mean": mean,
                "sem": float("nan") if sem is None else sem,
            }
            for arm in trial.arms
            for mean, sem in [outcomes[arm.name][self.name]]
        ]
        return Ok(Data(df=pd.DataFrame(rows)))


class ProcessRunner(Runner):
    """A runner of Ax that evaluates a function of a trial's parameters in worker processes.

    A trial whose function raises, hangs beyond the timeout, dies, or returns no finite number for
    some metric is marked failed, with the reason, and has no outcome. So is a trial of several arms
    of which one fails. Values and reasons are written to the trial's metadata, hence to storage. A
    trial that a previous process had started is evaluated again. Storage has the function by its
    name, which is imported when a trial runs: go on only with experiments that you trust.
    """

    def __init__(
        self,
        function: str | Callable[[dict[str, Any]], Any],
        workers: int | None = None,
        timeout: float | None = None,
        retries: int = 0,
    ) -> None:
        """Check the settings, see :func:`run_trials`; processes start when there are trials.

        Raises:
            UsageError: One is out of range, or other processes would not find the function.
        """
        if workers is not None:
            check_whole("workers", workers, 1)
        check_whole("retries", retries, 0)
        check_timeout(timeout)
        if not isinstance(function, str):
            module = getattr(function, "__module__", None)
            name = getattr(function, "__qualname__", "")
            if getattr(sys.modules.get(module or ""), name, None) is not function:
                raise UsageError(
                    f"Expected function at the top level of a module, where other processes find "
                    f"it, got {function!r}."
                )
            function = f"{module}:{name}"
        self.function = function
        self.workers, self.timeout, self.retries = workers, timeout, retries
        self._executor: str | Executor | None = None
        self._opened = ExitStack()
        self._evaluator: Executed[Mapping[str, Any], Report] | None = None
        self._jobs: dict[int, tuple[_ArmKey, Task[Mapping[str, Any]]]] = {}
        self._outcomes: dict[_ArmKey, Outcome[Report]] = {}
        self._started = 0

    @property
    def _places(self) -> int:
        """Number of trials at once: as given, else as many as an executor has now, or 1."""
        if self.workers is not None or self._executor is None:
            return self.workers or 1
        return self._open().capacity

    def use(self, executor: str | Executor) -> None:
        """Evaluate on an executor instead of in processes; Ax does not store it.

        Raises:
            UsageError: It is not available, or has workers of another version of bo_stream or
                torch.
        """
        self.close()
        self._executor = executor
        self._open()

    def _open(self) -> Executed[Mapping[str, Any], Report]:
        """Return the evaluator, which is started if need be."""
        if self._evaluator is None:
            work, enter = FunctionOfParameters(self.function), self._opened.enter_context
            if self._executor is None:
                self._evaluator = enter(worker_processes(work, self._places, self.timeout))
            else:
                opened = enter(executor_of(self._executor, self.workers))
                at_once = self.workers or places(self._executor)
                self._evaluator = enter(Executed(work, opened, at_once, self.timeout))
        return self._evaluator

    def run(self, trial: BaseTrial) -> dict[str, Any]:
        """Start a trial and return its metadata; overrides ``Runner.run``, which is abstract.

        Raises:
            UnsupportedError: The experiment has a metric that would never report.
        """
        silent = [metric.name for metric in _silent(trial.experiment)]
        if silent:
            metrics = ", ".join(f"ProcessMetric({name!r})" for name in silent)
            raise UnsupportedError(
                f"Nothing reports the metrics {', '.join(silent)}: call client.configure_metrics("
                f"[{metrics}]), or run the trials by bo_stream.ax.run_trials, which does so."
            )
        self._start(trial)
        return {RECORD: {"outcomes": {}}}

    def _start(self, trial: BaseTrial) -> None:
        """Evaluate the arms of a trial when a process is free."""
        for arm in trial.arms:
            self._submit((trial.index, arm.name), Task(self._started, arm.parameters, 0))
            self._started += 1

    def _submit(self, arm: _ArmKey, task: Task[Mapping[str, Any]]) -> None:
        """Submit the evaluation of an arm."""
        self._jobs[task.key] = arm, task
        self._open().submit(task)

    def _at_work(self) -> set[int]:
        """Return the indices of trials with arms that have no outcome yet."""
        return {trial for (trial, _), _ in self._jobs.values()}

    def poll_available_capacity(self) -> int:
        """Return the number of trials that would start at once.

        Overrides ``Runner.poll_available_capacity``, by which Ax sizes a batch of new trials.
        """
        return max(0, self._places - len(self._at_work()))

    def poll_trial_status(self, trials: Iterable[BaseTrial]) -> dict[TrialStatus, set[int]]:
        """Wait for an outcome, at most ``PATIENCE``, and return the trials by their status.

        Overrides ``Runner.poll_trial_status``, which Ax's orchestrator calls between its sleeps:
        a poll that waits makes these needless.

        Raises:
            UnsupportedError: A trial was not started by a runner of this kind, or no process
                starts.
        """
        trials = list(trials)
        running = [trial for trial in trials if trial.status == TrialStatus.RUNNING]
        others = [str(trial.index) for trial in running if RECORD not in trial.run_metadata]
        if others:
            raise UnsupportedError(
                f"Trials {', '.join(others)} are running, but no ProcessRunner began them: "
                "complete them, or call client.mark_trial_failed or client.mark_trial_abandoned, "
                "first."
            )
        at_work = self._at_work()
        for trial in running:  # some were started by a previous process
            if trial.index not in at_work and _status_of(trial) == TrialStatus.RUNNING:
                self._start(trial)
        try:
            self._wait()
        except UsageError as error:
            raise UnsupportedError(str(error)) from error
        statuses: dict[TrialStatus, set[int]] = defaultdict(set)
        for trial in trials:
            for arm in trial.arms:
                outcome = self._outcomes.pop((trial.index, arm.name), None)
                if outcome is None:
                    continue
                record = trial.run_metadata[RECORD]
                metrics = trial.experiment.metrics.values()
                names = [each.name for each in metrics if isinstance(each, ProcessMetric)]
                try:
                    if outcome.value is None:
                        raise NoOutcomeError(outcome.error)
                    record["outcomes"][arm.name] = complete(outcome.value, names)
                except NoOutcomeError as error:
                    record["error"] = f"{arm.name}: {error}"
            if "error" in trial.run_metadata.get(RECORD, {}):
                self._cancel(trial.index)
            statuses[_status_of(trial)].add(trial.index)
        return dict(statuses)

    def _wait(self) -> None:
        """Wait for an outcome, at most ``PATIENCE``, then collect all that there are.

        A failed attempt is repeated up to ``retries`` times, and is no outcome before.
        """
        end, came = time.monotonic() + PATIENCE, False
        while self._jobs:
            left = 0.0 if came else max(0.0, end - time.monotonic())
            outcome = self._open().poll(left)
            if outcome is None:
                if left == 0.0:
                    return
                continue
            arm, task = self._jobs.pop(outcome.key)
            if outcome.error is not None and task.attempt < self.retries:
                self._submit(arm, Task(task.key, task.X, task.attempt + 1))
            else:
                self._outcomes[arm] = outcome
                came = True

    def _cancel(self, trial: int) -> None:
        """Give up the arms of a trial."""
        for key, (arm, _) in list(self._jobs.items()):
            if arm[0] == trial:
                self._open().cancel(key)
                del self._jobs[key]
        self._outcomes = {arm: own for arm, own in self._outcomes.items() if arm[0] != trial}

    def poll_exception(self, trial: BaseTrial) -> str:
        """Return why a trial has failed; overrides ``Runner.poll_exception``, which raises."""
        return str(trial.run_metadata.get(RECORD, {}).get("error", "no reason is known"))

    def stop(self, trial: BaseTrial, reason: str | None = None) -> dict[str, Any]:
        """Give up a trial and stop its evaluation; overrides ``Runner.stop``, which raises."""
        self._cancel(trial.index)
        return {}

    def close(self) -> None:
        """End the processes. Their unfinished trials are evaluated again when they are polled."""
        self._opened.close()
        self._evaluator = None
        self._jobs.clear()


def _status_of(trial: BaseTrial) -> TrialStatus:
    """Return the status of a trial by its metadata."""
    record: Mapping[str, Any] = trial.run_metadata.get(RECORD, {})
    if "error" in record:
        return TrialStatus.FAILED
    if set(record.get("outcomes", ())) == {arm.name for arm in trial.arms}:
        return TrialStatus.COMPLETED
    return trial.status


def _silent(experiment: Experiment) -> list[Metric]:
    """Return the metrics that do not report anything by themselves."""
    return [m for m in experiment.metrics.values() if type(m) in (Metric, MapMetric)]
