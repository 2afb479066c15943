"""Ax's ``get_next_trials`` with thousands of completed trials: streaming against Ax's default.

Noisy Levy in 3-D. Both strategies have Ax's acquisition function (qLogNEI) and its search of 20
restarts and 1,024 raw samples. Ax's default builds and fits its model anew at each trial. WISKI
takes the new outcome only; its hyperparameters are learned when the trials have become 1.3 times
as many, so each trial bears ``1 / (0.3 n)`` of the first call, which learns them from all data.
What Ax spends besides on its own data is what is left of a call when the generator's ``fit`` and
``gen`` are taken off.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from ax.api.client import Client
from ax.generators.torch.botorch_modular.generator import BoTorchGenerator

from benchmarks.common.harness import Options, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from benchmarks.optimization.problems import PROBLEMS, first_points
from benchmarks.peers.ax_client import attach, client_of, complete, inputs_of, quiet
from bo_stream.ax import StreamGenerator
from bo_stream.loops.models import REFIT

PROBLEM = PROBLEMS["Levy"]
FASTER = {1_000: 8.0, 3_000: 40.0}
LIMIT_SECONDS = 1.5


@dataclass(frozen=True)
class Times:
    """Of a strategy's calls with n completed trials.

    Attributes:
        first: Seconds of the first one, which builds the model and learns its hyperparameters.
        typical: Median of those after it.
        model: Median seconds that they spent in the generator.
        calls: How many there were after the first.
    """

    first: float
    typical: float
    model: float
    calls: int

    def with_refits(self, n: int) -> float:
        """A call with its share of the refits."""
        return self.typical + self.first / ((REFIT - 1.0) * n)


class Clock:
    """Seconds in some methods, the outermost call counted."""

    def __init__(self) -> None:
        """At zero."""
        self.seconds = 0.0
        self._running = False

    def watching(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The same method; its time is added up."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return method(*args, **kwargs)
            began, self._running = time.perf_counter(), True
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began
                self._running = False

        return watched


def measured(n: int, streams: bool, calls: int) -> Times:
    """A strategy with n completed trials and some more."""
    X, Y, noise = first_points(PROBLEM, n, seed=0)
    client = client_of(PROBLEM, streams, first=5, seed=0)
    attach(client, X, -Y.squeeze(-1))
    torch.manual_seed(0)
    first, _ = one(client, streams, noise)
    rest = [one(client, streams, noise) for _ in range(calls)]
    gc.collect()
    return Times(
        first,
        statistics.median(total for total, _ in rest),
        statistics.median(model for _, model in rest),
        calls,
    )


def one(client: Client, streams: bool, noise: torch.Generator) -> tuple[float, float]:
    """Seconds of a call, and those of them in the generator; the trial is completed after it."""
    kind, clock = StreamGenerator if streams else BoTorchGenerator, Clock()
    with (
        patch.object(kind, "fit", clock.watching(kind.fit)),
        patch.object(kind, "gen", clock.watching(kind.gen)),
    ):
        began = time.perf_counter()
        ((index, parameters),) = client.get_next_trials(1).items()
        total = time.perf_counter() - began
    complete(client, index, PROBLEM, inputs_of(parameters), noise)
    return total, clock.seconds


def stream_claims(n: int, ours: Times) -> list[Claim]:
    """What a call takes with WISKI."""
    label = f"n = {n:,}: get_next_trials with WISKI"
    detail = (
        f"without refits {ours.typical:.2f} s ({ours.model:.2f} s in the generator, "
        f"{ours.typical - ours.model:.2f} s Ax's own); the call with a refit {ours.first:.1f} s"
    )
    taken = ours.with_refits(n)
    if n == 5_000:
        return [at_most(f"{label}, refits included", taken, LIMIT_SECONDS, "s", detail)]
    return [stated(f"{label}, refits included", taken, "s", detail)]


def peer_claims(n: int, ours: Times, theirs: Times) -> list[Claim]:
    """How much longer it takes by default."""
    label = f"n = {n:,}: Ax's default over WISKI, refits included"
    detail = f"{theirs.typical:.1f} s, median of {theirs.calls}"
    ratio = theirs.typical / ours.with_refits(n)
    return [
        at_least(label, ratio, FASTER[n], "", detail)
        if n in FASTER
        else stated(label, ratio, "", detail),
        stated(f"n = {n:,}: get_next_trials by Ax's default", theirs.typical, "s"),
        stated(f"n = {n:,}: the call with a refit", theirs.typical / ours.first, "times faster"),
    ]


def main() -> None:
    """Run it."""
    options: Options = start(__doc__)
    warnings.simplefilter("ignore")
    quiet()
    claims: list[Claim] = []
    peers = options.pick({1_000: 5, 3_000: 2}, {40: 1})
    counts = options.pick((1_000, 3_000, 5_000), (40,))
    for n in counts:
        ours = measured(n, streams=True, calls=options.pick(15, 2))
        claims += stream_claims(n, ours)
        if n in peers:
            claims += peer_claims(n, ours, measured(n, streams=False, calls=peers[n]))
        print(*claims[-3:], sep="\n", flush=True)
    finish("ax_trials", claims, options, {"n": counts, "problem": "Levy", "refit": REFIT})


if __name__ == "__main__":
    main()
