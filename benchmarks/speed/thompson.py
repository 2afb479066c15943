"""Thompson sampling of 200 points after 4,500 outcomes in 3-D: under 10 s.

Each point maximises an exact posterior function of its own over the whole box. Beside it what
BoTorch offers an exact GP: joint samples at 5,000 Sobol points, of which each takes its best. On
those points the functions of both models should choose alike.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from botorch.generation.sampling import MaxPosteriorSampling
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from torch import Tensor
from torch.quasirandom import SobolEngine

from benchmarks.common.harness import interleave, start
from benchmarks.common.report import at_most, finish, stated
from benchmarks.optimization.optimization_step import points
from benchmarks.optimization.problems import PROBLEMS, D, with_hyperparameters_of
from bo_stream import WISKI
from bo_stream.loops.optimization import OptimizationSettings, Optimizer

LIMIT_SECONDS = 10.0


@dataclass(frozen=True)
class Sizes:
    """Outcomes, points asked for, candidates of the exact GP, and repeats."""

    n: int
    q: int
    candidates: int
    repeats: int


def told(X: Tensor, Y: Tensor) -> Optimizer:
    """An optimizer that knows these points, its hyperparameters learned."""
    settings = OptimizationSettings(
        bounds=((0.0, 1.0),) * D, maximize=True, kernel="rbf", acquisition="TS", model="wiski"
    )
    optimizer = Optimizer(settings)
    for x, y in zip(X.tolist(), Y.flatten().tolist(), strict=True):
        optimizer.tell(optimizer.register(x).key, y)
    optimizer.best()
    return optimizer


def model_of(optimizer: Optimizer) -> WISKI:
    """Its model."""
    model = optimizer.surrogate.model
    assert model is not None
    return model


@torch.no_grad()
def best_candidates(model: Model, candidates: Tensor, q: int) -> Tensor:
    """BoTorch's Thompson sampling on candidates, ``q x d``."""
    chosen: Tensor = MaxPosteriorSampling(model, replacement=True)(candidates, q)
    return chosen


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore")
    sizes = options.pick(Sizes(4_500, 200, 5_000, 1), Sizes(60, 20, 100, 1))
    problem = PROBLEMS["Levy"]
    X, Y, _ = points(problem, sizes.n, seed=0)
    optimizer = told(X, Y)
    model = model_of(optimizer)
    exact = with_hyperparameters_of(model, SingleTaskGP(X, Y)).eval()
    candidates = SobolEngine(D, scramble=True, seed=0).draw(sizes.candidates, dtype=torch.float64)
    chosen: dict[str, Tensor] = {}

    def ask() -> None:
        chosen["WISKI over the box"] = torch.tensor([trial.X for trial in optimizer.ask(sizes.q)])
        for trial in optimizer.pending:
            optimizer.withdraw(trial.key)

    def sample_exact() -> None:
        chosen["exact on candidates"] = best_candidates(exact, candidates, sizes.q)

    def sample_wiski() -> None:
        chosen["WISKI on candidates"] = best_candidates(model, candidates, sizes.q)

    tasks = {"ask": ask, "exact": sample_exact, "WISKI": sample_wiski}
    medians = interleave(tasks, sizes.repeats, warmup=0)
    claims = [
        at_most(
            f"ask for {sizes.q} points, n = {sizes.n:,}",
            medians["ask"],
            LIMIT_SECONDS,
            "s",
            f"grid {model.grid_size}, rank {model.rank}",
        ),
        *(
            stated(f"joint samples at {sizes.candidates:,} candidates, {name}", medians[name], "s")
            for name in ("exact", "WISKI")
        ),
        *(
            stated(f"mean regret of the points, {name}", float(problem.regret(found).mean()))
            for name, found in chosen.items()
        ),
    ]
    finish("thompson", claims, options, vars(sizes))


if __name__ == "__main__":
    main()
