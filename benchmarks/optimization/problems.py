"""Bayesian optimization of the WISKI paper's noisy functions, the same for each model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from botorch.acquisition.monte_carlo import qUpperConfidenceBound
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.optim.optimize import optimize_acqf
from botorch.sampling.normal import SobolQMCNormalSampler
from botorch.test_functions import (
    Ackley,
    Griewank,
    Levy,
    Michalewicz,
    Rastrigin,
    StyblinskiTang,
    SyntheticTestFunction,
)
from torch import Tensor

from benchmarks.peers.players import ExactPlayer, Player
from bo_stream import WISKI
from bo_stream.loops.optimization.optimizer import LEFT_OUT

D = 3
Q = 3
BETA = 2.0


@dataclass(frozen=True)
class Problem:
    """A function over the unit cube, to be minimised; what a model sees of it is to be maximised.

    Attributes:
        function: BoTorch's, in its own bounds.
        noise: Standard deviation.
        optimum: Its least value.
    """

    function: SyntheticTestFunction
    noise: float
    optimum: float

    def value(self, X: Tensor) -> Tensor:
        """Without noise, ``n x d -> n``."""
        low, high = self.function.bounds
        value: Tensor = self.function.evaluate_true(low + (high - low) * X)
        return value

    def regret(self, X: Tensor) -> Tensor:
        """What the value lacks of the optimum, ``n x d -> n``."""
        return self.value(X) - self.optimum

    def measure(self, X: Tensor, generator: torch.Generator) -> Tensor:
        """What a model is told, ``n x d -> n x 1``."""
        noise = self.noise * torch.randn(len(X), generator=generator)
        return -(self.value(X) + noise).unsqueeze(-1)


PROBLEMS = {
    "Levy": Problem(Levy(D), 10.0, 0.0),
    "Ackley": Problem(Ackley(D), 4.0, 0.0),
    "StyblinskiTang": Problem(StyblinskiTang(D), 20.0, -39.16616570377142 * D),
    "Rastrigin": Problem(Rastrigin(D), 10.0, 0.0),
    "Griewank": Problem(Griewank(D), 4.0, 0.0),
    "Michalewicz": Problem(Michalewicz(D), 5.0, -2.76039468),
}
"""The functions and noise of the paper's table 2.

Michalewicz's optimum in 3-D, which BoTorch does not know, is that of its terms of one input each.
"""


class WiskiPlayer(Player):
    """WISKI with its default kernel and grid, and between refits as few features as in the loop."""

    def __init__(self, X: Tensor, Y: Tensor) -> None:
        """Begin."""
        self._model = WISKI(X, Y, bounds=unit_cube(D))
        super().__init__(self._model)

    @property
    def model(self) -> WISKI:
        """The one that follows the stream."""
        return self._model

    def update(self, X: Tensor, Y: Tensor) -> None:
        """In place."""
        self._model.update(X, Y)

    def refit(self) -> None:
        """From all features, as the loop does."""
        self._model.truncate(0.0)
        super().refit()
        self._model.truncate(LEFT_OUT)


PLAYERS: dict[str, Callable[[Tensor, Tensor], Player]] = {
    "WISKI": WiskiPlayer,
    "exact": ExactPlayer,
}


def with_hyperparameters_of(wiski: WISKI, model: SingleTaskGP) -> SingleTaskGP:
    """An exact model with WISKI's kernel, mean and noise."""
    for name in ("covar_module", "mean_module", "likelihood"):
        getattr(model, name).load_state_dict(getattr(wiski, name).state_dict())
    return model


@dataclass(frozen=True)
class Search:
    """How the next points are looked for.

    Attributes:
        q: Points a step.
        restarts: Starts of L-BFGS-B.
        raw_samples: Points that the starts are chosen from.
        samples: Of the posterior.
        maxiter: Most iterations.
    """

    q: int = Q
    restarts: int = 10
    raw_samples: int = 512
    samples: int = 128
    maxiter: int = 200


WIDE = Search()


def acquire(model: Model, seed: int, search: Search = WIDE, d: int = D) -> Tensor:
    """The next points by qUCB, ``q x d``: one after the other, by L-BFGS-B."""
    sampler = SobolQMCNormalSampler(torch.Size([search.samples]), seed=seed)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        points, _ = optimize_acqf(
            qUpperConfidenceBound(model, beta=BETA, sampler=sampler),
            bounds=unit_cube(d),
            q=search.q,
            num_restarts=search.restarts,
            raw_samples=search.raw_samples,
            options={"maxiter": search.maxiter},
            sequential=True,
        )
    return points


def unit_cube(d: int) -> Tensor:
    """Its bounds, ``2 x d``."""
    return torch.tensor([[0.0] * d, [1.0] * d])


@torch.no_grad()
def best_mean(model: Model, X: Tensor) -> Tensor:
    """Of observed points ``n x d`` the one with the largest posterior mean, ``1 x d``."""
    means = model.posterior(X.unsqueeze(-2)).mean.reshape(-1)
    return X[means.argmax()].unsqueeze(0)


def first_points(problem: Problem, n: int, seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Random points with their outcomes, and the generator of further noise."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, problem.function.dim, generator=generator)
    return X, problem.measure(X, generator), generator


def spelled(values: Sequence[float]) -> str:
    """Numbers in a row."""
    return ", ".join(f"{value:.3g}" for value in values)
