"""A posterior process, kept for a state of the hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass

from bo_stream.module_state import State
from bo_stream.process.process import PosteriorProcess


@dataclass(frozen=True)
class KeptProcess:
    """What a model solved, or put together, last.

    Attributes:
        state: Of the model.
        process: The posterior.
    """

    state: State
    process: PosteriorProcess
