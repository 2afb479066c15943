"""Asynchronous optimization: points are chosen while hundreds of evaluations are under way.

No evaluation waits for another one, nor for a choice: some points are chosen ahead. One thread
gives out points and takes outcomes; another one owns the model: it chooses, learns, and writes the
checkpoints. Outcomes enter the ledger at once, trial by trial, and the model at the next choice.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from bo_stream.errors import UsageError, check_whole
from bo_stream.executors.engine import SECONDS_BETWEEN_LOOKS
from bo_stream.loops.optimization.executed import Executed, PointEvaluator
from bo_stream.loops.optimization.objectives import InProcess, Outcome, Task
from bo_stream.loops.optimization.optimizer import Optimizer, save_optimizer
from bo_stream.loops.optimization.trials import Journal, Trial, all_failed
from bo_stream.loops.run import OPTIMIZATION, StopRequest, hold_folder

AHEAD = 0.25
"""Points chosen ahead for each evaluation under way, unless given."""

SECONDS_BETWEEN_CHECKPOINTS = 60.0

_SHARE_OF_CHECKPOINTS = 0.02
"""Largest share of the time that is spent on checkpoints."""

_PATIENCE = 0.02
"""Seconds to wait for an outcome while points are being chosen."""


def run_asynchronously(
    optimizer: Optimizer,
    evaluator: PointEvaluator,
    total: int,
    at_once: int | None = None,
    *,
    ahead: int | None = None,
    retries: int = 0,
    folder: Path | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> None:
    """Evaluate points until ``total`` have been, ``at_once`` at a time, without a pause between.

    The optimizer may have trials already: those that are pending are evaluated first. A run that
    was interrupted, or killed, goes on from its folder: load the optimizer (``load_optimizer``) and
    call this again. Outcomes that had come are there; evaluations that were under way are repeated.

    Args:
        optimizer: It is asked and told; nothing else may ask it meanwhile.
        evaluator: Open; it is left open.
        total: Trials to be evaluated, those before included.
        at_once: Evaluations to be kept under way; None: as many as the evaluator has workers, where
            it says so; a cluster's may come and go.
        ahead: Points that are chosen before there is a worker for them, so that none waits; they
            do not know of the last outcomes. None: a quarter of those under way.
        retries: How often a failed evaluation is tried again.
        folder: Folder of checkpoints, created if necessary; None: there are none.
        on_trial: Called with each trial that was told or has failed; it may register and retry,
            which are evaluated next, and amend and withdraw: in place of each withdrawn trial
            another one is evaluated.

    Raises:
        UsageError: A number is out of range or missing, all evaluations fail, or the folder is in
            use or holds another optimization.

    Example:
        >>> with worker_processes(objective, 8) as workers:
        ...     run_asynchronously(optimizer, workers, 400, folder=Path("run"))
    """
    run = AsynchronousRun(optimizer, evaluator, total, at_once, ahead, retries, folder)
    with ExitStack() as stack:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            advice = "Wait until that run ends, stop it, or give another folder."
            stack.enter_context(hold_folder(folder, advice))
            if (folder / OPTIMIZATION.name).is_file():
                with OPTIMIZATION.opened(folder) as content:
                    saved = [tuple(trial["X"]) for trial in content["trials"]]
                if saved != [trial.X for trial in optimizer.ledger][: len(saved)]:
                    raise UsageError(
                        f"{folder} holds another optimization, of {len(saved):,} trials. To go on "
                        "with it, load it by load_optimizer; else give another folder."
                    )
        for trial in stack.enter_context(closing(run.trials())):
            if on_trial is not None:
                on_trial(trial)


def places_of(evaluator: PointEvaluator, at_once: int | None) -> Callable[[], int]:
    """Return a function of the number of evaluations to keep under way now.

    Args:
        evaluator: Asked each time if no number is given.
        at_once: A number that stays.

    Raises:
        UsageError: Neither of them says it.
    """
    if at_once is not None:
        return lambda: at_once
    if isinstance(evaluator, (Executed, InProcess)):
        return lambda: evaluator.capacity
    raise UsageError(
        f"A {type(evaluator).__name__} does not say how many workers it has: expected at_once=, "
        "the number of evaluations to keep under way."
    )


class AsynchronousRun:
    """Evaluations under way, points that wait for a worker, and the choice of more."""

    def __init__(
        self,
        optimizer: Optimizer,
        evaluator: PointEvaluator,
        total: int,
        at_once: int | None = None,
        ahead: int | None = None,
        retries: int = 0,
        folder: Path | None = None,
        record: Callable[[], Mapping[str, Any] | None] = lambda: None,
        after_choice: Callable[[], None] = lambda: None,
    ) -> None:
        """Put the parts together.

        Args:
            optimizer: Trials and model.
            evaluator: It is left open.
            total: See :func:`run_asynchronously`, as for the next three.
            at_once: Evaluations to be kept under way.
            ahead: Points that are chosen before there is a worker for them.
            retries: How often a failed evaluation is tried again.
            folder: Existing folder of checkpoints, or None.
            record: Function that returns plain values to be stored in a checkpoint, or None; it is
                called in the thread of the model, too.
            after_choice: Called in the thread of the model when points were chosen.

        Raises:
            UsageError: A number is out of range, or nothing says how many evaluations there are to
                be at a time.
        """
        check_whole("total", total, 1)
        check_whole("retries", retries, 0)
        for name, value, least in (("at_once", at_once, 1), ("ahead", ahead, 0)):
            if value is not None:
                check_whole(name, value, least)
        self._places = places_of(evaluator, at_once)
        self._optimizer, self._evaluator = optimizer, evaluator
        self._total, self._at_once, self._ahead, self._retries = total, at_once, ahead, retries
        self._folder, self._record, self._after_choice = folder, record, after_choice
        self._journal = None if folder is None else Journal(folder)
        self._written = optimizer.ledger.changes
        self._looked = optimizer.ledger.changes
        self._ready = deque(optimizer.pending)
        self._under_way: set[int] = set()
        self._failed = optimizer.ledger.count("failed")  # also those that are withdrawn later
        self._choice: Future[list[Trial]] | None = None
        self._next_checkpoint = -math.inf
        self._seconds_of_choices = self._choice_began = 0.0

    @property
    def seconds_of_choices(self) -> float:
        """Time in which points were chosen or checkpoints written, during the evaluations."""
        since = 0.0 if self._choice is None else time.monotonic() - self._choice_began
        return self._seconds_of_choices + since

    def trials(self, stop: StopRequest | None = None) -> Generator[Trial]:
        """Evaluate what is left, and yield each trial that was told or has failed.

        Once a stop is requested no evaluation begins, and those under way are waited for. Whatever
        ends this, an error, too, the evaluations under way are cancelled and a checkpoint is
        written.
        """
        ledger = self._optimizer.ledger
        self._write_checkpoint()
        try:
            with ThreadPoolExecutor(1, "choice") as chooser:
                while True:
                    # those to be tried again, and those that were registered meanwhile, come first
                    looked, self._looked = self._looked, ledger.changes
                    for trial in map(ledger.__getitem__, reversed(ledger.changed_since(looked))):
                        was_chosen = trial.origin != "hand" and trial.attempts == 0
                        if trial.status == "pending" and not was_chosen:
                            self._ready.appendleft(trial)
                    stopped = stop is not None and stop.made
                    if not stopped:
                        left = self._total - ledger.count("told") - ledger.count("failed")
                        places = min(self._places(), left)
                        while self._ready and len(self._under_way) < places:
                            trial = ledger[self._ready.popleft().key]
                            # it may have been withdrawn meanwhile, or be here twice
                            if trial.status == "pending" and trial.key not in self._under_way:
                                self._under_way.add(trial.key)
                                self._evaluator.submit(Task(trial.key, trial.X, trial.attempts))
                    if not stopped and self._choice is None:
                        count = self._wanted()
                        if count > 0 or time.monotonic() > self._next_checkpoint:
                            self._choice_began = time.monotonic()
                            self._choice = chooser.submit(self._choose, count)
                    if self._under_way:
                        yield from self._next_trials()
                    elif self._choice is None:
                        return
                    if self._choice is not None and (self._choice.done() or not self._under_way):
                        chosen = self._choice.result()  # for which it waits if nothing else comes
                        self._seconds_of_choices, self._choice = self.seconds_of_choices, None
                        self._write_changes()
                        self._ready.extend(chosen)
        finally:
            for key in self._under_way:
                self._evaluator.cancel(key)
            self._write_checkpoint()
            if self._journal is not None:
                self._journal.close()

    # --- evaluations --------------------------------------------------------------------------

    def _next_trials(self) -> Iterator[Trial]:
        """Wait for an outcome, or until there may be something to do; yield its trial, if any."""
        outcome: Outcome[float] | None
        if self._choice is not None:
            outcome = self._evaluator.poll(_PATIENCE)
        elif self._at_once is None:  # workers may come while no evaluation ends
            outcome = self._evaluator.poll(SECONDS_BETWEEN_LOOKS)
        else:
            outcome = self._evaluator.next_outcome()
        if outcome is None or outcome.key not in self._under_way:
            return
        self._under_way.remove(outcome.key)
        ledger, key, retries = self._optimizer.ledger, outcome.key, self._retries
        trial = ledger[key]
        if trial.status == "pending":  # else it was amended or withdrawn meanwhile
            trial = ledger.record(key, outcome.value, outcome.error, outcome.seconds, retries)
        self._write_changes()
        if trial.status not in ("pending", "withdrawn"):
            self._failed += trial.status == "failed"
            enough = max(self._optimizer.settings.initial, self._places())
            if ledger.count("told") == 0 and self._failed >= min(enough, self._total):
                raise all_failed(self._failed, trial)
            yield trial
            self._write_changes()

    # --- choices ------------------------------------------------------------------------------

    def _wanted(self) -> int:
        """Return the number of points to choose: none while half of those ahead are left.

        No more are chosen ahead than there are outcomes to choose them by.
        """
        places, most, ledger = self._places(), self._ahead, self._optimizer.ledger
        ahead = min(math.ceil(AHEAD * places) if most is None else most, ledger.count("told"))
        if len(self._ready) > ahead // 2:
            return 0
        room = places - len(self._under_way) + ahead - len(self._ready)
        return max(0, min(room, self._total - len(ledger) + ledger.count("withdrawn")))

    def _choose(self, count: int) -> list[Trial]:
        """Choose points, and write a checkpoint if it is time; in a thread of its own."""
        trials = self._optimizer.ask(count) if count > 0 else []
        if trials:
            self._after_choice()
        if time.monotonic() > self._next_checkpoint:
            self._write_checkpoint()
        return trials

    # --- files --------------------------------------------------------------------------------

    def _write_changes(self) -> None:
        """Write each trial to the journal that has changed since it was written there."""
        if self._journal is None:
            return
        ledger = self._optimizer.ledger
        changes = ledger.changes  # those of a choice meanwhile come twice
        self._journal.add([ledger[key] for key in ledger.changed_since(self._written)])
        self._written = changes

    def _write_checkpoint(self) -> None:
        if self._folder is None or self._journal is None:
            self._next_checkpoint = math.inf
            return
        started = time.monotonic()
        mark = self._journal.mark()
        save_optimizer(self._folder, self._optimizer, self._record(), self._journal.name)
        self._journal.begin(mark)
        now = time.monotonic()
        pause = max(SECONDS_BETWEEN_CHECKPOINTS, (now - started) / _SHARE_OF_CHECKPOINTS)
        self._next_checkpoint = now + pause
