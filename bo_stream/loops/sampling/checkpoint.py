"""Checkpoints: what a run has done, so that it can be stopped at any time and go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from bo_stream.loops.errors import UsageError
from bo_stream.loops.models import MODELS
from bo_stream.loops.run_files import (
    ModelFile,
    read_index,
    read_or_say_damaged,
    write_index,
)
from bo_stream.loops.sampling.loop import SamplingState, Score
from bo_stream.loops.sampling.settings import STRATEGIES, Settings, Strategy

FORMAT = 4
"""Changes whenever an older checkpoint cannot be read any more."""

FILE_NAME = "checkpoint.json"


@dataclass(frozen=True)
class DataOrigin:
    """Where a run's data came from, and what they were.

    Attributes:
        path: Absolute path of the file; None: the simulated map.
        x: Names of the input columns, if they were given.
        y: Name of the target column, if it was given.
        fingerprint: Of the data (:attr:`Dataset.fingerprint`).
    """

    path: str | None
    x: tuple[str, ...] | None
    y: str | None
    fingerprint: str


@dataclass(frozen=True)
class StrategyRecord:
    """All of a strategy's state but its model.

    Attributes:
        picks: Positions in the pool, in order.
        curve: Scores.
        refits: Numbers of observations at which hyperparameters were learned.
        outliers: Places in ``picks`` of those that the model is without, in order.
    """

    picks: list[int]
    curve: list[Score]
    refits: list[int]
    outliers: list[int]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """From plain values, as JSON gives them back."""
        names = ("picks", "refits", "outliers")
        picks, refits, outliers = ([int(n) for n in record[name]] for name in names)
        return cls(picks, [Score(**entry) for entry in record["curve"]], refits, outliers)


@dataclass(frozen=True)
class Checkpoint:
    """A run at rest, without its models, which lie in files beside.

    There is no random state: the survey's order comes from the seed in the settings, and the
    choices from the models.

    Attributes:
        origin: Of the data.
        settings: Resolved, of the first strategy.
        seconds: Spent so far.
        records: Per strategy, all of its state but the model.
        models: Per strategy, the model's file.
    """

    origin: DataOrigin
    settings: Settings
    seconds: float
    records: Mapping[Strategy, StrategyRecord]
    models: Mapping[Strategy, ModelFile]

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Names of the strategies that run side by side."""
        return tuple(self.records)

    def load_state(self, folder: Path, strategy: Strategy) -> SamplingState:
        """Read a strategy's model and put its state together.

        Nothing that the file brings is run; see :meth:`StreamingGP.load`.

        Raises:
            UsageError: The model's file is missing, damaged, or not the one that was written.
        """
        record, file = self.records[strategy], self.models[strategy]
        _check_picks(folder / FILE_NAME, record, file.observations)
        model = file.read(folder, MODELS[self.settings.model].model, self.settings.device)
        return SamplingState(model, record.picks, record.curve, record.refits, record.outliers)


def _check_picks(path: Path, record: StrategyRecord, observations: int) -> None:
    picks, outliers = len(record.picks), len(record.outliers)
    distinct = len(set(record.picks))
    places = set(record.outliers)
    in_order = record.outliers == sorted(places) and places <= set(range(picks))
    if not (in_order and picks == distinct == observations + outliers):
        raise UsageError(
            f"{path} contradicts itself: {picks:,} picks, {distinct:,} of them distinct, "
            f"{outliers:,} outliers, and a model of {observations:,} observations."
        )


def save_checkpoint(
    folder: Path,
    origin: DataOrigin,
    settings: Settings,
    seconds: float,
    states: Mapping[Strategy, SamplingState],
) -> None:
    """Write a checkpoint; whatever happens, a whole one, the old or the new, is left.

    The models go to new files, then ``checkpoint.json`` is replaced in one move, then the old
    models are removed.

    Raises:
        OSError: The folder cannot be written, or the disk is full; the old checkpoint stands.
    """
    old = _model_files(folder)
    try:
        models = {
            key: ModelFile.write(folder, f"model-{key}-{len(state.picks):07d}", state.model)
            for key, state in states.items()
        }
        _write_index(folder, origin, settings, seconds, states, models)
    except BaseException:
        _remove(_model_files(folder) - old)
        raise
    _remove(old)


def _write_index(
    folder: Path,
    origin: DataOrigin,
    settings: Settings,
    seconds: float,
    states: Mapping[Strategy, SamplingState],
    models: Mapping[Strategy, ModelFile],
) -> None:
    content = {
        "data": asdict(origin),
        "settings": settings.as_record(),
        "seconds": seconds,
        "runs": {key: _state_record(state, models[key]) for key, state in states.items()},
    }
    write_index(folder / FILE_NAME, FORMAT, content)


def _state_record(state: SamplingState, model: ModelFile) -> dict[str, Any]:
    curve = [asdict(entry) for entry in state.curve]
    lists = {name: getattr(state, name) for name in ("picks", "refits", "outliers")}
    return {"model": asdict(model), "curve": curve, **lists}


def _model_files(folder: Path) -> set[Path]:
    return set(folder.glob("model-*.pt"))


def _remove(paths: set[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a run's checkpoint, without its models.

    Raises:
        UsageError: There is none, it is damaged, or another version wrote it.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise UsageError(f"There is no run to resume in {folder}: it has no {FILE_NAME}.")
    content = read_index(path, FORMAT)
    with read_or_say_damaged(path):
        return _parsed(content)


def _parsed(content: Mapping[str, Any]) -> Checkpoint:
    data, runs = content["data"], content["runs"]
    present = [name for name in STRATEGIES if name in runs]
    if not present:
        raise ValueError("no strategy")
    return Checkpoint(
        _parsed_origin(data),
        Settings.from_record(content["settings"]),
        float(content["seconds"]),
        {name: StrategyRecord.from_record(runs[name]) for name in present},
        {name: ModelFile.from_record(runs[name]["model"]) for name in present},
    )


def _parsed_origin(data: Mapping[str, Any]) -> DataOrigin:
    x = None if data["x"] is None else tuple(str(name) for name in data["x"])
    path, y = (None if data[name] is None else str(data[name]) for name in ("path", "y"))
    return DataOrigin(path, x, y, str(data["fingerprint"]))
