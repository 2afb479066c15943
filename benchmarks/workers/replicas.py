"""Replicas without a driver beside a driver that chooses as many points at a time.

Sixty-four replicas, in one process and round by round: each chooses a point, all are evaluated, all
exchange through a store in memory. The driver asks for batches of 64 by Thompson sampling. Both
begin with the same Sobol points and outcomes, and have the same settings. The regret is of the best
point by its value without noise; that of replicas is of one of them, for at the end all have the
same posterior, which is measured too. ``SEEDS`` of the environment is the number of runs.
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from botorch.test_functions import Branin, StyblinskiTang
from scipy.stats import wilcoxon
from torch import Tensor
from torch.quasirandom import SobolEngine

from benchmarks.common.harness import Options, processor_seconds, start
from benchmarks.common.report import Claim, at_least, at_most, finish, stated
from benchmarks.optimization.problems import Problem, spelled
from bo_stream.distributed import Exchanged, MemoryStore, Replica
from bo_stream.loops.optimization import OptimizationSettings, Optimizer

SEEDS = int(os.environ.get("SEEDS", "10"))
DOUBT = 0.05
"""Least one-sided p-value of equal regrets."""

SAME = 1e-8
"""Largest difference of two replicas' posteriors, in units of the process."""

TASKS = {
    "Branin": Problem(Branin(), 1.0, 0.397887),
    "StyblinskiTang-2": Problem(StyblinskiTang(2), 5.0, -39.16616570377142 * 2),
}


@dataclass(frozen=True)
class Sizes:
    """Replicas, rounds after the first points, and nodes of the grid in a dimension."""

    replicas: int
    rounds: int
    grid: int


@dataclass(frozen=True)
class Run:
    """What 64 replicas came to.

    Attributes:
        regret: At the end.
        difference: Largest one between two replicas' posteriors.
        sent: Bytes that a replica sent in a step, in mean.
        taken: Bytes that it took.
        choosing: Processor seconds of its choice, in mean.
        exchanging: Processor seconds of its exchange.
    """

    regret: float
    difference: float
    sent: float
    taken: float
    choosing: float
    exchanging: float


def settings(problem: Problem, sizes: Sizes, seed: int) -> OptimizationSettings:
    """Of both: Thompson sampling over the unit cube, after as many Sobol points as replicas."""
    return OptimizationSettings(
        bounds=((0.0, 1.0),) * int(problem.function.dim),
        q=sizes.replicas,
        initial=sizes.replicas,
        model="wiski",
        grid=(sizes.grid,),
        acquisition="TS",
        seed=seed,
    )


class Measured:
    """The noisy function, whose noise depends on the seed and on the evaluations before."""

    def __init__(self, problem: Problem, seed: int) -> None:
        """Begin."""
        self._problem, self._generator = problem, torch.Generator().manual_seed(seed)

    def __call__(self, X: Sequence[Sequence[float]]) -> list[float]:
        """Evaluate points, to be minimised."""
        outcomes: list[float] = (
            -self._problem.measure(torch.tensor(X), self._generator).flatten()
        ).tolist()
        return outcomes


def by_driver(problem: Problem, sizes: Sizes, seed: int) -> float:
    """The regret of one optimizer with batches."""
    optimizer, measure = Optimizer(settings(problem, sizes, seed)), Measured(problem, seed)
    for _ in range(1 + sizes.rounds):
        trials = optimizer.ask()
        for trial, y in zip(trials, measure([trial.X for trial in trials]), strict=True):
            optimizer.tell(trial.key, y)
    return float(problem.regret(torch.tensor([optimizer.best().trial.X])))


def by_replicas(problem: Problem, sizes: Sizes, seed: int) -> Run:
    """Let replicas search, each a point a round."""
    store, measure = MemoryStore(), Measured(problem, seed)
    each = replace(settings(problem, sizes, seed), q=1)
    names = [f"replica-{i:02d}" for i in range(sizes.replicas)]
    replicas = [Replica(each, store, name) for name in names]
    asked: list[list[tuple[float, ...]]] = []
    reports: list[Exchanged] = []
    choosing, exchanging = 0.0, 0.0
    for _ in range(1 + sizes.rounds):
        asked.clear()
        choosing += processor_seconds(lambda: asked.extend(r.ask() for r in replicas))
        for replica, X, y in zip(replicas, asked, measure([X for (X,) in asked]), strict=True):
            replica.tell(X, [y])
        for _ in range(2):  # all send, then all take
            exchanging += processor_seconds(lambda: reports.extend(r.exchange() for r in replicas))
    settle(replicas)
    steps = sizes.replicas * (1 + sizes.rounds)
    return Run(
        float(problem.regret(torch.tensor([replicas[0].best().X]))),
        difference(replicas),
        sum(report.bytes_sent for report in reports) / steps,
        sum(report.bytes_taken for report in reports) / steps,
        choosing / steps,
        exchanging / steps,
    )


def settle(replicas: Sequence[Replica]) -> None:
    """Exchange until nothing changes."""
    while any([replica.exchange().changed for replica in replicas]):  # noqa: C419  # all exchange
        pass


@torch.no_grad()
def difference(replicas: Sequence[Replica]) -> float:
    """The largest one of two posteriors' means, or of their variances, in units of the process."""
    at = SobolEngine(replicas[0].settings.dim, scramble=True, seed=0).draw(256).double()
    scale = float(replicas[0].model.outcome_scale())
    found: list[tuple[Tensor, Tensor]] = []
    for replica in replicas:
        posterior = replica.model.posterior(at)
        found.append((posterior.mean / scale, posterior.variance / scale**2))
    spreads = [torch.stack(values) for values in zip(*found, strict=True)]
    return max(float((s.amax(0) - s.amin(0)).max()) for s in spreads)


def searches(title: str, options: Options) -> list[Claim]:
    """Compare replicas and driver on one function, over seeds."""
    problem = TASKS[title]
    sizes = options.pick(Sizes(64, 3, 30), Sizes(4, 1, 8))
    drivers, runs = list[float](), list[Run]()
    for seed in range(options.pick(SEEDS, 2)):
        drivers.append(by_driver(problem, sizes, seed))
        runs.append(by_replicas(problem, sizes, seed))
        print(f"{title}, seed {seed}: driver {drivers[-1]:.3g}, {runs[-1]}", flush=True)
    regrets = [run.regret for run in runs]
    differences = [a - b for a, b in zip(regrets, drivers, strict=True)]
    same = all(d == 0.0 for d in differences)
    doubt = 1.0 if same else float(wilcoxon(differences, alternative="greater").pvalue)

    def mean(name: str) -> float:
        return statistics.mean(getattr(run, name) for run in runs)

    return [
        stated(f"{title}: median regret, driver", statistics.median(drivers), "", spelled(drivers)),
        stated(
            f"{title}: median regret, replicas", statistics.median(regrets), "", spelled(regrets)
        ),
        stated(f"{title}: median paired difference", statistics.median(differences), ""),
        at_least(f"{title}: p-value of no worse regrets (Wilcoxon)", doubt, DOUBT, ""),
        at_most(
            f"{title}: largest difference of two replicas' posteriors",
            max(run.difference for run in runs),
            SAME,
            "",
        ),
        stated(f"{title}: sent by a replica in a step", mean("sent"), "bytes"),
        stated(f"{title}: taken by a replica in a step", mean("taken"), "bytes"),
        stated(f"{title}: processor time of a choice", mean("choosing"), "s"),
        stated(f"{title}: processor time of an exchange", mean("exchanging"), "s"),
    ]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore")
    claims = [claim for title in TASKS for claim in searches(title, options)]
    finish("replicas", claims, options, {"seeds": SEEDS})


if __name__ == "__main__":
    main()
