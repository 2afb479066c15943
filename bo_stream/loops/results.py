"""Writing of results: files that are replaced together, pictures, and the parts of records."""

from __future__ import annotations

import io
import json
import platform
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpytorch.module import Module
from matplotlib.figure import Figure

from bo_stream.diagnostics.trust import PICTURE, RECORD, TrustReport, report
from bo_stream.diagnostics.validation import ProgressiveValidation
from bo_stream.loops.models import MODELS
from bo_stream.models.base import StreamingGP
from bo_stream.storage.archive import atomic_write, package_version

_PACKAGES = ("bo-stream", "torch", "botorch", "gpytorch", "linear-operator", "numpy", "scipy")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace files, given as contents by name, once all are on the disk, or none.

    Raises:
        OSError: The disk is full or the folder cannot be written; the old files stand.
    """
    with ExitStack() as stack:
        for name, content in files.items():
            file = stack.enter_context(atomic_write(folder / name))
            file.write(content)
            file.flush()


def write_picture(path: Path, draw: Callable[[], Figure]) -> None:
    """Draw a picture and write it; if it cannot be drawn, warn and leave none."""
    try:
        figure, file = draw(), io.BytesIO()
        figure.savefig(file, format="png", dpi=150)
    except Exception as error:  # whatever it is, the results are there
        path.unlink(missing_ok=True)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        warnings.warn(f"{path.name} could not be drawn ({reason}).", RuntimeWarning, stacklevel=2)
    else:
        write_files(path.parent, {path.name: file.getvalue()})


def write_trust(
    folder: Path, model: StreamingGP, record: ProgressiveValidation
) -> TrustReport | None:
    """Write trust.json and trust.png, a report on a model; if there can be none, warn."""
    try:
        found = report(model, record)
    except Exception as error:  # whatever it is, the results are there
        for name in (RECORD, PICTURE):
            (folder / name).unlink(missing_ok=True)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        warnings.warn(f"{RECORD} could not be written ({reason}).", RuntimeWarning, stacklevel=2)
        return None
    write_files(folder, {RECORD: found.to_json()})
    write_picture(folder / PICTURE, found.plot)
    return found


def record_file(content: Mapping[str, Any], seconds: float, notes: list[str]) -> bytes:
    """Return a run's record as a JSON file, with time, memory, versions and texts of warnings."""
    circumstances = {
        "seconds": round(seconds, 3),
        "threads": torch.get_num_threads(),
        "peak_memory_mib": _peak_memory_mib(),
        "versions": {"python": platform.python_version()}
        | {name: package_version(name) for name in _PACKAGES},
        "warnings": notes,
    }
    return (json.dumps({**content, **circumstances}, indent=2) + "\n").encode()


def model_record(name: str, model: StreamingGP) -> dict[str, Any]:
    """Return size, hyperparameters and log of a model of a kind in ``MODELS`` as plain values."""
    return {
        "class": type(model).__name__,
        **MODELS[name].describe(model),
        "likelihood": _parameters(model.likelihood),
        "kernel": _parameters(model.covar_module),
        "outcome_scale": model.outcome_scale().tolist(),
        "numerical_log": [asdict(event) for event in model.numerical_log],
    }


def _parameters(module: Module) -> dict[str, Any]:
    """Return constrained values by name."""
    values = {
        name: parameter if constraint is None else constraint.transform(parameter)
        for name, parameter, constraint in module.named_parameters_and_constraints()
    }
    return {name.replace("raw_", ""): value.tolist() for name, value in values.items()}


def _peak_memory_mib() -> int | None:
    """Return the largest resident memory of this process; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1024.0 if sys.platform != "darwin" else 1024.0**2))
