"""Put observations into a model's memory, take them out, weaken or join them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from torch import Size, Tensor

from bo_stream.models.checks import check_mergeable
from bo_stream.models.memory import Observations, Targets
from bo_stream.models.outcomes.base import Outcomes
from bo_stream.models.shell.construction import (
    checked_projection,
    choose_likelihood,
    observed_inputs,
)
from bo_stream.models.shell.posteriors import keeps_tensors, prior_of

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP

M = TypeVar("M", bound="StreamingGP")

# --- verbs ---------------------------------------------------------------------------------


@keeps_tensors
def update(model: M, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> M:
    """Put n observations into memory, in place, at a cost that no earlier ones add to.

    Bad input raises and changes nothing. See the class for the cost and for what is exact.

    Args:
        model: Itself.
        X: ``batch_shape x n x d``; n = 0 changes nothing.
        Y: ``batch_shape x n x m``. For a classifier labels, ``n`` or ``n x 1``: whole numbers
            from 0, of any dtype. One beyond the known classes brings in all up to it, as if
            they had been there from the start, unless the classes were fixed.
        Yvar: Known noise variances shaped as Y; NaN: unknown. None with labels.

    Raises:
        BotorchTensorDimensionError: Shapes do not fit the model.
        InputDataError: Dtype, device, NaN, infinity, negative variance; on a grid, inputs too
            far outside; labels that are none, or of an unknown class where these are fixed.
        UnsupportedError: The model is conditioned on hypothetical data, or lacks some classes;
            variances are given that it does not take.
        ValueError: The memory would become too large.
    """
    check_not_conditioned(model, "update")
    Y, Yvar, outputs = model._units.checked(model, X, Y, Yvar, "update")
    if X.shape[-2] > 0:
        with undone_on_error(model):
            _grow(model, outputs)
            observe(model, X, Y, Yvar, 1.0)
    return model


@keeps_tensors
def retract(model: M, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> M:
    """Take observations out of memory: undoes :meth:`update` with the same arguments.

    Args and errors as there; also InputDataError if more are taken out than are in, or if the
    rest would be of no observations at all, so that they cannot have been in. This is found
    where the memory tells, and the model stays as it was. Rows whose place others could have
    taken are taken for those; not so by a grid model that still holds its few first
    observations as rows, which finds each of them.
    """
    check_not_conditioned(model, "retract")
    Y, Yvar, _ = model._units.checked(model, X, Y, Yvar, "retract")
    check_retractable(model, X)
    if X.shape[-2] > 0:
        with undone_on_error(model):
            observe(model, X, Y, Yvar, -1.0)
            model._units = model._units.found(model.num_observations > 1e-6)
    return model


@keeps_tensors
def forget(model: M, factor: float) -> M:
    """Let every past observation count ``factor`` times: exponential forgetting.

    Args:
        model: Itself.
        factor: In (0, 1].

    Raises:
        ValueError: The factor is out of range.
        UnsupportedError: The model is conditioned on hypothetical data.
    """
    check_not_conditioned(model, "forget")
    if not 0.0 < factor <= 1.0:
        raise ValueError(f"Expected factor in (0, 1], got {factor}.")
    set_memory(model, model._memory.scale(factor))
    return model


@keeps_tensors
def clear(model: M) -> M:
    """Drop all observations; hyperparameters, places and standardisation stay.

    Raises:
        UnsupportedError: The model is conditioned on hypothetical data.
    """
    check_not_conditioned(model, "clear")
    model._units = model._units.found(False)
    model._latest = LatestInputs()
    set_memory(model, model._inference.cleared(model._memory, model._prior))
    return model


@keeps_tensors
def merge(model: M, other: M) -> M:
    """Add another model's memory to this one's, in place; hyperparameters stay as they are.

    See the class for what is exact.

    Raises:
        UnsupportedError: Another class, shape or transform, or a model that is conditioned on
            hypothetical data.
        ValueError: The memory would become too large.
    """
    units = getattr(other, "_units", None)
    outputs = model._units.outputs_with(units)
    if not isinstance(units, Outcomes):
        raise UnsupportedError(f"Expected other to be a model, got {type(other).__name__}.")
    alike = other._shallow_copy()
    _grow(alike, outputs)
    with undone_on_error(model), torch.no_grad():
        _grow(model, outputs)
        check_mergeable(model, alike)
        check_not_conditioned(model, "merge")
        check_not_conditioned(other, "merge")
        both = model._units.merged(alike._units)
        theirs = alike._memory.map_targets(_shifted_targets(alike._units.shift - both.shift))
        model._memory, model._cache = model._inference.merged(
            model._memory, model._cache, theirs, model._prior
        )
        model._units = both
        refresh_fixed_noise(model)
    model._latest = other._latest.followed_by(model._latest)
    return model


def _shifted_targets(shift: Tensor) -> Tensor:
    """Return the map of target columns [Y, 1] to [Y + shift, 1], ``... x m x 2 x 2``."""
    matrix = torch.eye(2, dtype=shift.dtype, device=shift.device).repeat(*shift.shape, 1, 1)
    matrix[..., 1, 0] = shift
    return matrix


# --- what they check, and their steps ------------------------------------------------------


def check_not_conditioned(model: StreamingGP, verb: str) -> None:
    """Check that a model is one of real observations, for a verb that changes its memory."""
    if model._conditioned_process is not None:
        raise UnsupportedError(
            f"{verb} needs a model of real observations, got one that is conditioned on "
            "hypothetical ones (condition_on_observations, fantasize) or keeps known points "
            "(with_known_points). Use it on the original model."
        )


def check_retractable(model: StreamingGP, X: Tensor) -> None:
    """Check that a memory holds as many observations as are taken out at X, ``... x n x d``."""
    if X.shape[-2] > model.num_observations + 0.5:
        raise InputDataError(
            f"Expected X to hold at most the {model.num_observations:g} observations in "
            f"memory, got {X.shape[-2]}. Retract only what was given to update."
        )


@contextmanager
def undone_on_error(model: StreamingGP) -> Iterator[None]:
    """Put the memory, its units and what depends on their number back if anything raises."""
    outputs, units, likelihood = model._num_outputs, model._units, model.likelihood
    memory, cache = model._memory, model._cache
    try:
        yield
    except BaseException:
        model._num_outputs, model._units, model.likelihood = outputs, units, likelihood
        model._memory, model._cache = memory, cache
        raise


def _grow(model: StreamingGP, outputs: int) -> None:
    """Take outputs that all observations had and none named: classes without a label so far."""
    if outputs == model._num_outputs:
        return
    units = model._units.grown(outputs)
    if units is model._units:  # none that can grow: those of a merge are compared afterwards
        return
    memory = model._inference.grown(model._memory, model._prior, outputs)
    model._units, model._num_outputs = units, outputs
    set_memory(model, memory)
    model.likelihood = choose_likelihood(None, model._units.shift, model._parameter_shape)
    refresh_fixed_noise(model)


@torch.no_grad()
def observe(model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float) -> None:
    """Put checked observations into memory, or take them out if the sign is negative."""
    former, latest, prior = model._units.floor.zero, model._latest, prior_of(model)
    model._units = model._units.before(prior, model._memory, Y, Yvar, sign)
    if model._units.floor.zero is not former:
        set_memory(model, model._memory)
    prior = replace(prior, outcomes=model._units)
    infers = has_learned_noise(model) or model._inference.noise_varies
    targets = model._units.encode(prior, Y, Yvar, infers)
    data = Observations(coordinates(model, X).to(torch.float64), *targets, sign)
    model._memory, model._cache = model._inference.observe(model._memory, model._cache, data, prior)
    refresh_fixed_noise(model)
    model._latest = latest.with_rows(X) if sign > 0.0 else latest.without(X, lambda rows: rows)


def set_memory(model: StreamingGP, memory: Any) -> None:
    """Replace the memory, and drop what was derived from it."""
    model._memory, model._cache = memory, None


def observations(
    model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None, sign: float
) -> Observations:
    """Return checked observations as a memory takes them."""
    return Observations(coordinates(model, X).to(torch.float64), *measured(model, Y, Yvar), sign)


def measured(model: StreamingGP, Y: Tensor, Yvar: Tensor | None) -> Targets:
    """Targets less the shift, noise variances, and where these are known."""
    return model._units.encode(model._prior, Y, Yvar, has_learned_noise(model))


def has_learned_noise(model: StreamingGP) -> bool:
    """Say whether observations without a known variance have that of the likelihood."""
    return isinstance(model.likelihood, GaussianLikelihood)


@torch.no_grad()
def coordinates(model: StreamingGP, X: Tensor) -> Tensor:
    """Inputs of observations as they enter memory now, ``... x d -> ... x k``."""
    transform, stem = getattr(model, "input_transform", None), getattr(model, "stem", None)
    inputs = (X if transform is None else observed_inputs(X, transform)).detach()
    return inputs if stem is None else checked_projection(stem(inputs))


def refresh_fixed_noise(model: StreamingGP) -> None:
    """Keep a fixed-noise likelihood at the mean known variance, for BoTorch's fantasies."""
    if isinstance(model.likelihood, FixedNoiseGaussianLikelihood):
        level = model._from_per_output(model.noise_level()).unsqueeze(-1)
        model.likelihood.noise_covar.noise = level.to(model._dtype)


# --- the latest inputs ---------------------------------------------------------------------

LATEST = 64
"""How many inputs of the latest observations a model holds."""

WAITING = 16
"""At most so many parts, of at most ``2 LATEST`` rows, are held before they are joined."""


@dataclass(frozen=True)
class LatestInputs:
    """The last ``LATEST`` inputs that a model observed, and those of hypothetical observations.

    Attributes:
        parts: Observed, in order of arrival, each ``... x k x d``; they wait to be joined, so that
            an update costs one copy.
        hypothetical: Each ``... x q x d``, in the order in which a model was conditioned on them.
    """

    parts: tuple[Tensor, ...] = ()
    hypothetical: tuple[Tensor, ...] = ()

    @property
    def observed(self) -> Tensor | None:
        """Those observed, ``... x k x d``, or None before the first."""
        return _last(torch.cat(self.parts, -2)) if self.parts else None

    def with_rows(self, X: Tensor) -> LatestInputs:
        """After n more observations, ``... x n x d``. Cost O(LATEST d)."""
        new = _last(X.detach()).clone()
        former = self.parts if new.shape[-2] < LATEST else ()
        parts = (*former, new)
        if len(parts) > WAITING or sum(part.shape[-2] for part in parts) > 2 * LATEST:
            parts = (_last(torch.cat(parts, -2)),)
        return LatestInputs(parts, self.hypothetical)

    def followed_by(self, later: LatestInputs) -> LatestInputs:
        """Append those of another model, which observed all of its own later."""
        observed = later.observed
        return self if observed is None else self.with_rows(observed)

    def without(self, gone: Tensor, coordinates: Callable[[Tensor], Tensor]) -> LatestInputs:
        """Drop the latest of those rows that were taken out, as often as each was.

        Args:
            gone: In some coordinates, ``... x n x k``.
            coordinates: The map of inputs to them.
        """
        held = self.observed
        if held is None:
            return self
        rows, removed = _as_rows(coordinates(held)), _as_rows(gone)
        times = (rows.unsqueeze(1) == removed).all(-1).sum(-1)
        later = (rows.unsqueeze(1) == rows).all(-1).triu(1).sum(-1)
        return replace(self, parts=(held[..., later >= times, :],))

    def to(self, device: torch.device) -> LatestInputs:
        """Move the inputs to another device."""
        parts = tuple(X.to(device) for X in self.parts)
        return LatestInputs(parts, tuple(X.to(device) for X in self.hypothetical))

    def expanded(self, batch_shape: Size, like: Tensor, width: int) -> Tensor:
        """Return all of them in one tensor, ``batch_shape x k x d``.

        Args:
            batch_shape: That the model's posteriors have.
            like: Has the dtype and the device.
            width: Number d of inputs; hypothetical ones of another (under ``AppendFeatures``) are
                left out.
        """
        observed = self.observed
        held = like.new_empty(0, width) if observed is None else observed
        parts = (X.to(like) for X in (held, *self.hypothetical) if X.shape[-1] == width)
        return torch.cat([X.expand(*batch_shape, *X.shape[-2:]) for X in parts], -2)


def _last(X: Tensor) -> Tensor:
    """Return the last ``LATEST`` rows."""
    surplus = X.shape[-2] - LATEST
    return X.narrow(-2, surplus, LATEST) if surplus > 0 else X


def _as_rows(X: Tensor) -> Tensor:
    """Reshape ``batch_shape x n x d`` to ``n x (batch d)``: a row has all batches."""
    return X.double().movedim(-2, 0).flatten(1)
