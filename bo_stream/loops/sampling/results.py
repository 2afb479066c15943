"""Everything that a run leaves for its reader, in one folder."""

from __future__ import annotations

import csv
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpytorch.module import Module
from matplotlib.figure import Figure

from bo_stream.loops.models import MODELS
from bo_stream.loops.run_files import all_versions
from bo_stream.loops.sampling.campaign import Campaign
from bo_stream.loops.sampling.loop import ActiveSampling, Score, predict
from bo_stream.loops.sampling.pictures import MapView, as_png, draw_curve, draw_map
from bo_stream.loops.sampling.settings import Strategy
from bo_stream.models.base import StreamingGP
from bo_stream.storage import atomic_write


def picks_table(campaign: Campaign) -> bytes:
    """One line per choice.

    Strategy, step (0: initial points), row of the data, its values, 1 for an outlier or else 0.
    """
    data = campaign.data
    header = ("strategy", "step", "row", *data.columns, data.target, "outlier")
    lines = [
        (name, step, row, *data.X[row], data.y[row], int(row in outliers))
        for name, loop in campaign.loops.items()
        for outliers in [set(loop.outlying_rows())]
        for step, row in _steps_and_rows(loop)
    ]
    return _table(header, lines)


def _steps_and_rows(loop: ActiveSampling) -> list[tuple[int, int]]:
    first, q = loop.settings.initial, loop.settings.q
    return [(max(0, (i - first) // q + 1), row) for i, row in enumerate(loop.picked_rows())]


def curve_table(curves: dict[Strategy, list[Score]]) -> bytes:
    """One line per score."""
    header = ("strategy", "observations", "rmse", "rmse_sd", "nll", "coverage")
    lines = [(name, *asdict(score).values()) for name, curve in curves.items() for score in curve]
    return _table(header, lines)


def _table(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(lines)
    return text.getvalue().encode()


def run_record(campaign: Campaign, finals: dict[Strategy, Score], notes: list[str]) -> bytes:
    """Every setting and version, the data, the learned model, final scores, time and memory."""
    return (json.dumps(_run_record(campaign, finals, notes), indent=2) + "\n").encode()


def _run_record(
    campaign: Campaign, finals: dict[Strategy, Score], notes: list[str]
) -> dict[str, Any]:
    data = campaign.data
    return {
        "finished": campaign.finished,
        "steps_done": campaign.main.steps_done,
        "data": {
            "source": data.source,
            "rows": len(data.y),
            "columns": data.columns,
            "target": data.target,
            "bounds": data.bounds.tolist(),
            **asdict(campaign.origin),
        },
        "settings": campaign.main.settings.as_record(),
        "strategies": {
            name: _strategy_record(loop, finals[name]) for name, loop in campaign.loops.items()
        },
        "seconds": round(campaign.seconds, 3),
        "threads": torch.get_num_threads(),
        "peak_memory_mib": peak_memory_mib(),
        "versions": all_versions(),
        "warnings": notes,
    }


def _strategy_record(loop: ActiveSampling, final: Score) -> dict[str, Any]:
    return {
        "final": asdict(final),
        "refits_at": loop.state.refits,
        "outliers": loop.outlying_rows(),
        "model": model_record(loop.settings.model, loop.state.model),
    }


def model_record(name: str, model: StreamingGP) -> dict[str, Any]:
    """Size, hyperparameters and the numerical record of a model, as plain values.

    Args:
        name: In ``MODELS``.
        model: Of that kind.
    """
    return {
        "class": type(model).__name__,
        **MODELS[name].describe(model),
        "likelihood": _parameters(model.likelihood),
        "kernel": _parameters(model.covar_module),
        "outcome_scale": model.outcome_scale().tolist(),
        "numerical_log": [asdict(event) for event in model.numerical_log],
    }


def _parameters(module: Module) -> dict[str, Any]:
    """Constrained values by name."""
    values = {
        name: parameter if constraint is None else constraint.transform(parameter)
        for name, parameter, constraint in module.named_parameters_and_constraints()
    }
    return {name.replace("raw_", ""): value.tolist() for name, value in values.items()}


def peak_memory_mib() -> int | None:
    """Largest resident memory of this process; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1024.0 if sys.platform != "darwin" else 1024.0**2))


def write_results(campaign: Campaign, folder: Path, notes: list[str]) -> dict[Strategy, Score]:
    """Write picks.csv, curve.csv and run.json, all or none; then draw map.png and curve.png.

    A picture that cannot be drawn is a warning.

    Returns:
        The score of each strategy's model as it is.

    Raises:
        OSError: The disk is full or the folder cannot be written; the old files stand.
    """
    curves = {name: _curve_to_here(loop) for name, loop in campaign.loops.items()}
    finals = {name: curve[-1] for name, curve in curves.items()}
    files = {
        "picks.csv": picks_table(campaign),
        "curve.csv": curve_table(curves),
        "run.json": run_record(campaign, finals, notes),
    }
    write_together(folder, files)
    write_picture(folder / "curve.png", lambda: draw_curve(curves, campaign.data.target))
    write_picture(folder / "map.png", lambda: draw_map(_map_view(campaign)))
    return finals


def write_picture(path: Path, draw: Callable[[], Figure]) -> None:
    """Draw a picture and write it; if it cannot be drawn, warn and leave none.

    Raises:
        OSError: The disk is full or the folder cannot be written; the old picture stands.
    """
    try:
        content = as_png(draw())
    except Exception as error:  # whatever it is, the results are there
        path.unlink(missing_ok=True)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        warnings.warn(f"{path.name} could not be drawn ({reason}).", RuntimeWarning, stacklevel=2)
    else:
        write_together(path.parent, {path.name: content})


def write_together(folder: Path, files: Mapping[str, bytes]) -> None:
    """Replace all files once all are on the disk."""
    with ExitStack() as stack:
        for name, content in files.items():
            file = stack.enter_context(atomic_write(folder / name))
            file.write(content)
            file.flush()


def _curve_to_here(loop: ActiveSampling) -> list[Score]:
    curve = list(loop.state.curve)
    if not curve or curve[-1].observations < loop.observations:
        curve.append(loop.score_now())
    return curve


def _map_view(campaign: Campaign) -> MapView:
    data, loop = campaign.data, campaign.main
    X = torch.from_numpy(data.unit_X).to(loop.survey.pool_X)
    mean, variance = predict(loop.state.model, X)
    return MapView(
        data,
        mean.double().cpu().numpy(),
        variance.double().sqrt().cpu().numpy(),
        loop.picked_rows(),
        loop.settings.initial,
        loop.outlying_rows(),
    )
