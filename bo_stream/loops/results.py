"""Everything that a run leaves for its reader, in one folder."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from matplotlib.figure import Figure

from bo_stream.loops.active_sampling import ActiveSampling
from bo_stream.loops.campaign import Campaign
from bo_stream.loops.pictures import MapView, as_png, draw_curve, draw_map
from bo_stream.loops.prediction import predict
from bo_stream.loops.records import curve_table, picks_table, run_record
from bo_stream.loops.scoring import Score
from bo_stream.loops.settings import Strategy
from bo_stream.storage import atomic_write


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
