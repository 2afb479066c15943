"""The run in numbers: picks, curve and everything that it was made with."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from gpytorch.module import Module

from bo_stream.loops.active_sampling import ActiveSampling
from bo_stream.loops.campaign import Campaign
from bo_stream.loops.models import MODELS
from bo_stream.loops.scoring import Score
from bo_stream.loops.settings import Strategy
from bo_stream.loops.versions import all_versions
from bo_stream.models.streaming_gp import StreamingGP


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
