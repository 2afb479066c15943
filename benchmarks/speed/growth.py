"""Processor time of an update and a refit against n, for the picture in README.md."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from botorch.models.model import Model

from benchmarks.common.data import levy, levy_stream
from benchmarks.common.harness import processor_seconds, start, timings
from benchmarks.common.report import Claim, finish, stated
from benchmarks.peers.peers import PEERS, exact, product_kernel
from benchmarks.speed.refit import Refit
from benchmarks.speed.update import D, Q, conditioned, predict
from bo_stream import AutoGP

KERNEL = "RBF"
EXACT, OURS = "SingleTaskGP", "AutoGP"

Tasks = dict[str, Callable[[], None]]
Seconds = dict[str, dict[str, dict[int, float]]]
"""Medians by task, model and number of observations."""


@dataclass(frozen=True)
class Sizes:
    """Of one run: numbers of observations, the largest for the exact GP, and turns that count."""

    numbers: tuple[int, ...]
    exact_update: int
    exact_refit: int
    repeats: int
    refits: int


def streams(numbers: tuple[int, ...]) -> Iterator[AutoGP]:
    """The same model each time, after as many observations as each number says."""
    bounds = torch.tensor([[0.0] * D, [1.0] * D])
    model: AutoGP | None = None
    before = 0
    for step, n in enumerate(numbers):
        for X, Y in levy_stream(n - before, 10_000, D, seed=step):
            if model is None:
                model = AutoGP(X, Y, covar_module=product_kernel(KERNEL, D), bounds=bounds)
            else:
                model.update(X, Y)
        before = n
        assert model is not None
        yield model.eval()


class Update:
    """A task that gives 3 observations to a copy of a model, and predicts at 100 points."""

    def __init__(self, model: Model) -> None:
        """Hold the model as it is before, solved."""
        self.new_X, self.new_Y = levy(Q, D, seed=1)
        self.test_X, _ = levy(100, D, seed=2)
        predict(model, self.test_X)
        self.model = model

    def prepare(self) -> None:
        """Copy the model."""
        self.copy = copy.deepcopy(self.model)

    def __call__(self) -> None:
        """Update the copy and predict."""
        predict(self.copy.update(self.new_X, self.new_Y), self.test_X)


class ExactUpdate:
    """The same by ``condition_on_observations`` of an exact model, stock or repaired."""

    def __init__(self, n: int, peer: str) -> None:
        """Build the model of n observations, and solve it as a loop does before it conditions."""
        self.task = Update(exact(KERNEL, *levy(n, D)).eval())
        self.peer = PEERS[peer]

    def __call__(self) -> None:
        """Condition the model and predict."""
        task = self.task
        with self.peer():
            conditioned(task.model, task.new_X, task.new_Y, task.test_X)


def prepared_seconds(task: Callable[[], object]) -> float:
    """Processor time of a call, without that of what prepares it."""
    if isinstance(task, Update):
        task.prepare()
    return processor_seconds(task)


def updates(ours: AutoGP, n: int, sizes: Sizes) -> Tasks:
    """Tasks that take 3 observations and predict at 100 points."""
    peers = PEERS if n <= sizes.exact_update else ()
    return {OURS: Update(ours), **{f"{EXACT}, {name}": ExactUpdate(n, name) for name in peers}}


def refits(ours: AutoGP, n: int, sizes: Sizes) -> Tasks:
    """Tasks that learn the hyperparameters of copies."""
    tasks: Tasks = {OURS: Refit(ours)}
    if n <= sizes.exact_refit:
        tasks[EXACT] = Refit(exact(KERNEL, *levy(n, D)))
    return tasks


def measured(sizes: Sizes) -> tuple[Seconds, dict[int, str]]:
    """Time all tasks, those at one number of observations in turns; name our families there."""
    found: Seconds = {"update": {}, "refit": {}}
    families: dict[int, str] = {}
    for n, ours in zip(sizes.numbers, streams(sizes.numbers), strict=True):
        families[n] = ours.family
        turns = 1 if n == sizes.exact_refit else sizes.refits  # the exact GP's takes minutes
        for task, tasks, repeats, warmup in (
            ("refit", refits(ours, n, sizes), turns, 0),
            ("update", updates(ours, n, sizes), sizes.repeats, 1),
        ):
            for name, times in timings(tasks, repeats, warmup, prepared_seconds).items():
                curve = found[task].setdefault(name.partition(",")[0], {})
                curve[n] = min(statistics.median(times), curve.get(n, float("inf")))
    return found, families


def claims_of(seconds: Seconds) -> Iterator[Claim]:
    """Every time."""
    for task, curves in seconds.items():
        for name, curve in curves.items():
            for n, value in curve.items():
                yield stated(f"{task}, {name}, n = {n:,}", 1e3 * value, "ms")


def main() -> None:
    """Run it."""
    options = start(__doc__)
    full = Sizes((10, 30, 100, 300, 1_000, 3_000, 10_000, 100_000, 1_000_000), 3_000, 3_000, 15, 3)
    sizes = options.pick(full, Sizes((10, 30), 30, 10, 2, 1))
    seconds, families = measured(sizes)
    settings = {"seconds": seconds, "families": families, "kernel": KERNEL, "inputs": D}
    finish("growth", list(claims_of(seconds)), options, settings)


if __name__ == "__main__":
    main()
