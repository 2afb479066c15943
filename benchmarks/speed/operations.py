"""Operations whose speed a change must keep; ``before_after.py`` times them in two versions.

Only names that a user has are imported, so that the file runs with an older version, too. Run by
itself it serves: a line with an operation's name comes in, a line with its processor seconds goes
out, until the input ends.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from botorch.acquisition.monte_carlo import qUpperConfidenceBound
from botorch.fit import fit_gpytorch_mll
from botorch.optim.optimize import optimize_acqf
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.test_functions import Levy
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

import bo_stream
from bo_stream import OSGPR, WISKI, LinearStem
from bo_stream.acquisition import FeatureNIPV
from bo_stream.learning import OnlineLearner

Operation = Callable[[], object]

D = 3
UNIT_CUBE = torch.tensor([[0.0] * D, [1.0] * D], dtype=torch.float64)
LEVY = Levy(dim=D)
NOISE_SD = 10.0


def rows(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of the unit cube, ``n x 3``, and noisy values of minus Levy's function, ``n x 1``."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, D, generator=generator)
    noise = NOISE_SD * torch.randn(n, 1, generator=generator)
    return X, noise - LEVY(20.0 * X - 10.0).unsqueeze(-1)


def fitted(n: int) -> WISKI:
    """WISKI with n rows, at the best of its likelihood."""
    model = WISKI(*rows(n, 0), bounds=UNIT_CUBE)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def inducing(n: int) -> OSGPR:
    """O-SGPR with n rows, the first 100 of them the inducing points, which stay."""
    X, Y = rows(n, 0)
    return OSGPR(X, Y, inducing_points=X[:100], allocator=None)


def conditioning(model: WISKI | OSGPR) -> Operation:
    """Thirty updates of three rows, each with the posterior at a hundred points."""
    test_X, batches = rows(100, 1)[0], [rows(3, seed) for seed in range(2, 32)]
    began = copy.deepcopy(model)

    def run() -> None:
        now = copy.deepcopy(began)
        for X, Y in batches:
            now.update(X, Y)
            with torch.no_grad():
                _ = now.posterior(test_X).variance

    return run


def ingestion() -> Operation:
    """Half a million rows, 10,000 at a time, into the default grid."""
    batches = [rows(10_000, seed) for seed in range(50)]

    def run() -> None:
        model = WISKI(torch.empty(0, D), torch.empty(0, 1), bounds=UNIT_CUBE)
        for X, Y in batches:
            model.update(X, Y)

    return run


def refitting(model: WISKI | OSGPR) -> Operation:
    """``fit_gpytorch_mll`` from the model's hyperparameters."""

    def run() -> None:
        fresh = copy.deepcopy(model)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(fresh.likelihood, fresh))

    return run


def variance_reduction(model: WISKI) -> Operation:
    """Build ``FeatureNIPV``; 50 times its values and gradients at four batches of six points."""
    mc_points, X = rows(1_000, 1)[0], torch.rand(4, 6, D).requires_grad_()

    def run() -> None:
        acquisition = FeatureNIPV(model, mc_points=mc_points)
        for _ in range(50):
            torch.autograd.grad(acquisition(X).sum(), X)

    return run


def fantasies(model: WISKI | OSGPR) -> Operation:
    """Twenty fantasies of 16 samples at 8 batches of two points, with gradients."""
    X, test_X = torch.rand(8, 2, D), rows(20, 1)[0]
    sampler = SobolQMCNormalSampler(torch.Size([16]), seed=0)

    def run() -> None:
        for _ in range(20):
            at = X.clone().requires_grad_()
            posterior = model.fantasize(at, sampler).posterior(test_X)
            torch.autograd.grad(posterior.mean.square().sum() + posterior.variance.sum(), at)

    return run


def step_of_optimization(model: WISKI) -> Operation:
    """Take three outcomes, refit, and find the next three points by qUCB."""
    X, Y = rows(3, 1)

    def run() -> None:
        now = copy.deepcopy(model)
        now.update(X, Y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(now.likelihood, now))
        sampler = SobolQMCNormalSampler(torch.Size([128]), seed=0)
        acquisition = qUpperConfidenceBound(now, 2.0, sampler)
        torch.manual_seed(0)
        optimize_acqf(acquisition, UNIT_CUBE, 3, 10, 512, sequential=True)

    return run


def learning_with_a_stem() -> Operation:
    """A hundred steps of ``OnlineLearner`` on a linear stem from ten inputs to two."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(1_100, 10, generator=generator)
    Y = torch.sin(X @ torch.randn(10, 1, generator=generator)) + 0.1 * torch.randn(
        1_100, 1, generator=generator
    )
    torch.manual_seed(0)
    model = WISKI(X[:1_000], Y[:1_000], stem=LinearStem(10, 2), grid_size=16)

    def run() -> None:
        learner = OnlineLearner(copy.deepcopy(model), stem_learning_rate=0.0)
        for i in range(1_000, 1_100):
            learner.step(X[i : i + 1], Y[i : i + 1])

    return run


def trials_of_ax() -> Operation:
    """``get_next_trials`` with 1,000 completed trials and no refit, three times."""
    from benchmarks.optimization.problems import PROBLEMS
    from benchmarks.peers.ax_client import (  # Ax is slow to import
        attach,
        client_of,
        complete,
        inputs_of,
    )

    for name in ("ax", "ax.api.client", "ax.generation_strategy"):
        logging.getLogger(name).setLevel(logging.ERROR)
    client = client_of(PROBLEMS["Levy"], True, first=5, seed=0)
    X, Y = rows(1_000, 0)
    attach(client, X, -Y.squeeze(-1))

    def run() -> None:
        torch.manual_seed(0)
        for _ in range(3):
            ((index, parameters),) = client.get_next_trials(1).items()
            noise = torch.Generator().manual_seed(index)
            complete(client, index, PROBLEMS["Levy"], inputs_of(parameters), noise)

    run()  # builds the model and fits it
    return run


BUILDERS: dict[str, Callable[[], Operation]] = {
    "update": lambda: conditioning(fitted(3_000)),
    "update, OSGPR": lambda: conditioning(inducing(3_000)),
    "ingest": ingestion,
    "refit": lambda: refitting(WISKI(*rows(3_000, 0), bounds=UNIT_CUBE)),
    "refit, OSGPR": lambda: refitting(inducing(1_000)),
    "nipv": lambda: variance_reduction(fitted(3_000)),
    "fantasies": lambda: fantasies(fitted(3_000)),
    "fantasies, OSGPR": lambda: fantasies(inducing(1_000)),
    "optimization_step": lambda: step_of_optimization(fitted(4_500)),
    "uci": learning_with_a_stem,
    "ax_trials": trials_of_ax,
}
"""By name, a function that prepares the operation."""


def served(names: Iterator[str]) -> Iterator[float]:
    """Processor seconds of each operation asked for; the first time, it is prepared before."""
    prepared: dict[str, Operation] = {}
    for name in names:
        if name not in prepared:
            torch.manual_seed(0)
            prepared[name] = BUILDERS[name]()
        torch.manual_seed(1)
        began = time.process_time()
        prepared[name]()
        yield time.process_time() - began


def main() -> None:
    """Serve."""
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    print(f"package {bo_stream.__file__}", flush=True)
    for seconds in served(line.strip() for line in sys.stdin):
        print(f"seconds {seconds}", flush=True)


if __name__ == "__main__":
    main()
