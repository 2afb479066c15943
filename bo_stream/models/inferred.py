"""A streaming model that owns a memory, a way of inference, and a cache of what that derived."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_finite
from bo_stream.models.inference import Inference
from bo_stream.models.memory import MergedMemory, Observations
from bo_stream.process.process import PosteriorProcess
from bo_stream.tensors import keeps_tensors

M = TypeVar("M", bound=MergedMemory)
C = TypeVar("C")
T = TypeVar("T")


class InferenceOption(Generic[T]):
    """An attribute of a model that is the option of its inference of the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, model: InferredGP[Any, Any] | None, owner: type) -> T:
        value: T = self if model is None else getattr(model._inference, self._name)  # type: ignore[assignment]
        return value

    def __set__(self, model: InferredGP[Any, Any], value: T) -> None:
        model._inference = replace(model._inference, **{self._name: value})  # type: ignore[type-var]


class InferredGP(StreamingGP, Generic[M, C]):
    """The verbs of a streaming model by an :class:`Inference`."""

    _memory: M
    _inference: Inference[M, C]
    _cache: C | None = None

    @keeps_tensors
    def process(self, X: Tensor | None = None) -> PosteriorProcess:
        """The posterior as a process; see :class:`StreamingGP`. Solved once, then kept."""
        if X is not None:
            check_finite("X", X)
        if self._supposed is not None:
            self._inference.check_reach(self._supposed, X)
            return self._supposed
        with torch.no_grad():
            process, self._cache = self._inference.process(
                self._memory, self._cache, self._prior, X
            )
        return process

    @keeps_tensors
    def feature_process(self, X: Tensor | None = None) -> PosteriorProcess:
        """The posterior in the weights of features; see :class:`StreamingGP`."""
        if self._supposed is not None:
            return self.process(X)
        if X is not None:
            check_finite("X", X)
        with torch.no_grad():
            process, self._cache = self._inference.feature_process(
                self._memory, self._cache, self._prior, X
            )
        return process

    @torch.no_grad()
    def _take(self, data: Observations) -> None:
        self._memory, self._cache = self._inference.observe(
            self._memory, self._cache, data, self._prior
        )
        self._refresh_fixed_noise()

    def _set_memory(self, memory: M) -> None:
        self._memory, self._cache = memory, None

    @torch.no_grad()
    def _finish_refit(self) -> None:
        self._memory, self._cache = self._inference.refitted(self._memory, self._cache, self._prior)

    def _move(self, device: torch.device) -> None:
        self._memory, self._cache = self._inference.moved(self._memory, self._cache, device)

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
        with torch.no_grad():
            self._memory, self._cache = self._inference.merged(
                self._memory, self._cache, theirs, self._prior
            )
        self._refer_to_both(other)
        self._refresh_fixed_noise()
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
        value, self._cache = self._inference.objective(self._memory, self._cache, self._prior)
        return value

    def _log_marginal_likelihood(self) -> Tensor:
        value, self._cache = self._inference.log_marginal_likelihood(
            self._memory, self._cache, self._prior
        )
        return value
