"""Tell apart input transforms that are fixed and such as are learned with the kernel."""

from __future__ import annotations

from typing import Any

from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import (
    ChainedInputTransform,
    FilterFeatures,
    InputTransform,
    ReversibleInputTransform,
    Warp,
)
from torch import Tensor

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
