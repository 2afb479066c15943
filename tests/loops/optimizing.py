"""Quick settings and helpers, shared by the tests of Bayesian optimization."""

from __future__ import annotations

from collections.abc import Iterable

from bo_stream.loops.optimization import OptimizationSettings, Optimizer, Trial
from tests.loops.functions import bowl

QUICK = OptimizationSettings(
    bounds=((-2.0, 3.0),), initial=4, num_restarts=2, raw_samples=16, grid=(24,)
)

REGION = OptimizationSettings(bounds=((-2.0, 3.0),) * 3, q=4, initial=6, search="region")


def tell_all(optimizer: Optimizer, trials: Iterable[Trial]) -> None:
    for trial in trials:
        optimizer.tell(trial.key, bowl(list(trial.X)))


def started(settings: OptimizationSettings = QUICK, steps: int = 1) -> Optimizer:
    """After the initial points and some steps."""
    optimizer = Optimizer(settings)
    tell_all(optimizer, optimizer.ask(settings.initial))
    for _ in range(steps):
        tell_all(optimizer, optimizer.ask())
    return optimizer


def points(trials: Iterable[Trial]) -> list[tuple[float, ...]]:
    return [trial.X for trial in trials]
