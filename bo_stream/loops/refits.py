"""Refits of hyperparameters in a loop."""

from __future__ import annotations

from collections.abc import Sequence

from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import Hyperparameters, relearn
from bo_stream.models.wiski.wiski import WISKI

LEFT_OUT = 1e-4
"""Prior variance truncated from the model's features between refits, over the noise variance."""

FEW_PER_INPUT = 50
"""Most outcomes per input at which a refit starts from the default hyperparameters too."""


def learn(model: StreamingGP, starts: Sequence[Hyperparameters] = ()) -> None:
    """Learn hyperparameters in place, from the present values and further starts (``relearn``).

    All features are used, as the noise may turn out to be smaller; then :func:`thin` is called.
    """
    if isinstance(model, WISKI):
        model.truncate(0.0)
    relearn(model, starts)
    thin(model)


def thin(model: StreamingGP) -> None:
    """Truncate the features of a model on a grid, in place, to those that exceed the noise."""
    if isinstance(model, WISKI):
        model.truncate(LEFT_OUT)
