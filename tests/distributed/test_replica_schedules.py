"""Whatever the schedule of exchanges, replicas have the posterior of all that was sent."""

from __future__ import annotations

import random

import pytest

from bo_stream.distributed import Replica
from bo_stream.distributed.deltas import Listing
from tests.distributed.replicas import (
    LaggingStore,
    Point,
    assert_same,
    expected,
    points,
    settings,
    settle,
    told,
)

SEARCH = settings(refit=2.5)


class Schedule:
    """Random replicas that are told, exchange, compact, die, come back, or join late."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = LaggingStore(self.random)
        self.sent: list[tuple[Point, float]] = []
        self.waiting: dict[str, list[tuple[Point, float]]] = {}
        self.replicas: dict[str, Replica] = {}
        self.dead: list[str] = []
        for name in "ABC":
            self.join(name)

    def join(self, name: str) -> None:
        self.store.failures, lag, self.store.lag = 0.0, self.store.lag, 0.0
        self.replicas[name], self.waiting[name] = Replica(SEARCH, self.store, name), []
        self.store.lag = lag

    def tell(self, name: str) -> None:
        X = points(self.random.choice((1, 1, 1, 2, 9)), self.random)
        self.waiting[name] += told(self.replicas[name], X)

    def exchange(self, name: str) -> bool:
        """Exchange once; says whether it went through."""
        self.store.failures = self.random.choice((0.0, 0.03))
        try:
            self.replicas[name].exchange()
        except OSError:
            return False
        finally:
            self.store.failures = 0.0
        self.sent += self.waiting[name]
        self.waiting[name] = []
        return True

    def die(self, name: str) -> None:
        """Lose what was not sent."""
        while not self.exchange(name):
            pass
        self.tell(name)
        del self.replicas[name]
        self.dead.append(name)

    def step(self) -> None:
        name = self.random.choice(sorted(self.replicas))
        action = self.random.random()
        self.store.lag = self.random.choice((0.0, 0.3, 0.9))
        if action < 0.45:
            self.tell(name)
        elif action < 0.85:
            self.exchange(name)
        elif action < 0.92:
            self.replicas[name].compact()
        elif action < 0.96 and len(self.replicas) > 2:
            self.die(name)
        else:
            self.join(self.dead.pop() if self.dead else f"late-{len(self.replicas)}")

    def end(self) -> None:
        self.store.lag = self.store.failures = 0.0
        settle(list(self.replicas.values()))
        for name in self.replicas:
            self.sent += self.waiting[name]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:The kernel's lengthscale is too short for the grid")
@pytest.mark.filterwarnings("ignore:.* neither in the store nor in a snapshot")  # while it lags
@pytest.mark.parametrize("seed", range(10))
def test_replicas_end_with_the_posterior_of_all_that_was_sent(seed: int) -> None:
    schedule = Schedule(seed)
    for _ in range(60):
        schedule.step()
    schedule.end()
    replicas = [*schedule.replicas.values(), Replica(SEARCH, schedule.store, "last")]
    assert len(schedule.sent) > 20
    assert Listing.of(schedule.store).learned  # hyperparameters have moved
    model = expected(replicas[0], schedule.sent)
    for replica in replicas:
        assert_same(replica.model, model)
        assert replica.best().X == replicas[0].best().X
