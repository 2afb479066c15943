"""An optimization from its start to its results, as the command runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from bo_stream.diagnostics.trust import TrustReport, mark_hand_overs
from bo_stream.errors import UsageError, check_whole, encodable, make_plain
from bo_stream.executors.processes import has_address, parsed
from bo_stream.loops.models import model_record
from bo_stream.loops.optimization.asynchronous import AsynchronousRun
from bo_stream.loops.optimization.executed import PointEvaluator, check_timeout, point_evaluator
from bo_stream.loops.optimization.objectives import Objective, Task
from bo_stream.loops.optimization.optimizer import Best, Optimizer, parsed_optimizer, save_optimizer
from bo_stream.loops.optimization.region_search import RegionSurrogate
from bo_stream.loops.optimization.trials import (
    STATUSES,
    Status,
    Trial,
    all_failed,
)
from bo_stream.loops.run import (
    OPTIMIZATION,
    SECONDS_BETWEEN_CHECKPOINTS,
    CoreWatch,
    StopRequest,
    check_not_shorter,
    from_record,
    record_file,
    run_with_checkpoints,
    write_files,
    write_picture,
    write_trust,
)

_SLOW_SECONDS = 1.0
"""Seconds of an evaluation beyond which its outcome is saved at once."""


class OptimizationCampaign:
    """Steps of asking, evaluating and telling, that can be stopped at any outcome.

    The outcomes of a step come in any order; the next step waits for all, so that any number of
    workers gives the same run. If the plan is asynchronous no evaluation waits for another one: a
    step is then as many trials as a choice has, in the order in which their evaluations end. So
    either has the same number of trials, and a run may go on as the other.

    Attributes:
        objective: The function that is optimised.
        optimizer: Trials and model.
        plan: How much is to be done, and how.
        steps: Steps that are done.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        plan: Plan,
        steps: list[OptimizationStep] | None = None,
        open_step: OptimizationStep | None = None,
    ) -> None:
        """Put the parts together; a plan of fewer steps than are done is a ``UsageError``."""
        self.objective, self.optimizer, self.plan = objective, optimizer, plan
        self.steps = [] if steps is None else steps
        self._open = open_step
        self._best: Best | None = None
        self._watch = CoreWatch()
        check_not_shorter(self.steps_done, plan.total)

    @classmethod
    def resume(cls, folder: Path, trusted: Collection[str] = (), **changes: Any) -> Self:
        """Go on with the run that a folder holds, to the same candidates as without a stop.

        Nothing in the folder is executed, and no address in it is connected to: a run on a cluster
        is given its ``executor`` again.

        Args:
            folder: Folder of :meth:`save`.
            trusted: Functions of your own, ``package.module:function``, that the run may call: as
                the objective, or as a builder of its acquisition function.
            changes: New values of the plan's attributes.

        Raises:
            UsageError: No such run, a damaged one, one that names a function that is not trusted,
                its function is not to be found any more, or it used workers at an address and
                ``changes`` have no ``executor``.
        """
        with OPTIMIZATION.opened(folder) as content:
            optimizer, run = parsed_optimizer(folder, content, trusted), content["run"]
            if run is None:
                raise UsageError(
                    f"{folder} holds an optimizer without a run: load_optimizer reads it."
                )
            objective = from_record(Objective, run["objective"])
            objective.prepare()
            steps = [from_record(OptimizationStep, step) for step in run["steps"]]
            opened = None if run["open"] is None else from_record(OptimizationStep, run["open"])
            plan = from_record(Plan, run["plan"])
        if plan.names_address and "executor" not in changes:
            raise UsageError(
                f"The run in {folder} was evaluated on {plan.executor}. If you trust it, name it "
                "again: --executor, or executor=; or name another one."
            )
        campaign = cls(objective, optimizer, replace(plan, **changes), steps, opened)
        if plan.asynchronous:
            campaign._take_up_outcomes()
            check_not_shorter(campaign.steps_done, campaign.plan.total)
        return campaign

    def save(self, folder: Path) -> None:
        """Write a checkpoint; see :func:`bo_stream.loops.optimization.optimizer.save_optimizer`."""
        opened = None if self._open is None else asdict(self._open)
        save_optimizer(folder, self.optimizer, {**self._record(), "open": opened})

    def _record(self) -> dict[str, Any]:
        """Return all but the open step, which another thread may be changing."""
        return {
            "objective": asdict(self.objective),
            "plan": asdict(self.plan),
            "steps": [asdict(step) for step in self.steps],
            "open": None,
        }

    @property
    def steps_done(self) -> int:
        """Number of steps after the initial points."""
        return max(0, len(self.steps) - 1)

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return len(self.steps) > self.plan.total

    @property
    def seconds(self) -> float:
        """Time spent in steps, over all parts of the run; until the last checkpoint if killed."""
        return sum(step.seconds for step in self.steps)

    def evaluator(self, executor: Executor | None = None) -> AbstractContextManager[PointEvaluator]:
        """Return a context of an evaluator: as planned, or on an executor of one's own.

        Raises:
            UsageError: Workers cannot be had, or have another version of bo_stream or torch.
        """
        plan = self.plan
        chosen = plan.executor if executor is None else executor
        return point_evaluator(self.objective, plan.workers, plan.timeout, chosen, plan.resources)

    def run_in(
        self,
        folder: Path,
        evaluator: PointEvaluator,
        stop: StopRequest,
        on_event: Callable[[Event], None],
        seconds_between_checkpoints: float = SECONDS_BETWEEN_CHECKPOINTS,
    ) -> None:
        """Do the remaining steps with checkpoints in a folder; see ``run_with_checkpoints``.

        If the plan is asynchronous each outcome is on the disk before it is an event, and a stop
        lets the evaluations under way end; see ``AsynchronousRun``.
        """
        if self.plan.asynchronous:
            with closing(self._run_asynchronously(evaluator, folder, stop)) as events:
                for event in events:
                    on_event(event)
            self.save(folder)
            return
        with closing(self.run(evaluator)) as events:
            run_with_checkpoints(
                events,
                lambda: self.save(folder),
                stop,
                on_event,
                ends_step=lambda event: isinstance(event, OptimizationStep),
                is_costly=lambda event: (
                    isinstance(event, Trial) and (event.seconds or 0.0) > _SLOW_SECONDS
                ),
                seconds_between_checkpoints=seconds_between_checkpoints,
            )

    def run(self, evaluator: PointEvaluator) -> Generator[Event]:
        """Do the steps that are left; after each trial and each step, the state is complete.

        Where it ends within a step the evaluations under way are cancelled.

        Raises:
            UsageError: Every trial failed.
        """
        if self.plan.asynchronous:
            yield from self._run_asynchronously(evaluator)
            return
        ledger = self.optimizer.ledger
        while not self.finished:
            started, step = time.monotonic(), self._opened()
            missing = self._size(step) - len(step.keys)
            if missing > 0:  # first trials that wait, then chosen ones
                keys = [t.key for t in self.optimizer.pending if t.key not in step.keys][:missing]
                if len(keys) < missing:
                    with self._watch:
                        keys += [t.key for t in self.optimizer.ask(missing - len(keys))]
                seconds = step.model_seconds + time.monotonic() - started
                step = replace(
                    step, keys=(*step.keys, *keys), model_seconds=seconds, wall_seconds=None
                )
                self._open = step
            waiting = [trial for trial in self.optimizer.pending if trial.key in step.keys]
            pending, started = {trial.key for trial in waiting}, time.monotonic()
            retries = self.plan.retries
            try:
                for trial in waiting:
                    evaluator.submit(Task(trial.key, trial.X, trial.attempts))
                while pending:
                    end = evaluator.next_outcome()
                    trial = ledger.record(end.key, end.value, end.error, end.seconds, retries)
                    if trial.status == "pending":  # it is tried again
                        evaluator.submit(Task(trial.key, trial.X, trial.attempts))
                    else:
                        pending.remove(trial.key)
                    waited = step.evaluation_seconds + time.monotonic() - started
                    self._open = replace(step, evaluation_seconds=waited)
                    yield trial
            finally:
                for key in pending:
                    evaluator.cancel(key)
            started = time.monotonic()
            self._find_best()
            step = self._with_best(self._open or step)
            step = replace(step, model_seconds=step.model_seconds + time.monotonic() - started)
            self.steps.append(step)
            self._open = None
            yield step
            failed = ledger.with_status("failed")
            if len(failed) == len(ledger):
                raise all_failed(len(failed), failed[-1])

    def _opened(self) -> OptimizationStep:
        return self._open or OptimizationStep(len(self.steps), (), 0.0)

    def _size(self, step: OptimizationStep) -> int:
        """Return the number of trials of a step."""
        settings = self.optimizer.settings
        return settings.q if step.number else settings.initial

    def _find_best(self) -> None:
        if self.optimizer.ledger.count("told"):
            self._best = self.optimizer.best()

    def _with_best(self, step: OptimizationStep) -> OptimizationStep:
        """Return a step with the best point that was found last, in this part of the run or not."""
        best = self._best
        if best is None:
            last = self.steps[-1] if self.steps else step
            return replace(step, best=last.best, mean=last.mean, noiseless=last.noiseless)
        noiseless = self.objective.noiseless(best.trial.X)
        return replace(step, best=best.trial.key, mean=best.mean, noiseless=noiseless)

    # --- asynchronously -----------------------------------------------------------------------

    def _run_asynchronously(
        self,
        evaluator: PointEvaluator,
        folder: Path | None = None,
        stop: StopRequest | None = None,
    ) -> Generator[Event]:
        """Evaluate the trials that are left; another thread has the model and finds the best."""
        settings, plan = self.optimizer.settings, self.plan
        run = AsynchronousRun(
            self.optimizer,
            evaluator,
            settings.initial + plan.total * settings.q,
            plan.at_once,
            plan.ahead,
            plan.retries,
            folder,
            self._record,
            self._find_best,
        )
        self._take_up_outcomes()
        ended, chosen = time.monotonic(), 0.0
        with closing(run.trials(stop)) as trials:
            for trial in trials:
                previous, ended = ended, time.monotonic()
                choosing, chosen = run.seconds_of_choices - chosen, run.seconds_of_choices
                yield from self._add(trial, choosing, ended - previous)
        self._find_best()
        if self.steps:
            self.steps[-1] = self._with_best(self.steps[-1])

    def _add(self, trial: Trial, choosing: float, elapsed: float) -> Iterator[Event]:
        """Put a trial that ended into the open step, and yield both, the step when it is full."""
        step = self._opened()
        step = replace(
            step,
            keys=(*step.keys, trial.key),
            model_seconds=step.model_seconds + choosing,
            evaluation_seconds=max(step.evaluation_seconds, trial.seconds or 0.0),
            wall_seconds=step.seconds + elapsed,
        )
        self._open = step
        if len(step.keys) < self._size(step):
            yield trial
            return
        step = self._with_best(step)
        self.steps.append(step)
        self._open = None
        yield trial
        yield step

    def _take_up_outcomes(self) -> None:
        """Have in steps exactly the trials that ended: a kill, or another plan, leaves others."""
        if self._open is not None:
            self._open = replace(self._open, keys=())
        inside = {key for step in self.steps for key in step.keys}
        for trial in self.optimizer.ledger:
            if trial.key not in inside and trial.status in ("told", "failed"):
                for _ in self._add(trial, 0.0, 0.0):
                    pass


@dataclass(frozen=True)
class Plan:
    """Settings that may change when a run goes on: how much is done, where, and in which order.

    Attributes:
        total: Steps to do after the initial points.
        retries: How often a failed evaluation is tried again.
        workers: Processes that evaluate at a time; 0: this one, where a function that ends its
            process ends the run.
        timeout: Seconds after which an evaluation has failed; None: never.
        executor: Where evaluations run instead of in ``workers``: ``processes:N``, ``threads:N``,
            ``dask:ADDRESS``, ``ray``, ... (see ``bo_stream.executors.executor_of``).
        resources: What each evaluation needs of the executor's resources, by name.
        asynchronous: Whether each worker is given its next point the moment it is free, instead of
            when all evaluations of a step have ended.
        at_once: Evaluations that are kept under way asynchronously; None: as many as there are
            workers, which may come and go.
        ahead: Points that are chosen before there is a worker for them, see ``run_asynchronously``.
    """

    total: int
    retries: int = 0
    workers: int = 1
    timeout: float | None = None
    executor: str | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    asynchronous: bool = False
    at_once: int | None = None
    ahead: int | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        check_whole("steps", self.total, 0)
        check_whole("retries", self.retries, 0)
        check_whole("workers", self.workers, 0)
        check_timeout(self.timeout)
        if self.executor is not None:
            parsed(self.executor)
        elif self.resources:
            raise UsageError("Resources are those of an executor: expected executor, got None.")
        elif self.timeout is not None and self.workers == 0:
            raise UsageError(
                "A timeout needs a process that can be stopped: expected workers of at least 1, "
                "got 0."
            )
        for name, value, least in (("at_once", self.at_once, 1), ("ahead", self.ahead, 0)):
            if value is None:
                continue
            check_whole(name, value, least)
            if not self.asynchronous:
                raise UsageError(
                    f"{name} is for asynchronous runs: expected asynchronous, or no {name}, got "
                    f"{value}."
                )
        if self.asynchronous and self.executor is None and self.workers == 0:
            raise UsageError(
                "An asynchronous run keeps workers busy: expected workers of at least 1, or an "
                "executor, got workers 0."
            )

    @property
    def names_address(self) -> bool:
        """Whether evaluations run on workers that are found at an address."""
        return self.executor is not None and has_address(self.executor)


@dataclass(frozen=True)
class OptimizationStep:
    """Record of one step; step 0 is the initial points.

    In an asynchronous run it lasts from the end of the step before to the end of its own last
    trial, and the best point is the one found at the last choice.

    Attributes:
        number: Number of the step.
        keys: Keys of its trials.
        model_seconds: Time of choosing, updating and learning; asynchronously of checkpoints, too,
            during the evaluations.
        evaluation_seconds: Time of waiting for outcomes, over all parts of the run; asynchronously
            the duration of the longest evaluation.
        best: Key of the best trial so far (see :class:`Best`), None before any outcome.
        mean: Posterior mean there.
        noiseless: Value of the function there, where it is known.
        wall_seconds: Wall time, asynchronously; None: the sum of both others.
    """

    number: int
    keys: tuple[int, ...]
    model_seconds: float
    evaluation_seconds: float = 0.0
    best: int | None = None
    mean: float | None = None
    noiseless: float | None = None
    wall_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Wall time of the step."""
        if self.wall_seconds is None:
            return self.model_seconds + self.evaluation_seconds
        return self.wall_seconds


Event: TypeAlias = Trial | OptimizationStep


# --- result files of an optimization: the history of its trials, a record, and a picture ---------


History = Literal["csv", "parquet"]
HISTORIES: tuple[History, ...] = ("csv", "parquet")
"""File types of the history of all trials."""

MARKED = 100
"""Most steps that are drawn with a marker each."""


def write_optimization(
    campaign: OptimizationCampaign, folder: Path, notes: list[str], kind: History = "csv"
) -> TrustReport | None:
    """Write history and run.json, both or none; then trace.png, trust.png and trust.json.

    Afterwards a history of another kind is removed from the folder. A picture that cannot be drawn
    is a warning. In run.json are the ``notes``, texts of warnings, and the model of the outcomes in
    units of ``outcome_unit``, or of a region on ``outcome_scale``. Returns whether that model, if
    there is one, can be trusted; of a region there are no alarms.
    """
    optimizer, surrogate = campaign.optimizer, campaign.optimizer.surrogate
    settings, model, scale = optimizer.settings, surrogate.model, None
    best, better = None, best_outcome(campaign)
    if isinstance(surrogate, RegionSurrogate) and surrogate.local is not None:
        scale = asdict(surrogate.local.scale)
    last = campaign.steps[-1] if campaign.steps else None
    if last is not None and last.best is not None:
        trial = optimizer.ledger[last.best]
        best = {
            "key": trial.key,
            "X": trial.X,
            "Y": trial.Y,
            "posterior_mean": last.mean,
            "noiseless": last.noiseless,
        }
    record = {
        "finished": campaign.finished,
        "steps_done": campaign.steps_done,
        "objective": asdict(campaign.objective),
        "optimum": campaign.objective.optimum,
        "settings": asdict(settings),
        "plan": asdict(campaign.plan),
        "best": best,
        "best_outcome": None
        if better is None
        else {
            "key": better.key,
            "X": better.X,
            "Y": better.Y,
            "noiseless": campaign.objective.noiseless(better.X),
        },
        "counts": counts(campaign),
        "steps": [asdict(step) for step in campaign.steps],
        "refits_at": surrogate.refits,
        "outcome_unit": surrogate.unit,
        "outcome_scale": scale,
        "model": None if model is None else model_record(settings.model, model),
    }
    table = history(campaign)
    content = table.to_csv(index=False).encode() if kind == "csv" else table.to_parquet(index=False)
    files = {
        f"history.{kind}": content,
        "run.json": record_file(record, campaign.seconds, notes),
    }
    write_files(folder, files)
    for other in set(HISTORIES) - {kind}:  # of a run that went on in another kind
        (folder / f"history.{other}").unlink(missing_ok=True)
    write_picture(folder / "trace.png", lambda: draw_trace(campaign))
    if model is None:
        return None
    unalarmed = None
    if isinstance(surrogate, RegionSurrogate):
        unalarmed = "A region learns another model at each step: alarms are not judged."
    return write_trust(folder, model, surrogate.validation, unalarmed)


def best_outcome(campaign: OptimizationCampaign) -> Trial | None:
    """Find the trial of a better outcome, to six digits, than that of the best posterior mean."""
    ledger, sign = campaign.optimizer.ledger, campaign.optimizer.settings.sign
    key = campaign.steps[-1].best if campaign.steps else None
    outcomes = {trial.key: sign * (trial.Y or 0.0) for trial in ledger.with_status("told")}
    if key not in outcomes or f"{outcomes[key]:.6g}" == f"{max(outcomes.values()):.6g}":
        return None
    return ledger[max(outcomes, key=outcomes.__getitem__)]


def history(campaign: OptimizationCampaign) -> pd.DataFrame:
    """Return one row per trial, by key; ``best`` is the best outcome up to it."""
    opened = [] if campaign._open is None else [campaign._open]
    steps = {key: step.number for step in campaign.steps + opened for key in step.keys}
    rows = [
        {
            "key": trial.key,
            "step": steps.get(trial.key),
            "origin": trial.origin,
            "status": trial.status,
            "attempts": trial.attempts,
            **{f"x{i}": x for i, x in enumerate(trial.X)},
            "y": trial.Y,
            "noiseless": campaign.objective.noiseless(trial.X),
            "seconds": trial.seconds,
            "error": None if trial.error is None else encodable(trial.error),
        }
        for trial in campaign.optimizer.ledger
    ]
    table = pd.DataFrame(rows)
    if rows:
        y = table["y"].astype("float64")
        table["best"] = (y.cummax() if campaign.optimizer.settings.maximize else y.cummin()).ffill()
    return table


def counts(campaign: OptimizationCampaign) -> dict[Status, int]:
    """Count the trials of each status."""
    ledger = campaign.optimizer.ledger
    return {status: ledger.count(status) for status in STATUSES}


def draw_trace(campaign: OptimizationCampaign) -> Figure:
    """Draw the best value above and the seconds per step below, over the steps."""
    figure = Figure(figsize=(7.0, 6.0), layout="constrained")
    values, seconds = figure.subplots(2, 1, sharex=True)
    ledger, maximize = campaign.optimizer.ledger, campaign.optimizer.settings.maximize
    verb = "maximising" if maximize else "minimising"
    figure.suptitle(f"{campaign.objective.function}, {verb}: {len(ledger):,} trials")
    names = [field.name for field in fields(OptimizationStep)]
    steps = pd.DataFrame(map(asdict, campaign.steps), columns=names)
    steps = steps.astype({"mean": float, "noiseless": float})  # None becomes NaN
    size = 3.0 if len(steps) <= MARKED else 0.0

    better = np.fmax if maximize else np.fmin
    best = [  # of each step, NaN where no outcome was observed
        better.reduce(np.array([np.nan, *(ledger[key].Y for key in keys)], float))
        for keys in steps["keys"]
    ]
    so_far = better.accumulate(np.array(best, float))
    values.plot(steps.number, so_far, "-", color="0.6", label="best outcome")
    values.plot(steps.number, steps["mean"], "o-", ms=size, label="best posterior mean")
    if steps.noiseless.notna().any():
        values.plot(steps.number, steps.noiseless, "s--", ms=size, label="noiseless value there")
    optimum = campaign.objective.optimum
    if optimum is not None and not maximize:
        values.axhline(optimum, color="black", lw=0.8, ls=":", label=f"optimum {optimum:.4g}")
    values.set_ylabel("best value")

    seconds.plot(steps.number, steps.model_seconds, "o-", ms=size, lw=1, label="model and choice")
    seconds.plot(steps.number, steps.evaluation_seconds, "o-", ms=size, lw=1, label="evaluation")
    seconds.set(xlabel="step", ylabel="seconds per step")
    if (steps.model_seconds > 0.0).any():
        seconds.set_yscale("log", nonpositive="mask")
    observed = np.cumsum([sum(ledger[key].Y is not None for key in keys) for keys in steps["keys"]])
    moves = getattr(campaign.optimizer.surrogate.model, "history", ())
    # each in the step in which its number of observations was reached
    at = [min(int(np.searchsorted(observed, m.observations)), len(steps) - 1) for m in moves]
    mark_hand_overs(
        seconds, [(campaign.steps[i].number, m) for i, m in zip(at, moves, strict=True)]
    )
    for axes in (values, seconds):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    return figure
