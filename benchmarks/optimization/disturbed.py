"""A region search where trials fail or outcomes are wrong: how much later it arrives.

Ackley's function in twelve inputs, ten points at a time, 500 evaluations. Trials fail at random,
one in twenty or three in ten, or all on one side of the least value; or one outcome in twenty is
wrong: a million, as of a simulation that diverges. The regret is of the best point evaluated.
Median regrets are at most a twentieth of that of as many random points.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable

import torch
from botorch.test_functions import Ackley
from torch import Tensor

from benchmarks.common.harness import start
from benchmarks.common.report import Claim, at_most, finish, stated
from benchmarks.optimization.many_input_problems import HIGH, LOW, wide
from benchmarks.optimization.problems import Problem
from bo_stream.loops.optimization import OptimizationSettings, Optimizer

DIM, BATCH, EVALUATIONS, SEEDS = 12, 10, 500, 5
PROBLEM = Problem(Ackley(DIM, bounds=wide(DIM)), 0.0, 0.0)
WRONG = 1e6
BESIDE = -LOW / (HIGH - LOW) + 0.005
"""Mean of the first four inputs from which on trials fail on one side: just beyond the least."""

Rule = Callable[[Tensor, torch.Generator], bool]


def at_random(share: float) -> Rule:
    """Apply to a share of the points, wherever they are."""
    return lambda _, generator: bool(torch.rand((), generator=generator) < share)


FAILS: dict[str, Rule] = {
    "nothing": at_random(0.0),
    "1 in 20 fails": at_random(0.05),
    "3 in 10 fail": at_random(0.3),
    "all on one side fail": lambda x, _: float(x[:4].mean()) > BESIDE,
}
IS_WRONG: dict[str, Rule] = {"1 in 20 outcomes is wrong": at_random(0.05)}


def searched(name: str, seed: int, evaluations: int) -> float:
    """Search once; return the regret."""
    fails, is_wrong = (rules.get(name, at_random(0.0)) for rules in (FAILS, IS_WRONG))
    generator = torch.Generator().manual_seed(seed)
    bounds = ((0.0, 1.0),) * DIM
    settings = OptimizationSettings(bounds=bounds, q=BATCH, seed=seed, search="region")
    optimizer, best = Optimizer(settings), float("inf")
    while len(optimizer.ledger) < evaluations:
        for trial in optimizer.ask():
            x = torch.tensor(trial.X, dtype=torch.float64)
            if fails(x, generator):
                optimizer.fail(trial.key, "failed")
                continue
            value = float(PROBLEM.value(x.unsqueeze(0)))
            best = min(best, value)
            optimizer.tell(trial.key, WRONG if is_wrong(x, generator) else value)
    return best - PROBLEM.optimum


def random_regret(seed: int, evaluations: int) -> float:
    """Return the regret of random points."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(evaluations, DIM, generator=generator, dtype=torch.float64)
    return float(PROBLEM.regret(X).min())


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore")
    seeds, evaluations = options.pick((SEEDS, EVALUATIONS), (1, 40))
    chance = statistics.median(random_regret(seed, evaluations) for seed in range(seeds))
    claims: list[Claim] = [stated("random points: regret", chance)]
    for name in (*FAILS, *IS_WRONG):
        regrets = [searched(name, seed, evaluations) for seed in range(seeds)]
        print(f"{name}: {regrets}", flush=True)
        detail = ", ".join(f"{regret:.3g}" for regret in regrets)
        target = options.pick(chance / 20.0, chance)
        claims.append(at_most(f"{name}: regret", statistics.median(regrets), target, "", detail))
    finish("disturbed", claims, options, {"evaluations": evaluations, "seeds": seeds})


if __name__ == "__main__":
    main()
