"""A model's memory as a stream changes it: the verbs that do not depend on what it holds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from bo_stream.models.compatibility import check_mergeable
from bo_stream.models.hyperparameters import move_priors
from bo_stream.models.input_transforms import LatestInputs
from bo_stream.models.measured_gp import MeasuredGP, Memory
from bo_stream.models.memory import Observations
from bo_stream.models.noise import NoiseFloor
from bo_stream.tensors import keeps_tensors


class StatisticsMemory(Memory, Protocol):
    """A memory of statistics: what can be done to it whatever they are of."""

    def scale(self, factor: float, /) -> StatisticsMemory:
        """Every observation counts ``factor`` times."""
        ...

    def select(self, outputs: list[int], /) -> Self:
        """A copy for some of the outputs."""
        ...

    def to(self, device: torch.device, /) -> Self:
        """The memory on another device."""
        ...


class RememberingGP(MeasuredGP):
    """A model with a memory of statistics, which observations enter and leave."""

    _memory: StatisticsMemory

    @property
    def _output_batch(self) -> torch.Size:
        return torch.Size((*self._batch_shape, self._num_outputs))

    @abstractmethod
    def _take(self, data: Observations) -> None:
        """Put checked observations into memory, or take them out; all or nothing."""

    @abstractmethod
    def _set_memory(self, memory: Any) -> None:
        """Replace the memory, and drop what was derived from it."""

    def update(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Self:
        """Put n observations into memory, in place, at a cost that no earlier ones add to.

        Bad input raises and changes nothing. See the class for the cost and for what is exact.

        Args:
            X: ``batch_shape x n x d``; n = 0 changes nothing.
            Y: ``batch_shape x n x m``.
            Yvar: Known noise variances shaped as Y; NaN: unknown.

        Raises:
            BotorchTensorDimensionError: Shapes do not fit the model.
            InputDataError: Dtype, device, NaN, infinity, negative variance; on a grid, inputs too
                far outside.
            UnsupportedError: The model supposes data.
            ValueError: The memory would become too large.
        """
        return self._changed("update", X, Y, Yvar, 1.0)

    def retract(self, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Self:
        """Take observations out of memory: undoes :meth:`update` with the same arguments.

        Args and errors as there; also InputDataError if more are taken out than are in, or if the
        rest would be of no observations at all, so that they cannot have been in. This is found
        where the memory tells, and the model stays as it was. Rows whose place others could have
        taken are taken for those; not so by a grid model that still holds its few first
        observations as rows, which finds each of them.
        """
        return self._changed("retract", X, Y, Yvar, -1.0)

    @keeps_tensors
    def _changed(self, verb: str, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float) -> Self:
        self._check_not_supposed(verb)
        self._check_observations(X, Y, Yvar)
        if sign < 0:
            self._check_retractable(X)
        if X.shape[-2] > 0:
            self._enter_or_leave(X, Y, Yvar, sign)
        return self

    def _enter_or_leave(self, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float) -> None:
        former = self._reference
        try:
            if self._finds_reference and not self._has_reference:
                self._refer_to(self._measured(Y, Yvar)[0])
            self._observe(X, Y, Yvar, sign)
            if sign < 0.0:
                self._has_reference = self.num_observations > 1e-6
        except BaseException:
            self._reference = former
            raise

    @property
    def _reference(self) -> tuple[Tensor, NoiseFloor, bool]:
        """What :meth:`clear` and the first observations afterwards change besides the memory."""
        return self._shift, self._noise_floor, self._has_reference

    @_reference.setter
    def _reference(self, former: tuple[Tensor, NoiseFloor, bool]) -> None:
        self._shift, self._noise_floor, self._has_reference = former

    def _check_retractable(self, X: Tensor) -> None:
        if X.shape[-2] > self.num_observations + 0.5:
            raise InputDataError(
                f"Expected X to hold at most the {self.num_observations:g} observations in "
                f"memory, got {X.shape[-2]}. Retract only what was given to update."
            )

    def _observe(self, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float) -> None:
        zero = self._noise_floor.zero
        self._settle_noise_floor(Y, Yvar, sign)
        if self._noise_floor.zero is not zero:
            self._set_memory(self._memory)
        self._take(self._observations(X, Y, Yvar, sign))
        latest = self._latest
        self._latest = latest.with_rows(X) if sign > 0.0 else latest.without(X, lambda rows: rows)

    def _begin_to_clear(self) -> None:
        """Forget what refers to observations beside the memory.

        Raises:
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("clear")
        self._has_reference = False
        self._latest = LatestInputs()

    def _targets_of(self, other: Self) -> Tensor:
        """The map of another model's target columns to the merged ones, ``... x m x 2 x 2``.

        Raises:
            UnsupportedError: The two cannot be merged.
        """
        check_mergeable(self, other)
        self._check_not_supposed("merge")
        other._check_not_supposed("merge")
        return _shifted_targets(other._shift - self._merged_reference(other)[0])

    def _merged_reference(self, other: Self) -> tuple[Tensor, NoiseFloor, bool]:
        """This model's reference after a merge: the other's if this model is empty."""
        is_empty = self._finds_reference and not self._has_reference
        shift, floor, has_reference = other._reference if is_empty else self._reference
        return shift, floor.joined(other._noise_floor), has_reference

    def _set_merged(self, memory: Any, other: Self) -> None:
        """Take the memory of both models, whose targets :meth:`_targets_of` has mapped."""
        self._set_memory(memory)
        self._refer_to_both(other)
        self._refresh_fixed_noise()

    def _refer_to_both(self, other: Self) -> None:
        """Change what refers to observations beside the memory, in a merge."""
        self._reference = self._merged_reference(other)
        self._latest = other._latest.followed_by(self._latest)

    @keeps_tensors
    def forget(self, factor: float) -> Self:
        """Let every past observation count ``factor`` times: exponential forgetting.

        Args:
            factor: In (0, 1].

        Raises:
            ValueError: The factor is out of range.
            UnsupportedError: The model supposes data.
        """
        self._check_not_supposed("forget")
        if not 0.0 < factor <= 1.0:
            raise ValueError(f"Expected factor in (0, 1], got {factor}.")
        self._set_memory(self._memory.scale(factor))
        return self

    def _prepare_refit(self) -> None:
        self._standardize_by(self._memory.totals)
        self._settle_zeros()
        self._refresh_fixed_noise()

    def _settle_zeros(self) -> None:
        """Let the noise of observations said to have none follow the outcomes' variance."""
        floor = self._noise_floor
        settled = floor.settled(self._memory.totals) if floor.any_zero else floor
        if not torch.equal(settled.zero, floor.zero):
            self._noise_floor = settled
            self._set_memory(self._memory)

    def _select_memory(self, outputs: list[int]) -> None:
        self._set_memory(self._memory.select(outputs))
        self._shift = self._shift[..., outputs]
        self._noise_floor = self._noise_floor.map(lambda variance: variance[..., outputs])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the memory along to another device, where it stays in float64, and all priors."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        move_priors(self, fn)
        device = fn(torch.empty(0, dtype=self._dtype, device=self._shift.device)).device
        if device != self._shift.device:
            self._shift = self._shift.to(device)
            self._noise_floor = self._noise_floor.map(lambda variance: variance.to(device))
            self._latest = self._latest.to(device)
            self._move(device)
        return self

    def _move(self, device: torch.device) -> None:
        """Bring the memory, and what places its points, to the device of the hyperparameters."""
        self._set_memory(self._memory.to(device))


def _shifted_targets(shift: Tensor) -> Tensor:
    """The map of target columns [Y, 1] to [Y + shift, 1], ``... x m x 2 x 2``."""
    matrix = torch.eye(2, dtype=shift.dtype, device=shift.device).repeat(*shift.shape, 1, 1)
    matrix[..., 1, 0] = shift
    return matrix
