"""Inputs of the latest observations, for functions of BoTorch that read training data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import (
    ChainedInputTransform,
    FilterFeatures,
    InputTransform,
    ReversibleInputTransform,
    Warp,
)
from torch import Size, Tensor

from bo_stream.models.checks import check_instance


def keeps_boxes(transform: InputTransform | None) -> bool:
    """Say whether the image of a box is a box, between the images of its corners."""
    if isinstance(transform, ChainedInputTransform):
        parts: list[Any] = list(transform.values())
        return all(keeps_boxes(part) for part in parts)
    return transform is None or isinstance(transform, ReversibleInputTransform | FilterFeatures)


def is_learnable(transform: InputTransform) -> bool:
    """Say whether an input transform has parameters that a fit would move.

    Raises:
        UnsupportedError: It is no input transform.
    """
    check_instance("input_transform", transform, InputTransform, "Normalize(d)")
    return any(parameter.requires_grad for parameter in transform.parameters())


def split_transform(
    transform: InputTransform | None,
) -> tuple[InputTransform | None, InputTransform | None]:
    """Split an input transform into a fixed one and, behind it, one that is learned.

    Args:
        transform: Of a chain the first part with parameters to learn begins the second.

    Returns:
        Either is None where there is nothing for it to do.
    """
    if transform is None or not is_learnable(transform):
        return transform, None
    if not isinstance(transform, ChainedInputTransform):
        return None, transform
    parts: dict[str, Any] = dict(transform.items())
    first = next(i for i, part in enumerate(parts.values()) if is_learnable(part))
    names = list(parts)
    fixed = {name: parts[name] for name in names[:first]}
    learned = {name: parts[name] for name in names[first:]}
    return (ChainedInputTransform(**fixed) if fixed else None), ChainedInputTransform(**learned)


def adapt_priors(transform: InputTransform) -> None:
    """Give the priors of ``Warp`` closures that a file can hold, and that serve many outputs.

    BoTorch's are lambdas. GPyTorch adds a prior's terms by the leading dimensions of its parameter
    to the objectives of as many outputs: those of a warp, which all outputs share, must be 1.
    """
    warps: list[Any] = [part for part in transform.modules() if isinstance(part, Warp)]
    for warp in warps:
        for name, (read, write) in _CLOSURES.items():
            if name in warp._priors:
                warp.register_prior(name, warp._priors[name][0], read, write)


def _concentration0(warp: Any) -> Tensor:
    return _shared(warp.concentration0)


def _concentration1(warp: Any) -> Tensor:
    return _shared(warp.concentration1)


def _shared(values: Tensor) -> Tensor:
    return values.view(1, 1, 1, -1)


def _set_concentration0(warp: Any, value: Tensor) -> None:
    warp._set_concentration(i=0, value=value.flatten())


def _set_concentration1(warp: Any, value: Tensor) -> None:
    warp._set_concentration(i=1, value=value.flatten())


_CLOSURES = {
    "concentration0_prior": (_concentration0, _set_concentration0),
    "concentration1_prior": (_concentration1, _set_concentration1),
}


def check_learned(transform: InputTransform, inputs: Tensor, transformed: Tensor) -> None:
    """Check that a learnable transform can be a part of the kernel.

    Args:
        transform: With parameters to learn.
        inputs: Before it.
        transformed: After it.

    Raises:
        UnsupportedError: It gives other shapes, is left out in some modes, or differs between the
            elements of a batch.
    """
    for part in transform.modules():
        if not isinstance(part, InputTransform) or isinstance(part, ChainedInputTransform):
            continue
        always = part.transform_on_train and part.transform_on_eval and part.transform_on_fantasize
        if part.is_one_to_many or not always:
            raise UnsupportedError(
                f"Expected every part of input_transform from the first learnable one on to be "
                f"applied always, one row of each, got {type(part).__name__}. Put it before the "
                "learnable one."
            )
        batch_shape: Any = getattr(part, "batch_shape", ())
        if len(batch_shape) > 0:
            raise UnsupportedError(
                f"Expected a learnable {type(part).__name__} without batch_shape, got "
                f"{tuple(batch_shape)}. Use one model per batch element."
            )
    if transformed.shape != inputs.shape:
        raise UnsupportedError(
            f"Expected a learnable input_transform to leave the shape of its inputs, got "
            f"{tuple(transformed.shape)} of {tuple(inputs.shape)} from {type(transform).__name__}."
        )


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

    def with_hypothetical(self, X: Tensor) -> LatestInputs:
        """After a model was conditioned on hypothetical observations at X, ``... x q x d``."""
        return replace(self, hypothetical=(*self.hypothetical, X.detach()))

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


class TrainInputs(Tensor):
    """The inputs that a model knows, as BoTorch reads training inputs: ``... x k x d``.

    A tensor as any other, but for the index -1, by which ``ProximalAcquisitionFunction`` asks for
    the last input. Operations on it return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    last_input: Callable[[], Tensor]

    @classmethod
    def of(cls, X: Tensor, last_input: Callable[[], Tensor]) -> Self:
        """View a tensor so.

        Args:
            X: ``... x k x d``.
            last_input: Gives the last of them after the model's input transform, ``d'``.
        """
        result = X.as_subclass(cls)
        result.last_input = last_input
        return result

    def __getitem__(self, index: Any) -> Tensor:
        """Index as any tensor; -1 gives the last input after the input transform."""
        if isinstance(index, int) and index == -1:
            return self.last_input()
        return torch.Tensor.__getitem__(self, index)


def check_not_train_inputs(X: Tensor) -> None:
    """Check that a distribution is not asked for at the training inputs, to compare outcomes with.

    Raises:
        UnsupportedError: It is, by BoTorch's cross-validation or by its criteria of fit.
    """
    if isinstance(X, TrainInputs):
        raise UnsupportedError(
            "A streaming model does not keep the data that loo_cv, efficient_loo_cv and "
            "compute_in_sample_model_fit_metric read: take "
            "bo_stream.diagnostics.leave_one_out(model, X, Y) or model.log_marginal_likelihood()."
        )


def _refuse(self: Tensor, *args: object, **kwargs: object) -> NoReturn:
    raise UnsupportedError(
        "A streaming model does not keep the outcomes that this function reads from train_targets: "
        "hand it your own (in place of make_best_f: lambda model, X: {'best_f': "
        "model.posterior(X_observed).mean.amax((-2, -1))})."
    )


class UnkeptOutcomes(Tensor):
    """An empty tensor in place of outcomes that are not kept: it has their dtype and device.

    Functions of BoTorch that read outcomes do so by the methods below, which raise
    UnsupportedError. Operations on it return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    max = size = unsqueeze = transpose = __sub__ = _refuse
