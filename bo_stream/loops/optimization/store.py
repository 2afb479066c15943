"""An optimizer in a folder: its trials as JSON, its model in a file beside."""

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
from bo_stream.loops.run_folder import OPTIMIZATION, ModelFile, from_record


def save_optimizer(
    folder: Path, optimizer: Optimizer, run: Mapping[str, Any] | None = None
) -> None:
    """Write an optimizer; whatever happens, a complete one, the old or the new, is left.

    A model that is being changed is left out, and built anew from the trials.

    Args:
        folder: Created if necessary.
        optimizer: The optimizer.
        run: Plain values to be kept with it.

    Raises:
        OSError: The folder cannot be written, or the disk is full; the old files stand.
    """
    surrogate = optimizer.surrogate
    if not surrogate.is_whole:
        surrogate = Surrogate(optimizer.settings)
    content = {
        "settings": asdict(optimizer.settings),
        "trials": [vars(trial) for trial in optimizer.ledger],
        "surrogate": {
            "held": list(surrogate.held.items()),
            "refits": surrogate.refits,
            "unit": surrogate.unit,
        },
        "run": None if run is None else dict(run),
    }
    models = {} if surrogate.model is None else {"surrogate": surrogate.model}
    OPTIMIZATION.save(folder, content, models)


def load_optimizer(
    folder: Path, trusted: Collection[str] = ()
) -> tuple[Optimizer, dict[str, Any] | None]:
    """Read an optimizer and the values that were kept with it.

    Nothing in the folder is executed: models are read as :meth:`StreamingGP.load` does, and
    functions are imported only if they are trusted.

    Args:
        folder: Folder of :func:`save_optimizer`.
        trusted: Functions ``package.module:function`` that the folder may name.

    Raises:
        UsageError: There is none, it is damaged, another version wrote it, or it names a function
            that is not trusted.
    """
    with OPTIMIZATION.opened(folder) as content:
        return parsed_optimizer(folder, content, trusted), content["run"]


def parsed_optimizer(
    folder: Path, content: Mapping[str, Any], trusted: Collection[str]
) -> Optimizer:
    """Build the optimizer of an index's content; see :func:`load_optimizer`."""
    unknown = [name for name in _functions(content) if name not in trusted]
    if unknown:
        raise UsageError(
            f"The run in {folder} names {' and '.join(unknown)}, which would be imported and "
            "called. If you trust it, name it too: as FUNCTION or --acquisition of the command, or "
            "by trusted=[...]."
        )
    settings = from_record(OptimizationSettings, content["settings"])
    ledger = Ledger(from_record(Trial, record) for record in content["trials"])
    state, model = content["surrogate"], None
    held = {int(key): float(Y) for key, Y in state["held"]}
    if "surrogate" in content["models"]:
        file = from_record(ModelFile, content["models"]["surrogate"])
        if file.observations != len(held):
            raise UsageError(
                f"{folder / OPTIMIZATION.name} contradicts itself: {len(held):,} outcomes, a model "
                f"of {file.observations:,}."
            )
        model = file.read(folder, MODELS[settings.model].model, settings.device)
    surrogate = Surrogate(settings, model, held, state["refits"], float(state["unit"]))
    return Optimizer(settings, ledger, surrogate)


def named_functions(folder: Path) -> list[str]:
    """Return the functions ``package.module:function`` that a folder's run imports and calls.

    Raises:
        UsageError: There is no optimizer, it is damaged, or another version wrote it.
    """
    with OPTIMIZATION.opened(folder) as content:
        return _functions(content)


def _functions(content: Mapping[str, Any]) -> list[str]:
    run = content["run"]
    names = [] if run is None else [str(run["objective"]["function"])]
    return [name for name in (*names, str(content["settings"]["acquisition"])) if ":" in name]
