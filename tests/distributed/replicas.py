"""Searches of replicas, stores that fail or lag, and the model that replicas should have."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from bo_stream import WISKI
from bo_stream.distributed import MemoryStore, Replica
from bo_stream.distributed.replica import template_of
from bo_stream.loops.optimization import OptimizationSettings
from bo_stream.models.base import StreamingGP
from bo_stream.testing.streams import assert_close

BOX = ((-2.0, 3.0), (10.0, 30.0))
Point = tuple[float, ...]


def settings(**changes: Any) -> OptimizationSettings:
    """A small search in two dimensions, whose model is built and learned fast."""
    chosen: dict[str, Any] = {"acquisition": "TS", "grid": (12,), "initial": 4, "raw_samples": 16}
    return OptimizationSettings(**{"bounds": BOX, "num_restarts": 2, **chosen, **changes})


def height(x: Sequence[float]) -> float:
    """A function of the box, far from zero."""
    return 1e3 + math.sin(0.7 * x[0]) * (x[1] - 20.0) + x[0] ** 2


def points(count: int, generator: random.Random) -> list[Point]:
    """Random points of the box."""
    return [tuple(generator.uniform(*pair) for pair in BOX) for _ in range(count)]


def told(replica: Replica, X: list[Point]) -> list[tuple[Point, float]]:
    """Tell heights; returns what was told."""
    Y = [height(x) for x in X]
    replica.tell(X, Y)
    return list(zip(X, Y, strict=True))


def settle(replicas: Sequence[Replica]) -> None:
    """Exchange until nothing changes any more."""
    for _ in range(10):
        reports = [replica.exchange() for replica in replicas]
        if not any(report.changed for report in reports):
            return
    raise AssertionError("replicas do not come to rest")


def expected(replica: Replica, ledger: Sequence[tuple[Point, float]]) -> StreamingGP:
    """The model of a ledger in its order, with the hyperparameters and the rank of a replica's."""
    own = replica.settings
    model = deepcopy(template_of(own, None))
    X = own.to_unit_cube([x for x, _ in ledger])
    Y = own.sign * X.new_tensor([y for _, y in ledger]).unsqueeze(-1)
    model.update(X, Y).load_state_dict(replica.model.state_dict())
    if isinstance(model, WISKI):
        model.tolerance = replica.model.tolerance
    return model


def assert_same(model: StreamingGP, other: StreamingGP) -> None:
    """Equal posteriors at a grid of points, to 1e-8 in units of the process."""
    assert model.num_observations == other.num_observations
    X = torch.cartesian_prod(*[torch.linspace(0.0, 1.0, 6, dtype=torch.float64)] * 2)
    scale = float(other.outcome_scale())
    a, b = model.posterior(X), other.posterior(X)
    shift = float(b.mean.mean())
    assert_close((a.mean - shift) / scale, (b.mean - shift) / scale)
    assert_close(a.variance / scale**2, b.variance / scale**2)


class LaggingStore(MemoryStore):
    """A store of which every replica sees new deltas late, and which fails now and then.

    Attributes:
        lag: Probability with which a listing leaves out a delta that it may leave out.
        failures: Probability with which a call fails, before or after it has done its work.
    """

    def __init__(self, generator: random.Random) -> None:
        super().__init__()
        self.lag, self.failures, self._generator = 0.0, 0.0, generator

    def __setitem__(self, key: str, value: bytes) -> None:
        self._fail()
        super().__setitem__(key, value)
        self._fail()

    def __getitem__(self, key: str) -> bytes:
        self._fail()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        self._fail()
        hidden = (
            k.startswith("delta/") and self._generator.random() < self.lag for k in self._keys
        )
        return iter([key for key, away in zip(self._keys, hidden, strict=True) if not away])

    @property
    def _keys(self) -> list[str]:
        return sorted(self._values)

    def _fail(self) -> None:
        if self._generator.random() < self.failures:
            raise OSError("the store cannot be reached")


def state(replica: Replica) -> dict[str, Tensor]:
    """A copy of the hyperparameters and the standardisation."""
    return {name: value.clone() for name, value in replica.model.state_dict().items()}


def is_in(replica: Replica, hyperparameters: dict[str, Tensor]) -> bool:
    """Whether a replica has these very hyperparameters."""
    own = replica.model.state_dict()
    return all(torch.equal(own[name], value) for name, value in hyperparameters.items())
