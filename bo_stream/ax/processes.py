"""Trials of Ax whose arms are evaluated in processes of their own."""

from __future__ import annotations

import atexit
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd
from ax.core.base_trial import BaseTrial
from ax.core.data import Data
from ax.core.experiment import Experiment
from ax.core.map_metric import MapMetric
from ax.core.metric import Metric, MetricFetchE, MetricFetchResult
from ax.core.runner import Runner
from ax.core.trial_status import TrialStatus
from ax.exceptions.core import UnsupportedError
from ax.utils.common.result import Err, Ok

from bo_stream.loops.errors import UsageError
from bo_stream.loops.optimization.evaluation import Outcome, Task, Workers
from bo_stream.loops.optimization.objectives import (
    FunctionOfParameters,
    NoOutcomeError,
    Report,
    complete,
)

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


Arm: TypeAlias = tuple[int, str]
"""Index of a trial and name of one of its arms."""


@dataclass(frozen=True)
class Result:
    """What came of an arm.

    Attributes:
        report: Values by metric, or None.
        error: Why there are none, or None.
    """

    report: Report | None
    error: str | None


@dataclass
class _Job:
    arm: Arm
    task: Task[Mapping[str, Any]]


class Evaluations:
    """Worker processes and the arms that they are at."""

    def __init__(self, function: str, workers: int, timeout: float | None, retries: int) -> None:
        """Start processes as they are needed.

        Args:
            function: ``package.module:function``.
            workers: Most processes.
            timeout: Seconds after which an attempt has failed and its process is killed.
            retries: How often a failed attempt is made again.

        Raises:
            UsageError: workers or timeout is out of range.
        """
        self._workers = Workers(FunctionOfParameters(function), workers, timeout)
        self._retries = retries
        self._jobs: dict[int, _Job] = {}
        self._results: dict[Arm, Result] = {}
        self._keys = 0

    def begin(self, arm: Arm, parameters: Mapping[str, Any]) -> None:
        """Evaluate an arm when a process is free."""
        self._submit(_Job(arm, Task(self._keys, parameters, 0)))
        self._keys += 1

    def _submit(self, job: _Job) -> None:
        self._jobs[job.task.key] = job
        self._workers.submit(job.task)

    def at_work(self) -> set[Arm]:
        """Arms that nothing has come of yet."""
        return {job.arm for job in self._jobs.values()}

    def take(self, arm: Arm) -> Result | None:
        """What came of an arm, once; None: nothing yet."""
        return self._results.pop(arm, None)

    def wait(self, seconds: float) -> None:
        """Until something has come of an arm, or no longer than this; then take in all there is.

        Raises:
            UsageError: A process cannot even be started.
        """
        end, came = time.monotonic() + seconds, False
        while self._jobs:
            left = 0.0 if came else max(0.0, end - time.monotonic())
            outcome = self._workers.poll(left)
            if outcome is not None:
                came = self._settle(outcome) or came
            elif left == 0.0:
                return

    def _settle(self, outcome: Outcome[Report]) -> bool:
        job = self._jobs.pop(outcome.key)
        task = job.task
        if outcome.error is not None and task.attempt < self._retries:
            self._submit(_Job(job.arm, Task(task.key, task.X, task.attempt + 1)))
            return False
        self._results[job.arm] = Result(outcome.value, outcome.error)
        return True

    def cancel(self, trial: int) -> None:
        """Give up the arms of a trial."""
        for key, job in list(self._jobs.items()):
            if job.arm[0] == trial:
                self._workers.cancel(key)
                del self._jobs[key]
        for arm in [arm for arm in self._results if arm[0] == trial]:
            del self._results[arm]

    def close(self) -> None:
        """End the processes."""
        self._workers.close()
        self._jobs.clear()


PATIENCE = 1.0
"""Seconds for which a poll waits until something comes."""


class ProcessRunner(Runner):
    """Evaluates a function of a trial's parameters in worker processes.

    A trial whose function raises, hangs beyond the timeout, dies, or returns no finite number for
    some metric is marked failed, with the reason; nothing of it reaches the model. So is a trial of
    several arms of which one fails. Values and reasons are kept in the trial's metadata, hence in
    storage. A trial that a former process had begun is evaluated again. Storage has the function by
    its name, which is imported when a trial runs: go on only with experiments that you trust.

    A poll waits until something has come, so that Ax's orchestrator need not sleep between polls:
    see :func:`orchestrator_options`, and :func:`run_trials`, which does it all.
    """

    def __init__(
        self,
        function: str | Callable[[dict[str, Any]], Any],
        workers: int = 1,
        timeout: float | None = None,
        retries: int = 0,
    ) -> None:
        """Start processes when there are trials.

        Args:
            function: Of a dict of parameters; returns a dict of metrics, each a number or a tuple
                of mean and standard error, or one such value where there is one metric. At the top
                level of a module, or by name: ``package.module:function``.
            workers: Most processes.
            timeout: Seconds that one attempt may take; None: any time.
            retries: How often a failed attempt is made again.

        Raises:
            UsageError: Of workers, timeout or retries one is out of range, or the function has no
                name by which another process finds it.
        """
        if retries < 0:
            raise UsageError(f"Expected retries of at least 0, got {retries}.")
        self.function = function if isinstance(function, str) else _name_of(function)
        self.workers, self.timeout, self.retries = workers, timeout, retries
        self._evaluations = Evaluations(self.function, workers, timeout, retries)
        self._is_open = False

    def run(self, trial: BaseTrial) -> dict[str, Any]:
        """Begin a trial.

        Raises:
            UnsupportedError: The experiment has a metric that would never report.
        """
        _check_metrics(trial.experiment)
        self._begin(trial)
        return {RECORD: {"outcomes": {}}}

    def _begin(self, trial: BaseTrial) -> None:
        if not self._is_open:
            atexit.register(self.close)  # which comes before multiprocessing waits for processes
            self._is_open = True
        for arm in trial.arms:
            self._evaluations.begin((trial.index, arm.name), arm.parameters)

    def poll_available_capacity(self) -> int:
        """Number of trials that would begin at once."""
        trials = {trial for trial, _ in self._evaluations.at_work()}
        return max(0, self.workers - len(trials))

    def poll_trial_status(self, trials: Iterable[BaseTrial]) -> dict[TrialStatus, set[int]]:
        """Wait a while, then say what has become of trials.

        Raises:
            UnsupportedError: One was not begun by a runner of this kind, or no process starts.
        """
        trials = list(trials)
        self._resume([trial for trial in trials if trial.status == TrialStatus.RUNNING])
        try:
            self._evaluations.wait(PATIENCE)
        except UsageError as error:
            raise UnsupportedError(str(error)) from error
        statuses: dict[TrialStatus, set[int]] = defaultdict(set)
        for trial in trials:
            self._collect(trial)
            statuses[_status_of(trial)].add(trial.index)
        return dict(statuses)

    def _resume(self, running: list[BaseTrial]) -> None:
        _check_ours(running)
        at_work = {index for index, _ in self._evaluations.at_work()}
        for trial in running:
            if trial.index not in at_work and _status_of(trial) == TrialStatus.RUNNING:
                self._begin(trial)

    def _collect(self, trial: BaseTrial) -> None:
        for arm in trial.arms:
            result = self._evaluations.take((trial.index, arm.name))
            if result is not None:
                _record(trial, arm.name, result)
        if "error" in trial.run_metadata.get(RECORD, {}):
            self._evaluations.cancel(trial.index)

    def poll_exception(self, trial: BaseTrial) -> str:
        """Why a trial has failed."""
        return str(trial.run_metadata.get(RECORD, {}).get("error", "no reason is known"))

    def stop(self, trial: BaseTrial, reason: str | None = None) -> dict[str, Any]:
        """Give up a trial; a process that is at it is killed."""
        self._evaluations.cancel(trial.index)
        return {}

    def close(self) -> None:
        """End the processes. Trials that they were at are evaluated again when they are polled."""
        self._evaluations.close()
        atexit.unregister(self.close)
        self._is_open = False


def _record(trial: BaseTrial, arm: str, result: Result) -> None:
    record = trial.run_metadata[RECORD]
    try:
        if result.report is None:
            raise NoOutcomeError(result.error)
        names = [m.name for m in trial.experiment.metrics.values() if isinstance(m, ProcessMetric)]
        record["outcomes"][arm] = complete(result.report, names)
    except NoOutcomeError as error:
        record["error"] = f"{arm}: {error}"


def _status_of(trial: BaseTrial) -> TrialStatus:
    record: Mapping[str, Any] = trial.run_metadata.get(RECORD, {})
    if "error" in record:
        return TrialStatus.FAILED
    if set(record.get("outcomes", ())) == {arm.name for arm in trial.arms}:
        return TrialStatus.COMPLETED
    return trial.status


def _check_ours(running: list[BaseTrial]) -> None:
    others = [str(trial.index) for trial in running if RECORD not in trial.run_metadata]
    if others:
        raise UnsupportedError(
            f"Trials {', '.join(others)} are running, but no ProcessRunner began them: complete "
            "them, or call client.mark_trial_failed or client.mark_trial_abandoned, first."
        )


def _check_metrics(experiment: Experiment) -> None:
    silent = [m.name for m in experiment.metrics.values() if type(m) in (Metric, MapMetric)]
    if silent:
        metrics = ", ".join(f"ProcessMetric({name!r})" for name in silent)
        raise UnsupportedError(
            f"Nothing reports the metrics {', '.join(silent)}: call client.configure_metrics("
            f"[{metrics}]), or run the trials by bo_stream.ax.run_trials, which does so."
        )


def _name_of(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "")
    if getattr(sys.modules.get(module or ""), name, None) is not function:
        raise UsageError(
            f"Expected function at the top level of a module, where other processes find it, got "
            f"{function!r}."
        )
    return f"{module}:{name}"
