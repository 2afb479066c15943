"""Every way to choose about M inducing points for a set."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.common.harness import Options
from benchmarks.peers.sparse_problem import Problem
from bo_stream.allocation import (
    OIPS,
    Allocator,
    CoverTree,
    GreedyVariance,
    KMeans,
    Random,
    UniformGrid,
)

NEAR = 0.02
"""By how much the number of points may miss M."""
SEEDS = 3
STEPS, MOST_OPTIMISED = 20, 512
"""Steps along the gradient, and the largest M that they are made for."""


def placed(allocator: Allocator, problem: Problem, seed: int) -> Tensor:
    """Its points for all training rows at once."""
    X = problem.shuffled(seed)
    return allocator.update(X[:0], X, problem.kernel)


def searched(make: Callable[[float], Allocator], problem: Problem, M: int, seed: int) -> Tensor:
    """About M points of an allocator that asks for a distance instead."""
    low, high = problem.X.aminmax(dim=0)
    distance = float((high - low).prod() / M) ** (1.0 / problem.dim)
    best = problem.X[:0]
    for _ in range(10):
        Z = placed(make(distance), problem, seed)
        best = min((best, Z), key=lambda points: abs(len(points) - M))
        if abs(len(best) - M) <= NEAR * M:
            break
        distance *= (len(Z) / M) ** (1.0 / problem.dim)
    return best


def optimised(problem: Problem, M: int, steps: int) -> Tensor:
    """Moved by the gradient of the bound."""
    Z = placed(KMeans(M), problem, 0)
    return problem.model(Z, window=len(problem.X)).optimize_points(steps).inducing_points


@dataclass(frozen=True)
class Contender:
    """A way to choose points.

    Attributes:
        place: Of a problem, M and a seed.
        seeds: How often to repeat it.
        most: Largest M that it is asked for.
    """

    place: Callable[[Problem, int, int], Tensor]
    seeds: int = 1
    most: float = math.inf


def contenders(problem: Problem, options: Options) -> dict[str, Contender]:
    """By name."""
    seeds, steps = options.pick(SEEDS, 1), options.pick(STEPS, 2)
    found = {
        "CoverTree": Contender(lambda p, M, seed: searched(CoverTree, p, M, seed), seeds),
        "OIPS": Contender(lambda p, M, seed: searched(oips_apart, p, M, seed), seeds),
        "GreedyVariance": Contender(lambda p, M, seed: placed(GreedyVariance(M), p, seed)),
        "KMeans": Contender(lambda p, M, seed: placed(KMeans(M, seed), p, seed)),
        "Random": Contender(lambda p, M, seed: placed(Random(M, seed), p, seed), seeds),
        "Optimised": Contender(lambda p, M, seed: optimised(p, M, steps), most=MOST_OPTIMISED),
    }
    if problem.dim == 2:
        found["UniformGrid"] = Contender(lambda p, M, seed: placed(UniformGrid(_side(M)), p, seed))
    return found


def oips_apart(distance: float) -> OIPS:
    """OIPS whose threshold is the correlation at a distance, in lengthscales."""
    return OIPS(math.exp(-0.5 * distance * distance))


def _side(M: int) -> int:
    return round(math.sqrt(M))
