"""200 evaluations of 0.4 s by eight workers, local processes and Dask's: near the ideal time?

Evaluations sleep, so that eight fit two cores. Workers are warm: each has evaluated once before. In
a second run of each a worker is killed on the way: every trial has its outcome, and each once.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path

from benchmarks.harness import start
from benchmarks.report import at_least, at_most, finish
from bo_stream.executors import LostTaskWarning, executor_of
from bo_stream.executors.engine import EngineExecutor
from bo_stream.loops.optimization import OptimizationSettings, Optimizer
from bo_stream.loops.optimization.campaign import OptimizationCampaign, Plan
from bo_stream.loops.optimization.executed import Executed
from bo_stream.loops.optimization.objectives import Objective
from bo_stream.loops.optimization.trials import Trial

SECONDS = 0.4
BOX = ((0.0, 1.0), (0.0, 1.0))


def nap(x: list[float]) -> float:
    """When there is the file that the environment names, one of these kills its worker."""
    time.sleep(SECONDS)
    with suppress(FileNotFoundError):
        Path(os.environ["BENCHMARK_KILL"]).unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return (x[0] - 0.3) ** 2 + (x[1] - 0.6) ** 2


def process(_: int) -> int:
    time.sleep(SECONDS)
    return os.getpid()


def warm_up(executor: EngineExecutor, count: int) -> None:
    """Until each worker process has loaded what an evaluation needs."""
    objective, found = Objective("benchmarks.executors:nap", BOX), set()
    while len(found) < count:
        wait([executor.submit(objective.evaluate, [0.5, 0.5], 0, 0) for _ in range(count)])
        found |= set(executor.map(process, range(count)))


def run(spec: str, workers: int, steps: int, kill: bool) -> tuple[OptimizationCampaign, int, int]:
    """A campaign, the most outcomes that a trial had, and the number of lost tasks."""
    objective = Objective("benchmarks.executors:nap", BOX)
    settings = OptimizationSettings(BOX, q=workers, initial=workers)
    campaign = OptimizationCampaign(objective, Optimizer(settings), Plan(steps))
    came: Counter[int] = Counter()
    with executor_of(spec) as executor:
        assert isinstance(executor, EngineExecutor)
        warm_up(executor, workers)
        with Executed(objective, executor) as evaluator, warnings.catch_warnings():
            warnings.simplefilter("ignore", LostTaskWarning)
            for event in campaign.run(evaluator):
                if isinstance(event, Trial):
                    came[event.key] += event.status == "told"
                elif kill and event.number == steps // 2:
                    Path(os.environ["BENCHMARK_KILL"]).touch()
            return campaign, max(came.values()), evaluator.losses


def main() -> None:
    options = start(__doc__)
    os.environ["BENCHMARK_KILL"] = str(Path(tempfile.mkdtemp()) / "kill")
    workers, steps = options.pick(8, 2), options.pick(24, 1)
    claims = []
    for name, spec in (("processes", f"processes:{workers}"), ("Dask", f"dask:{workers}")):
        total = workers * (steps + 1)
        ideal = SECONDS * (steps + 1)
        campaign, _, _ = run(spec, workers, steps, kill=False)
        waiting = sum(step.evaluation_seconds for step in campaign.steps)
        choosing = sum(step.model_seconds for step in campaign.steps)
        detail = f"{waiting:.2f} s for {ideal:g} s; {choosing:.2f} s of choosing {steps} batches"
        claims.append(at_most(f"{name}: time to the ideal", waiting / ideal, 1.25, "", detail))
        campaign, most, losses = run(spec, workers, steps, kill=True)
        told = len(campaign.optimizer.ledger.with_status("told"))
        detail = f"{losses} lost and done again; at most {most} outcome a trial"
        claims.append(at_least(f"{name}, a worker killed: outcomes", told, total, "", detail))
        claims.append(at_most(f"{name}, a worker killed: outcomes a trial", most, 1))
    finish("executors", claims, options, {"workers": workers, "evaluations": total})


if __name__ == "__main__":
    main()
