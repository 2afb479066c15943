"""A run of steps that is saved now and then and ends when it is done or asked to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self, TypeVar

from bo_stream.loops.errors import UsageError

Event = TypeVar("Event")

SECONDS_BETWEEN_CHECKPOINTS = 15.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_with_checkpoints(
    events: Iterator[Event],
    save: Callable[[], None],
    stop: StopRequest,
    on_event: Callable[[Event], None],
    *,
    ends_step: Callable[[Event], bool] = lambda _: True,
    is_costly: Callable[[Event], bool] = lambda _: False,
    seconds_between_checkpoints: float = SECONDS_BETWEEN_CHECKPOINTS,
) -> None:
    """Carry out a run; a checkpoint is also written at the end, even after an error.

    Args:
        events: The steps, or parts of steps, which are done as they are drawn.
        save: Writes a checkpoint.
        stop: Looked at after each event that ends a step.
        on_event: Called after each event.
        ends_step: Whether the run may be stopped after an event.
        is_costly: Whether an event is saved at once.
        seconds_between_checkpoints: Least time between two others.

    Raises:
        OSError: A checkpoint cannot be written; the one before stands.
    """
    last = -float("inf")
    try:
        for event in events:
            on_event(event)
            if stop.made and ends_step(event):
                return
            if is_costly(event) or time.monotonic() - last > seconds_between_checkpoints:
                save()
                last = time.monotonic()
    finally:
        save()


def check_not_shorter(done: int, asked: int) -> None:
    """Raise a ``UsageError`` if fewer steps are asked for than are done."""
    if done > asked:
        raise UsageError(
            f"The run has done {done:,} steps already: expected steps of at least that, got "
            f"{asked:,}."
        )


class StopRequest:
    """A context in which a first Ctrl-C (or SIGTERM) asks to stop, and a second one interrupts.

    Attributes:
        made: Whether a stop was asked for.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        """Prepare a request, at which ``on_request`` is called."""
        self.made = False
        self._on_request = on_request
        self._former: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        self._former = {number: signal.signal(number, self._asked) for number in _SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        self._restore_handlers()

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.made = True
        self._restore_handlers()
        self._on_request()

    def _restore_handlers(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
