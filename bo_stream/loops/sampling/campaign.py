"""A sampling campaign: strategies side by side over the same data, kept in one folder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bo_stream.errors import UsageError
from bo_stream.loops.crowded_cores import CoreWatch
from bo_stream.loops.datasets import Dataset, read_dataset, simulated_prevalence
from bo_stream.loops.predictions import Score
from bo_stream.loops.run import SAMPLING, ModelFile, check_not_shorter, from_record
from bo_stream.loops.sampling.replay import PoolSplit, SamplingReplay, Step
from bo_stream.loops.sampling.settings import STRATEGIES, Settings, Strategy
from bo_stream.loops.sampling.state import SamplingState

_STEPS_ON_SIMULATED = 50
"""Default number of choices on the simulated map: half a minute's work on two cores."""


@dataclass(frozen=True)
class DataOrigin:
    """Source and identity of a run's data.

    Attributes:
        path: Absolute path of the file; None: the simulated map.
        x: Names of the input columns, if they were given.
        y: Name of the target column, if it was given.
        fingerprint: Digest of the data (:attr:`Dataset.fingerprint`).
    """

    path: str | None
    x: tuple[str, ...] | None
    y: str | None
    fingerprint: str


class Campaign:
    """Loops of several strategies, which step in turn so that they can be compared at any time.

    Attributes:
        data: The map.
        origin: Source of the data.
        loops: Loop per strategy; the first one is the main one.
        seconds: Time spent in steps, over all parts of the run.
    """

    def __init__(
        self,
        data: Dataset,
        origin: DataOrigin,
        settings: Settings,
        former: Mapping[Strategy, tuple[SamplingState, list[Score]] | None],
        seconds: float = 0.0,
    ) -> None:
        """Begin loops, or go on with state and scores; use :meth:`begin` or :meth:`resume`."""
        resolved = settings.resolved(*data.X.shape)
        split = PoolSplit.of(data, resolved)
        self.data, self.origin, self.seconds = data, origin, seconds
        self.loops = {
            name: SamplingReplay(split, replace(resolved, strategy=name), *(parts or ()))
            for name, parts in former.items()
        }
        self._within_step = False

    @classmethod
    def begin(
        cls,
        path: Path | None,
        x: Sequence[str] | None,
        y: str | None,
        settings: Settings,
        strategies: Sequence[Strategy],
    ) -> Campaign:
        """Read the data (None: the simulated map) and start each strategy from the same points."""
        data = _read(path, x, y)
        if path is None and settings.steps is None:
            settings = replace(settings, steps=_STEPS_ON_SIMULATED)
        absolute = None if path is None else str(path.resolve())
        origin = DataOrigin(absolute, None if x is None else tuple(x), y, data.fingerprint)
        return cls(data, origin, settings, dict.fromkeys(strategies))

    @classmethod
    def resume(cls, folder: Path, path: Path | None = None, steps: int | None = None) -> Campaign:
        """Go on with the campaign of :meth:`save`, to the same choices as without a stop.

        Nothing in the folder is executed.

        Args:
            folder: Folder of the campaign.
            path: Where the data are now; default: where they were.
            steps: New number of steps, not below those that are done.

        Raises:
            UsageError: There is no checkpoint, or a damaged one, one of other data or of another
                version, or the data are missing.
        """
        with SAMPLING.opened(folder) as content:
            origin = from_record(DataOrigin, content["data"])
            settings = from_record(Settings, content["settings"])
            seconds = float(content["seconds"])
            present = [name for name in STRATEGIES if name in content["runs"]]
            if not present:
                raise ValueError("no strategy")
            runs = {name: content["runs"][name] for name in present}
            curves = {name: _curve(run) for name, run in runs.items()}
            states = {name: SamplingState.of_record(run) for name, run in runs.items()}
            files = {name: from_record(ModelFile, file) for name, file in content["models"].items()}
        data = _read(path or (origin.path and Path(origin.path)) or None, origin.x, origin.y)
        if data.fingerprint != origin.fingerprint:
            raise UsageError(
                f"The checkpoint in {folder} is of another data set than {data.source} "
                f"(fingerprint {origin.fingerprint[:12]}, got {data.fingerprint[:12]}). Give the "
                "data that the run began with, or start anew in another folder."
            )
        pool = settings.resolved(*data.X.shape).pool or 0
        for name, state in states.items():
            state.load_model(files.get(name), folder / SAMPLING.name, settings, pool)
        former = {name: (state, curves[name]) for name, state in states.items()}
        longer = settings if steps is None else replace(settings, steps=steps)
        campaign = cls(data, origin, longer, former, seconds)
        check_not_shorter(campaign.steps_done, campaign.main.settings.steps or 0)
        return campaign

    def save(self, folder: Path) -> None:
        """Write a checkpoint; within a step nothing is written, and the one before stands.

        A resumed run comes to the same choices from either: they depend on models and seed alone.
        """
        if self._within_step:
            return
        content = {
            "data": asdict(self.origin),
            "settings": asdict(self.main.settings),
            "seconds": self.seconds,
            "runs": {name: _record(loop) for name, loop in self.loops.items()},
        }
        SAMPLING.save(folder, content, {name: loop.model for name, loop in self.begun.items()})

    @property
    def main(self) -> SamplingReplay:
        """Loop of the first strategy."""
        return next(iter(self.loops.values()))

    @property
    def begun(self) -> dict[Strategy, SamplingReplay]:
        """Loops that have done their start."""
        return {name: loop for name, loop in self.loops.items() if loop.curve}

    @property
    def steps_done(self) -> int:
        """Number of steps of the main loop."""
        return self.main.steps_done

    @property
    def finished(self) -> bool:
        """Whether all loops are finished."""
        return all(loop.finished for loop in self.loops.values())

    def run(self) -> Iterator[tuple[Strategy, Step]]:
        """Do the steps that are left, in turn; after each, the state is complete."""
        started, watch = time.monotonic() - self.seconds, CoreWatch()
        while not self.finished:
            behind = [name for name, loop in self.loops.items() if not loop.finished]
            name = min(behind, key=lambda name: self.loops[name].observations)
            self._within_step = True
            with watch:
                step = self.loops[name].advance()
            self._within_step = False
            self.seconds = time.monotonic() - started
            yield name, step


def _read(path: Path | None, x: Sequence[str] | None, y: str | None) -> Dataset:
    return simulated_prevalence() if path is None else read_dataset(path, x, y)


def _record(loop: SamplingReplay) -> dict[str, Any]:
    return {**loop.state.record(), "curve": [asdict(entry) for entry in loop.curve]}


def _curve(record: Mapping[str, Any]) -> list[Score]:
    return [from_record(Score, entry) for entry in record["curve"]]
