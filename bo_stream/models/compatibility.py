"""Which models have memories that can be added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP


def check_mergeable(model: StreamingGP, other: StreamingGP) -> None:
    """Check that two memories speak of the same quantities.

    Raises:
        UnsupportedError: They differ in class, shape, transforms or kind of noise, or in a
            standardisation that cannot be learned anew.
    """
    mine, theirs = _signature(model), _signature(other)
    for name, value in mine.items():
        if value != theirs[name]:
            raise UnsupportedError(
                f"Cannot merge models with different {name}: {value} and {theirs[name]}."
            )
    if not model._units.rescales and not _are_standardised_alike(model, other):
        raise UnsupportedError(
            "Expected a model whose outcomes are standardised alike, got another mean or "
            "standard deviation: sites cannot change their units. Standardise Y yourself, the "
            "same for both, and leave out outcome_transform."
        )


def _are_standardised_alike(model: StreamingGP, other: StreamingGP) -> bool:
    mine, theirs = (m._outcomes.offset_and_scale(m._units.shift) for m in (model, other))
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _signature(model: StreamingGP) -> dict[str, Any]:
    transform = model._input_transform
    state = {} if transform is None else transform.state_dict()
    is_known = isinstance(model.likelihood, FixedNoiseGaussianLikelihood)
    return {
        "class": type(model).__name__,
        "batch_shape": tuple(model.batch_shape),
        "number of outputs": model.num_outputs,
        "number of inputs": model._input_dim,
        "outcome transforms": [
            (type(step).__name__, step._outputs, getattr(step, "power", None))
            for step in model._outcomes.fixed
        ],
        "input transform": (type(transform).__name__, {k: v.tolist() for k, v in state.items()}),
        "stem": _stem_state(model),
        "kind of noise": "known" if is_known else "learned",
        "likelihood": type(model.likelihood).__name__,
    }


def _stem_state(model: StreamingGP) -> dict[str, Any]:
    stem = model._modules.get("stem")
    return {} if stem is None else {k: v.tolist() for k, v in stem.state_dict().items()}
