"""500 workers with evaluations of 60 s above 95 % busy, while real points are chosen for them.

The clock is simulated: an evaluation takes seconds of it, drawn about 60, and the processor time
that the driver takes (choosing, learning, giving out points) is added to it. So are 100 and 2,000
workers. Beside it, the seconds of choosing a point against the number of points at once, of
outcomes and of pending points, by family; and for comparison one point after the other.
"""

from __future__ import annotations

import heapq
import time
import warnings
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from botorch.test_functions import Ackley, Hartmann, Levy
from botorch.test_functions.synthetic import SyntheticTestFunction

from benchmarks.common.harness import processor_seconds, start
from benchmarks.common.report import Claim, at_least, finish, stated
from benchmarks.optimization.many_input_problems import wide
from bo_stream.errors import UsageError
from bo_stream.loops.optimization import OptimizationSettings, Optimizer, run_asynchronously
from bo_stream.loops.optimization import acquisition as acquisitions
from bo_stream.loops.optimization.objectives import Outcome, Task
from bo_stream.models.auto.auto import AutoGP

LEAST_BUSY = 0.95
SECONDS = 60.0
SPREAD = 15.0
NOISE = 0.05
_NAP = 0.002


class SimulatedWorkers:
    """An evaluator of which each task takes simulated seconds.

    While the driver does nothing but wait, the clock jumps to the next end of an evaluation;
    otherwise it goes on with the processor time of this process.

    Attributes:
        count: Number of workers.
        busy: Seconds of evaluations, each up to the last task's start.
    """

    def __init__(self, function: SyntheticTestFunction, count: int, seed: int = 0) -> None:
        """Workers that wait."""
        self.count, self._function, self._seed = count, function, seed
        self._jumps = -time.process_time()
        self._ends: list[tuple[float, int]] = []
        self._tasks: dict[int, tuple[Task[tuple[float, ...]], float]] = {}
        self._spans: list[tuple[float, float]] = []
        self.last_start = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def now(self) -> float:
        """Seconds on the clock."""
        return self._jumps + time.process_time()

    def submit(self, task: Task[tuple[float, ...]]) -> None:
        """Begin a task at once."""
        if len(self._ends) >= self.count:
            raise UsageError(f"Only {self.count} tasks at a time.")
        began = self.now
        generator = np.random.default_rng((self._seed, task.key, task.attempt))
        shape = (SECONDS / SPREAD) ** 2
        seconds = float(generator.gamma(shape, SECONDS / shape))
        self._tasks[task.key] = task, seconds
        heapq.heappush(self._ends, (began + seconds, task.key))
        self._spans.append((began, began + seconds))
        self.last_start = began

    def poll(self, seconds: float | None) -> Outcome[float] | None:
        """Return an outcome that is due; else let real time go on for a moment."""
        if seconds is None:
            return self.next_outcome()
        if self._ends and self._ends[0][0] <= self.now:
            return self._outcome()
        time.sleep(_NAP)
        return None

    def next_outcome(self) -> Outcome[float]:
        """Let the clock jump to the next end."""
        self._jumps += max(0.0, self._ends[0][0] - self.now)
        return self._outcome()

    def _outcome(self) -> Outcome[float]:
        _, key = heapq.heappop(self._ends)
        task, seconds = self._tasks.pop(key)
        X = torch.tensor([task.X], dtype=torch.float64)
        noise = np.random.default_rng((self._seed, key)).standard_normal()
        return Outcome(key, float(self._function.evaluate_true(X)) + NOISE * noise, None, seconds)

    def cancel(self, key: int) -> None:
        """Drop a task."""
        self._ends = [end for end in self._ends if end[1] != key]
        heapq.heapify(self._ends)

    def close(self) -> None:
        """Drop all tasks."""
        self._ends = []

    def busy(self) -> float:
        """Share of the time of all workers, up to the last start, that was spent on tasks."""
        spent = sum(min(end, self.last_start) - began for began, end in self._spans)
        return spent / (self.count * self.last_start)


def optimizer_of(function: SyntheticTestFunction, acquisition: str, **options: Any) -> Optimizer:
    """An optimizer of a function, of the default model unless told, or of a region."""
    bounds = tuple((low, high) for low, high in function.bounds.T.tolist())
    if acquisition == "region":
        options |= {"search": "region"}
    else:
        options |= {"search": "box", "acquisition": acquisition}
    return Optimizer(OptimizationSettings(bounds=bounds, **options))


def simulate(
    name: str, function: SyntheticTestFunction, acquisition: str, workers: int, each: int
) -> list[Claim]:
    """A run of some evaluations for each worker."""
    optimizer = optimizer_of(function, acquisition)
    processor = time.process_time()
    with SimulatedWorkers(function, workers) as evaluator:
        run_asynchronously(optimizer, evaluator, workers * each, workers)
    processor = time.process_time() - processor
    X = torch.tensor([optimizer.best().trial.X], dtype=torch.float64)
    regret = float(function.evaluate_true(X)) - function.optimal_value
    chosen = sum(trial.origin == "model" for trial in optimizer.ledger)
    detail = (
        f"{workers * each:,} evaluations in {evaluator.last_start + SECONDS:,.0f} simulated s, "
        f"{processor:,.0f} s of the driver's processor, "
        f"{1000.0 * processor / max(chosen, 1):.0f} ms a chosen point; regret {regret:.3g}; "
        f"{family(optimizer)}"
    )
    what = f"busy, {workers:,} workers, {name}, {acquisition}"
    share = evaluator.busy()
    if workers == 500:
        return [at_least(what, 100.0 * share, 100.0 * LEAST_BUSY, "%", detail)]
    return [stated(what, 100.0 * share, "%", detail)]


def family(optimizer: Optimizer) -> str:
    """The family of the model, and the number of its outcomes."""
    model = optimizer.surrogate.model
    kind = model.family if isinstance(model, AutoGP) else type(model).__name__
    return f"{kind} of {optimizer.ledger.count('told'):,} outcomes"


def told(
    function: SyntheticTestFunction, acquisition: str, n: int, pending: int, model: str
) -> Optimizer:
    """An optimizer with outcomes at random points and some points pending, its model fitted."""
    optimizer = optimizer_of(function, acquisition, model=model, refit=0.0)
    generator = torch.Generator().manual_seed(n)
    X = torch.rand(n + pending, function.dim, generator=generator, dtype=torch.float64)
    X = function.bounds[0] + (function.bounds[1] - function.bounds[0]) * X
    Y = function.evaluate_true(X) + NOISE * torch.randn(n + pending, generator=generator)
    for i, (x, y) in enumerate(zip(X.tolist(), Y.tolist(), strict=True)):
        trial = optimizer.register(x)
        if i < n:
            optimizer.tell(trial.key, y)
    optimizer.best()
    return optimizer


@dataclass(frozen=True)
class Choice:
    """What is chosen: function, model, acquisition, and the numbers of points."""

    name: str
    model: str
    acquisition: str
    n: int
    pending: int
    q: int


def choose(choice: Choice, functions: dict[str, SyntheticTestFunction], many: int) -> Claim:
    """Processor seconds of choosing a point, of some points at once."""
    optimizer = told(
        functions[choice.name], choice.acquisition, choice.n, choice.pending, choice.model
    )
    former, acquisitions.MANY = acquisitions.MANY, many
    seconds = processor_seconds(lambda: optimizer.ask(choice.q))
    acquisitions.MANY = former
    way = "one by one" if many > choice.pending + choice.q else "together"
    return stated(
        f"choosing a point, {choice.q} {way}, {choice.acquisition}, {choice.name}, "
        f"{choice.n:,} outcomes, {choice.pending:,} pending",
        1000.0 * seconds / choice.q,
        "ms",
        family(optimizer),
    )


def main() -> None:
    """Run it."""
    options = start(
        __doc__, flags={"choices": "seconds of choosing only", "workers": "workers only"}
    )
    warnings.simplefilter("ignore")
    functions: dict[str, SyntheticTestFunction] = {
        "Levy-3": Levy(3),
        "Hartmann-6": Hartmann(6),
        "Ackley-60": Ackley(60, bounds=wide(60)),
    }
    runs = options.pick(
        [
            ("Levy-3", "TS", 100, 10),
            ("Levy-3", "TS", 500, 5),
            ("Levy-3", "qLogEI", 500, 5),
            ("Hartmann-6", "TS", 500, 5),
            ("Ackley-60", "region", 500, 5),
            ("Levy-3", "TS", 2_000, 3),
        ],
        [("Levy-3", "TS", 8, 3), ("Ackley-60", "region", 40, 4)],
    )
    choices = options.pick(
        [
            Choice(name, model, acquisition, n, pending, q)
            for name, model, n in (
                ("Levy-3", "auto", 200),
                ("Levy-3", "wiski", 2_000),
                ("Levy-3", "wiski", 10_000),
                ("Hartmann-6", "auto", 500),
                ("Hartmann-6", "osgpr", 2_000),
            )
            for acquisition in ("TS", "qLogEI")
            for pending, q in ((500, 20), (500, 200))
        ],
        [Choice("Levy-3", "auto", "qLogEI", 30, 4, 2)],
    )
    claims: list[Claim] = []
    if "workers" not in options.flags:
        for choice in choices:
            claims.append(choose(choice, functions, options.pick(acquisitions.MANY, 2)))
            print(claims[-1].row()[:2], flush=True)
        before = options.pick(
            Choice("Levy-3", "wiski", "qLogEI", 2_000, 500, 1),
            Choice("Hartmann-6", "auto", "qLogEI", 30, 4, 2),
        )
        claims.append(choose(before, functions, many=10**9))
    if "choices" not in options.flags:
        for name, acquisition, workers, each in runs:
            claims += simulate(name, functions[name], acquisition, workers, each)
            print(claims[-1].row(), flush=True)
    sizes = {"seconds": SECONDS, "spread": SPREAD, "runs": runs}
    finish("many_workers", claims, options, sizes)


if __name__ == "__main__":
    main()
