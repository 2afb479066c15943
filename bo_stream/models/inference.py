"""How a memory becomes a posterior process, and what is learned from it: the interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from bo_stream.models.memory import MergedMemory, Observations
from bo_stream.models.prior import Prior
from bo_stream.module_state import State
from bo_stream.process.process import PosteriorProcess


class Solution(Protocol):
    """What an inference has solved for a memory under one state of the hyperparameters."""

    @property
    def process(self) -> PosteriorProcess:
        """The posterior."""
        ...


M = TypeVar("M", bound=MergedMemory)
C = TypeVar("C", bound=Solution)


class Inference(ABC, Generic[M, C]):
    """A way to a posterior from a memory M, with what it keeps between calls, C.

    It holds options and no data: memories and solutions are values that are given and returned, so
    that a call which raises has changed nothing. Numerical events and what a user is told once go
    to the journal of the prior.
    """

    @abstractmethod
    def observe(
        self, memory: M, solution: C | None, data: Observations, prior: Prior
    ) -> tuple[M, C | None]:
        """Put a batch into memory, or take it out if its sign is negative.

        Args:
            memory: Before.
            solution: Of it under the present hyperparameters, if there is one.
            data: A checked batch.
            prior: The hyperparameters.

        Returns:
            The memory afterwards, and its solution where that follows at a small cost.

        Raises:
            InputDataError: What is to be taken out is not in memory.
            ValueError: The memory would become too large.
        """

    @abstractmethod
    def solve(self, memory: M, prior: Prior) -> C:
        """Solve for the posterior of a memory."""

    @abstractmethod
    def objective(self, memory: M, prior: Prior) -> Tensor:
        """Return what a fit maximises beside the priors of hyperparameters, ``batch_shape x m``."""

    @abstractmethod
    def log_marginal_likelihood(self, memory: M, prior: Prior) -> Tensor:
        """Return that of all observations, or its bound, ``batch_shape x m``."""

    @abstractmethod
    def refitted(self, memory: M, prior: Prior) -> M:
        """Return the memory as new hyperparameters want it, after a refit."""

    @abstractmethod
    def merged(self, memory: M, other: M, prior: Prior) -> M:
        """Return the memory of both, whose targets are in the same units.

        Raises:
            ValueError: The memory would become too large.
        """

    @abstractmethod
    def cleared(self, memory: M, prior: Prior) -> M:
        """Return a memory of no observations with the same places."""


@dataclass(frozen=True)
class Kept(Generic[C]):
    """A solution, and the state of the hyperparameters that it is of.

    Attributes:
        state: Of the model.
        solution: Of its memory.
    """

    state: State
    solution: C

    @property
    def process(self) -> PosteriorProcess:
        """The posterior."""
        return self.solution.process
