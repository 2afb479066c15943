"""Everything that an optimization leaves for its reader, and the sitting that makes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from bo_stream.loops.optimization.campaign import OptimizationCampaign
from bo_stream.loops.optimization.evaluation import PointEvaluator
from bo_stream.loops.optimization.records import history_file, run_record
from bo_stream.loops.optimization.steps import OptimizationStep
from bo_stream.loops.optimization.trace import draw_trace
from bo_stream.loops.optimization.trials import History, Trial
from bo_stream.loops.results import write_picture, write_together
from bo_stream.loops.sitting import SECONDS_BETWEEN_CHECKPOINTS, StopRequest

SLOW_SECONDS = 1.0
"""Evaluations longer than this are on the disk as soon as they are told."""


def write_optimization(
    campaign: OptimizationCampaign, folder: Path, notes: list[str], kind: History = "csv"
) -> None:
    """Write history and run.json, both or none; then draw trace.png.

    A picture that cannot be drawn is a warning.

    Raises:
        OSError: The disk is full or the folder cannot be written; the old files stand.
    """
    files = {
        f"history.{kind}": history_file(campaign, kind),
        "run.json": run_record(campaign, notes),
    }
    write_together(folder, files)
    write_picture(folder / "trace.png", lambda: draw_trace(campaign))


def sit_optimizing(
    campaign: OptimizationCampaign,
    folder: Path,
    evaluator: PointEvaluator,
    stop: StopRequest,
    on_event: Callable[[Trial | OptimizationStep], None],
    seconds_between_checkpoints: float = SECONDS_BETWEEN_CHECKPOINTS,
) -> None:
    """Do the campaign's steps, with a checkpoint now and then and at the end.

    An evaluation longer than ``SLOW_SECONDS`` is on the disk as soon as it is told.

    Args:
        campaign: Begun or resumed.
        folder: For the checkpoints.
        evaluator: Of the campaign's objective.
        stop: Looked at after each step.
        on_event: Called after each trial and each step.
        seconds_between_checkpoints: At least.

    Raises:
        OSError: A checkpoint cannot be written; the one before stands.
        UsageError: No evaluation succeeds; what was tried is in the checkpoint.
    """
    try:
        _sit(campaign, folder, evaluator, stop, on_event, seconds_between_checkpoints)
    except BaseException:  # whatever it is, no evaluation is lost
        campaign.save(folder)
        raise
    campaign.save(folder)


def _sit(
    campaign: OptimizationCampaign,
    folder: Path,
    evaluator: PointEvaluator,
    stop: StopRequest,
    on_event: Callable[[Trial | OptimizationStep], None],
    seconds_between_checkpoints: float,
) -> None:
    last = -float("inf")
    for event in campaign.run(evaluator):
        on_event(event)
        if stop.made and isinstance(event, OptimizationStep):
            return
        if _took_long(event) or time.monotonic() - last > seconds_between_checkpoints:
            campaign.save(folder)
            last = time.monotonic()


def _took_long(event: Trial | OptimizationStep) -> bool:
    return isinstance(event, Trial) and (event.seconds or 0.0) > SLOW_SECONDS
