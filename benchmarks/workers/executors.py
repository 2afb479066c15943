"""200 evaluations of 0.4 s by eight workers, local processes and Dask's: near the ideal time?

Evaluations sleep, so that eight fit two cores. Workers are warm: each has evaluated once before.
In further runs a worker, Dask's scheduler, or the driver is killed in the middle of a batch, and
started again: every trial is told once, the model has nothing else, and the trials are those of
the run that nobody disturbed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.common.command import COMMAND
from benchmarks.common.harness import start
from benchmarks.common.naps import (
    BOX,
    FUNCTION,
    SECONDS,
    at_evaluation,
    begin_record,
    begun,
    clear_record,
    wait_for,
)
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from benchmarks.workers.dask_cluster import ROOT, DaskCluster
from bo_stream.executors import LostTaskWarning, WaitingWarning, executor_of
from bo_stream.executors.engine import EngineExecutor
from bo_stream.loops.optimization import OptimizationSettings, Optimizer
from bo_stream.loops.optimization.campaign import OptimizationCampaign, Plan
from bo_stream.loops.optimization.executed import Executed
from bo_stream.loops.optimization.objectives import Objective
from bo_stream.loops.optimization.trials import Trial
from bo_stream.loops.run import OPTIMIZATION

OBJECTIVE = Objective(FUNCTION, BOX, len(BOX))


@dataclass(frozen=True)
class Size:
    """How much is done.

    Attributes:
        workers: Workers, and trials a batch.
        steps: Batches after the initial one.
    """

    workers: int
    steps: int

    @property
    def trials(self) -> int:
        """Number of all trials."""
        return self.workers * (self.steps + 1)

    @property
    def middle(self) -> int:
        """Number of an evaluation in the middle of a batch in the middle of the run."""
        return self.workers * ((self.steps + 1) // 2) + self.workers // 2


@dataclass(frozen=True)
class Ended:
    """A campaign that has ended.

    Attributes:
        campaign: The campaign.
        again: Evaluations that were begun once more.
        pause: Longest time between two outcomes of a campaign of this process, in seconds.
    """

    campaign: OptimizationCampaign
    again: int
    pause: float = 0.0


def process(_: int) -> int:
    time.sleep(SECONDS)
    return os.getpid()


def warm_up(executor: EngineExecutor, count: int) -> None:
    """Until each worker process has loaded what an evaluation needs."""
    found: set[int] = set()
    while len(found) < count:
        wait([executor.submit(OBJECTIVE.evaluate, [0.5, 0.5], 0, 0) for _ in range(count)])
        found |= set(executor.map(process, range(count)))
    clear_record()


def run(executor: EngineExecutor, size: Size, kill: Callable[[], object] | None = None) -> Ended:
    """A campaign by warm workers, in the middle of which something may be killed."""
    settings = OptimizationSettings(BOX, q=size.workers, initial=size.workers)
    campaign = OptimizationCampaign(OBJECTIVE, Optimizer(settings), Plan(size.steps))
    warm_up(executor, size.workers)
    with (
        Executed(OBJECTIVE, executor) as evaluator,
        warnings.catch_warnings(),
        at_evaluation(size.middle, kill or (lambda: None)),
    ):
        warnings.simplefilter("ignore", LostTaskWarning)
        warnings.simplefilter("ignore", WaitingWarning)
        trials = (event for event in campaign.run(evaluator) if isinstance(event, Trial))
        times = [time.monotonic(), *(time.monotonic() for _ in trials)]
    pause = max(after - before for before, after in pairwise(times))
    return Ended(campaign, len(begun()) - size.trials, pause)


def run_twice(spec: str, size: Size) -> tuple[Ended, Ended]:
    """A campaign that nobody disturbs, and one of which a worker is killed."""
    with engine_of(spec) as executor:
        return run(executor, size), run(executor, size, kill_worker)


@contextmanager
def engine_of(spec: str) -> Iterator[EngineExecutor]:
    with executor_of(spec) as executor:
        assert isinstance(executor, EngineExecutor)
        yield executor


def kill_worker() -> None:
    """The one that has begun an evaluation last."""
    os.kill(begun()[-1], signal.SIGKILL)


def run_with_killed_driver(spec: str, size: Size, folder: Path) -> Ended:
    """A campaign of ``bo-stream optimize``, which is killed on the way, and resumed."""
    clear_record()
    asked = ["optimize", FUNCTION, "--executor", spec, "--out", str(folder)]
    box = " ".join(f"{low:g},{high:g}" for low, high in BOX)
    amount = ["--initial", str(size.workers), "-q", str(size.workers), "--steps", str(size.steps)]
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        first = started([*asked, "--bounds", box, *amount], log.fileno())
        try:
            wait_for(size.middle, lambda: first.poll() is None)
            while not (folder / OPTIMIZATION.name).exists():
                time.sleep(0.01)
        finally:
            first.kill()
            first.wait()
        if started([*asked, "--resume"], log.fileno()).wait() != 0:
            raise RuntimeError(f"bo-stream optimize --resume failed: see {log.name}.")
    campaign = OptimizationCampaign.resume(folder, trusted=[FUNCTION], executor=spec)
    return Ended(campaign, len(begun()) - size.trials)


def started(arguments: list[str], log: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    threads = str(torch.get_num_threads())
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-c", COMMAND, *arguments]
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def of_time(name: str, ended: Ended, size: Size) -> Claim:
    steps, ideal = ended.campaign.steps, SECONDS * (size.steps + 1)
    waiting = sum(step.evaluation_seconds for step in steps)
    choosing = sum(step.model_seconds for step in steps)
    detail = f"{waiting:.2f} s for {ideal:g} s; {choosing:.2f} s of choosing {size.steps} batches"
    return at_most(f"{name}: time to the ideal", waiting / ideal, 1.25, "", detail)


def of_outcomes(name: str, ended: Ended, undisturbed: Ended, size: Size) -> list[Claim]:
    """Each trial once, in the ledger and in the model, and no other trial."""
    optimizer, peer = ended.campaign.optimizer, undisturbed.campaign.optimizer
    assert optimizer.surrogate.model is not None
    once = [trial for trial in optimizer.ledger if (trial.status, trial.attempts) == ("told", 1)]
    others = {(trial.X, trial.Y) for trial in optimizer.ledger}
    others ^= {(trial.X, trial.Y) for trial in peer.ledger}
    observations = round(optimizer.surrogate.model.num_observations)
    besides = abs(observations - size.trials) + len(optimizer.ledger) - len(once)
    detail = f"{ended.again} evaluations done again"
    return [
        at_least(f"{name}: trials told once", len(once), size.trials, "", detail),
        at_most(f"{name}: trials besides, or missing in the model", besides, 0),
        at_most(f"{name}: trials of this run alone, or of the undisturbed alone", len(others), 0),
    ]


def main() -> None:
    options = start(__doc__)
    torch.set_default_dtype(torch.float32)  # as in the process of the command
    size = Size(options.pick(8, 2), options.pick(24, 1))
    ends = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        begin_record(folder / "begun.txt")
        spec = f"processes:{size.workers}"
        undisturbed, ends["processes, a worker killed"] = run_twice(spec, size)
        ended = run_with_killed_driver(spec, size, folder / "processes")
        ends["processes, the driver killed"] = ended
        ends["Dask"], ends["Dask, a worker killed"] = run_twice(f"dask:{size.workers}", size)
        with DaskCluster(size.workers) as cluster:
            spec = f"dask:{cluster.address}"
            ended = run_with_killed_driver(spec, size, folder / "dask")
            ends["Dask, the driver killed"] = ended
            with engine_of(spec) as executor:
                ended = run(executor, size, cluster.kill_scheduler)
            ends["Dask, the scheduler killed"] = ended
    claims = [of_time("processes", undisturbed, size), of_time("Dask", ends["Dask"], size)]
    claims.append(stated("Dask, the scheduler killed: until it went on", ended.pause, "s"))
    for name, each in ends.items():
        claims += of_outcomes(name, each, undisturbed, size)
    finish("executors", claims, options, {"workers": size.workers, "evaluations": size.trials})


if __name__ == "__main__":
    main()
