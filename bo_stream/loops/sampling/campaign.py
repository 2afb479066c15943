"""Active sampling from its start to its end, on a data set whose outcomes are revealed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bo_stream.errors import UsageError
from bo_stream.loops.datasets import Dataset, read_dataset, simulated_prevalence
from bo_stream.loops.models import unit_cube
from bo_stream.loops.run import (
    SAMPLING,
    CoreWatch,
    ModelFile,
    Score,
    check_not_shorter,
    from_record,
    score,
)
from bo_stream.loops.sampling.sampling import ActiveSampling
from bo_stream.loops.sampling.settings import (
    STRATEGIES,
    Settings,
    Strategy,
    check_outcomes,
)
from bo_stream.loops.sampling.state import SamplingState


class SamplingReplay:
    """Replay of a known map: an :class:`ActiveSampling` is told the outcomes that it asks for.

    It never sees another outcome. With strategy ``random`` it is not asked, but told the next
    points of the pool, whose order is random. Both begin with the first points of the pool. The
    points where the values are to be known are the test inputs.

    Attributes:
        split: The map.
        settings: Resolved settings.
        sampling: Observations and model.
        state: Of the sampling.
        curve: Scores so far.

    Example:
        >>> settings = Settings(steps=100).resolved(*data.X.shape)
        >>> replay = SamplingReplay(PoolSplit.of(data, settings), settings)
        >>> for chosen in replay.run():
        ...     print(replay.steps_done, chosen)
    """

    def __init__(
        self,
        split: PoolSplit,
        settings: Settings,
        state: SamplingState | None = None,
        curve: Sequence[Score] = (),
    ) -> None:
        """Begin with resolved settings, or go on with state and scores, maybe of fewer steps.

        The split was made with the same settings. The score at the end of fewer steps is left out,
        unless it is due.
        """
        self.split, self.settings = split, settings
        self.curve = [each for each in curve if self._is_due(self._step_of(each.observations))]
        pool_X, test_X = split.pool_X, split.test_X
        self.sampling = ActiveSampling(pool_X, settings, test_X, unit_cube(pool_X), state)
        self.state = self.sampling.state

    @property
    def steps_done(self) -> int:
        """Number of steps after the start."""
        return self._step_of(self.sampling.observations)

    def _step_of(self, observations: int) -> int:
        return max(0, observations - self.settings.initial) // self.settings.q

    def _is_due(self, step: int) -> bool:
        """Return whether the model is scored after a step."""
        return step % (self.settings.score_every or 1) == 0 or step == self.settings.steps

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return bool(self.curve) and self.steps_done >= (self.settings.steps or 0)

    def run(self) -> Iterator[list[int]]:
        """Do the steps that are left, and yield the choice of each once it is complete."""
        while not self.finished:
            yield self.advance()

    def advance(self) -> list[int]:
        """Do the start, if that is still to be done, or else one step; return what was chosen."""
        settings, told = self.settings, self.sampling.observations
        if not self.curve:
            chosen = list(range(settings.initial))
        elif settings.strategy == "random":
            chosen = list(range(told, told + settings.q))
        else:
            chosen = self.sampling.ask(settings.q)
        self.sampling.tell(chosen, self.split.pool_Y[chosen])
        if self._is_due(self.steps_done):
            self.curve.append(self.score_now())
        return chosen

    def score_now(self) -> Score:
        """Score the model as it is, without adding to the curve."""
        X, Y = self.split.test_X, self.split.test_Y
        scored = score(self.sampling.model, X, Y, self.settings.threshold)
        return replace(scored, observations=self.sampling.observations)

    def picked_rows(self) -> list[int]:
        """Return the rows of the data that were chosen, in order."""
        return self.split.pool_rows[self.state.picks].tolist()

    def outlying_rows(self) -> list[int]:
        """Return the outliers among :meth:`picked_rows`, which the model is without, in order."""
        return self.split.pool_rows[self.sampling.outliers].tolist()


@dataclass(frozen=True)
class PoolSplit:
    """A data set in random order, split into a pool and test points, inputs in the unit cube.

    Attributes:
        pool_X: Candidates, ``N x d``.
        pool_Y: Their outcomes, to be looked at only once chosen, ``N x 1``.
        pool_rows: Their rows in the data, ``N``.
        test_X: Held-out inputs, ``t x d``.
        test_Y: Held-out outcomes, ``t x 1``.
    """

    pool_X: Tensor
    pool_Y: Tensor
    pool_rows: Tensor
    test_X: Tensor
    test_Y: Tensor

    @classmethod
    def of(cls, data: Dataset, settings: Settings) -> PoolSplit:
        """Split by the seed of resolved settings, in the same way for every strategy.

        Raises:
            UsageError: The target is too large, or differs by too little.
        """
        check_outcomes(data.y, settings.dtype)
        order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(settings.seed))
        test_rows, rest = order[: settings.test], order[settings.test :]
        pool_rows = rest[: settings.pool]
        like = torch.empty(0, dtype=getattr(torch, settings.dtype), device=settings.device)
        X = torch.from_numpy(data.unit_X).to(like)
        Y = torch.from_numpy(data.y).unsqueeze(-1).to(like)
        return cls(X[pool_rows], Y[pool_rows], pool_rows, X[test_rows], Y[test_rows])


# --- a sampling campaign: strategies side by side over the same data, in one folder --------------


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
        loops: Loop per strategy.
        main: Loop of the first strategy.
        seconds: Time spent in steps, over all parts of the run.
    """

    def __init__(
        self,
        data: Dataset,
        origin: DataOrigin,
        settings: Settings,
        parts: Mapping[Strategy, tuple[SamplingState, list[Score]] | None],
        seconds: float = 0.0,
    ) -> None:
        """Begin loops, or go on with state and scores; use :meth:`begin` or :meth:`resume`."""
        resolved = settings.resolved(*data.X.shape)
        split = PoolSplit.of(data, resolved)
        self.data, self.origin, self.seconds = data, origin, seconds
        self.loops = {
            name: SamplingReplay(split, replace(resolved, strategy=name), *(part or ()))
            for name, part in parts.items()
        }
        self.main = next(iter(self.loops.values()))
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
            curves = {
                name: [from_record(Score, entry) for entry in run["curve"]]
                for name, run in runs.items()
            }
            states = {name: SamplingState.of_record(run) for name, run in runs.items()}
            files = {name: from_record(ModelFile, file) for name, file in content["models"].items()}
        data = _read(path or (origin.path and Path(origin.path)) or None, origin.x, origin.y)
        if data.fingerprint != origin.fingerprint:
            raise UsageError(
                f"The checkpoint in {folder} is of another data set than {data.source} "
                f"(fingerprint {origin.fingerprint[:12]}, got {data.fingerprint[:12]}). Give the "
                "data that the run began with, or start again in another folder."
            )
        pool = settings.resolved(*data.X.shape).pool or 0
        for name, state in states.items():
            state.load_model(files.get(name), folder / SAMPLING.name, settings, pool)
        parts = {name: (state, curves[name]) for name, state in states.items()}
        longer = settings if steps is None else replace(settings, steps=steps)
        campaign = cls(data, origin, longer, parts, seconds)
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
            "runs": {
                name: {**loop.state.record(), "curve": [asdict(score) for score in loop.curve]}
                for name, loop in self.loops.items()
            },
        }
        SAMPLING.save(
            folder, content, {name: loop.sampling.model for name, loop in self.begun.items()}
        )

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

    def run(self) -> Iterator[Strategy]:
        """Do the steps that are left, in turn, each by a strategy; then the state is complete."""
        started, watch = time.monotonic() - self.seconds, CoreWatch()
        while not self.finished:
            behind = [name for name, loop in self.loops.items() if not loop.finished]
            name = min(behind, key=lambda name: self.loops[name].sampling.observations)
            self._within_step = True
            with watch:
                self.loops[name].advance()
            self._within_step = False
            self.seconds = time.monotonic() - started
            yield name


def _read(path: Path | None, x: Sequence[str] | None, y: str | None) -> Dataset:
    return simulated_prevalence() if path is None else read_dataset(path, x, y)
