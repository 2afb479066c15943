"""How a memory becomes a posterior process, and what is learned from it: the interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

from bo_stream.bases.basis import Basis
from bo_stream.models.memory import Memory, Observations
from bo_stream.models.outcomes.base import NoiseAtInputs
from bo_stream.models.outcomes.noise import LEAST_NOISE
from bo_stream.models.prior import Prior
from bo_stream.process.process import PosteriorProcess, WeightSpaceProcess
from bo_stream.tensors import State

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP

P = TypeVar("P", bound=PosteriorProcess)


@dataclass(frozen=True)
class Solved(Generic[P]):
    """A posterior process at one state of all hyperparameters.

    Attributes:
        state: Of the model.
        process: The posterior.
    """

    state: State
    process: P


KeptProcess = Solved[PosteriorProcess]


class SolvedWeights(Solved[WeightSpaceProcess]):
    """The posterior in the weights of features."""

    def can_take(self, data: Observations, basis: Basis) -> bool:
        """Say whether a batch is small, adds, and meets the basis that was solved in."""
        room = self.process.weights.has_room_for(len(data))
        return room and data.sign > 0.0 and self.process.basis is basis

    def after(self, features: Tensor, outcomes: Tensor, noise: Tensor) -> SolvedWeights:
        """Condition on a batch of standardised outcomes. Cost O(n r²)."""
        centred = outcomes - self.process.prior_mean
        weights = self.process.weights.observe(features, centred, noise)
        return SolvedWeights(self.state, replace(self.process, weights=weights))


M = TypeVar("M", bound=Memory)
C = TypeVar("C")
T = TypeVar("T")

Solve = Callable[[Any, Any, Prior, Tensor | None], tuple[PosteriorProcess, Any]]
"""Maps memory, cache, prior and inputs to a process and the cache that has it."""


class Inference(ABC, Generic[M, C]):
    """A way to a posterior from a memory M, with a cache C of what it derived from it.

    It holds options and no data: memories and caches are values that are given and returned, so
    that a call which raises has changed nothing. A cache knows the state of the hyperparameters
    that it is of. Numerical events and what a user is told once are put on record in the model.

    Most methods take the memory of the observations, its cache if there is one, and a prior, which
    views the hyperparameters; inputs X, ``... x d``, are transformed.
    """

    noise_varies: ClassVar[bool] = False
    """Whether the noise variance depends on the inputs, and is learned where it is not known."""

    on_grid: ClassVar[bool] = False
    """Whether the kernel is interpolated on a grid, so that it is a sum of products over inputs."""

    least_noise: ClassVar[float] = LEAST_NOISE
    """Smallest positive known noise variance that is solved for, in parts of the outcomes'."""

    restarts: ClassVar[bool] = True
    """Whether a refit may begin anywhere: the objective depends on hyperparameters and data alone,
    not on variational parameters or features that were learned for the present values."""

    @abstractmethod
    def observe(
        self, memory: M, cache: C | None, data: Observations, prior: Prior
    ) -> tuple[M, C | None]:
        """Put a checked batch into memory, or take it out if its sign is negative.

        Return the memory afterwards, and as much of the cache as follows at a small cost.
        Hyperparameters that are learned along with the stream are set last, when nothing can fail.

        Raises:
            InputDataError: What is to be taken out is not in memory.
            UnsupportedError: Nothing can be taken out.
            ValueError: The memory would become too large.
        """

    @abstractmethod
    def process(
        self, memory: M, cache: C | None, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, C]:
        """Return the posterior as a process that can take X, and the cache that has it."""

    def feature_process(
        self, memory: M, cache: C | None, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, C]:
        """Return :meth:`process` in the weights of features: the only one, for most models."""
        return self.process(memory, cache, prior, X)

    def check_reach(self, process: PosteriorProcess, X: Tensor | None) -> None:
        """Check that a process which is conditioned on hypothetical observations can take X.

        Raises:
            InputDataError: It cannot; most take any.
        """
        return

    def noise(
        self,
        memory: M,
        cache: C | None,
        prior: Prior,
        X: Tensor | None = None,
        process: PosteriorProcess | None = None,
    ) -> tuple[NoiseAtInputs | None, C | None]:
        """Return the noise variance as it depends on the inputs, or None: for most models.

        It will be asked of X, or instead wherever a posterior ``process`` can be asked.
        """
        return None, cache

    @abstractmethod
    def objective(self, memory: M, cache: C | None, prior: Prior) -> tuple[Tensor, C | None]:
        """Return what a fit maximises beside the priors of hyperparameters, and the cache.

        Differentiable in the hyperparameters, ``batch_shape x m``.
        """

    def log_marginal_likelihood(
        self, memory: M, cache: C | None, prior: Prior
    ) -> tuple[Tensor, C | None]:
        """Return that of all observations, or its bound: for most models the objective."""
        return self.objective(memory, cache, prior)

    def refitted(self, memory: M, cache: C | None, prior: Prior) -> tuple[M, C | None]:
        """Return the memory, and a cache, as new hyperparameters want them after a refit."""
        return memory, cache

    @abstractmethod
    def merged(self, memory: M, cache: C | None, other: M, prior: Prior) -> tuple[M, C | None]:
        """Return the memory of both, whose targets are in the same units, and a cache of it.

        Raises:
            ValueError: The memory would become too large.
        """

    @abstractmethod
    def cleared(self, memory: M, prior: Prior) -> M:
        """Return a memory of no observations with the same places."""

    def grown(self, memory: M, prior: Prior, outputs: int) -> M:
        """Return the memory with so many outputs: more ones, that no observation named.

        Raises:
            UnsupportedError: The memory cannot have more.
            ValueError: It would become too large.
        """
        raise UnsupportedError(f"Expected {prior.num_outputs} outputs, got {outputs}.")

    def moved(self, memory: M, cache: C | None, device: torch.device) -> tuple[M, C | None]:
        """Return the memory on another device, and a cache of it, if that is not solved anew."""
        return memory.to(device), None


class InferenceOption(Generic[T]):
    """An attribute of a model that is the option of its inference of the same name.

    Args:
        fixed: Whether it stays as the constructor set it.
    """

    def __init__(self, fixed: bool = False) -> None:
        self._fixed = fixed

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, model: StreamingGP | None, owner: type) -> T:
        value: T = self if model is None else getattr(model._inference, self._name)  # type: ignore[assignment]
        return value

    def __set__(self, model: StreamingGP, value: T) -> None:
        if self._fixed:
            raise AttributeError(f"{self._name} stays as it was set when the model was built")
        model._inference = replace(model._inference, **{self._name: value})  # type: ignore[type-var]
