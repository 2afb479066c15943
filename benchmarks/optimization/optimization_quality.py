"""Bayesian optimization as good as with the exact GP: regret after 100 steps on six functions.

Both models see the same first points and the same noise, are refitted by the same rule and are
asked by the same acquisition function. Each finished run is written to a file, so that an
interrupted benchmark goes on where it was; the file is removed at the end.
"""

from __future__ import annotations

import warnings

from benchmarks.common.harness import Options, start
from benchmarks.common.report import finish
from benchmarks.optimization.problems import PLAYERS, PROBLEMS, D, acquire
from benchmarks.peers.contest import Contest, Sizes, all_runs, claims_of, regrets, settings_of
from bo_stream.models.fitting import FEW_PER_INPUT

CONTEST = Contest(PROBLEMS, PLAYERS, acquire, first=5, few=FEW_PER_INPUT * D)
"""Refits at 14 to 305 observations; from the default hyperparameters too as long as in the loop."""


def main() -> None:
    """Run it."""
    options: Options = start(__doc__)
    warnings.simplefilter("ignore")
    sizes = options.pick(Sizes(100, 5, 6, tuple(PROBLEMS)), Sizes(1, 1, 1, ("Levy",)))
    file = options.out / f"optimization_quality{'.smoke' if options.smoke else ''}.runs.json"
    runs = all_runs(CONTEST, sizes, file)
    print(regrets(CONTEST, runs, sizes) + "\n")
    file.unlink(missing_ok=True)
    settings = settings_of(CONTEST, sizes, runs)
    finish("optimization_quality", claims_of(CONTEST, runs), options, settings)


if __name__ == "__main__":
    main()
