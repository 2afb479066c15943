"""Learning hyperparameters in a loop, at a cost that the loop's steps can bear."""

from __future__ import annotations

from collections.abc import Sequence

from bo_stream.models.base import StreamingGP
from bo_stream.models.refit import Hyperparameters, relearn
from bo_stream.models.wiski.wiski import WISKI

LEFT_OUT = 1e-4
"""Prior variance that the model's features leave out between refits, in parts of the noise's."""

FEW_PER_INPUT = 50
"""Up to this many outcomes an input, a refit starts from the default hyperparameters too."""


def learn(model: StreamingGP, starts: Sequence[Hyperparameters] = ()) -> None:
    """Learn in all features, for the noise may turn out to be less; then keep what it asks for.

    Args:
        model: Its hyperparameters are replaced in place.
        starts: Where to begin besides where it stands; see ``relearn``.
    """
    if isinstance(model, WISKI):
        model.truncate(0.0)
    relearn(model, starts)
    thin(model)


def thin(model: StreamingGP) -> None:
    """Keep as many features as the noise asks for, where a model has more. In place."""
    if isinstance(model, WISKI):
        model.truncate(LEFT_OUT)
