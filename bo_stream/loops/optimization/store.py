"""An optimizer at rest in a folder: the ledger as JSON, the model in a file beside it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bo_stream.loops.errors import UsageError
from bo_stream.loops.models import MODELS
from bo_stream.loops.optimization.optimizer import Optimizer
from bo_stream.loops.optimization.settings import OptimizationSettings
from bo_stream.loops.optimization.surrogate import Surrogate
from bo_stream.loops.optimization.trials import Ledger, Trial
from bo_stream.loops.versions import check_written_by_this, package_version
from bo_stream.models.streaming_gp import StreamingGP
from bo_stream.storage import atomic_write

FORMAT = 3
"""Changes whenever an older file cannot be read any more."""

FILE_NAME = "optimization.json"


def save_optimizer(
    folder: Path, optimizer: Optimizer, run: Mapping[str, Any] | None = None
) -> None:
    """Write an optimizer; whatever happens, a whole one, the old or the new, is left.

    The model goes to a new file, then the index is replaced in one move, then the old model is
    removed.

    Args:
        folder: Made if need be.
        optimizer: To be written.
        run: Plain values that go with it.

    Raises:
        OSError: The folder cannot be written, or the disk is full; the old files stand.
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = set(folder.glob("surrogate-*.pt"))
    model, path = optimizer.surrogate.model, _model_path(folder, optimizer.surrogate)
    try:
        if model is not None:
            model.save(path)
        with atomic_write(folder / FILE_NAME) as file:
            file.write(json.dumps(_record(optimizer, run)).encode())
    except BaseException:
        _remove(set(folder.glob("surrogate-*.pt")) - old)
        raise
    _remove(old - {path})


def _model_path(folder: Path, surrogate: Surrogate) -> Path:
    return folder / f"surrogate-{surrogate.revision:07d}.pt"


def _remove(paths: set[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _record(optimizer: Optimizer, run: Mapping[str, Any] | None) -> dict[str, Any]:
    surrogate = optimizer.surrogate
    return {
        "format": FORMAT,
        "bo_stream": package_version("bo-stream"),
        "settings": optimizer.settings.as_record(),
        "trials": [trial.as_record() for trial in optimizer.ledger],
        "surrogate": {
            "built": surrogate.model is not None,
            "held": list(surrogate.held.items()),
            "refits": surrogate.refits,
            "revision": surrogate.revision,
            "unit": surrogate.unit,
        },
        "run": None if run is None else dict(run),
    }


def load_optimizer(folder: Path) -> tuple[Optimizer, dict[str, Any] | None]:
    """Read an optimizer and what went with it.

    Raises:
        UsageError: There is none, it is damaged, or another version wrote it.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise UsageError(f"There is no optimization to resume in {folder}: it has no {FILE_NAME}.")
    try:
        content = json.loads(path.read_text())
        check_written_by_this(content, path, FORMAT)
        return _parsed(content, folder), content["run"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged or no checkpoint ({error!r}).") from error


def _parsed(content: Mapping[str, Any], folder: Path) -> Optimizer:
    settings = OptimizationSettings.from_record(content["settings"])
    ledger = Ledger(Trial.from_record(record) for record in content["trials"])
    state = content["surrogate"]
    held = {int(key): float(Y) for key, Y in state["held"]}
    surrogate = Surrogate(settings, None, held, state["refits"], int(state["revision"]))
    surrogate.unit = float(state["unit"])
    if state["built"]:
        surrogate.model = _read_model(_model_path(folder, surrogate), settings)
    return Optimizer(settings, ledger, surrogate)


def _read_model(path: Path, settings: OptimizationSettings) -> StreamingGP:
    try:
        return MODELS[settings.model].model.load(path, map_location=settings.device)
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"{path}, part of the checkpoint, cannot be read: {error}") from error
