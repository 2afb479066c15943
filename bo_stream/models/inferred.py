"""A streaming model that owns a memory, a way of inference, and what that has solved."""

from __future__ import annotations

from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from bo_stream.inference_mode import keeps_tensors
from bo_stream.models.base import StreamingGP
from bo_stream.models.inference import Inference, Kept, Solution
from bo_stream.models.memory import MergedMemory, Observations
from bo_stream.module_state import State, is_in

M = TypeVar("M", bound=MergedMemory)
C = TypeVar("C", bound=Solution)


class InferredGP(StreamingGP, Generic[M, C]):
    """The verbs of a streaming model by an :class:`Inference`."""

    _memory: M
    _inference: Inference[M, C]
    _solved: Kept[C] | None

    @torch.no_grad()
    def _solve(self, state: State) -> Kept[C]:
        return Kept(state, self._inference.solve(self._memory, self._prior))

    @torch.no_grad()
    def _take(self, data: Observations) -> None:
        kept = self._solved
        if kept is not None and not is_in(self, kept.state):
            kept = None
        solution = None if kept is None else kept.solution
        self._memory, solution = self._inference.observe(self._memory, solution, data, self._prior)
        self._solved = None if kept is None or solution is None else Kept(kept.state, solution)
        self._refresh_fixed_noise()

    def _set_memory(self, memory: M) -> None:
        self._memory, self._solved = memory, None

    @torch.no_grad()
    def _finish_refit(self) -> None:
        memory = self._inference.refitted(self._memory, self._prior)
        if memory is not self._memory:
            self._set_memory(memory)

    def _projected(self, inputs: Tensor) -> Tensor:
        return inputs

    @keeps_tensors
    def merge(self, other: Self) -> Self:
        """Add another model's memory to this one's, in place; hyperparameters stay as they are.

        See the class for what is exact.

        Raises:
            UnsupportedError: Another class, shape, transform, or a model that supposes data.
            ValueError: The memory would become too large.
        """
        matrix = self._targets_of(other)
        theirs = other._memory.map_targets(matrix)
        self._set_merged(self._inference.merged(self._memory, theirs, self._prior), other)
        return self

    @keeps_tensors
    def clear(self) -> Self:
        """Drop all observations; hyperparameters, places and standardisation stay.

        Raises:
            UnsupportedError: The model supposes data.
        """
        self._begin_to_clear()
        self._set_memory(self._inference.cleared(self._memory, self._prior))
        return self

    def _learning_objective(self) -> Tensor:
        return self._inference.objective(self._memory, self._prior)

    def _log_marginal_likelihood(self) -> Tensor:
        return self._inference.log_marginal_likelihood(self._memory, self._prior)
