"""Hyperparameters and the standardisation of outcomes, as the one record that replicas share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bo_stream.loops.optimization.surrogate import thin
from bo_stream.models.base import StreamingGP


def arrays_of(model: StreamingGP) -> dict[str, Tensor]:
    """Return all hyperparameters, and means and deviations of outcomes, as arrays by name."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def set_from(model: StreamingGP, arrays: Mapping[str, Tensor]) -> None:
    """Set a model's hyperparameters and standardisation; what depends on these alone follows.

    Raises:
        ValueError: They are those of another model, or not finite; the model stays as it is.
    """
    own = model.state_dict()
    if own.keys() != arrays.keys():
        names = sorted(own.keys() ^ arrays.keys())
        raise ValueError(f"expected the hyperparameters of the model, but {', '.join(names)}")
    for name, value in own.items():
        given = arrays[name]
        if given.shape != value.shape or given.dtype != value.dtype:
            raise ValueError(
                f"expected {name} of shape {tuple(value.shape)} and {value.dtype}, got "
                f"{tuple(given.shape)} and {given.dtype}"
            )
    for name, _ in model.named_parameters():
        if not bool(arrays[name].isfinite().all()):
            raise ValueError(f"{name} is not finite")
    model.load_state_dict(dict(arrays))
    thin(model)
