"""The WISKI paper's noisy functions to 1,500 steps of three points, O-SVGP beside WISKI.

Figures 5 a, A.6 and A.7: both models see the same first points and the same noise, are refitted by
the same rule, when the observations have grown by 1.3, and are asked by qUCB. O-SVGP takes a step
of Adam on all hyperparameters in each update besides, which is how it learns its noise. The regret
is of the best point evaluated, and of the evaluated one of the best posterior mean.

Each finished run is kept in a file in the folder of results: a run that was stopped goes on from
it, and one of more functions or seeds adds to it.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, replace
from functools import partial

from botorch.fit import fit_gpytorch_mll
from botorch.models.transforms import Standardize
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.priors import LogNormalPrior
from torch import Tensor

from benchmarks.common.harness import names, start
from benchmarks.common.report import finish
from benchmarks.common.resume import Finished
from benchmarks.optimization.problems import PROBLEMS, D, WiskiPlayer, acquire
from benchmarks.peers.contest import (
    Contest,
    Run,
    Runs,
    Sizes,
    claims_of,
    curve_of,
    regrets,
    run,
    said,
    settings_of,
)
from benchmarks.peers.players import StreamPlayer
from bo_stream import OSVGP
from bo_stream.models.fitting import FEW_PER_INPUT

MAX_POINTS = 512
"""Most inducing points of O-SVGP."""


class OsvgpPlayer(StreamPlayer):
    """O-SVGP with Gaussian noise, which a step of Adam on each batch learns with the kernel."""

    def __init__(self, X: Tensor, Y: Tensor) -> None:
        """Begin."""
        noise = GaussianLikelihood(noise_prior=LogNormalPrior(-4.0, 1.0))
        scale = Standardize(1)
        model = OSVGP(X, Y, noise, outcome_transform=scale, max_points=MAX_POINTS, hyper_steps=1)
        super().__init__(model)

    def refit(self) -> None:
        """Learn kernel and mean from the memory; the steps on batches learn the noise."""
        elbo = VariationalELBO(self.model.likelihood, self.model, num_data=1)
        fit_gpytorch_mll(elbo)


CONTEST = Contest(
    PROBLEMS,
    {"WISKI": WiskiPlayer, "O-SVGP": OsvgpPlayer},
    acquire,
    first=5,
    few=FEW_PER_INPUT * D,
)


def kept_runs(sizes: Sizes, kept: Finished) -> Runs:
    """Do every run, or read it where it was done before."""
    runs: Runs = {}
    for seed in range(sizes.seeds):
        for name in sizes.functions:
            for player in CONTEST.players:
                key = f"{name}, {player}, seed {seed}"
                done = kept.part(key, Run, partial(run, CONTEST, name, player, seed, sizes))
                runs[name, player, seed] = replace(done, curve=curve_of(asdict(done)))
                print(said(name, player, seed, runs[name, player, seed]), flush=True)
    return runs


def main() -> None:
    """Run it."""
    options = start(
        __doc__,
        values={
            "functions": ("all", "names separated by ';'"),
            "seeds": ("2", "how many"),
        },
    )
    warnings.simplefilter("ignore")
    functions = names(options.values["functions"], PROBLEMS, "function")
    sizes = options.pick(
        Sizes(1_500, 25, int(options.values["seeds"]), functions), Sizes(2, 1, 1, ("Levy",))
    )
    file = options.out / f"long_runs{'.smoke' if options.smoke else ''}.runs.json"
    runs = kept_runs(sizes, Finished(file, {"steps": sizes.steps, "every": sizes.every}))
    print(regrets(CONTEST, runs, sizes) + "\n")
    finish("long_runs", claims_of(CONTEST, runs), options, settings_of(CONTEST, sizes, runs))


if __name__ == "__main__":
    main()
