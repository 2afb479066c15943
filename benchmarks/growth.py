"""Processor time of an update and a refit against n, for the picture in README.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from botorch.models.model import Model
from torch import Tensor

from benchmarks.data import levy, levy_stream
from benchmarks.harness import processor_seconds, start, timings
from benchmarks.peers import PEERS, default_kernel, exact
from benchmarks.refit import Refit
from benchmarks.report import Claim, finish, stated
from benchmarks.update import D, Q, conditioned, predict
from bo_stream import OSGPR, WISKI
from bo_stream.models.base import StreamingGP

KERNEL = "RBF"
EXACT = "SingleTaskGP"

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


def streams(names: tuple[str, ...], numbers: tuple[int, ...]) -> Iterator[dict[str, StreamingGP]]:
    """The same models each time, after as many observations as each number says."""
    models: dict[str, StreamingGP] = {}
    before = 0
    for step, n in enumerate(numbers):
        for X, Y in levy_stream(n - before, 10_000, D, seed=step):
            if not models:
                models = {name: begun(name, X, Y) for name in names}
            else:
                for model in models.values():
                    model.update(X, Y)
        before = n
        yield {name: model.eval() for name, model in models.items()}


def begun(name: str, X: Tensor, Y: Tensor) -> StreamingGP:
    """A streaming model of first observations."""
    kernel = default_kernel(KERNEL, D)
    if name == "OSGPR":
        return OSGPR(X, Y, covar_module=kernel)
    bounds = torch.tensor([[0.0] * D, [1.0] * D])
    return WISKI(X, Y, covar_module=kernel, bounds=bounds)


def updates(models: dict[str, StreamingGP], n: int, sizes: Sizes) -> Tasks:
    """Tasks that take 3 observations and predict at 100 points."""
    new_X, new_Y = levy(Q, D, seed=1)
    test_X, _ = levy(100, D, seed=2)

    def streamed(model: StreamingGP) -> Callable[[], None]:
        return lambda: predict(model.update(new_X, new_Y), test_X)

    def peer(model: Model, name: str) -> Callable[[], None]:
        def run() -> None:
            with PEERS[name]():
                conditioned(model, new_X, new_Y, test_X)

        return run

    tasks = {name: streamed(model) for name, model in models.items()}
    if n <= sizes.exact_update:
        model = exact(KERNEL, *levy(n, D)).eval()
        predict(model, test_X)  # as a loop does before it conditions
        tasks |= {f"{EXACT}, {name}": peer(model, name) for name in PEERS}
    return tasks


def refits(models: dict[str, StreamingGP], n: int, sizes: Sizes) -> Tasks:
    """Tasks that learn the hyperparameters of copies."""
    tasks: Tasks = {name: Refit(model) for name, model in models.items()}
    if n <= sizes.exact_refit:
        tasks[EXACT] = Refit(exact(KERNEL, *levy(n, D)))
    return tasks


def measured(sizes: Sizes) -> Seconds:
    """Time all tasks, those at one number of observations in turns."""
    found: Seconds = {"update": {}, "refit": {}}
    for n, models in zip(sizes.numbers, streams(("WISKI", "OSGPR"), sizes.numbers), strict=True):
        for task, tasks, repeats in (
            ("refit", refits(models, n, sizes), sizes.refits),
            ("update", updates(models, n, sizes), sizes.repeats),
        ):
            for name, times in timings(tasks, repeats, 1, processor_seconds).items():
                curve = found[task].setdefault(name.partition(",")[0], {})
                curve[n] = min(statistics.median(times), curve.get(n, float("inf")))
    return found


def claims_of(seconds: Seconds) -> Iterator[Claim]:
    """Every time."""
    for task, curves in seconds.items():
        for name, curve in curves.items():
            for n, value in curve.items():
                yield stated(f"{task}, {name}, n = {n:,}", 1e3 * value, "ms")


def main() -> None:
    """Run it."""
    options = start(__doc__)
    full = Sizes((10, 30, 100, 300, 1_000, 3_000, 10_000, 100_000, 1_000_000), 3_000, 1_000, 15, 3)
    sizes = options.pick(full, Sizes((10, 30), 30, 10, 2, 1))
    seconds = measured(sizes)
    settings = {"seconds": seconds, "kernel": KERNEL, "inputs": D}
    finish("growth", list(claims_of(seconds)), options, settings)


if __name__ == "__main__":
    main()
