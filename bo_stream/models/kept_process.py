"""A posterior process, kept for a state of the hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass

from bo_stream.process.process import PosteriorProcess
from bo_stream.tensors import State


@dataclass(frozen=True)
class KeptProcess:
    """What a model solved, or put together, last.

    Attributes:
        state: Of the model.
        process: The posterior.
    """

    state: State
    process: PosteriorProcess
