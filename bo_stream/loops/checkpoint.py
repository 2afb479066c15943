"""Checkpoints: what a run has done, so that it can be stopped at any time and go on."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bo_stream.loops.active_sampling import SamplingState
from bo_stream.loops.errors import UsageError
from bo_stream.loops.models import MODELS
from bo_stream.loops.scoring import Score
from bo_stream.loops.settings import STRATEGIES, Settings, Strategy
from bo_stream.loops.versions import check_written_by_this, package_version
from bo_stream.storage import atomic_write

FORMAT = 2
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
class Checkpoint:
    """A run at rest, without its models, which lie in files beside.

    There is no random state: the survey's order comes from the seed in the settings, and the
    choices from the models.

    Attributes:
        origin: Of the data.
        settings: Resolved, of the first strategy.
        seconds: Spent so far.
        states: Per strategy, all of its state but the model.
        models: Per strategy, the name of the model's file.
    """

    origin: DataOrigin
    settings: Settings
    seconds: float
    states: Mapping[Strategy, Mapping[str, Any]]
    models: Mapping[Strategy, str]

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Names of the strategies that run side by side."""
        return tuple(self.states)

    def load_state(self, folder: Path, strategy: Strategy) -> SamplingState:
        """Read a strategy's model and put its state together.

        Raises:
            UsageError: The model's file is missing or damaged.
        """
        path = folder / self.models[strategy]
        record = self.states[strategy]
        try:
            kind = MODELS[self.settings.model].model
            model = kind.load(path, map_location=self.settings.device)
        except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise UsageError(f"{path}, part of the checkpoint, cannot be read: {error}") from error
        curve = [Score(**entry) for entry in record["curve"]]
        return SamplingState(model, list(record["picks"]), curve, list(record["refits"]))


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
    names = {key: f"model-{key}-{len(state.picks):07d}.pt" for key, state in states.items()}
    old = _model_files(folder)
    try:
        for key, state in states.items():
            state.model.save(folder / names[key])
        _write_index(folder, origin, settings, seconds, states, names)
    except BaseException:
        _remove(_model_files(folder) - old)
        raise
    _remove(old - {folder / name for name in names.values()})


def _write_index(
    folder: Path,
    origin: DataOrigin,
    settings: Settings,
    seconds: float,
    states: Mapping[Strategy, SamplingState],
    names: Mapping[Strategy, str],
) -> None:
    content = {
        "format": FORMAT,
        "bo_stream": package_version("bo-stream"),
        "data": asdict(origin),
        "settings": settings.as_record(),
        "seconds": seconds,
        "runs": {key: _state_record(state, names[key]) for key, state in states.items()},
    }
    with atomic_write(folder / FILE_NAME) as file:
        file.write(json.dumps(content).encode())


def _state_record(state: SamplingState, model: str) -> dict[str, Any]:
    curve = [asdict(entry) for entry in state.curve]
    return {"model": model, "picks": state.picks, "curve": curve, "refits": state.refits}


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
    try:
        content = json.loads(path.read_text())
        check_written_by_this(content, path, FORMAT)
        return _parsed(content)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged or no checkpoint ({error!r}).") from error


def _parsed(content: Mapping[str, Any]) -> Checkpoint:
    data, runs = content["data"], content["runs"]
    x = None if data["x"] is None else tuple(data["x"])
    present = [name for name in STRATEGIES if name in runs]
    parts = ("picks", "curve", "refits")
    return Checkpoint(
        DataOrigin(data["path"], x, data["y"], data["fingerprint"]),
        Settings.from_record(content["settings"]),
        float(content["seconds"]),
        {name: {part: runs[name][part] for part in parts} for name in present},
        {name: str(runs[name]["model"]) for name in present},
    )
