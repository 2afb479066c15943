"""An optimizer at rest in a folder: the ledger as JSON, the model in a file beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bo_stream.loops.errors import UsageError
from bo_stream.loops.models import MODELS
from bo_stream.loops.optimization.optimizer import Optimizer, Surrogate
from bo_stream.loops.optimization.settings import OptimizationSettings
from bo_stream.loops.optimization.trials import Ledger, Trial
from bo_stream.loops.run_files import (
    ModelFile,
    read_index,
    read_or_say_damaged,
    write_index,
)
from bo_stream.models.base import StreamingGP

FORMAT = 4
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
    try:
        model = _write_model(folder, optimizer.surrogate)
        write_index(folder / FILE_NAME, FORMAT, _record(optimizer, model, run))
    except BaseException:
        _remove(set(folder.glob("surrogate-*.pt")) - old)
        raise
    _remove(old)


def _write_model(folder: Path, surrogate: Surrogate) -> ModelFile | None:
    if surrogate.model is None or not surrogate.is_whole:
        return None
    return ModelFile.write(folder, f"surrogate-{surrogate.revision:07d}", surrogate.model)


def _remove(paths: set[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _record(
    optimizer: Optimizer, model: ModelFile | None, run: Mapping[str, Any] | None
) -> dict[str, Any]:
    surrogate = optimizer.surrogate
    if not surrogate.is_whole:  # it is built anew from the trials
        surrogate = Surrogate(optimizer.settings, revision=surrogate.revision)
    return {
        "settings": optimizer.settings.as_record(),
        "trials": [trial.as_record() for trial in optimizer.ledger],
        "surrogate": {
            "model": None if model is None else asdict(model),
            "held": list(surrogate.held.items()),
            "refits": surrogate.refits,
            "revision": surrogate.revision,
            "unit": surrogate.unit,
        },
        "run": None if run is None else dict(run),
    }


def named_functions(folder: Path) -> list[str]:
    """The functions ``package.module:function`` that a folder's run imports and calls.

    Raises:
        UsageError: There is no optimizer, it is damaged, or another version wrote it.
    """
    content = _read(folder)
    with read_or_say_damaged(folder / FILE_NAME):
        return _functions(content)


def _functions(content: Mapping[str, Any]) -> list[str]:
    run = content["run"]
    names = [] if run is None else [str(run["objective"]["function"])]
    return [name for name in (*names, str(content["settings"]["acquisition"])) if ":" in name]


def load_optimizer(
    folder: Path, trusted: Collection[str] = ()
) -> tuple[Optimizer, dict[str, Any] | None]:
    """Read an optimizer and what went with it.

    Nothing that the folder brings is run: models are read as :meth:`StreamingGP.load` does, and
    functions are imported only if they are trusted.

    Args:
        folder: Of :func:`save_optimizer`.
        trusted: Functions ``package.module:function`` that the folder may name.

    Raises:
        UsageError: There is none, it is damaged, another version wrote it, or it names a function
            that is not trusted.
    """
    content = _read(folder)
    with read_or_say_damaged(folder / FILE_NAME):
        _check_trusted(folder, _functions(content), trusted)
        return _parsed(content, folder), content["run"]


def _read(folder: Path) -> dict[str, Any]:
    path = folder / FILE_NAME
    if not path.is_file():
        raise UsageError(f"There is no optimization to resume in {folder}: it has no {FILE_NAME}.")
    return read_index(path, FORMAT)


def _check_trusted(folder: Path, names: list[str], trusted: Collection[str]) -> None:
    unknown = [name for name in names if name not in trusted]
    if unknown:
        raise UsageError(
            f"The run in {folder} names {' and '.join(unknown)}, which would be imported and "
            "called. If you trust it, name it too: as FUNCTION or --acquisition of the command, or "
            "by trusted=[...]."
        )


def _parsed(content: Mapping[str, Any], folder: Path) -> Optimizer:
    settings = OptimizationSettings.from_record(content["settings"])
    ledger = Ledger(Trial.from_record(record) for record in content["trials"])
    state = content["surrogate"]
    held = {int(key): float(Y) for key, Y in state["held"]}
    surrogate = Surrogate(settings, None, held, state["refits"], int(state["revision"]))
    surrogate.unit = float(state["unit"])
    if state["model"] is not None:
        surrogate.model = _read_model(folder, ModelFile.from_record(state["model"]), surrogate)
    return Optimizer(settings, ledger, surrogate)


def _read_model(folder: Path, file: ModelFile, surrogate: Surrogate) -> StreamingGP:
    if file.observations != len(surrogate.held):
        raise UsageError(
            f"{folder / FILE_NAME} contradicts itself: {len(surrogate.held):,} outcomes, a model "
            f"of {file.observations:,}."
        )
    settings = surrogate.settings
    return file.read(folder, MODELS[settings.model].model, settings.device)
