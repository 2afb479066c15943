"""Bayesian optimization of the WISKI paper's noisy functions, the same for each model."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from botorch.acquisition.monte_carlo import qUpperConfidenceBound
from botorch.exceptions.errors import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.model import Model
from botorch.optim.closures import get_loss_closure_with_grads
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
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from bo_stream import WISKI
from bo_stream.loops.optimization.surrogate import LEFT_OUT

D = 3
Q = 3
BETA = 2.0
RESTARTS = 10
RAW_SAMPLES = 512
MC_SAMPLES = 128
BOUNDS = ((0.0,) * D, (1.0,) * D)


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


Parameters = dict[str, Tensor]
"""A model's hyperparameters by name."""


class Player(ABC):
    """A model that observes, is refitted, and is asked.

    Attributes:
        failed_fits: Refits that raised; the hyperparameters stay then.
    """

    failed_fits = 0

    def __init__(self, model: Model) -> None:
        """Begin with the default hyperparameters of a model."""
        self._defaults = parameters_of(model)

    @property
    @abstractmethod
    def model(self) -> Model:
        """As it is now."""

    @abstractmethod
    def update(self, X: Tensor, Y: Tensor) -> None:
        """Take observations, ``n x d`` and ``n x 1``."""

    def refit(self) -> None:
        """``fit_gpytorch_mll`` with every default, from the present hyperparameters."""
        try:
            fit_gpytorch_mll(ExactMarginalLogLikelihood(self.model.likelihood, self.model))
        except ModelFittingError:
            self.failed_fits += 1
            self.model.eval()

    def search(self) -> None:
        """Refit from the present and from the default hyperparameters; the better end is kept."""
        ends = []
        for start in (parameters_of(self.model), self._defaults):
            give_parameters(self.model, start)
            self.refit()
            ends.append((self._loss(), parameters_of(self.model)))
        give_parameters(self.model, min(ends, key=lambda end: end[0])[1])

    def _loss(self) -> float:
        """What a refit minimises."""
        mll = ExactMarginalLogLikelihood(self.model.likelihood, self.model).train()
        loss, _ = get_loss_closure_with_grads(mll, dict(self.model.named_parameters()))()
        self.model.eval()
        return float(loss)


class WiskiPlayer(Player):
    """WISKI with its default kernel and grid, and between refits as few features as in the loop."""

    def __init__(self, X: Tensor, Y: Tensor) -> None:
        """Begin."""
        self._model = WISKI(X, Y, bounds=torch.tensor(BOUNDS))
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


class ExactPlayer(Player):
    """``SingleTaskGP`` with every default, built anew around the hyperparameters it had."""

    def __init__(self, X: Tensor, Y: Tensor) -> None:
        """Begin."""
        self._X, self._Y = X, Y
        self._model = SingleTaskGP(X, Y)
        super().__init__(self._model)

    @property
    def model(self) -> SingleTaskGP:
        """The last one."""
        return self._model

    def update(self, X: Tensor, Y: Tensor) -> None:
        """All data at once, standardised anew."""
        self._X, self._Y = torch.cat((self._X, X)), torch.cat((self._Y, Y))
        former = self._model.state_dict()
        self._model = SingleTaskGP(self._X, self._Y)
        kept = {k: v for k, v in former.items() if not k.startswith("outcome_transform")}
        self._model.load_state_dict(kept, strict=False)
        self._model.eval()


PLAYERS: dict[str, Callable[[Tensor, Tensor], Player]] = {
    "WISKI": WiskiPlayer,
    "exact": ExactPlayer,
}


def parameters_of(model: Model) -> Parameters:
    """Copies."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def give_parameters(model: Model, values: Parameters) -> None:
    """Replace a model's."""
    model.load_state_dict(values, strict=False)
    model.eval()


def with_hyperparameters_of(wiski: WISKI, model: SingleTaskGP) -> SingleTaskGP:
    """An exact model with WISKI's kernel, mean and noise."""
    for name in ("covar_module", "mean_module", "likelihood"):
        getattr(model, name).load_state_dict(getattr(wiski, name).state_dict())
    return model


def acquire(model: Model, seed: int) -> Tensor:
    """The next points by qUCB, ``q x d``: one after the other, by L-BFGS-B."""
    sampler = SobolQMCNormalSampler(torch.Size([MC_SAMPLES]), seed=seed)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        points, _ = optimize_acqf(
            qUpperConfidenceBound(model, beta=BETA, sampler=sampler),
            bounds=torch.tensor(BOUNDS),
            q=Q,
            num_restarts=RESTARTS,
            raw_samples=RAW_SAMPLES,
            options={"maxiter": 200},
            sequential=True,
        )
    return points


@torch.no_grad()
def best_mean(model: Model, X: Tensor) -> Tensor:
    """Of observed points ``n x d`` the one with the largest posterior mean, ``1 x d``."""
    means = model.posterior(X.unsqueeze(-2)).mean.reshape(-1)
    return X[means.argmax()].unsqueeze(0)


def first_points(problem: Problem, n: int, seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Random points with their outcomes, and the generator of further noise."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, D, generator=generator)
    return X, problem.measure(X, generator), generator


def spelled(values: Sequence[float]) -> str:
    """Numbers in a row."""
    return ", ".join(f"{value:.3g}" for value in values)
