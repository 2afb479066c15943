"""Hartmann-6 with inducing points: regret as with the exact GP, and fantasies at n = 10,000.

400 noisy points by qUCB, four a step, from three seeds, as in ``optimization_quality.py``. Then, on
a model that took 10,000 points in a stream and is at its cap of inducing points, one evaluation of
a lookahead acquisition function with its gradient at 16 candidates of four points.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from functools import partial

import torch
from botorch.acquisition import AcquisitionFunction, qKnowledgeGradient
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from botorch.test_functions import Hartmann
from torch import Tensor

from benchmarks.common.harness import Options, start, timings
from benchmarks.common.report import Claim, at_most, finish, stated
from benchmarks.optimization.problems import Problem, Search, acquire
from benchmarks.peers.contest import Contest, Sizes, all_runs, claims_of, regrets, settings_of
from benchmarks.peers.players import ExactPlayer, StreamPlayer
from benchmarks.speed.nipv import evaluate
from bo_stream import OSGPR
from bo_stream.allocation import OIPS
from bo_stream.models.fitting import FEW_PER_INPUT, relearn

D = 6
PROBLEM = Problem(Hartmann(D), 0.2, -3.32237)
SEARCH = Search(q=4, restarts=4, raw_samples=256, samples=64, maxiter=60)
RHO = 0.95
"""OIPS' threshold of the model of 10,000 points: close enough for its cap of 512 to bind."""
FANTASIES = 16
MC_POINTS = 500
CANDIDATES = 16
SECOND = 1.0


class OsgprPlayer(StreamPlayer):
    """OSGPR with every default."""

    def __init__(self, X: Tensor, Y: Tensor) -> None:
        """Begin."""
        super().__init__(OSGPR(X, Y))

    def search(self) -> None:
        """And place the points for the hyperparameters that were kept."""
        super().search()
        self._model.train().eval()


CONTEST = Contest(
    {"Hartmann": PROBLEM},
    {"OSGPR": OsgprPlayer, "exact": ExactPlayer},
    partial(acquire, search=SEARCH, d=D),
    first=20,
    few=FEW_PER_INPUT * D,
)


def streamed(n: int) -> OSGPR:
    """A model after n uniform points, its hyperparameters learned at 500 and at the end."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(n, D, generator=generator)
    Y = PROBLEM.measure(X, generator)
    model = OSGPR(X[:500], Y[:500], allocator=OIPS(RHO))
    relearn(model)
    for rows in torch.arange(500, n).split(500):
        model.update(X[rows], Y[rows])
    relearn(model)
    return model.requires_grad_(False)


def lookaheads(model: OSGPR) -> dict[str, tuple[AcquisitionFunction, Tensor]]:
    """Acquisition functions, and the points that they are asked at."""
    mc_points = torch.rand(MC_POINTS, D)
    return {
        f"qKG, {FANTASIES} fantasies": (
            qKnowledgeGradient(model, num_fantasies=FANTASIES),
            torch.rand(CANDIDATES, SEARCH.q + FANTASIES, D),
        ),
        f"qNIPV, {MC_POINTS} points": (
            qNegIntegratedPosteriorVariance(model, mc_points=mc_points),
            torch.rand(CANDIDATES, SEARCH.q, D),
        ),
    }


def fantasy_claims(options: Options) -> list[Claim]:
    """Seconds of an evaluation with gradient."""
    n = options.pick(10_000, 600)
    model = streamed(n)
    tasks: dict[str, Callable[[], object]] = {
        name: partial(evaluate, *asked) for name, asked in lookaheads(model).items()
    }
    times = timings(tasks, options.pick(15, 1))
    where = f"n = {n:,}, {CANDIDATES} x {SEARCH.q} candidates"
    made_of = f"{len(model.inducing_points)} inducing points"
    claims = [
        at_most(
            f"{name}, with gradient, {where}",
            statistics.median(taken),
            SECOND,
            "s",
            f"largest {max(taken):.3g} s",
        )
        for name, taken in times.items()
    ]
    return [*claims, stated("points of that model", len(model.inducing_points), "", made_of)]


def main() -> None:
    """Run it."""
    options = start(__doc__)
    warnings.simplefilter("ignore")
    lookahead = fantasy_claims(options)
    sizes = options.pick(Sizes(95, 5, 3, ("Hartmann",)), Sizes(1, 1, 1, ("Hartmann",)))
    file = options.out / f"hartmann{'.smoke' if options.smoke else ''}.runs.json"
    runs = all_runs(CONTEST, sizes, file)
    print(regrets(CONTEST, runs, sizes) + "\n")
    file.unlink(missing_ok=True)
    settings = settings_of(CONTEST, sizes, runs) | {"noise": PROBLEM.noise, "rho": RHO}
    finish("hartmann", claims_of(CONTEST, runs) + lookahead, options, settings)


if __name__ == "__main__":
    main()
