"""Everything that a run leaves for its reader, in one folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from bo_stream.loops.active_sampling import ActiveSampling
from bo_stream.loops.campaign import Campaign
from bo_stream.loops.pictures import MapView, as_png, draw_curve, draw_map
from bo_stream.loops.prediction import predict
from bo_stream.loops.records import curve_table, picks_table, run_record
from bo_stream.loops.scoring import Score
from bo_stream.loops.settings import Strategy
from bo_stream.storage import atomic_write


def write_results(campaign: Campaign, folder: Path, notes: list[str]) -> dict[Strategy, Score]:
    """Write picks.csv, curve.csv, map.png, curve.png and run.json, all or none.

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
        "curve.png": as_png(draw_curve(curves, campaign.data.target)),
        "map.png": as_png(draw_map(_map_view(campaign))),
        "run.json": run_record(campaign, finals, notes),
    }
    write_together(folder, files)
    return finals


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
    )
