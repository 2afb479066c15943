"""A whole step of optimization at 4,500 points: 50 times faster than exact, and flat from 500 on.

A step takes 3 outcomes, learns the hyperparameters anew from where they stand and finds the next 3
points. Half of the points are uniform, half lie about the optimum, as an optimization leaves them.
Both models begin at the optimum of their own likelihood without those 3 outcomes.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common.harness import Options, seconds, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated, times
from benchmarks.optimization.problems import (
    PROBLEMS,
    D,
    Problem,
    Q,
    WiskiPlayer,
    acquire,
    spelled,
    with_hyperparameters_of,
)
from benchmarks.peers.players import ExactPlayer, Player

FASTER = 50.0
FLAT = 1.25
NEAR = 0.1


@dataclass(frozen=True)
class Sizes:
    """Points of the large and the small stream, WISKI's steps on each, and the functions."""

    large: int
    small: int
    steps: int
    functions: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """Seconds of the parts of a step."""

    update: float
    refit: float
    acquisition: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.update + self.refit + self.acquisition

    def __str__(self) -> str:
        return (
            f"{self.total:.2f} s (update {self.update:.3f}, refit {self.refit:.2f}, "
            f"acquisition {self.acquisition:.2f})"
        )


def points(problem: Problem, n: int, seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """As an optimization leaves them, ``n x d`` and ``n x 1``, and the generator of more noise."""
    generator = torch.Generator().manual_seed(seed)
    low, high = problem.function.bounds
    optimum = (problem.function.optimizers[0] - low) / (high - low)
    near = optimum + NEAR * torch.randn(n - n // 2, D, generator=generator)
    X = torch.cat((torch.rand(n // 2, D, generator=generator), near.clamp(0.0, 1.0)))
    X = X[torch.randperm(n, generator=generator)]
    return X, problem.measure(X, generator), generator


def timed_step(player: Player, X: Tensor, Y: Tensor, seed: int) -> tuple[Step, Tensor]:
    """One step, and the points that it chose."""
    picked: list[Tensor] = []
    step = Step(
        seconds(lambda: player.update(X, Y)),
        seconds(player.refit),
        seconds(lambda: picked.append(acquire(player.model, seed))),
    )
    return step, picked[0]


def median_step(steps: Sequence[Step]) -> Step:
    """The step of the median total (the upper one of an even number)."""
    return sorted(steps, key=lambda step: step.total)[len(steps) // 2]


class Stream:
    """WISKI after n points of a problem, doing one step after the other."""

    def __init__(self, problem: Problem, n: int) -> None:
        """Fitted to n points, with the next ones chosen."""
        self.problem = problem
        self.X, self.Y, self.noise = points(problem, n, seed=n)
        self.player = WiskiPlayer(self.X, self.Y)
        self.player.refit()
        self.next_X = acquire(self.player.model, 0)
        self.steps: list[Step] = []

    def step(self) -> None:
        """Measure the points chosen last, then one step."""
        Y = self.problem.measure(self.next_X, self.noise)
        done, self.next_X = timed_step(self.player, self.next_X, Y, len(self.steps) + 1)
        self.steps.append(done)


def exact_step(stream: Stream) -> Step:
    """The exact GP's step, on the stream's first points and the last ones that it chose."""
    player = ExactPlayer(stream.X, stream.Y)
    with_hyperparameters_of(stream.player.model, player.model)
    player.refit()
    noise = torch.Generator().manual_seed(1)
    step, _ = timed_step(player, stream.next_X, stream.problem.measure(stream.next_X, noise), 1)
    return step


def compare(name: str, sizes: Sizes) -> list[Claim]:
    """WISKI's steps around one step of the exact GP."""
    streams = [Stream(PROBLEMS[name], n) for n in (sizes.small, sizes.large)]
    for stream in streams:
        for _ in range(sizes.steps // 2):
            stream.step()
    exact = exact_step(streams[-1])
    for stream in streams:
        for _ in range(sizes.steps - sizes.steps // 2):
            stream.step()
    small, large = (median_step(stream.steps) for stream in streams)
    where = f"{name}, n = {sizes.large:,}"
    ranks = ", ".join(str(stream.player.model.rank) for stream in streams)
    return [
        at_least(
            f"one step, {where}",
            exact.total / large.total,
            FASTER,
            "times faster",
            f"WISKI {large}; exact, once, {exact}",
        ),
        *times(f"one step, {where}", exact.total, large.total),
        at_most(
            f"one step, {where} over n = {sizes.small:,}",
            large.total / small.total,
            FLAT,
            "",
            f"{small} at n = {sizes.small:,}; ranks {ranks}",
        ),
        stated(
            f"mean of {sizes.steps} steps, {where}",
            statistics.fmean(step.total for step in streams[-1].steps),
            "s",
            f"each {spelled([step.total for step in streams[-1].steps])}; n = {sizes.small:,}: "
            f"{spelled([step.total for step in streams[0].steps])}",
        ),
    ]


def main() -> None:
    """Run it."""
    options: Options = start(__doc__)
    warnings.simplefilter("ignore")
    full = Sizes(4_500, 500, 9, ("Levy", "Ackley"))
    sizes = options.pick(full, Sizes(60, 40, 1, ("Levy",)))
    claims = [claim for name in sizes.functions for claim in compare(name, sizes)]
    finish("optimization_step", claims, options, {**vars(sizes), "q": Q})


if __name__ == "__main__":
    main()
