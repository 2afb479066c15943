"""Run a campaign until it is done or asked to stop, with a checkpoint now and then."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from bo_stream.loops.sampling.campaign import Campaign
from bo_stream.loops.sampling.loop import Step
from bo_stream.loops.sampling.settings import Strategy

SECONDS_BETWEEN_CHECKPOINTS = 15.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Within its block, the first Ctrl-C (or SIGTERM) asks to stop, the second one interrupts.

    Attributes:
        made: Whether a stop was asked for.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        """Args: ``on_request`` is called at the first signal."""
        self.made = False
        self._on_request = on_request
        self._former: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        """Take over the signals."""
        self._former = {number: signal.signal(number, self._asked) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the signals back."""
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.made = True
        self._give_back()
        self._on_request()


def sit(
    campaign: Campaign,
    folder: Path,
    stop: StopRequest,
    on_step: Callable[[Strategy, Step], None],
    seconds_between_checkpoints: float = SECONDS_BETWEEN_CHECKPOINTS,
) -> None:
    """Do the campaign's steps; a checkpoint is written at the end, however it comes about.

    Within a step there is nothing whole to be written: the checkpoint before stands, from which a
    resumed run comes to the same choices.

    Args:
        campaign: Begun or resumed.
        folder: For the checkpoints.
        stop: Looked at between steps.
        on_step: Called after each step.
        seconds_between_checkpoints: At least.

    Raises:
        OSError: A checkpoint cannot be written; the one before stands.
    """
    try:
        _sit(campaign, folder, stop, on_step, seconds_between_checkpoints)
    finally:
        if campaign.is_whole:
            campaign.save(folder)


def _sit(
    campaign: Campaign,
    folder: Path,
    stop: StopRequest,
    on_step: Callable[[Strategy, Step], None],
    seconds_between_checkpoints: float,
) -> None:
    last = -float("inf")
    for strategy, step in campaign.run():
        on_step(strategy, step)
        if stop.made:
            return
        if time.monotonic() - last > seconds_between_checkpoints:
            campaign.save(folder)
            last = time.monotonic()
