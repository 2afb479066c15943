"""Searches of the unit cube by other packages and by this one, asked and told alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from importlib.util import find_spec
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.ax_client import attach, inputs_of
from bo_stream.loops.optimization import OptimizationSettings, Optimizer


class Searcher(ABC):
    """A search for the least value over the unit cube in d inputs."""

    @abstractmethod
    def ask(self) -> Tensor:
        """Choose the next points, ``n x d`` with n of at most q."""

    @abstractmethod
    def tell(self, X: Tensor, Y: Tensor) -> None:
        """Take the outcomes Y, ``n``, of the points X, ``n x d``, that were asked for last."""

    @abstractmethod
    def take(self, X: Tensor, Y: Tensor) -> None:
        """Take outcomes of points that it did not ask for, before the first ``ask``.

        So its history is long without a long search, and its cost there can be measured.
        """

    @abstractmethod
    def recommended(self) -> Tensor | None:
        """Return the point it ends with, ``1 x d``; None: it leaves that to the outcomes."""


@final
class RandomSearch(Searcher):
    """Uniform points."""

    def __init__(self, dim: int, q: int, seed: int) -> None:
        """Begin."""
        self._shape, self._generator = (q, dim), torch.Generator().manual_seed(seed)

    def ask(self) -> Tensor:
        """Draw q points."""
        return torch.rand(self._shape, generator=self._generator, dtype=torch.float64)

    def tell(self, X: Tensor, Y: Tensor) -> None:
        """Nothing is learned."""

    def take(self, X: Tensor, Y: Tensor) -> None:
        """Nothing is kept."""

    def recommended(self) -> Tensor | None:
        """None: the best observed point."""
        return None


@final
class CmaSearch(Searcher):
    """CMA-ES of the package ``cma``, with restarts (IPOP: Auger and Hansen, 2005).

    The first population is q. When a search has ended, by the rules of the package, another begins
    at a random point with twice the population, which is asked for q at a time.
    """

    SIGMA = 0.25
    """First standard deviation, in sides of the cube."""

    def __init__(self, dim: int, q: int, seed: int, middle: bool) -> None:
        """Begin.

        Args:
            dim: Inputs d.
            q: Points at a time, and the first population.
            seed: Of everything.
            middle: Whether the first search begins in the middle of the cube, or at random.
        """
        self._dim, self._q, self._seed = dim, q, seed
        self._generator = np.random.default_rng(seed)
        self._begin(np.full(dim, 0.5) if middle else self._generator.random(dim), q)
        self._found: tuple[float, Tensor] | None = None

    def _begin(self, start: np.ndarray, population: int) -> None:
        import cma

        self._population = population
        options = {"bounds": [0.0, 1.0], "popsize": population, "verbose": -9}
        options["seed"] = 1 + int(self._generator.integers(2**31 - 2))  # 0 would be the clock
        self._strategy: Any = cma.CMAEvolutionStrategy(start, self.SIGMA, options)
        self._asked: list[np.ndarray] = []
        self._told: list[float] = []

    def ask(self) -> Tensor:
        """Return the next q of the population, drawn when the last one is complete."""
        if not self._asked:
            self._asked = self._strategy.ask()
        rows = self._asked[len(self._told) : len(self._told) + self._q]
        return torch.tensor(np.array(rows)).clamp(0.0, 1.0)

    def tell(self, X: Tensor, Y: Tensor) -> None:
        """Keep the outcomes until those of the whole population are there."""
        self._told += Y.tolist()
        if len(self._told) < len(self._asked):
            return
        self._strategy.tell(self._asked, self._told)
        self._asked, self._told = [], []
        if self._strategy.stop():
            ended = float(np.median(self._strategy.fit.fit)), self._mean()
            self._found = min(self._found or ended, ended, key=lambda found: found[0])
            self._begin(self._generator.random(self._dim), 2 * self._population)

    def take(self, X: Tensor, Y: Tensor) -> None:
        """Nothing is kept: its cost does not depend on a history."""

    def recommended(self) -> Tensor | None:
        """Return the mean of the distribution, or that of an earlier search that ended lower.

        Lower is the median of the last population's outcomes: the least of noisy ones says little.
        """
        if not self._strategy.countiter:
            return None if self._found is None else self._found[1]
        now = float(np.median(self._strategy.fit.fit)), self._mean()
        return min(self._found or now, now, key=lambda found: found[0])[1]

    def _mean(self) -> Tensor:
        return torch.tensor(np.array([self._strategy.result.xfavorite])).clamp(0.0, 1.0)


@final
class EnnSearch(Searcher):
    """TuRBO-ENN of the package ``ennbo``: nearest neighbours in a trust region, its own start.

    Its scales are fitted with ``FIT_SAMPLES`` rows, and candidates chosen from the Pareto front of
    mean and standard deviation: of what the package offers the best, with noise too (medians of
    three seeds on Ackley-20 with noise 0.5: 5.5 after 1,000, 7.2 by its confidence bound).
    """

    FIT_SAMPLES = 100

    def __init__(self, dim: int, q: int, seed: int) -> None:
        """Begin."""
        from enn.turbo.config.acq_type import AcqType
        from enn.turbo.config.enn_fit_config import ENNFitConfig
        from enn.turbo.config.enn_surrogate_config import ENNSurrogateConfig
        from enn.turbo.config.factory import turbo_enn_config
        from enn.turbo.rust_optimizer import create_optimizer

        self._q = q
        surrogate = ENNSurrogateConfig(fit=ENNFitConfig(num_fit_samples=self.FIT_SAMPLES))
        self._optimizer = create_optimizer(
            bounds=np.tile([0.0, 1.0], (dim, 1)),
            config=turbo_enn_config(enn=surrogate, acq_type=AcqType.PARETO),
            rng=np.random.default_rng(seed),
        )

    def ask(self) -> Tensor:
        """Ask it."""
        return torch.tensor(self._optimizer.ask(self._q)).clamp(0.0, 1.0)

    def tell(self, X: Tensor, Y: Tensor) -> None:
        """Tell it: it maximises."""
        self._optimizer.tell(X.numpy(), -Y.numpy())

    def take(self, X: Tensor, Y: Tensor) -> None:
        """Tell it."""
        self.tell(X, Y)

    def recommended(self) -> Tensor | None:
        """None: the package names no point, so the best observed one."""
        return None


@final
class AxSearch(Searcher):
    """Ax's default strategy, by its client."""

    def __init__(self, dim: int, q: int, seed: int) -> None:
        """Begin; Ax decides on its first trials."""
        from ax.api.client import Client
        from ax.api.configs import RangeParameterConfig

        self._q = q
        self._client = Client(random_seed=seed)
        self._client.configure_experiment(
            [
                RangeParameterConfig(name=f"x{i}", bounds=(0.0, 1.0), parameter_type="float")
                for i in range(dim)
            ]
        )
        self._client.configure_optimization("-loss")
        self._asked: list[int] = []

    def ask(self) -> Tensor:
        """Ask for trials."""
        trials = self._client.get_next_trials(self._q)
        self._asked = list(trials)
        return torch.cat([inputs_of(parameters) for parameters in trials.values()])

    def tell(self, X: Tensor, Y: Tensor) -> None:
        """Complete them."""
        for index, y in zip(self._asked, Y.tolist(), strict=True):
            self._client.complete_trial(index, {"loss": y})

    def take(self, X: Tensor, Y: Tensor) -> None:
        """Attach completed trials."""
        attach(self._client, X, Y)

    def recommended(self) -> Tensor | None:
        """Return the best parameterization by the model's predictions."""
        best, *_ = self._client.get_best_parameterization()
        return inputs_of(best)


@final
class OurSearch(Searcher):
    """This package's ``Optimizer``."""

    def __init__(self, dim: int, q: int, seed: int, search: str, **options: Any) -> None:
        """Begin.

        Args:
            dim: Inputs d.
            q: Points at a time.
            seed: Of everything.
            search: Its name; ``box`` is the whole cube, which versions before the name search, too.
            **options: Other settings; every other default.
        """
        if knows_searches():
            options |= {"search": search}
        elif search != "box":
            raise NotImplementedError(
                f"OptimizationSettings has no field 'search': {search!r} needs a later version."
            )
        bounds = ((0.0, 1.0),) * dim
        self._optimizer = Optimizer(OptimizationSettings(bounds=bounds, q=q, seed=seed, **options))
        self._asked: list[int] = []

    def ask(self) -> Tensor:
        """Ask for trials."""
        trials = self._optimizer.ask()
        self._asked = [trial.key for trial in trials]
        return torch.tensor([trial.X for trial in trials], dtype=torch.float64)

    def tell(self, X: Tensor, Y: Tensor) -> None:
        """Tell their outcomes."""
        for key, y in zip(self._asked, Y.tolist(), strict=True):
            self._optimizer.tell(key, y)

    def take(self, X: Tensor, Y: Tensor) -> None:
        """Register the points, and tell their outcomes."""
        self._asked = [self._optimizer.register(row).key for row in X.tolist()]
        self.tell(X, Y)

    def recommended(self) -> Tensor | None:
        """Return the observed point of the least posterior mean."""
        return torch.tensor([self._optimizer.best().trial.X], dtype=torch.float64)


def knows_searches() -> bool:
    """Return whether the settings of this package's optimizer name a search."""
    return any(field.name == "search" for field in fields(OptimizationSettings))


def absent(package: str, install: str) -> str | None:
    """Return what ``pip install`` is to be given; None if the package is there."""
    return None if find_spec(package) else install
