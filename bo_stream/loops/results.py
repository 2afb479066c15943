"""Everything that a run leaves for its reader, in one folder."""

from __future__ import annotations

from pathlib import Path

import torch

from bo_stream.loops.active_sampling import ActiveSampling
from bo_stream.loops.campaign import Campaign
from bo_stream.loops.pictures import MapView, draw_curve, draw_map, save_figure
from bo_stream.loops.records import write_curve, write_picks, write_run
from bo_stream.loops.scoring import Score, predict
from bo_stream.loops.settings import Strategy


def write_results(campaign: Campaign, folder: Path, notes: list[str]) -> dict[Strategy, Score]:
    """Write picks.csv, curve.csv, map.png, curve.png and run.json, each in one move.

    Returns:
        The score of each strategy's model as it is.

    Raises:
        OSError: The disk is full or the folder cannot be written; old files stand.
    """
    curves = {name: _curve_to_here(loop) for name, loop in campaign.loops.items()}
    finals = {name: curve[-1] for name, curve in curves.items()}
    write_picks(campaign, folder / "picks.csv")
    write_curve(curves, folder / "curve.csv")
    save_figure(draw_curve(curves, campaign.data.target), folder / "curve.png")
    save_figure(draw_map(_map_view(campaign)), folder / "map.png")
    write_run(campaign, finals, notes, folder / "run.json")
    return finals


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
