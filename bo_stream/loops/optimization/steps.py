"""How much is to be done, and what each step did."""

from __future__ import annotations

from dataclasses import dataclass

from bo_stream.loops.errors import UsageError
from bo_stream.loops.settings import check_whole


@dataclass(frozen=True)
class Plan:
    """What may change when a run goes on: it decides how much is done, not what is tried next.

    Attributes:
        total: Steps to do after the initial points.
        retries: How often a failed evaluation is tried again.
        workers: Processes that evaluate at a time; 0: this one, where a function that ends its
            process ends the run.
        timeout: Seconds after which an evaluation has failed; None: never.
    """

    total: int
    retries: int = 0
    workers: int = 1
    timeout: float | None = None

    def __post_init__(self) -> None:
        """Check each.

        Raises:
            UsageError: One is out of range.
        """
        for name, value, least in (
            ("steps", self.total, 0), ("retries", self.retries, 0), ("workers", self.workers, 0),
        ):  # fmt: skip
            check_whole(name, value, least)
        if self.timeout is not None and not self.timeout > 0.0:
            raise UsageError(f"Expected timeout above 0 seconds, got {self.timeout}.")
        if self.timeout is not None and self.workers == 0:
            raise UsageError(
                "A timeout needs a process that can be stopped: expected workers of at least 1, "
                "got 0."
            )


@dataclass(frozen=True)
class OptimizationStep:
    """What one step did; step 0 is the initial points.

    Attributes:
        number: Of the step.
        keys: Of its trials.
        best: Key of the best trial so far (see :class:`Best`), None before any outcome.
        mean: Posterior mean there.
        noiseless: The function there, where it is known.
        model_seconds: Choosing, updating and learning.
        evaluation_seconds: Waiting for outcomes, over all sittings.
    """

    number: int
    keys: tuple[int, ...]
    best: int | None
    mean: float | None
    noiseless: float | None
    model_seconds: float
    evaluation_seconds: float


@dataclass
class OpenStep:
    """A step whose outcomes are not all there yet."""

    keys: list[int]
    model_seconds: float
    evaluation_seconds: float = 0.0
