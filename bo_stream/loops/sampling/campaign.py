"""One or more strategies over the same survey, side by side, kept in one folder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bo_stream.loops.crowded_cores import CoreWatch
from bo_stream.loops.datasets import Dataset, Survey, read_dataset, simulated_prevalence
from bo_stream.loops.errors import UsageError
from bo_stream.loops.sampling.checkpoint import (
    Checkpoint,
    DataOrigin,
    read_checkpoint,
    save_checkpoint,
)
from bo_stream.loops.sampling.loop import ActiveSampling, Step
from bo_stream.loops.sampling.settings import Settings, Strategy

_STEPS_ON_SIMULATED = 150
"""Choices on the simulated map unless asked for others: a minute's work on two cores."""


class Campaign:
    """The strategies' loops step in turn, so that they can be stopped and compared at any time.

    Attributes:
        data: The map.
        origin: Where it came from.
        loops: Per strategy; the first one is the main one.
        seconds: Spent in steps, over all sittings.
        is_whole: False while a step is at work.
    """

    def __init__(
        self,
        data: Dataset,
        origin: DataOrigin,
        loops: dict[Strategy, ActiveSampling],
        seconds: float = 0.0,
    ) -> None:
        """Put the parts together; use :meth:`begin` or :meth:`resume`."""
        self.data = data
        self.origin = origin
        self.loops = loops
        self.seconds = seconds
        self.is_whole = True

    @classmethod
    def begin(
        cls,
        path: Path | None,
        x: Sequence[str] | None,
        y: str | None,
        settings: Settings,
        strategies: Sequence[Strategy],
    ) -> Campaign:
        """Read the data (None: the simulated map) and start each strategy from the same points.

        Raises:
            UsageError: Data that cannot be used, or too few for the settings.
        """
        data = _read(path, x, y)
        if path is None and settings.steps is None:
            settings = replace(settings, steps=_STEPS_ON_SIMULATED)
        resolved = settings.resolved(*data.X.shape)
        survey = Survey.of(data, resolved)
        loops = {
            name: ActiveSampling(survey, replace(resolved, strategy=name)) for name in strategies
        }
        return cls(data, _origin(data, path, x, y), loops)

    @classmethod
    def resume(cls, folder: Path, path: Path | None = None, steps: int | None = None) -> Campaign:
        """Go on with the campaign that a folder holds, to the same choices as without a stop.

        Args:
            folder: Of :meth:`save`.
            path: Where the data are now; default: where they were.
            steps: More steps than at first, if given.

        Raises:
            UsageError: No checkpoint, one of other data or of another version, or missing data.
        """
        checkpoint = read_checkpoint(folder)
        origin = checkpoint.origin
        data = _read(path or (origin.path and Path(origin.path)) or None, origin.x, origin.y)
        _check_same_data(data, origin, folder)
        settings = _with_steps(checkpoint.settings, steps)
        resolved = settings.resolved(*data.X.shape)
        loops = _resumed_loops(checkpoint, folder, Survey.of(data, resolved), resolved)
        campaign = cls(data, origin, loops, checkpoint.seconds)
        _check_not_shorter(campaign.main)
        return campaign

    @property
    def main(self) -> ActiveSampling:
        """The loop of the first strategy."""
        return next(iter(self.loops.values()))

    @property
    def finished(self) -> bool:
        """Whether all loops are."""
        return all(loop.finished for loop in self.loops.values())

    def run(self) -> Iterator[tuple[Strategy, Step]]:
        """Do the steps that are left, in turn; after each, all of the state is whole."""
        started, watch = time.monotonic() - self.seconds, CoreWatch()
        while not self.finished:
            name = self._furthest_behind()
            self.is_whole = False
            with watch:
                step = self.loops[name].advance()
            self.is_whole = True
            self.seconds = time.monotonic() - started
            yield name, step

    def _furthest_behind(self) -> Strategy:
        behind = [name for name, loop in self.loops.items() if not loop.finished]
        return min(behind, key=lambda name: self.loops[name].progress)

    def save(self, folder: Path) -> None:
        """Write a checkpoint; see :func:`bo_stream.loops.sampling.checkpoint.save_checkpoint`."""
        states = {name: loop.state for name, loop in self.loops.items()}
        save_checkpoint(folder, self.origin, self.main.settings, self.seconds, states)


def _read(path: Path | None, x: Sequence[str] | None, y: str | None) -> Dataset:
    return simulated_prevalence() if path is None else read_dataset(path, x, y)


def _origin(data: Dataset, path: Path | None, x: Sequence[str] | None, y: str | None) -> DataOrigin:
    absolute = None if path is None else str(path.resolve())
    return DataOrigin(absolute, None if x is None else tuple(x), y, data.fingerprint)


def _check_same_data(data: Dataset, origin: DataOrigin, folder: Path) -> None:
    if data.fingerprint != origin.fingerprint:
        raise UsageError(
            f"The checkpoint in {folder} is of another data set than {data.source} (fingerprint "
            f"{origin.fingerprint[:12]}, got {data.fingerprint[:12]}). Give the data that the run "
            "began with, or start anew in another folder."
        )


def _with_steps(settings: Settings, steps: int | None) -> Settings:
    return settings if steps is None else replace(settings, steps=steps)


def _check_not_shorter(loop: ActiveSampling) -> None:
    if loop.steps_done > (loop.settings.steps or 0):
        raise UsageError(
            f"The run has done {loop.steps_done:,} steps already: expected steps of at least that, "
            f"got {loop.settings.steps:,}."
        )


def _resumed_loops(
    checkpoint: Checkpoint, folder: Path, survey: Survey, settings: Settings
) -> dict[Strategy, ActiveSampling]:
    loops: dict[Strategy, ActiveSampling] = {}
    for name in checkpoint.strategies:
        own = replace(settings, strategy=name)
        loops[name] = ActiveSampling(survey, own, checkpoint.load_state(folder, name))
    return loops
