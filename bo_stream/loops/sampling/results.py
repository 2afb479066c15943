"""Result files of a sampling campaign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from bo_stream.diagnostics.trust import TrustReport
from bo_stream.loops.predictions import Score, mean_over_run, predict
from bo_stream.loops.results import (
    model_record,
    record_file,
    write_files,
    write_picture,
    write_trust,
)
from bo_stream.loops.sampling.campaign import Campaign
from bo_stream.loops.sampling.pictures import MapView, draw_curve, draw_map
from bo_stream.loops.sampling.replay import SamplingReplay
from bo_stream.loops.sampling.settings import Strategy, strategy_name


def write_results(
    campaign: Campaign, folder: Path, notes: list[str]
) -> tuple[dict[Strategy, Score], dict[Strategy, Score], TrustReport | None]:
    """Write picks.csv, curve.csv and run.json, all or none; then the pictures and trust.json.

    These are curve.png, map.png and trust.png. One that cannot be drawn is a warning. The
    ``notes``, texts of warnings, are put into run.json. Returns the score of each strategy's model
    as it is, its mean over the run, and whether the model of the main one can be trusted.
    """
    curves = {name: _curve_to_here(loop) for name, loop in campaign.begun.items()}
    finals = {name: curve[-1] for name, curve in curves.items()}
    means = {name: mean_over_run(curve) for name, curve in curves.items()}
    files = {
        "picks.csv": _picks_table(campaign),
        "curve.csv": _as_csv(
            pd.DataFrame(
                {"strategy": name, **asdict(score)}
                for name, curve in curves.items()
                for score in curve
            )
        ),
        "run.json": record_file(_record(campaign, finals, means), campaign.seconds, notes),
    }
    write_files(folder, files)
    main, target = campaign.main, campaign.data.target
    moves = getattr(main.model, "history", ())
    names = {name: strategy_name(name, main.settings.goal) for name in curves}
    write_picture(
        folder / "curve.png",
        lambda: draw_curve(curves, names, target, moves, main.state.onto_grid_at),
    )
    write_picture(folder / "map.png", lambda: draw_map(_map_view(campaign)))
    return finals, means, write_trust(folder, main.model, main.state.validation)


def _curve_to_here(loop: SamplingReplay) -> list[Score]:
    curve = list(loop.curve)
    if not curve or curve[-1].observations < loop.observations:
        curve.append(loop.score_now())
    return curve


def _picks_table(campaign: Campaign) -> bytes:
    """Return a table of the choices: the initial points have step 0, outliers have 1 at the end."""
    data = campaign.data
    header = ("strategy", "step", "row", *data.columns, data.target, "outlier")
    lines = [
        (name, step, row, *data.X[row], data.y[row], int(row in outliers))
        for name, loop in campaign.begun.items()
        for outliers in [set(loop.outlying_rows())]
        for place, row in enumerate(loop.picked_rows())
        for step in [max(0, (place - loop.settings.initial) // loop.settings.q + 1)]
    ]
    return _as_csv(pd.DataFrame(lines, columns=list(header)))


def _as_csv(table: pd.DataFrame) -> bytes:
    return table.to_csv(index=False, lineterminator="\n").encode()


def _record(
    campaign: Campaign, finals: Mapping[Strategy, Score], means: Mapping[Strategy, Score]
) -> dict[str, Any]:
    data = campaign.data
    return {
        "finished": campaign.finished,
        "steps_done": campaign.steps_done,
        "data": {
            "source": data.source,
            "rows": len(data.y),
            "columns": data.columns,
            "target": data.target,
            "bounds": data.bounds.tolist(),
            **asdict(campaign.origin),
        },
        "settings": asdict(campaign.main.settings),
        "strategies": {
            name: {
                "final": asdict(finals[name]),
                "mean_over_run": asdict(means[name]),
                "refits_at": loop.state.refits,
                "kernels": loop.state.kernels,
                "onto_grid_at": loop.state.onto_grid_at,
                "outliers": loop.outlying_rows(),
                "model": model_record(loop.settings.model, loop.model),
            }
            for name, loop in campaign.begun.items()
        },
    }


def _map_view(campaign: Campaign) -> MapView:
    data, loop = campaign.data, campaign.main
    X = torch.from_numpy(data.unit_X).to(loop.split.pool_X)
    mean, variance = predict(loop.model, X)
    return MapView(
        data,
        mean.double().cpu().numpy(),
        variance.double().sqrt().cpu().numpy(),
        loop.picked_rows(),
        loop.settings.initial,
        loop.outlying_rows(),
    )
