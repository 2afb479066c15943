"""Results of active sampling: tables, scores and pictures."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.integrate import trapezoid

from bo_stream.diagnostics.trust import TrustReport, mark_hand_overs
from bo_stream.loops.datasets import Array, Dataset
from bo_stream.loops.models import model_record
from bo_stream.loops.run import (
    Score,
    predict,
    record_file,
    write_files,
    write_picture,
    write_trust,
)
from bo_stream.loops.sampling.campaign import Campaign
from bo_stream.loops.sampling.settings import Strategy, strategy_name
from bo_stream.models.auto.inference import HandOver

_WIDE = 48
"""Letters of a label's line at most."""


@dataclass(frozen=True)
class MapView:
    """Content of a map, in units of the data.

    Attributes:
        data: True values at all sites.
        mean: Posterior mean at all rows, ``n``.
        deviation: Posterior standard deviation of the function there, ``n``.
        picks: Rows that were observed, in order.
        initial: Number of initial rows among them.
        outliers: Rows among them that the model is without.
    """

    data: Dataset
    mean: Array
    deviation: Array
    picks: Sequence[int]
    initial: int
    outliers: Sequence[int] = ()


def draw_map(view: MapView) -> Figure:
    """Draw truth, mean, standard deviation and picks: lines in 1-D, else maps of two inputs."""
    figure = _lines(view) if view.data.X.shape[1] == 1 else _maps(view)
    figure.suptitle(
        f"{view.data.source}: {len(view.picks):,} of {len(view.data.y):,} sites observed",
        fontsize=12,
    )
    return figure


def mean_over_run(curve: Sequence[Score]) -> Score:
    """Average scores over the observations between the first and the last of them.

    Each measure is taken to change linearly from one score to the next. The number of observations
    is the last one's.

    Args:
        curve: Scores at growing numbers of observations, one or more.
    """
    last = curve[-1]
    if len(curve) == 1:
        return last
    at = [score.observations for score in curve]
    means: dict[str, Any] = {
        field.name: float(trapezoid([getattr(score, field.name) for score in curve], at))
        / (at[-1] - at[0])
        for field in fields(Score)
        if getattr(last, field.name) is not None
    }
    return replace(last, **{**means, "observations": last.observations})


def draw_curve(
    curves: Mapping[Strategy, Sequence[Score]],
    names: Mapping[Strategy, str],
    target: str,
    hand_overs: Iterable[HandOver] = (),
    onto_grid_at: int | None = None,
) -> Figure:
    """Draw the errors over the number of observations, one colour per strategy.

    The share of wrong calls first, where there is a threshold; then RMSE and mean absolute error.

    Args:
        curves: Scores of each strategy.
        names: Of the strategies, for readers.
        target: Name of what is predicted.
        hand_overs: Of the main strategy's model, to be marked.
        onto_grid_at: Number of observations at which that model went onto a grid, to be marked.
    """
    last = next(iter(curves.values()))[-1]
    panels = 1 if last.wrong is None else 2
    figure = Figure(figsize=(1.4 + 5.6 * panels, 4.4), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    if last.wrong is not None:
        _draw_measure(axes[0], curves, names, "wrong", "of calls wrong", 100.0)
        axes[0].set_ylabel("held-out sites on the wrong side of the threshold, %", fontsize=9)
    errors = axes[-1]
    _draw_measure(errors, curves, names, "rmse_sd", "sd", 1.0)
    for (_, curve), style in zip(curves.items(), _STYLES, strict=False):
        own = [score.observations for score in curve], [score.mae_sd for score in curve]
        errors.plot(*own, color=style["color"], lw=0.9, ls=":")
    errors.plot([], [], color="0.4", lw=0.9, ls=":", label="mean absolute error")
    moves = [(move.observations, move) for move in hand_overs]
    for panel in axes:
        mark_hand_overs(panel, moves)
        if onto_grid_at is not None:
            panel.axvline(onto_grid_at, color="tab:red", lw=0.8, ls="-.", label="onto a grid")
        panel.set_xlabel("observations")
        panel.set_ylim(bottom=0.0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=9)
    errors.set_ylabel("held-out RMSE, in standard deviations of the target", fontsize=9)
    if last.rmse > 0.0 and not math.isnan(last.rmse_sd):
        unit = last.rmse / last.rmse_sd
        right = errors.secondary_yaxis(
            "right", functions=(lambda y: np.multiply(y, unit), lambda y: np.divide(y, unit))
        )
        right.set_ylabel(textwrap.fill(target, _WIDE), fontsize=9)
    return figure


_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "tab:blue", "ls": "-", "marker": "o", "ms": 3},
    {"color": "tab:orange", "ls": "--", "marker": "s", "ms": 3},
)


def _draw_measure(
    axes: Axes,
    curves: Mapping[Strategy, Sequence[Score]],
    names: Mapping[Strategy, str],
    measure: str,
    unit: str,
    times: float,
) -> None:
    """Draw a field of the scores of each strategy, with its mean over the run in the legend."""
    for (name, curve), style in zip(curves.items(), _STYLES, strict=False):
        observations = [score.observations for score in curve]
        values = [times * getattr(score, measure) for score in curve]
        mean = times * getattr(mean_over_run(curve), measure)
        number = f"{mean:.1f} %" if times == 100.0 else f"{mean:.3f}"
        label = f"{names[name]}: {number} {unit}, mean over the run"
        axes.plot(observations, values, label=label, **style)


def _maps(view: MapView) -> Figure:
    data, raster = view.data, _raster(view.data)
    extent_x, extent_y = np.ptp(data.X[:, :2], axis=0)
    stretch = float(extent_y / extent_x)
    first, second = (name.lower() for name in data.columns[:2])
    is_lon_lat = first.startswith(("lon", "lng")) and second.startswith("lat")
    # height of a unit of the second input over the width of one of the first
    aspect = 1.0 if 0.2 < stretch < 5.0 else 1.0 / stretch
    if is_lon_lat:
        aspect = 1.0 / math.cos(math.radians(float(np.median(data.X[:, 1]))))
    ratio = float(np.clip(aspect * stretch, 0.45, 1.8))
    width, height = (4.6, 4.6 * ratio) if ratio < 1.0 else (4.6 / ratio, 4.6)
    figure = Figure(figsize=(2 * width + 2.4, 2 * height + 1.2), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    values = {"norm": Normalize(*np.quantile(data.y, (0.002, 0.998))), "cmap": "viridis"}
    spread = {"norm": Normalize(*np.quantile(view.deviation, (0.0, 0.998))), "cmap": "magma"}
    panels = (
        ("truth", data.y, values),
        ("posterior mean", view.mean, values),
        ("posterior standard deviation", view.deviation, spread),
        ("picks over the posterior mean", view.mean, values),
    )
    for panel, (title, shown, colours) in zip(axes.flat, panels, strict=True):
        panel.set_title(title, fontsize=10)
        panel.set_aspect(aspect)
        painted: ScalarMappable
        if raster is None:
            size = float(np.clip(2e4 / len(shown), 1.0, 30.0))
            x, y = data.X[:, :2].T
            painted = panel.scatter(x, y, s=size, c=shown, linewidths=0, **colours)
        else:
            columns, rows, pixels = raster
            picture = np.full((rows.size, columns.size), np.nan)
            picture[pixels] = shown
            edges = (*_edges(columns), *_edges(rows))
            options: dict[str, Any] = {"origin": "lower", "interpolation": "none", **colours}
            painted = panel.imshow(picture, extent=edges, aspect=aspect, **options)
        bar = figure.colorbar(painted, ax=panel, shrink=0.9, pad=0.02)
        bar.set_label(textwrap.fill(data.target, _WIDE), fontsize=8)
        bar.ax.tick_params(labelsize=8)
    line: dict[str, Any] = {"linestyle": "none", "markeredgecolor": "black", "markeredgewidth": 0.4}
    for name, picks, marker, size, colour in (
        ("chosen", view.picks[view.initial :], "o", 2.6, "white"),
        ("initial", view.picks[: view.initial], "s", 4.5, "tab:red"),
        ("outliers", view.outliers, "X", 7.0, "tab:orange"),
    ):
        if picks:
            x, y = data.X[list(picks), :2].T
            label = f"{name} ({len(picks):,})"
            axes[1, 1].plot(x, y, marker=marker, ms=size, color=colour, label=label, **line)
    axes[1, 1].legend(loc="best", fontsize=8, framealpha=0.85)
    unit = " (degrees)" if is_lon_lat else ""
    for bottom, left in zip(axes[-1, :], axes[:, 0], strict=True):
        bottom.set_xlabel(data.columns[0] + unit, fontsize=9)
        left.set_ylabel(data.columns[1] + unit, fontsize=9)
    return figure


_Raster = tuple[Array, Array, tuple[NDArray[np.intp], NDArray[np.intp]]]
"""Ticks x and y of a regular grid, and the rows and columns of sites on it."""


def _raster(data: Dataset) -> _Raster | None:
    """Find the raster of a 2-D data set, or None if its sites are scattered."""
    if data.X.shape[1] != 2:
        return None
    most = 4 * len(data.y)
    x, y = (_ticks(values, most) for values in data.X.T)
    if x is None or y is None or x.size * y.size > most:
        return None
    column, row = (
        np.rint((values - ticks[0]) / (ticks[1] - ticks[0])).astype(np.intp)
        for values, ticks in zip(data.X.T, (x, y), strict=True)
    )
    return x, y, (row, column)


def _edges(ticks: Array) -> tuple[float, float]:
    """Return where the first pixel of some begins and the last one ends."""
    half = 0.5 * (ticks[1] - ticks[0])
    return float(ticks[0] - half), float(ticks[-1] + half)


def _ticks(values: Array, most: int) -> Array | None:
    """Find evenly spaced ticks on which all values lie, or None if there are none or too many."""
    unique = np.unique(np.round(values, 9))
    spacing = float(np.median(np.diff(unique))) if unique.size > 2 else 0.0
    if spacing <= 0.0:
        return None
    steps = (unique - unique[0]) / spacing
    if steps[-1] >= most or np.abs(steps - np.rint(steps)).max() > 0.1:
        return None
    ticks: Array = np.linspace(unique[0], unique[-1], int(np.rint(steps[-1])) + 1)
    return ticks


def _lines(view: MapView) -> Figure:
    data = view.data
    order = np.argsort(data.X[:, 0])
    x, mean, deviation = data.X[order, 0], view.mean[order], view.deviation[order]
    figure = Figure(figsize=(9.0, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(x, data.y[order], ".", color="0.6", ms=3, label="truth")
    axes.plot(x, mean, color="tab:blue", label="posterior mean")
    axes.fill_between(
        x, mean - 2 * deviation, mean + 2 * deviation, alpha=0.25, label="± 2 standard deviations"
    )
    rows = list(view.picks)
    axes.plot(data.X[rows, 0], data.y[rows], "o", mfc="none", mec="tab:red", ms=5, label="picks")
    if view.outliers:
        rows = list(view.outliers)
        axes.plot(data.X[rows, 0], data.y[rows], "X", color="tab:orange", ms=8, label="outliers")
    axes.set(xlabel=data.columns[0], ylabel=textwrap.fill(data.target, _WIDE))
    axes.legend(fontsize=8)
    return figure


# --- result files of a sampling campaign ---------------------------------------------------------


def write_results(
    campaign: Campaign, folder: Path, notes: list[str]
) -> tuple[dict[Strategy, Score], dict[Strategy, Score], TrustReport | None]:
    """Write picks.csv, curve.csv and run.json, all or none; then the pictures and trust.json.

    These are curve.png, map.png and trust.png. One that cannot be drawn is a warning. The
    ``notes``, texts of warnings, are put into run.json. Returns the score of each strategy's model
    as it is, its mean over the run, and whether the model of the main one can be trusted.
    """
    data, main = campaign.data, campaign.main
    curves = {name: list(loop.curve) for name, loop in campaign.begun.items()}
    for name, loop in campaign.begun.items():
        if not curves[name] or curves[name][-1].observations < loop.sampling.observations:
            curves[name].append(loop.score_now())
    finals = {name: curve[-1] for name, curve in curves.items()}
    means = {name: mean_over_run(curve) for name, curve in curves.items()}
    header = ("strategy", "step", "row", *data.columns, data.target, "outlier")
    picks = [  # the initial points have step 0, outliers have 1 at the end
        (name, step, row, *data.X[row], data.y[row], int(row in outliers))
        for name, loop in campaign.begun.items()
        for outliers in [set(loop.outlying_rows())]
        for position, row in enumerate(loop.picked_rows())
        for step in [max(0, (position - loop.settings.initial) // loop.settings.q + 1)]
    ]
    files = {
        "picks.csv": _as_csv(pd.DataFrame(picks, columns=list(header))),
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
    moves = getattr(main.sampling.model, "history", ())
    names = {name: strategy_name(name, main.settings.goal) for name in curves}
    write_picture(
        folder / "curve.png",
        lambda: draw_curve(curves, names, data.target, moves, main.state.onto_grid_at),
    )

    def draw() -> Figure:
        X = torch.from_numpy(data.unit_X).to(main.split.pool_X)
        mean, variance = predict(main.sampling.model, X)
        view = MapView(
            data,
            mean.double().cpu().numpy(),
            variance.double().sqrt().cpu().numpy(),
            main.picked_rows(),
            main.settings.initial,
            main.outlying_rows(),
        )
        return draw_map(view)

    write_picture(folder / "map.png", draw)
    return finals, means, write_trust(folder, main.sampling.model, main.state.validation)


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
                "model": model_record(loop.settings.model, loop.sampling.model),
            }
            for name, loop in campaign.begun.items()
        },
    }
