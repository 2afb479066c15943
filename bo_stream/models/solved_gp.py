"""A model whose posterior is solved once for a state of its hyperparameters, and then kept."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from bo_stream.models.checks import check_finite
from bo_stream.models.remembering_gp import RememberingGP
from bo_stream.process.process import PosteriorProcess
from bo_stream.tensors import State, is_in, keeps_tensors, state_of


class KeptPosterior(Protocol):
    """A posterior, and the state of the hyperparameters that it is of."""

    @property
    def state(self) -> State:
        """Of the model."""
        ...

    @property
    def process(self) -> PosteriorProcess:
        """The posterior."""
        ...


S = TypeVar("S", bound=KeptPosterior)


class SolvedGP(RememberingGP, Generic[S]):
    """A model that keeps what it solved until the memory or a hyperparameter moves."""

    _solved: S | None

    @abstractmethod
    def _solve(self, state: State) -> S:
        """The posterior of the present memory, with the present state of the hyperparameters."""

    @keeps_tensors
    def process(self, X: Tensor | None = None) -> PosteriorProcess:
        """The posterior as a process; see :class:`StreamingGP`. Solved once, then kept."""
        if X is not None:
            check_finite("X", X)
        if self._supposed is not None:
            return self._supposed
        if self._solved is None or not is_in(self, self._solved.state):
            self._solved = self._solve(state_of(self))
        return self._solved.process
